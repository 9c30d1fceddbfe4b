//! The data directory of a job: its lock and the paths in it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;

/// A data directory, locked until this is dropped.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// Holds the lock; the kernel releases it when the process ends for any reason.
    _lock: File,
}

impl Directory {
    /// Creates the directory if it does not exist, and locks it.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let made = fs::create_dir_all(path.join("logs")).and_then(|()| path.canonicalize());
        let path = made.map_err(|error| {
            Failure::io(format!("cannot use the data directory {}", path.display()), &error)
        })?;
        let lock = lock(&path)?;
        Ok(Self { path, _lock: lock })
    }

    /// Returns the path of the directory as text, for messages and command lines.
    pub fn shown(&self) -> String {
        self.path.display().to_string()
    }

    /// Returns the data directory of the embedded etcd.
    pub fn etcd(&self) -> PathBuf {
        self.path.join("etcd")
    }

    /// Returns the directory of the job's object store.
    pub fn store(&self) -> PathBuf {
        self.path.join("store")
    }

    pub fn log(&self, name: &str) -> PathBuf {
        self.path.join("logs").join(format!("{name}.log"))
    }

    pub fn logs(&self) -> PathBuf {
        self.path.join("logs")
    }

    /// Returns the path of the file with the summary of a finished job.
    pub fn summary(&self) -> PathBuf {
        self.path.join("summary.json")
    }

    /// Writes the endpoint of the embedded etcd, for `steadfast status --data-dir`.
    pub fn write_endpoint(&self, endpoint: &str) -> Result<(), Failure> {
        let path = endpoint_file(&self.path);
        fs::write(&path, endpoint)
            .map_err(|error| Failure::io(format!("cannot write {}", path.display()), &error))
    }
}

/// Reads the endpoint of the embedded etcd of a data directory.
pub fn read_endpoint(directory: &Path) -> Result<String, Failure> {
    let path = endpoint_file(directory);
    fs::read_to_string(&path).map(|text| text.trim().to_owned()).map_err(|error| {
        Failure::io(
            format!(
                "no job was ever run in {}: cannot read {}",
                directory.display(),
                path.display()
            ),
            &error,
        )
    })
}

fn endpoint_file(directory: &Path) -> PathBuf {
    directory.join("etcd-endpoint")
}

fn lock(directory: &Path) -> Result<File, Failure> {
    let path = directory.join("lock");
    let failure = |error: std::io::Error| {
        Failure::io(format!("cannot lock the data directory with {}", path.display()), &error)
    };
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = opened.map_err(failure)?;
    match file.try_lock() {
        Ok(()) => {
            file.set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| writeln!(file, "{}", std::process::id()))
                .map_err(failure)?;
            Ok(file)
        }
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // The process id is only informative.
            let _ = file.read_to_string(&mut holder);
            Err(Failure::new(
                ErrorKind::Conflict,
                format!(
                    "process {} already runs a job in {}; wait for it, stop it, or choose another \
                     directory with --data-dir",
                    holder.trim(),
                    directory.display()
                ),
            ))
        }
        Err(TryLockError::Error(error)) => Err(failure(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_serves_one_run_at_a_time_and_names_the_other() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/b");
        let directory = Directory::open(&path).unwrap();
        let failure = Directory::open(&path).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::Conflict);
        let holder = format!("process {} already runs", std::process::id());
        assert!(failure.message.starts_with(&holder), "{failure}");
        drop(directory);
        assert!(Directory::open(&path).is_ok());
    }

    #[test]
    fn a_directory_remembers_where_its_etcd_listens() {
        let parent = tempfile::tempdir().unwrap();
        let directory = Directory::open(parent.path()).unwrap();
        assert!(read_endpoint(parent.path()).is_err());
        directory.write_endpoint("http://127.0.0.1:4000").unwrap();
        assert_eq!(read_endpoint(parent.path()).unwrap(), "http://127.0.0.1:4000");
    }
}
