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
    /// Master processes; those beyond the first stand by.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub masters: u32,
    /// Pserver processes, and slots.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pservers: u32,
    /// Trainer processes.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub trainers: u32,
    /// Use this etcd instead of the embedded one; several URLs are separated by commas.
    #[arg(long, value_name = "URL", value_delimiter = ',', value_parser = endpoint)]
    pub etcd: Vec<String>,
    #[command(flatten)]
    pub auth: EtcdAuthArgs,
    /// Folder for etcd's data, checkpoints, model and logs [default: steadfast-data/<job>].
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Form of the summary on stdout.
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub output: Output,
    /// Folder with the programs of the processes [default: that of this program].
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
    /// The trainer's program, if it is a user's own.
    #[arg(long, value_name = "FILE")]
    pub trainer_bin: Option<PathBuf>,
    /// Folder for curves that TensorBoard reads.
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
    /// How long etcd takes a process for alive after its last sign of life.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = lease_ttl)]
    pub lease_ttl: Duration,
}
