//! TLS certificates for the processes of a test, made with `steadfast certs`.

use std::path::PathBuf;
use std::process::Command;

use crate::{Scene, program};

/// A directory with a certificate authority and one certificate per role.
#[derive(Clone, Debug)]
pub struct Certificates {
    directory: PathBuf,
}

impl Certificates {
    /// Creates certificates in a directory of the scene with `steadfast certs`. The etcd members listen on
    /// loopback.
    pub fn make(scene: &Scene, name: &str) -> Self {
        let made = Self { directory: scene.path(name) };
        made.run(&["init", "--etcd-host", "127.0.0.1"]);
        made
    }

    /// Renews the certificates with the same authority.
    pub fn renew(&self) {
        self.run(&["renew"]);
    }

    fn run(&self, args: &[&str]) {
        let mut command = Command::new(program("steadfast"));
        command.arg("certs").args(args).arg("--dir").arg(&self.directory);
        let output = command.output().expect("the program starts");
        assert!(output.status.success(), "{output:?}");
    }

    /// Returns the directory for `--tls` of a role.
    pub fn of(&self, role: &str) -> PathBuf {
        self.directory.join(role)
    }

    /// Returns the path of a file in the directory of a role.
    pub fn file(&self, role: &str, name: &str) -> String {
        self.of(role).join(name).display().to_string()
    }
}
