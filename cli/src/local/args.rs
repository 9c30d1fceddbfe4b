//! The flags of `steadfast local`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use steadfast_process::{EtcdAuthArgs, endpoint, lease_ttl};

use crate::output::Output;

/// Run a whole job on this machine.
#[derive(Clone, Debug, Args)]
pub struct LocalArgs {
    /// The job file.
    #[arg(value_name = "JOB.toml")]
    pub job_file: PathBuf,
    /// Number of master processes; all but one are standbys.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub masters: u32,
    /// Number of pserver processes and slots; also changes the number of slots of a resumed job [default: as
    /// many as the job has, or 2].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pservers: Option<u32>,
    /// Number of trainer processes.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub trainers: u32,
    /// Use this etcd instead of the embedded one; separate several URLs by commas.
    #[arg(long, value_name = "URL", value_delimiter = ',', value_parser = endpoint)]
    pub etcd: Vec<String>,
    #[command(flatten)]
    pub auth: EtcdAuthArgs,
    /// Directory for etcd's data, checkpoints, model and logs [default: steadfast-data/<job>].
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Format of the summary on stdout.
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub output: Output,
    /// Directory with the programs of the processes [default: the directory of this program].
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
    /// Program of a custom trainer.
    #[arg(long, value_name = "FILE")]
    pub trainer_bin: Option<PathBuf>,
    /// Interpreter of trainers with a Python model [default: that of the active environment].
    #[arg(long, value_name = "FILE")]
    pub python: Option<PathBuf>,
    /// Resume although the code of the model has changed; the summary and the audit then say so.
    #[arg(long)]
    pub accept_code_change: bool,
    /// Stop, as on Ctrl-C, when standard input ends: for programs that start a job and may be killed.
    #[arg(long)]
    pub stop_with_stdin: bool,
    /// Directory for TensorBoard event files.
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
    /// Time to live of etcd leases: a process that does not renew its lease in this time counts as dead.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = lease_ttl)]
    pub lease_ttl: Duration,
}
