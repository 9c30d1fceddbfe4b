//! `steadfast etcd`: runs the embedded etcd as a separate process.

use std::error::Error as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_etcd::{Config, Error, Server};
use steadfast_process::{Failure, LogArgs, Shutdown, init_logging};

/// Serve the embedded etcd, for use on one machine.
#[derive(Debug, Args)]
pub struct EtcdServerArgs {
    /// Address to serve on; port 0 picks a free one.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:2379")]
    listen: SocketAddr,
    /// Data directory.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// Allow addresses other than loopback: every client that reaches them can read and change all keys.
    #[arg(long)]
    insecure_allow_plaintext: bool,
    #[command(flatten)]
    log: LogArgs,
}

/// Serves until a signal arrives.
pub async fn run(args: EtcdServerArgs) -> Result<ExitCode, Failure> {
    init_logging("etcd", "-", std::process::id(), &args.log)?;
    let shutdown = Shutdown::install()?;
    if !args.listen.ip().is_loopback() && !args.insecure_allow_plaintext {
        return Err(Failure::invalid(format!(
            "--listen {} is not a loopback address, and the embedded etcd has neither TLS nor users; \
             run etcd instead, or pass --insecure-allow-plaintext",
            args.listen
        )));
    }
    let server = Server::bind(Config::new(args.listen, args.data_dir)).await.map_err(failure)?;
    server.serve(shutdown.drain()).await.map_err(failure)?;
    Ok(ExitCode::SUCCESS)
}

fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

fn failure(error: Error) -> Failure {
    let kind = match &error {
        Error::Listen { source, .. } => match source.kind() {
            std::io::ErrorKind::AddrInUse => ErrorKind::Conflict,
            std::io::ErrorKind::PermissionDenied => ErrorKind::Denied,
            _ => ErrorKind::Invalid,
        },
        Error::InUse { .. } => ErrorKind::Conflict,
        Error::Corrupt { .. } => ErrorKind::Invalid,
        Error::Disk { source, .. } if is_full(source) => ErrorKind::TooLarge,
        Error::Disk { .. } | Error::Serve(_) | Error::LogThread => ErrorKind::Internal,
    };
    let way_out = match &error {
        Error::Listen { .. } => "; choose another with --listen",
        Error::Disk { source, .. } if is_full(source) => "; free some space and restart it",
        Error::InUse { .. }
        | Error::Corrupt { .. }
        | Error::Disk { .. }
        | Error::Serve(_)
        | Error::LogThread => "",
    };
    let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
    Failure::new(kind, format!("{error}{cause}{way_out}"))
}
