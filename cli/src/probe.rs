//! `steadfast probe`: whether a process lives, or can do its work, for whoever looks after containers.

use std::process::ExitCode;

use clap::Args;
use steadfast_process::{Failure, TlsArgs};

use crate::admin_client;

/// Ask a process by its admin port whether it lives: 0 if it does, 6 if not.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// The admin port.
    #[arg(value_name = "HOST:PORT")]
    address: String,
    /// Ask whether it can do its work: a master acts, a pserver holds a slot, a trainer is registered.
    #[arg(long)]
    ready: bool,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Asks, and says what was answered.
pub async fn run(args: ProbeArgs) -> Result<ExitCode, Failure> {
    args.tls.decide()?;
    let path = if args.ready { "/readyz" } else { "/healthz" };
    let (code, text) = admin_client::ask(&args.address, path).await?;
    if code.is_success() {
        print!("{text}");
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::unavailable(format!("{}: {}", args.address, text.trim_end())))
}
