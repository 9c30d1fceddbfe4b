//! Certificates for the processes of a test, as an operator makes them.

use std::path::PathBuf;
use std::process::Command;

use crate::{Scene, program};

/// A folder of certificates: one authority, and each role's own.
#[derive(Clone, Debug)]
pub struct Certificates {
    folder: PathBuf,
}

impl Certificates {
    /// Has `steadfast certs` make them in a folder of the scene. Members of etcd are on loopback.
    pub fn make(scene: &Scene, name: &str) -> Self {
        let made = Self { folder: scene.path(name) };
        made.run(&["init", "--etcd-host", "127.0.0.1"]);
        made
    }

    /// Has them made anew by the same authority.
    pub fn renew(&self) {
        self.run(&["renew"]);
    }

    fn run(&self, args: &[&str]) {
        let mut command = Command::new(program("steadfast"));
        command.arg("certs").args(args).arg("--dir").arg(&self.folder);
        let output = command.output().expect("the program starts");
        assert!(output.status.success(), "{output:?}");
    }

    /// The folder for `--tls` of a role.
    pub fn of(&self, role: &str) -> PathBuf {
        self.folder.join(role)
    }

    /// A file of a role's folder.
    pub fn file(&self, role: &str, name: &str) -> String {
        self.of(role).join(name).display().to_string()
    }
}
