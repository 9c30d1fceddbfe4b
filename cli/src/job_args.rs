//! Which job a command is about, and how to reach its etcd.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_common::keys::Keys;
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_etcd::{Config, Server};
use steadfast_process::{EtcdArgs, Failure, TlsArgs, job_name};

use crate::local::read_endpoint;

/// The settings of every command that looks at a job.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// Name of the job; needed if etcd knows several.
    #[arg(long, value_name = "NAME", value_parser = job_name)]
    job: Option<String>,
    /// Where the job's keys lie in etcd [default: /jobs/<job>]; `/` is the bare layout.
    #[arg(long, value_name = "KEY")]
    root: Option<String>,
    #[command(flatten)]
    etcd: EtcdArgs,
    #[command(flatten)]
    tls: TlsArgs,
    /// Look at the job that `steadfast local` runs in this folder, or ran.
    #[arg(long, value_name = "DIR", conflicts_with = "etcd_endpoints")]
    data_dir: Option<PathBuf>,
}

/// A job that was found, or named.
#[derive(Clone, Debug)]
pub struct Job {
    pub name: String,
    pub etcd: Etcd,
    pub keys: Keys,
}

impl JobArgs {
    /// Connects to etcd and finds the job that is meant. If no run is under way in its folder, what
    /// the last one left is served until this process ends.
    ///
    /// # Errors
    /// If etcd does not answer, or knows not just one job and none was named.
    pub async fn find(&self) -> Result<Job, Failure> {
        self.tls.decide()?;
        match (self.connect().await, &self.data_dir) {
            (Err(failure), Some(folder)) => match serve_remains(folder).await {
                Some(endpoint) => self.choose(self.connect_to(endpoint).await?).await,
                None => Err(failure),
            },
            (etcd, _) => self.choose(etcd?).await,
        }
    }

    /// The same for a job whose etcd runs.
    ///
    /// # Errors
    /// As [`JobArgs::find`].
    pub async fn find_running(&self) -> Result<Job, Failure> {
        self.tls.decide()?;
        self.choose(self.connect().await?).await
    }

    /// How to reach the etcd that is meant.
    ///
    /// # Errors
    /// If a file cannot be read, or no run is under way in the folder.
    pub fn etcd_options(&self) -> Result<EtcdOptions, Failure> {
        let mut options = self.etcd.options(&self.tls)?;
        if let Some(folder) = &self.data_dir {
            options.endpoints = vec![read_endpoint(folder)?];
        }
        Ok(options)
    }

    async fn connect(&self) -> Result<Etcd, Failure> {
        let Some(folder) = &self.data_dir else {
            return Ok(Etcd::connect(&self.etcd.options(&self.tls)?).await?);
        };
        let what = || format!("no run is under way in {}", folder.display());
        self.connect_to(read_endpoint(folder)?).await.map_err(|failure| failure.context(what()))
    }

    async fn connect_to(&self, endpoint: String) -> Result<Etcd, Failure> {
        let mut options = self.etcd.options(&self.tls)?;
        options.endpoints = vec![endpoint];
        Ok(Etcd::connect(&options).await?)
    }

    async fn choose(&self, etcd: Etcd) -> Result<Job, Failure> {
        if let Some(root) = &self.root {
            let name = self.job.clone().unwrap_or_else(|| root.clone());
            return Ok(Job { name, etcd, keys: Keys::below(root) });
        }
        let of_name =
            |name: &str, etcd| Job { name: name.to_owned(), etcd, keys: Keys::of_job(name) };
        if let Some(name) = &self.job {
            return Ok(of_name(name, etcd));
        }
        let names = known(&etcd).await?;
        match names.as_slice() {
            [] => Err(Failure::new(ErrorKind::NotFound, "etcd knows no job")),
            [name] => Ok(of_name(name, etcd)),
            names => Err(Failure::invalid(format!(
                "etcd knows several jobs; choose one with --job: {}",
                names.join(", ")
            ))),
        }
    }
}

/// Serves the embedded etcd of a run that is over, on a free port of this machine, for as long as
/// this process lives; says where. None if the folder has none, or somebody else serves it.
async fn serve_remains(folder: &Path) -> Option<String> {
    let data = folder.join("etcd");
    if !data.is_dir() {
        return None;
    }
    let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = Server::bind(Config::new(anywhere, data)).await.ok()?;
    let endpoint = format!("http://{}", server.local_addr());
    tokio::spawn(server.serve(std::future::pending()));
    Some(endpoint)
}

/// The names of all jobs of which etcd has a key.
pub async fn known(etcd: &Etcd) -> Result<Vec<String>, Failure> {
    // The root of a job without a name is what the roots of all jobs begin with.
    let prefix = Keys::of_job("").root().to_owned();
    let view = etcd.list(&prefix).await?;
    Ok(job_names(view.entries.keys().map(String::as_str), &prefix))
}

/// The names of the jobs that keys belong to, each once.
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
