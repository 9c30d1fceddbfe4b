//! The deployment of `deploy/compose.yaml`, started under a separate project name and removed after the
//! test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::{Job, Scene, examples, program};

/// Images of the deployment except etcd, and the image of the test store.
const IMAGES: [&str; 2] = ["debian:bookworm-slim", "motoserver/moto:5.1.0"];

/// Images of etcd in order of preference: the one of the deployment, then an older one.
const ETCD_IMAGES: [&str; 2] = ["quay.io/coreos/etcd:v3.6.14", "quay.io/coreos/etcd:v3.5.16"];

/// Tag of the image with the already built programs.
const IMAGE: &str = "steadfast:test";
const PROGRAMS_IMAGE: &str = "steadfast-programs:test";
const PROGRAMS: [&str; 4] =
    ["steadfast", "steadfast-master", "steadfast-pserver", "steadfast-trainer"];

/// Timeout for pulling an image.
const PULL_MAX: &str = "60s";

/// A running deployment.
#[derive(Debug)]
pub struct Deployment {
    project: String,
    files: [PathBuf; 2],
    jobs: PathBuf,
    job: String,
    etcd_image: &'static str,
}

/// A container of a service.
#[derive(Clone, Debug)]
pub struct Container {
    pub id: String,
    pub service: String,
    /// Process id on the host.
    pub pid: i32,
    pub address: String,
}

impl Deployment {
    /// Builds the image and starts a job. Returns `None`, with a message, if Docker or an image is not
    /// available.
    pub fn up(scene: &Scene, job: &Job) -> Option<Self> {
        let etcd_image = match can_be_had() {
            Ok(image) => image,
            Err(reason) => {
                eprintln!("skipped: {reason}");
                return None;
            }
        };
        make_image(scene);
        let jobs = scene.path("jobs");
        fs::create_dir_all(jobs.join("data")).expect("the directory of the test is writable");
        for entry in fs::read_dir(examples().join("data")).expect("the examples have data") {
            let path = entry.expect("it can be listed").path();
            let name = path.file_name().expect("it has a name");
            fs::copy(&path, jobs.join("data").join(name)).expect("it can be copied");
        }
        let outside = format!("{}/", examples().join("data").display());
        fs::write(jobs.join(format!("{}.toml", job.name)), job.text.replace(&outside, "data/"))
            .expect("the directory of the test is writable");
        let repository = examples().join("..");
        let deployment = Self {
            project: format!("steadfast-test-{}", std::process::id()),
            // The second file replaces the store with a test server.
            files: ["deploy/compose.yaml", "tests/compose.store.yaml"]
                .map(|it| repository.join(it)),
            jobs,
            job: job.name.clone(),
            etcd_image,
        };
        deployment.compose(&["up", "--wait", "--no-build", "--quiet-pull"]);
        Some(deployment)
    }

    /// Runs `docker compose`; returns its stdout.
    #[track_caller]
    pub fn compose(&self, args: &[&str]) -> String {
        stdout_of(&self.try_compose(args), args)
    }

    fn try_compose(&self, args: &[&str]) -> Output {
        let mut command = Command::new("docker");
        command.args(["compose", "--project-name", &self.project]);
        for file in &self.files {
            command.arg("--file").arg(file);
        }
        command.env("STEADFAST_IMAGE", IMAGE).env("PROGRAMS", PROGRAMS_IMAGE);
        command.env("JOBS", &self.jobs).env("JOB", &self.job).env("ETCD_IMAGE", self.etcd_image);
        command.args(args).stdin(Stdio::null()).output().expect("docker starts")
    }

    /// Runs `deploy/chaos.sh` on the deployment; returns its output.
    #[track_caller]
    pub fn disturb(&self, rounds: u32) -> String {
        let mut command = Command::new("sh");
        command.arg(examples().join("../deploy/chaos.sh")).env("CHAOS_ROUNDS", rounds.to_string());
        command.env("COMPOSE_PROJECT_NAME", &self.project).env("CHAOS_EVERY", "1");
        let output = command.env("CHAOS_FOR", "6").output().expect("a shell starts");
        stdout_of(&output, &["chaos"])
    }

    /// Runs `steadfast` as an administrator; returns its JSON output, if it succeeds.
    pub fn steadfast(&self, args: &[&str]) -> Option<Value> {
        let run = ["run", "--rm", "--no-deps", "-T", "admin", "steadfast"];
        let output = self.try_compose(&[&run, args].concat());
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Returns the running containers of a service.
    pub fn running(&self, service: &str) -> Vec<Container> {
        let listed = self.compose(&["ps", "--quiet", "--status", "running", service]);
        listed.lines().filter_map(|id| self.inspect(id, service)).collect()
    }

    fn inspect(&self, id: &str, service: &str) -> Option<Container> {
        let network = format!("{}_inside", self.project);
        let form = format!(
            "{{{{.State.Pid}}}} {{{{with index .NetworkSettings.Networks \"{network}\"}}}}{{{{.IPAddress}}}}{{{{end}}}}"
        );
        let output = docker(&["inspect", "--format", &form, id]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (pid, address) = text.trim().split_once(' ')?;
        Some(Container {
            id: id.to_owned(),
            service: service.to_owned(),
            pid: pid.parse().ok().filter(|pid| 0 < *pid)?,
            address: address.to_owned(),
        })
    }

    /// Returns the exit codes of the containers of a service; `None` while one is running.
    pub fn exit_codes(&self, service: &str) -> Option<Vec<i64>> {
        let ids = self.compose(&["ps", "--quiet", "--all", service]);
        let code = |id: &str| -> Option<i64> {
            let form = "{{.State.Status}} {{.State.ExitCode}}";
            let output = docker(&["inspect", "--format", form, id]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.trim().strip_prefix("exited ")?.parse().ok()
        };
        ids.lines().map(code).collect()
    }

    /// Returns the network of all containers.
    pub fn network(&self) -> String {
        format!("{}_inside", self.project)
    }
}

impl Drop for Deployment {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let logs = self.try_compose(&["logs", "--no-color", "--tail", "15"]);
            eprintln!("{}", String::from_utf8_lossy(&logs.stdout));
        }
        let down = ["--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "1"];
        let down = self.try_compose(&down);
        if !down.status.success() {
            eprintln!("left behind: {}", String::from_utf8_lossy(&down.stderr));
        }
    }
}

impl Container {
    /// Kills the process from the host, as the OOM killer does. Docker does not restart a container after
    /// `docker kill`.
    pub fn kill(&self) {
        kill(Pid::from_raw(self.pid), Signal::SIGKILL)
            .expect("the process runs, and this user may kill it");
    }

    /// Runs a command in the network namespace of the container.
    #[track_caller]
    pub fn in_its_network(&self, command: &[&str]) {
        let mut entered = Command::new("nsenter");
        entered.args(["--target", &self.pid.to_string(), "--net", "--"]).args(command);
        let output = entered.output().expect("nsenter starts");
        assert!(output.status.success(), "{command:?}: {output:?}");
    }
}

/// Runs `docker`, which must succeed.
#[track_caller]
pub fn docker(args: &[&str]) -> Output {
    let output = Command::new("docker").args(args).stdin(Stdio::null()).output();
    let output = output.expect("docker starts");
    assert!(output.status.success(), "docker {args:?}: {output:?}");
    output
}

/// Agents of an elastic job in containers that share the network of this machine (`tests/compose.agents.yaml`).
#[derive(Debug)]
pub struct Agents {
    project: String,
    endpoint: String,
}

impl Agents {
    /// Describes agents of the job whose etcd is at `endpoint`; starts none. Returns `None`, with a message, if Docker or
    /// the image is not available.
    pub fn of(endpoint: &str) -> Option<Self> {
        let ready = compose_answers().and_then(|()| have(IMAGES[0]));
        ready.map_err(|reason| eprintln!("skipped: {reason}")).ok()?;
        let project = format!("steadfast-agents-{}", std::process::id());
        Some(Self { project, endpoint: endpoint.to_owned() })
    }

    /// Returns the command that gives compose some words, such as `up`.
    pub fn command(&self, words: &[&str]) -> Vec<String> {
        let file = examples().join("../tests/compose.agents.yaml");
        let program = format!("PROGRAM={}", program("steadfast").display());
        let endpoint = format!("ENDPOINT={}", self.endpoint);
        let compose = ["docker", "compose", "--project-name", &self.project, "--file", path(&file)];
        let all = [&["env", &program, &endpoint], &compose[..], words].concat();
        all.into_iter().map(str::to_owned).collect()
    }

    /// Returns how many agents run.
    pub fn running(&self) -> usize {
        let listed = self.run(&["ps", "--quiet", "--status", "running"]);
        String::from_utf8_lossy(&listed.stdout).lines().count()
    }

    fn run(&self, words: &[&str]) -> Output {
        let words = self.command(words);
        Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()).output().expect("env starts")
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        let down = self.run(&["down", "--timeout", "1"]);
        if !down.status.success() {
            eprintln!("left behind: {}", String::from_utf8_lossy(&down.stderr));
        }
    }
}

/// Checks that all images are available; returns the etcd image to use.
fn can_be_had() -> Result<&'static str, String> {
    compose_answers()?;
    IMAGES.into_iter().try_for_each(have)?;
    let here = ETCD_IMAGES.into_iter().find(|image| is_here(image));
    let etcd = here.or_else(|| ETCD_IMAGES.into_iter().find(|image| pull(image)));
    etcd.ok_or_else(|| "no etcd image is available locally or can be pulled".to_owned())
}

fn compose_answers() -> Result<(), String> {
    if !runs(&["info"]) {
        return Err("the Docker engine does not answer".to_owned());
    }
    if !runs(&["compose", "version"]) {
        return Err("docker has no `compose` command".to_owned());
    }
    Ok(())
}

fn have(image: &str) -> Result<(), String> {
    match is_here(image) || pull(image) {
        true => Ok(()),
        false => Err(format!("the image {image} is not available locally and cannot be pulled")),
    }
}

fn is_here(image: &str) -> bool {
    runs(&["image", "inspect", image])
}

fn runs(args: &[&str]) -> bool {
    let output = Command::new("docker").args(args).stdin(Stdio::null()).output();
    output.is_ok_and(|it| it.status.success())
}

fn pull(image: &str) -> bool {
    let mut command = Command::new("timeout");
    command.args([PULL_MAX, "docker", "pull", "--quiet", image]).stdin(Stdio::null());
    command.output().is_ok_and(|it| it.status.success())
}

/// Builds the image of `deploy/Dockerfile` from the already built programs.
fn make_image(scene: &Scene) {
    let directory = scene.path("image/programs");
    fs::create_dir_all(&directory).expect("the directory of the test is writable");
    for name in PROGRAMS {
        let (from, to) = (program(name), directory.join(name));
        // Debug line tables are three quarters of the size.
        let stripped = Command::new("strip").arg("-o").arg(&to).arg(&from).status();
        if !stripped.is_ok_and(|it| it.success()) {
            fs::copy(&from, &to).expect("it can be copied");
        }
    }
    let archive = scene.path("programs.tar");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(scene.path("image")).arg("-cf").arg(&archive).arg("programs");
    assert!(tar.status().is_ok_and(|it| it.success()), "the programs can be packed");
    docker(&["import", &archive.display().to_string(), PROGRAMS_IMAGE]);
    let repository = examples().join("..");
    let dockerfile = repository.join("deploy/Dockerfile");
    let argument = format!("PROGRAMS={PROGRAMS_IMAGE}");
    let build = ["build", "--quiet", "--tag", IMAGE, "--build-arg", &argument, "--file"];
    docker(&[&build[..], &[path(&dockerfile), path(&repository)]].concat());
}

fn path(path: &Path) -> &str {
    path.to_str().expect("paths of this repository are text")
}

#[track_caller]
fn stdout_of(output: &Output, args: &[&str]) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "docker compose {args:?}: {stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
