//! The settings of a coordinator and of a worker, from arguments and `STEADFAST_…` variables.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use steadfast_common::job::durations;
use steadfast_common::records::keys::Keys;
use steadfast_common::role::Role;
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_coord::{CoordError, Etcd};
use steadfast_coordinator_core::{OnError, Settings};
use steadfast_process::{Admin, EtcdArgs, Failure, LogArgs, SecurityArgs};
use tracing::warn;

use crate::announce::Announcement;
use crate::coordinator::{CoordinatorSettings, Lock};

/// Runs closures of coordinators, with the functions of the modules that it is started with.
#[derive(Debug, Parser)]
#[command(name = "python -m steadfast.worker", version)]
pub struct WorkerArgs {
    /// The modules whose functions may run, separated by commas: importable names, or paths of Python files. They may
    /// also stand before all flags.
    #[arg(long, required = true, value_name = "MODULE,…", value_delimiter = ',')]
    pub modules: Vec<String>,
    /// Address for coordinators. Port 0 picks a free one, which is printed.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Maximum number of closures that run at once, each on its own thread.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    /// Name of a job whose coordinator finds this worker in etcd, so that its address need not be known.
    #[arg(long, value_name = "NAME", value_parser = steadfast_process::job_name)]
    pub job: Option<String>,
    /// Host, or host and port, at which coordinators of the job connect to this worker [default: the bound address; if
    /// that is 0.0.0.0, the address of this machine on the route to etcd].
    #[arg(long, value_name = "HOST[:PORT]", value_parser = steadfast_process::advertised_host)]
    pub advertise: Option<String>,
    /// Time to live of the worker's lease in etcd.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = steadfast_process::lease_ttl)]
    pub lease_ttl: Duration,
    /// Address of the admin port: health, metrics, status.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    pub admin_listen: SocketAddr,
    /// Wait for etcd for so long when a worker with a job starts.
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = durations::parse)]
    pub etcd_start_timeout: Duration,
    #[command(flatten)]
    pub etcd: EtcdArgs,
    #[command(flatten)]
    pub security: SecurityArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

/// Runs functions on workers.
#[derive(Debug, Parser)]
#[command(name = "coordinator", version)]
pub struct CoordinatorArgs {
    /// Name of the job, below which results of closures with a name are kept in etcd. Without it nothing is kept.
    #[arg(long, value_name = "NAME", value_parser = steadfast_process::job_name)]
    pub job: Option<String>,
    /// Add the workers that are started for the job.
    #[arg(long, requires = "job")]
    pub discover: bool,
    /// Address of an admin port: health, metrics, status. There is none without it.
    #[arg(long, value_name = "HOST:PORT")]
    pub admin_listen: Option<SocketAddr>,
    #[command(flatten)]
    pub etcd: EtcdArgs,
    #[command(flatten)]
    pub security: SecurityArgs,
    /// Directory with the certificates of a trainer, with which the program sets the initial values of parameters, and
    /// saves their model.
    #[arg(long, value_name = "DIR", requires = "tls")]
    pub trainer_tls: Option<PathBuf>,
    /// Time to live of the lock in etcd.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = steadfast_process::lease_ttl)]
    pub lease_ttl: Duration,
    /// Let the other closures go on after one has failed.
    #[arg(long)]
    pub continue_on_error: bool,
    /// A closure fails after so many workers were lost that ran it.
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(1..))]
    pub worker_losses_max: u32,
    /// Maximum number of closures that wait for a worker; when it is reached, `schedule` blocks.
    #[arg(long, value_name = "N", default_value = "262144", value_parser = clap::value_parser!(u32).range(1..))]
    pub waiting_max: u32,
    #[command(flatten)]
    pub log: LogArgs,
}

impl WorkerArgs {
    /// Returns where a worker with this address announces itself, if it has a job.
    ///
    /// # Errors
    /// If no address is known at which others can connect, the endpoints of etcd are invalid, or it does not answer.
    pub async fn announcement(&self, bound: SocketAddr) -> Result<Option<Announcement>, Failure> {
        let Some(job) = &self.job else { return Ok(None) };
        let address = self.etcd.advertised(self.advertise.as_deref(), bound)?;
        let options = self.etcd.options(&self.security.tls);
        let waits = |error: &CoordError| warn!(%error, "waiting for etcd (--etcd-start-timeout)");
        let etcd = Etcd::connect_within(&options, self.etcd_start_timeout, waits).await?;
        let (keys, lease_ttl) = (Keys::of_job(job), self.lease_ttl);
        Ok(Some(Announcement { etcd, keys, address, lease_ttl }))
    }
}

impl CoordinatorArgs {
    /// Binds the admin port, if there is one.
    ///
    /// # Errors
    /// If the credentials cannot be loaded, or the address cannot be bound.
    pub async fn admin(&self) -> Result<Option<Admin>, Failure> {
        let Some(address) = self.admin_listen else { return Ok(None) };
        Admin::bind(address, self.security.exposure(Role::Admin)?).await.map(Some)
    }

    /// Loads the credentials, and connects to etcd if the coordinator has a job. `params` are the parameters that
    /// closures train.
    ///
    /// # Errors
    /// If the credentials cannot be loaded, or etcd does not answer.
    pub async fn settings(&self, params: Vec<ParamSpec>) -> Result<CoordinatorSettings, Failure> {
        if self.job.is_none() && !params.is_empty() {
            let message = "parameters belong to a job: pass its name, `job=\"…\"`";
            return Err(Failure::invalid(message));
        }
        if !params.is_empty() && self.security.tls.tls.is_some() && self.trainer_tls.is_none() {
            let message = "with TLS, a program with parameters also needs the certificates of a trainer: \
                           args=[…, \"--trainer-tls\", \"certs/trainer\"]";
            return Err(Failure::invalid(message));
        }
        let on_error = match self.continue_on_error {
            true => OnError::Continue,
            false => OnError::Stop,
        };
        let lock = match &self.job {
            None => None,
            Some(job) => {
                let etcd = Etcd::connect(&self.etcd.options(&self.security.tls)).await?;
                // Connecting does not wait for an answer.
                etcd.get(&Keys::of_job(job).coordinator_lock()).await?;
                Some(Lock { etcd, keys: Keys::of_job(job), lease_ttl: self.lease_ttl })
            }
        };
        Ok(CoordinatorSettings {
            machine: Settings { on_error, losses_max: self.worker_losses_max },
            waiting_max: self.waiting_max as usize,
            tls: self.security.tls.identity()?,
            lock,
            discovers: self.discover,
            params,
        })
    }
}
