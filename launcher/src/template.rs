//! How an agent is started on a host.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use steadfast_common::records::rendezvous::NodeRange;
use steadfast_launcher_core::hosts::HostName;
use steadfast_process::Failure;
use steadfast_supervise::{Input, Output, WorkerSpec};

use crate::args::LaunchArgs;
use crate::own_machine::OwnMachine;
use crate::shell_words;

/// Options of ssh: it asks for nothing, and ends when the host is lost.
const SSH: &[&str] = &[
    "ssh",
    "-T",
    "-oBatchMode=yes",
    "-oConnectTimeout=20",
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=3",
];

/// What the agents of all hosts have in common.
#[derive(Clone, Debug)]
pub(crate) struct Template {
    /// The words before the host. `None`: the default, which differs for the own machine.
    shell: Option<Vec<String>>,
    machine: OwnMachine,
    program: PathBuf,
    directory: PathBuf,
    /// Flags of `steadfast run`.
    flags: Vec<OsString>,
    nic: Option<String>,
    /// Variables that are passed on.
    env: Vec<(OsString, OsString)>,
    command: Vec<OsString>,
}

impl Template {
    /// Creates the template of a job.
    ///
    /// # Errors
    /// If the remote shell is invalid, or this process does not know its program or directory.
    pub fn new(
        args: &LaunchArgs,
        machine: OwnMachine,
        endpoints: &[String],
        nodes: NodeRange,
        workers_max: Option<u32>,
    ) -> Result<Self, Failure> {
        let shell = args.remote_shell.as_deref().map(shell_words::split).transpose();
        let shell = shell.map_err(|error| Failure::invalid(format!("--remote-shell: {error}")))?;
        let program = match &args.agent_program {
            Some(program) => program.clone(),
            None => std::env::current_exe()
                .map_err(|error| Failure::io("cannot find this program", &error))?,
        };
        let directory = match &args.directory {
            Some(directory) => directory.clone(),
            None => std::env::current_dir()
                .map_err(|error| Failure::io("cannot find the current directory", &error))?,
        };
        let mut flags = flags(args, endpoints, nodes);
        if let Some(workers_max) = workers_max {
            push(&mut flags, "--max-workers", workers_max.to_string());
        }
        let env = args.env.iter().map(|it| variable(it)).collect::<Result<_, _>>()?;
        let (nic, command) = (args.nic.clone(), args.command.clone());
        Ok(Self { shell, machine, program, directory, flags, nic, env, command })
    }

    /// Returns the process that runs an agent on a host: the agent itself, or a remote shell.
    pub fn spec(&self, host: &HostName, slots: u32, launch: u64) -> WorkerSpec {
        let is_direct = self.shell.is_none() && self.machine.is(host);
        let mut spec = if is_direct {
            let mut spec = WorkerSpec::new(host.as_str(), &self.program);
            spec.args = self.agent_args(host, slots, launch, None);
            spec.directory = Some(self.directory.clone());
            spec.env.clone_from(&self.env);
            spec
        } else {
            let ssh = || SSH.iter().map(ToString::to_string).collect();
            let shell: Vec<String> = self.shell.clone().unwrap_or_else(ssh);
            let mut spec = WorkerSpec::new(host.as_str(), &shell[0]);
            spec.args = shell[1..].iter().map(OsString::from).collect();
            spec.args.extend([host.as_str().into(), self.line(host, slots, launch)]);
            spec
        };
        spec.input = Input::Pipe;
        spec.output = Output::Lines { prefix: format!("[{host}] ") };
        spec
    }

    /// Returns the command line for the shell of a host.
    fn line(&self, host: &HostName, slots: u32, launch: u64) -> OsString {
        let args = self.agent_args(host, slots, launch, Some(host.as_str()));
        let variables: Vec<OsString> = self.env.iter().map(assignment).collect();
        let variables = variables.iter().map(OsString::as_os_str);
        let env = (!self.env.is_empty()).then_some(OsStr::new("env"));
        let start = env.into_iter().chain(variables).chain([self.program.as_os_str()]);
        let mut line = OsString::from("cd ");
        line.push(shell_words::join([self.directory.as_os_str()]));
        line.push(" && exec ");
        line.push(shell_words::join(start.chain(args.iter().map(OsString::as_os_str))));
        line
    }

    /// Returns the arguments of an agent. `launch` counts the agents in the order in which they are started; as their
    /// `--node-rank`, it ranks those that start together in the order of their hosts.
    fn agent_args(
        &self,
        host: &HostName,
        slots: u32,
        launch: u64,
        address: Option<&str>,
    ) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["run".into()];
        push(&mut args, "--launched-on", host.as_str());
        push(&mut args, "--nproc-per-node", slots.to_string());
        push(&mut args, "--node-rank", u32::try_from(launch).unwrap_or(u32::MAX).to_string());
        match (&self.nic, address) {
            (Some(nic), _) => push(&mut args, "--nic", nic),
            (None, Some(address)) => push(&mut args, "--address", address),
            (None, None) => {}
        }
        args.extend(self.flags.iter().cloned());
        args.push("--".into());
        args.extend(self.command.iter().cloned());
        args
    }
}

/// Reads `NAME=VALUE`, or `NAME` with the value of this process.
fn variable(text: &str) -> Result<(OsString, OsString), Failure> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value.into())),
        None => (text, std::env::var_os(text)),
    };
    let is_name = |it: char| it.is_ascii_alphanumeric() || it == '_';
    if name.is_empty() || !name.chars().all(is_name) {
        return Err(Failure::invalid(format!("--env {text}: use `NAME` or `NAME=VALUE`")));
    }
    let value = value.ok_or_else(|| {
        Failure::invalid(format!("--env {name}: the variable is not set; use `{name}=VALUE`"))
    })?;
    Ok((name.into(), value))
}

fn assignment((name, value): &(OsString, OsString)) -> OsString {
    let mut word = name.clone();
    word.push("=");
    word.push(value);
    word
}

fn flags(args: &LaunchArgs, endpoints: &[String], nodes: NodeRange) -> Vec<OsString> {
    let mut flags = Vec::new();
    push(&mut flags, "--rdzv-endpoint", endpoints.join(","));
    push(&mut flags, "--rdzv-id", &args.rdzv_id);
    push(&mut flags, "--nnodes", nodes.to_string());
    push(&mut flags, "--max-restarts", args.max_restarts.to_string());
    if 0 < args.warm_workers {
        push(&mut flags, "--warm-workers", args.warm_workers.to_string());
    }
    if let Some(modules) = &args.warm_imports {
        push(&mut flags, "--warm-imports", modules);
    }
    push(&mut flags, "--grace", time(args.grace));
    push(&mut flags, "--lease-ttl", time(args.lease_ttl));
    push(&mut flags, "--hang-timeout", args.hang_timeout.to_string());
    let auth = &args.auth;
    if let Some(user) = &auth.etcd_user {
        push(&mut flags, "--etcd-user", user);
    }
    let files = [
        ("--log-dir", &args.log_dir),
        ("--tls", &args.security.tls.tls),
        ("--etcd-password-file", &auth.etcd_password_file),
        ("--etcd-ca", &auth.etcd_ca),
        ("--etcd-cert", &auth.etcd_cert),
        ("--etcd-key", &auth.etcd_key),
    ];
    for (flag, path) in files {
        if let Some(path) = path {
            push(&mut flags, flag, path);
        }
    }
    flags
}

fn push(args: &mut Vec<OsString>, flag: &str, value: impl AsRef<OsStr>) {
    args.extend([flag.into(), value.as_ref().to_owned()]);
}

fn time(duration: Duration) -> String {
    format!("{}ms", duration.as_millis())
}
