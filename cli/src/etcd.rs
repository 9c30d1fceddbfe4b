//! `steadfast etcd`: the embedded etcd as a process of its own.

use std::error::Error as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_etcd::{Config, Error, Server};
use steadfast_process::{Failure, LogArgs, Shutdown, init_logging};

/// Serve the embedded etcd, which is for one machine.
#[derive(Debug, Args)]
pub struct EtcdServerArgs {
    /// Address to serve on; port 0 picks a free one.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:2379")]
    listen: SocketAddr,
    /// Folder that keeps the data.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// Serve on other addresses than loopback: whoever reaches them can read and change everything.
    #[arg(long)]
    insecure_allow_plaintext: bool,
    #[command(flatten)]
    log: LogArgs,
}

/// Serves until a signal.
pub async fn run(args: EtcdServerArgs) -> Result<ExitCode, Failure> {
    init_logging("etcd", "-", std::process::id(), &args.log)?;
    let shutdown = Shutdown::install()?;
    if !args.listen.ip().is_loopback() && !args.insecure_allow_plaintext {
        return Err(Failure::invalid(format!(
            "--listen {} is open to others than this machine's, and this etcd has neither TLS nor users: run \
             etcd itself where others are to reach it, or say --insecure-allow-plaintext",
            args.listen
        )));
    }
    let server = Server::bind(Config::new(args.listen, args.data_dir)).await.map_err(failure)?;
    server.serve(shutdown.drain()).await.map_err(failure)?;
    Ok(ExitCode::SUCCESS)
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
        Error::Disk { .. } | Error::Serve(_) | Error::LogThread => ErrorKind::Internal,
    };
    let way_out = match &error {
        Error::Listen { .. } => "; choose another with --listen",
        Error::InUse { .. }
        | Error::Corrupt { .. }
        | Error::Disk { .. }
        | Error::Serve(_)
        | Error::LogThread => "",
    };
    let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
    Failure::new(kind, format!("{error}{cause}{way_out}"))
}
