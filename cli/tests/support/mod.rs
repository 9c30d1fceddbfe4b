//! A local run whose master, pservers and trainers are scripts; the test acts as the master in etcd and
//! over gRPC.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use steadfast_common::records::keys::Keys;
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_host::task::Task;
use steadfast_net::TlsIdentity;
use steadfast_process::Exposure;
use steadfast_proto::v1::master_server::{Master, MasterServer};
use steadfast_proto::v1::*;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

pub const TIMEOUT: Duration = Duration::from_secs(30);

pub const JOB: &str = "name = 'digits'\npasses = 2\n[dataset]\nsource = ['digits.parquet']\n\
                       format = 'parquet'\nfeatures = ['pixel_*']\nlabel = 'digit'\n\
                       [model]\nkind = 'softmax'\nclasses = 10\n";

/// Script that waits for the end of the job.
const WAIT_FOR_END: &str = "while [ ! -e \"$here/over\" ]; do sleep 0.05; done";

/// A directory with a job file, scripts in place of the programs, and a data directory.
pub struct Stage {
    directory: TempDir,
}

impl Stage {
    pub fn new() -> Self {
        let stage = Self { directory: tempfile::tempdir().unwrap() };
        fs::write(stage.path("job.toml"), JOB).unwrap();
        for role in ["master", "pserver", "trainer"] {
            stage.script(role, WAIT_FOR_END);
        }
        stage
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes the script of a role; it first writes its process id to `pids`.
    pub fn script(&self, role: &str, body: &str) {
        let path = self.path(&format!("steadfast-{role}"));
        let text =
            format!("#!/bin/sh\nhere=$(dirname \"$0\")\necho $$ >> \"$here/pids\"\n{body}\n");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_steadfast"));
        command
            .current_dir(self.directory.path())
            .args(["local", "job.toml", "--bin-dir", ".", "--data-dir", "data"])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn start(&self, more: &[&str]) -> Running {
        Running { child: Some(self.command(more).spawn().unwrap()) }
    }

    pub fn status(&self, more: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_steadfast"));
        command.current_dir(self.directory.path()).args(["status", "--data-dir", "data"]);
        command.args(more).output().unwrap()
    }

    /// Waits until `count` processes have started, and returns their ids.
    pub async fn pids(&self, count: usize) -> Vec<Pid> {
        eventually(|| {
            let text = fs::read_to_string(self.path("pids")).unwrap_or_default();
            let pids: Vec<Pid> =
                text.lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw).collect();
            (count <= pids.len()).then_some(pids)
        })
        .await
    }

    /// Ends all waiting scripts.
    pub fn finish_processes(&self) {
        fs::write(self.path("over"), "").unwrap();
    }

    /// Connects to the etcd of the run.
    pub async fn etcd(&self) -> Etcd {
        let file = self.path("data/etcd-endpoint");
        let endpoint =
            eventually(|| fs::read_to_string(&file).ok().filter(|it| !it.is_empty())).await;
        let options = EtcdOptions { endpoints: vec![endpoint], ..EtcdOptions::default() };
        Etcd::connect(&options).await.unwrap()
    }
}

/// A run that is killed if the test fails.
pub struct Running {
    child: Option<Child>,
}

impl Running {
    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    pub fn pid(&self) -> Pid {
        let child = self.child.as_ref().expect("the run has not been awaited yet");
        Pid::from_raw(i32::try_from(child.id()).unwrap())
    }

    /// Waits until the run ends.
    pub async fn end(mut self) -> Output {
        let child = self.child.take().expect("it ends once");
        tokio::task::spawn_blocking(move || child.wait_with_output().unwrap()).await.unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub async fn eventually<T>(mut probe: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(start.elapsed() < TIMEOUT, "the condition was not met in {TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until all processes have ended.
pub async fn all_exited(pids: &[Pid]) {
    eventually(|| pids.iter().all(|pid| has_ended(*pid)).then_some(())).await;
}

/// A zombie counts as ended: a small container may have no init process to reap it.
fn has_ended(pid: Pid) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    stat.is_err() || stat.is_ok_and(|stat| stat.contains(") Z "))
}

/// A master that returns a fixed status and counts requests.
#[derive(Clone, Default)]
pub struct FakeMaster {
    pub requests: Arc<AtomicU32>,
    pub checkpoints: Arc<AtomicU32>,
}

impl FakeMaster {
    /// Starts serving and registers its address in etcd.
    pub async fn start(&self, etcd: &Etcd) -> Task<Result<(), tonic::transport::Error>> {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let listener = steadfast_process::bind(any, "--listen", &Exposure::Loopback).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let routes = Routes::new(MasterServer::new(self.clone()));
        let server = listener.serve(
            routes,
            steadfast_proto::access,
            &TlsIdentity::default(),
            CancellationToken::new(),
        );
        let record = serde_json::json!({
            "id": "00000000-0000-0000-0000-000000000001", "address": address, "admin": address
        });
        let key = Keys::of_job("digits").master_addr();
        etcd.put(&key, record.to_string().as_bytes()).await.unwrap();
        server
    }
}

/// The fixed status.
pub fn status_json() -> serde_json::Value {
    serde_json::json!({
        "job": "digits", "mode": "sync", "state": "training", "waiting": [], "generation": 1,
        "pass": 1, "passes": 2, "steps": null, "version": 40,
        "queues": { "todo": 3, "pending": 1, "done": 6, "discarded": 0 },
        "examples": 900, "examples_total": 1000, "examples_per_second": 120.5, "loss": 0.5,
        "evaluation": null, "master": { "address": "127.0.0.1:1", "epoch": 3 }, "slots": [],
        "ps_desired": 2, "warm_spares": 0, "trainers": [], "checkpoint": null,
        "checkpoint_error": null, "checkpoint_failures": 0, "checkpoints_committed": 0,
        "recoveries": [], "recoveries_count": 0, "lead_max": 0, "lead_bound": null, "waits": [], "warnings": [],
        "saving": { "trainer": null, "failures": 0, "error": null },
        "discarded": { "tasks": 0, "times": 0, "listed": [] },
        "time_breakdown": { "data": 0.0, "compute": 0.0, "push": 0.0, "wait": 0.0, "pull": 0.0, "moved_bytes": 0 },
        "seconds_left": 3.0, "result": null,
        "events": [], "points": []
    })
}

macro_rules! not_implemented {
    ($($method:ident: $request:ty => $reply:ty),* $(,)?) => {
        #[tonic::async_trait]
        impl Master for FakeMaster {
            async fn take_checkpoint(
                &self,
                _: Request<TakeCheckpointRequest>,
            ) -> Result<Response<TakeCheckpointReply>, Status> {
                self.checkpoints.fetch_add(1, Ordering::SeqCst);
                let (checkpoint, error) = ("c-7".to_owned(), String::new());
                Ok(Response::new(TakeCheckpointReply { checkpoint, error }))
            }

            async fn status(
                &self,
                _: Request<StatusRequest>,
            ) -> Result<Response<StatusReply>, Status> {
                self.requests.fetch_add(1, Ordering::SeqCst);
                Ok(Response::new(StatusReply { json: status_json().to_string().into() }))
            }

            $(
                async fn $method(&self, _: Request<$request>) -> Result<Response<$reply>, Status> {
                    Err(Status::unimplemented("not implemented by the test"))
                }
            )*
        }
    };
}

not_implemented! {
    begin_init: BeginInitRequest => BeginInitReply,
    finish_init: FinishInitRequest => FinishInitReply,
    follow: FollowRequest => FollowReply,
    next_task: NextTaskRequest => NextTaskReply,
    fail_task: FailTaskRequest => FailTaskReply,
    advance: AdvanceRequest => AdvanceReply,
    report_evaluation: ReportEvaluationRequest => ReportEvaluationReply,
    begin_save: BeginSaveRequest => BeginSaveReply,
    finish_save: FinishSaveRequest => FinishSaveReply,
    restore_checkpoint: RestoreCheckpointRequest => RestoreCheckpointReply,
    amend_job: AmendJobRequest => AmendJobReply,
    drain: DrainRequest => DrainReply,
    scale_trainers: ScaleRequest => ScaleReply,
    report_damage: ReportDamageRequest => ReportDamageReply,
    report_divergence: ReportDivergenceRequest => ReportDivergenceReply,
    discard_record: DiscardRecordRequest => DiscardRecordReply,
}
