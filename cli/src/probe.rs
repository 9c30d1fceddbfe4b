//! `steadfast probe`: whether a process lives, or can do its work, for whoever looks after containers.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Ask a process by its admin port whether it lives: 0 if it does, 6 if not.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// The admin port.
    #[arg(value_name = "HOST:PORT")]
    address: String,
    /// Ask whether it can do its work: a master acts, a pserver holds a slot, a trainer is registered.
    #[arg(long)]
    ready: bool,
}

/// Asks, and says what was answered.
pub async fn run(args: ProbeArgs) -> Result<ExitCode, Failure> {
    // Fails when the process has chosen its cryptography already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let path = if args.ready { "readyz" } else { "healthz" };
    let url = format!("http://{}/{path}", args.address);
    let silent = |error: reqwest::Error| {
        Failure::unavailable(format!("{} does not answer: {}", args.address, innermost(&error)))
    };
    let client = reqwest::Client::builder().timeout(PATIENCE).no_proxy().build();
    let answer = client.map_err(silent)?.get(&url).send().await.map_err(|error| {
        if error.is_builder() {
            Failure::new(ErrorKind::Invalid, format!("`{}` is no HOST:PORT", args.address))
        } else {
            silent(error)
        }
    })?;
    let status = answer.status();
    let text = answer.text().await.map_err(silent)?;
    if status.is_success() {
        print!("{text}");
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::unavailable(format!("{}: {}", args.address, text.trim_end())))
}

/// What went wrong at the bottom, which is what a person can mend.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
