//! Selects the job of a command and connects to its etcd.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;
use steadfast_common::error::ErrorKind;
use steadfast_common::records::keys::Keys;
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_etcd::{Config, Server};
use steadfast_net::TlsIdentity;
use steadfast_process::{EtcdArgs, Failure, TlsArgs, job_name};

use crate::job_master::JobMaster;
use crate::local::read_endpoint;
use steadfast_common::status::format::plural;

/// Flags of every command that works on a job.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// Name of the job; required if etcd has several.
    #[arg(long, value_name = "NAME", value_parser = job_name)]
    job: Option<String>,
    /// Prefix of the job's keys in etcd [default: /jobs/<job>]; `/` means no prefix.
    #[arg(long, value_name = "KEY")]
    root: Option<String>,
    #[command(flatten)]
    etcd: EtcdArgs,
    #[command(flatten)]
    tls: TlsArgs,
    /// Data directory of a present or past `steadfast local` run; selects its job.
    #[arg(long, value_name = "DIR", conflicts_with = "etcd_endpoints")]
    data_dir: Option<PathBuf>,
}

/// The selected job.
#[derive(Clone, Debug)]
pub struct Job {
    pub name: String,
    pub etcd: Etcd,
    pub keys: Keys,
    /// The identity for connections to members of the job.
    pub tls: TlsIdentity,
}

impl Job {
    pub fn master(&self) -> JobMaster {
        JobMaster::new(self.etcd.clone(), self.keys.clone(), self.tls.clone())
    }

    /// Returns whether this is an elastic job, as opposed to a training job.
    ///
    /// # Errors
    /// If etcd does not answer, or agents wait for a master to accept the job.
    pub async fn is_elastic(&self) -> Result<bool, Failure> {
        if let Some(entry) = self.etcd.get(&self.keys.job()).await? {
            return Ok(entry.json::<Value>().is_ok_and(|record| record["kind"] == "elastic"));
        }
        let agents = self.etcd.list(&self.keys.agents_prefix()).await?.entries.len();
        match agents {
            0 => Ok(false),
            agents => Err(Failure::new(
                ErrorKind::NotYet,
                format!(
                    "{} of job {} registered, and no master has accepted it; start `steadfast rendezvous`, or \
                     steadfast-master with its job file",
                    plural(agents, "agent"),
                    self.name
                ),
            )),
        }
    }

    /// Checks that the job is not elastic. `instead` is the end of the error message, which says what to do with an
    /// elastic job.
    ///
    /// # Errors
    /// If it is elastic, and as [`Job::is_elastic`].
    pub async fn must_train(&self, instead: &str) -> Result<(), Failure> {
        match self.is_elastic().await? {
            true => Err(Failure::invalid(format!("job {} is elastic: {instead}", self.name))),
            false => Ok(()),
        }
    }
}

impl JobArgs {
    /// Returns the flags for the job with a name, if none of them says which one is meant.
    pub fn or_named(mut self, name: &str) -> Self {
        if !self.is_named() {
            self.job = Some(name.to_owned());
        }
        self
    }

    /// Returns whether a flag says which job is meant.
    pub fn is_named(&self) -> bool {
        self.job.is_some() || self.data_dir.is_some() || self.root.is_some()
    }

    /// Connects to etcd and selects the job. If no run is active in the data directory, this process serves a
    /// copy of the etcd data of the last run until it exits.
    ///
    /// # Errors
    /// If etcd does not answer, or if no job was named and etcd does not have exactly one.
    pub async fn find(&self) -> Result<Job, Failure> {
        match (self.connect().await, &self.data_dir) {
            (Err(failure), Some(directory)) => match serve_stored_etcd(directory).await {
                Some(endpoint) => self.choose(self.connect_to(endpoint).await?).await,
                None => Err(failure),
            },
            (etcd, _) => self.choose(etcd?).await,
        }
    }

    /// Selects the job as [`JobArgs::find`] does, for commands on the checkpoints of a training job.
    ///
    /// # Errors
    /// As [`JobArgs::find`], and if the job is elastic.
    pub async fn find_with_checkpoints(&self) -> Result<Job, Failure> {
        let job = self.find().await?;
        job.must_train("Steadfast takes no checkpoints of it; its program writes its own").await?;
        Ok(job)
    }

    /// Selects the job as [`JobArgs::find`] does, but does not serve the stored etcd data of a run that has ended.
    ///
    /// # Errors
    /// As [`JobArgs::find`].
    pub async fn find_running(&self) -> Result<Job, Failure> {
        self.choose(self.connect().await?).await
    }

    /// Selects a job that does not run, to change its keys. If no run is active in the data directory, this process
    /// serves its etcd data, and not a copy, until it exits; no run can begin meanwhile.
    ///
    /// # Errors
    /// As [`JobArgs::find`].
    pub async fn find_stopped(&self) -> Result<Job, Failure> {
        // The port of a run that has ended may be that of another etcd by now.
        let stored = match &self.data_dir {
            Some(directory) => serve(directory.join("etcd")).await,
            None => None,
        };
        match stored {
            Some((endpoint, server)) => {
                tokio::spawn(server.serve(std::future::pending()));
                self.choose(self.connect_to(endpoint).await?).await
            }
            None => self.choose(self.connect().await?).await,
        }
    }

    /// Returns the connection options of the selected etcd.
    ///
    /// # Errors
    /// If a file cannot be read, or no run was ever started in the data directory.
    pub fn etcd_options(&self) -> Result<EtcdOptions, Failure> {
        let mut options = self.etcd.options(&self.tls);
        if let Some(directory) = &self.data_dir {
            options.endpoints = vec![read_endpoint(directory)?];
        }
        Ok(options)
    }

    async fn connect(&self) -> Result<Etcd, Failure> {
        let Some(directory) = &self.data_dir else {
            return Ok(Etcd::connect(&self.etcd.options(&self.tls)).await?);
        };
        let what = || format!("no run is active in {}", directory.display());
        self.connect_to(read_endpoint(directory)?).await.map_err(|failure| failure.context(what()))
    }

    async fn connect_to(&self, endpoint: String) -> Result<Etcd, Failure> {
        let mut options = self.etcd.options(&self.tls);
        options.endpoints = vec![endpoint];
        Ok(Etcd::connect(&options).await?)
    }

    async fn choose(&self, etcd: Etcd) -> Result<Job, Failure> {
        let tls = self.tls.identity()?;
        if let Some(root) = &self.root {
            let name = self.job.clone().unwrap_or_else(|| root.clone());
            return Ok(Job { name, etcd, keys: Keys::below(root), tls });
        }
        let of_name =
            |name: &str, etcd| Job { name: name.to_owned(), etcd, keys: Keys::of_job(name), tls };
        if let Some(name) = &self.job {
            return Ok(of_name(name, etcd));
        }
        let names = known(&etcd).await?;
        match names.as_slice() {
            [] => Err(Failure::new(ErrorKind::NotFound, "etcd has no job")),
            [name] => Ok(of_name(name, etcd)),
            names => Err(Failure::invalid(format!(
                "etcd has several jobs; choose one with --job: {}",
                names.join(", ")
            ))),
        }
    }
}

/// Serves the etcd data of a run that has ended on a free port of this machine until this process exits.
/// Returns the endpoint, or `None` if the directory has no data.
///
/// It serves a copy: reading changes nothing and does not block a new run in the same directory.
async fn serve_stored_etcd(directory: &Path) -> Option<String> {
    let copy = tempfile::tempdir().ok()?;
    let (from, to) = (directory.join("etcd"), copy.path().to_owned());
    tokio::task::spawn_blocking(move || copy_files(&from, &to)).await.ok()?.ok()?;
    let (endpoint, server) = serve(copy.path().to_owned()).await?;
    tokio::spawn(async move {
        let _keep_until_exit = copy;
        server.serve(std::future::pending()).await
    });
    Some(endpoint)
}

/// Binds a server of the etcd data in a directory to a free port of this machine. `None` if it has no data, or another
/// process serves them.
async fn serve(data: PathBuf) -> Option<(String, Server)> {
    if !data.is_dir() {
        return None;
    }
    let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = Server::bind(Config::new(anywhere, data)).await.ok()?;
    Some((format!("http://{}", server.local_addr()), server))
}

/// Copies the files of a directory, without subdirectories.
fn copy_files(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Returns the names of all jobs that have keys in etcd.
pub async fn known(etcd: &Etcd) -> Result<Vec<String>, Failure> {
    // The root of a job with an empty name is the common prefix of all jobs' roots.
    let prefix = Keys::of_job("").root().to_owned();
    let view = etcd.list(&prefix).await?;
    Ok(job_names(view.entries.keys().map(String::as_str), &prefix))
}

/// Returns the distinct names of the jobs that the keys belong to.
fn job_names<'a>(keys: impl Iterator<Item = &'a str>, prefix: &str) -> Vec<String> {
    let mut names: Vec<String> = keys
        .filter_map(|key| key.strip_prefix(prefix)?.split('/').next().map(str::to_owned))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_that_has_keys_is_named_once() {
        let keys = ["/jobs/b/job", "/jobs/a/job", "/jobs/a/ps/0", "/other/x"];
        assert_eq!(job_names(keys.into_iter(), "/jobs/"), ["a", "b"]);
    }
}
