//! `steadfast certs`: the certificates of a job, for those who have no authority of their own.

mod issue;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use steadfast_process::Failure;

use crate::output::FormArgs;

/// Make and renew the certificates of a job.
#[derive(Debug, Args)]
pub struct CertsArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Init(InitArgs),
    Renew(RenewArgs),
    Show(ShowArgs),
}

/// Make an authority and one certificate for each role; what is there already stays.
///
/// Each role has a folder with `ca.crt`, `tls.crt` and `tls.key`: give a process that of its role, and
/// nobody the folder `ca`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Folder for all of them.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Name or address that people reach processes by, in a browser say; may be given several times.
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
    /// Name or address of a member of etcd; may be given several times.
    #[arg(long, value_name = "NAME")]
    etcd_host: Vec<String>,
    /// Days until the certificates end.
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
}

/// Make new certificates for the same roles and names, by the same authority; processes take them up
/// without a restart.
#[derive(Debug, Args)]
pub struct RenewArgs {
    /// Folder with all of them.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Days until the certificates end.
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
}

/// List the certificates, their names and their ends.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Folder with all of them.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    form: FormArgs,
}

/// Does what was asked.
pub fn run(args: CertsArgs) -> Result<ExitCode, Failure> {
    match args.command {
        Command::Init(args) => issue::init(&args)?,
        Command::Renew(args) => issue::renew(&args)?,
        Command::Show(args) => show::run(&args)?,
    }
    Ok(ExitCode::SUCCESS)
}
