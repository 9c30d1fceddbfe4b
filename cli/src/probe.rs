//! `steadfast probe`: liveness and readiness checks of a process, for container health checks.

use std::process::ExitCode;

use clap::Args;
use steadfast_process::{Failure, TlsArgs, print};

use crate::admin_client;

/// Check by its admin port whether a process is alive: exits with 0 if it is, with 6 if not.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// Address of the admin port.
    #[arg(value_name = "HOST:PORT")]
    address: String,
    /// Check readiness instead: a master acts, a pserver holds a slot, a trainer is registered.
    #[arg(long)]
    ready: bool,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Queries the process and prints the response.
pub async fn run(args: ProbeArgs) -> Result<ExitCode, Failure> {
    let tls = args.tls.identity()?;
    let path = if args.ready { "/readyz" } else { "/healthz" };
    let (code, text) = admin_client::ask(&args.address, path, &tls).await?;
    if code.is_success() {
        print(text);
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::unavailable(format!("{}: {}", args.address, text.trim_end())))
}
