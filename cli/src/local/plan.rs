//! The processes of a local job and their command lines.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use steadfast_common::error::ErrorKind;
use steadfast_common::job::models::PYTHON;
use steadfast_common::job::spec::ModelSpec;
use steadfast_process::{Failure, variable_of};

use super::args::LocalArgs;
use super::python::Python;

/// Role of a process in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Etcd,
    Master,
    Pserver,
    Trainer,
    /// A worker of a coordinator's program.
    Worker,
    /// A program with a coordinator.
    Program,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Etcd => "etcd",
            Self::Master => "master",
            Self::Pserver => "pserver",
            Self::Trainer => "trainer",
            Self::Worker => "worker",
            Self::Program => "program",
        })
    }
}

/// One supervised process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub role: Role,
    /// Such as `trainer-1`; also the name of its log.
    pub name: String,
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Environment variables beside the inherited ones.
    pub env: Vec<(String, OsString)>,
    pub log: PathBuf,
}

/// The programs of the roles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    pub master: PathBuf,
    pub pserver: PathBuf,
    pub trainer: TrainerProgram,
}

/// How to start a trainer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrainerProgram {
    /// A program that takes the trainer's flags.
    Native(PathBuf),
    /// Python with these arguments. Settings go to environment variables, so that a program with its own
    /// arguments finds them.
    Python(Python),
    /// A program with a coordinator, which sets the initial values, and what its workers run.
    Coordinated { program: Python, worker: Python },
    /// A program with a coordinator is started by its user, and its workers, too.
    Elsewhere,
}

/// Says what a process runs.
#[derive(Clone, Copy, Debug)]
enum Program<'a> {
    Native(&'a PathBuf),
    Python(&'a Python),
}

/// The arguments of Python, before the script, for a worker of a coordinator.
const WORKER: [&str; 2] = ["-m", "steadfast.worker"];

impl Programs {
    /// Finds the programs in `--bin-dir`, or in the directory of this program.
    pub fn find(args: &LocalArgs, model: &ModelSpec, own: &Path) -> Result<Self, Failure> {
        let directory = match (&args.bin_dir, own.parent()) {
            (Some(directory), _) => absolute(directory)?,
            (None, Some(directory)) => directory.to_owned(),
            (None, None) => {
                return Err(Failure::invalid(
                    "cannot find the directory of the programs; set it with --bin-dir",
                ));
            }
        };
        let trainer = match &args.trainer_bin {
            Some(program) => TrainerProgram::Native(absolute(program)?),
            None if model.kind == PYTHON => {
                TrainerProgram::Python(Python::find(args, model, &directory)?)
            }
            None if model.has_closures() => match &model.script {
                Some(script) => TrainerProgram::Coordinated {
                    program: Python::of_script(args, script, &directory, &[])?,
                    worker: Python::of_script(args, script, &directory, &WORKER)?,
                },
                None => TrainerProgram::Elsewhere,
            },
            None => TrainerProgram::Native(directory.join("steadfast-trainer")),
        };
        let programs = Self {
            master: directory.join("steadfast-master"),
            pserver: directory.join("steadfast-pserver"),
            trainer,
        };
        let native = match &programs.trainer {
            TrainerProgram::Native(program) => Some(program),
            TrainerProgram::Python(_)
            | TrainerProgram::Coordinated { .. }
            | TrainerProgram::Elsewhere => None,
        };
        let missing: Vec<String> = [&programs.master, &programs.pserver]
            .into_iter()
            .chain(native)
            .filter(|program| !program.is_file())
            .map(|program| {
                format!(
                    "{} does not exist; build it with `cargo build --release`, or set its path \
                     with --bin-dir or --trainer-bin",
                    program.display()
                )
            })
            .collect();
        match missing.is_empty() {
            true => Ok(programs),
            false => Err(Failure::new(ErrorKind::NotFound, missing.join("\n"))),
        }
    }
}

pub fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path)
        .map_err(|error| Failure::io(format!("cannot use {}", path.display()), &error))
}

/// Settings of the processes of a job.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    pub args: &'a LocalArgs,
    pub programs: Programs,
    pub job: &'a str,
    /// Number of slots, each with a pserver.
    pub pservers: u32,
    /// Number of pservers that follow a slot.
    pub warm_spares: u32,
    pub job_file: PathBuf,
    pub store: PathBuf,
    pub endpoints: Vec<String>,
    /// Directory of the logs.
    pub logs: PathBuf,
}

impl Plan<'_> {
    /// Returns all processes except etcd.
    pub fn processes(&self) -> Vec<Process> {
        let Programs { master, pserver, trainer } = &self.programs;
        let trainers = self.args.trainers;
        let mut roles = vec![
            (Role::Master, self.args.masters, Program::Native(master)),
            (Role::Pserver, self.pservers + self.warm_spares, Program::Native(pserver)),
        ];
        match trainer {
            TrainerProgram::Native(program) => {
                roles.push((Role::Trainer, trainers, Program::Native(program)));
            }
            TrainerProgram::Python(python) => {
                roles.push((Role::Trainer, trainers, Program::Python(python)));
            }
            TrainerProgram::Coordinated { program, worker } => {
                roles.push((Role::Worker, trainers, Program::Python(worker)));
                roles.push((Role::Program, 1, Program::Python(program)));
            }
            TrainerProgram::Elsewhere => {}
        }
        let mut processes = Vec::new();
        for (role, count, of_role) in roles {
            for number in 0..count {
                let name = format!("{role}-{number}");
                let log = self.logs.join(format!("{name}.log"));
                let (program, args, mut env) = match of_role {
                    Program::Native(program) => (program.clone(), self.args_of(role), Vec::new()),
                    Program::Python(python) => {
                        let env = python.environment(&self.args_of(role));
                        (python.interpreter.clone(), python.args.clone(), env)
                    }
                };
                if role == Role::Trainer && self.args.accept_code_change {
                    env.push((variable_of("accept-code-change"), "true".into()));
                }
                processes.push(Process { role, name, program, args, env, log });
            }
        }
        processes
    }

    fn args_of(&self, role: Role) -> Vec<OsString> {
        let mut words = Words::default();
        words.add("--job", self.job);
        words.add("--etcd-endpoints", self.endpoints.join(","));
        words.add("--listen", "127.0.0.1:0");
        words.add("--admin-listen", "127.0.0.1:0");
        words.add("--lease-ttl", format!("{}ms", self.args.lease_ttl.as_millis()));
        let auth = &self.args.auth;
        words.add_if("--etcd-user", auth.etcd_user.as_deref());
        words.add_if("--etcd-password-file", auth.etcd_password_file.as_deref());
        words.add_if("--etcd-ca", auth.etcd_ca.as_deref());
        words.add_if("--etcd-cert", auth.etcd_cert.as_deref());
        words.add_if("--etcd-key", auth.etcd_key.as_deref());
        if role == Role::Master {
            words.add("--job-file", &self.job_file);
            words.add("--store", &self.store);
            words.add("--pservers", self.pservers.to_string());
            words.add_if("--tensorboard", self.args.tensorboard.as_deref());
        }
        words.0
    }
}

#[derive(Default)]
struct Words(Vec<OsString>);

impl Words {
    fn add(&mut self, flag: &str, value: impl Into<OsString>) {
        self.0.push(flag.into());
        self.0.push(value.into());
    }

    fn add_if(&mut self, flag: &str, value: Option<impl Into<OsString>>) {
        if let Some(value) = value {
            self.add(flag, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: LocalArgs,
    }

    fn args(words: &[&str]) -> LocalArgs {
        Only::parse_from(["it", "job.toml"].iter().chain(words)).args
    }

    fn mlp() -> ModelSpec {
        serde_json::from_value(serde_json::json!({ "kind": "mlp" })).unwrap()
    }

    #[test]
    fn only_masters_receive_the_job_file_and_every_process_picks_its_ports() {
        let args = args(&["--trainers", "3"]);
        let bin = |name: &str| PathBuf::from("/bin").join(name);
        let plan = Plan {
            args: &args,
            programs: Programs {
                master: bin("m"),
                pserver: bin("p"),
                trainer: TrainerProgram::Native(bin("t")),
            },
            job: "digits",
            pservers: 1,
            warm_spares: 0,
            job_file: "/jobs/digits.toml".into(),
            store: "/data/store".into(),
            endpoints: vec!["http://a:1".to_owned(), "http://b:1".to_owned()],
            logs: "/data/logs".into(),
        };
        let processes = plan.processes();
        let names: Vec<&str> = processes.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["master-0", "pserver-0", "trainer-0", "trainer-1", "trainer-2"]);
        let master = processes[0].args.join(&OsString::from(" ")).into_string().unwrap();
        assert_eq!(
            master,
            "--job digits --etcd-endpoints http://a:1,http://b:1 --listen 127.0.0.1:0 \
             --admin-listen 127.0.0.1:0 --lease-ttl 5000ms --job-file /jobs/digits.toml \
             --store /data/store --pservers 1"
        );
        assert!(!processes[1].args.contains(&OsString::from("--job-file")));
        assert_eq!(processes[4].log, Path::new("/data/logs/trainer-2.log"));
    }

    #[test]
    fn every_missing_program_is_named() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("steadfast-master"), "").unwrap();
        let own = directory.path().join("steadfast");
        let failure = Programs::find(&args(&[]), &mlp(), &own).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::NotFound);
        assert_eq!(failure.message.lines().count(), 2);
        assert!(failure.message.contains("steadfast-pserver does not exist"));
    }
}
