//! `steadfast certs`: issues the certificates of a job, for users without a certificate authority.

mod issue;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use steadfast_process::Failure;

use crate::output::FormArgs;

/// Create, renew and list the certificates of a job.
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

/// Create a certificate authority and one certificate per role; existing files are kept.
///
/// Each role has a directory with `ca.crt`, `tls.crt` and `tls.key`. Give each process the directory of its role,
/// and keep the directory `ca` private.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Directory for the certificates.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Additional host name or address of the processes, as used in a browser; repeatable.
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
    /// Host name or address of an etcd member; repeatable.
    #[arg(long, value_name = "NAME")]
    etcd_host: Vec<String>,
    /// Days until the certificates expire.
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
}

/// Issue new certificates for the same roles and names by the same authority; processes load them without a
/// restart.
#[derive(Debug, Args)]
pub struct RenewArgs {
    /// Directory with the certificates.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Days until the certificates expire.
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
}

/// List the certificates with their names and expiry.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Directory with the certificates.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    form: FormArgs,
}

pub fn run(args: CertsArgs) -> Result<ExitCode, Failure> {
    match args.command {
        Command::Init(args) => issue::init(&args)?,
        Command::Renew(args) => issue::renew(&args)?,
        Command::Show(args) => show::run(&args)?,
    }
    Ok(ExitCode::SUCCESS)
}
