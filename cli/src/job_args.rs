//! Which job a command is about, and how to reach its etcd.

use std::path::PathBuf;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_common::keys::Keys;
use steadfast_coord::Etcd;
use steadfast_process::{EtcdArgs, Failure, job_name};

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
    /// Look at the job that `steadfast local` runs in this folder.
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
    /// Connects to etcd and finds the job that is meant.
    ///
    /// # Errors
    /// If etcd does not answer, or knows not just one job and none was named.
    pub async fn find(&self) -> Result<Job, Failure> {
        let mut options = self.etcd.options()?;
        if let Some(folder) = &self.data_dir {
            options.endpoints = vec![read_endpoint(folder)?];
        }
        let etcd = Etcd::connect(&options).await.map_err(|error| match &self.data_dir {
            Some(folder) => {
                let data = folder.join("etcd");
                let way_out = match data.is_dir() {
                    true => format!(
                        " (for what it left, serve its etcd: `steadfast etcd --data-dir {}`)",
                        data.display()
                    ),
                    false => String::new(),
                };
                let what = format!("no run is under way in {}{way_out}", folder.display());
                Failure::from(error).context(what)
            }
            None => error.into(),
        })?;
        let (name, keys) = self.choose(&etcd).await?;
        Ok(Job { name, etcd, keys })
    }

    async fn choose(&self, etcd: &Etcd) -> Result<(String, Keys), Failure> {
        if let Some(root) = &self.root {
            let name = self.job.clone().unwrap_or_else(|| root.clone());
            return Ok((name, Keys::below(root)));
        }
        if let Some(name) = &self.job {
            return Ok((name.clone(), Keys::of_job(name)));
        }
        let names = known(etcd).await?;
        match names.as_slice() {
            [] => Err(Failure::new(ErrorKind::NotFound, "etcd knows no job")),
            [name] => Ok((name.clone(), Keys::of_job(name))),
            names => Err(Failure::invalid(format!(
                "etcd knows several jobs; choose one with --job: {}",
                names.join(", ")
            ))),
        }
    }
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
