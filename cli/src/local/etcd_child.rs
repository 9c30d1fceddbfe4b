//! Runs the embedded etcd as a child process.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_process::Failure;
use steadfast_supervise::Supervisor as Starter;
use tokio::sync::mpsc;

use super::directory::Directory;
use super::plan::{Process, Role};
use super::supervisor::{Notice, Supervisor};

/// Time for etcd to read its data and respond.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_millis(30);

/// Another process can take a free port before etcd binds it; then the next port is tried.
const PORTS_TRIED: u32 = 3;

/// A running embedded etcd.
#[derive(Debug)]
pub struct EtcdChild {
    pub supervisor: Supervisor,
    pub client: Etcd,
    pub endpoint: String,
}

/// Starts etcd on a free port and waits until it answers.
pub async fn start(
    directory: &Directory,
    own_program: &Path,
    notices_tx: &mpsc::Sender<Notice>,
    notices: &mut mpsc::Receiver<Notice>,
    starter: &Arc<Starter>,
) -> Result<EtcdChild, Failure> {
    let mut failure = None;
    for _ in 0..PORTS_TRIED {
        let address = format!("127.0.0.1:{}", free_port()?);
        let process = process(directory, own_program, &address);
        let log = process.log.clone();
        let endpoint = format!("http://{address}");
        let supervisor = Supervisor::start(vec![process], notices_tx, starter);
        let answer = tokio::select! {
            connected = connect(&endpoint, &log) => connected,
            fatal = first_fatal(notices) => Err(fatal),
        };
        match answer {
            Ok(client) => {
                directory.write_endpoint(&endpoint)?;
                return Ok(EtcdChild { supervisor, client, endpoint });
            }
            Err(error) => {
                supervisor.stop(Duration::ZERO).await;
                let another_port_may_help = error.kind == ErrorKind::Conflict;
                failure = Some(error);
                if !another_port_may_help {
                    break;
                }
            }
        }
    }
    Err(failure.unwrap_or_else(|| Failure::internal("etcd was not started")))
}

fn process(directory: &Directory, own_program: &Path, address: &str) -> Process {
    let args = ["etcd", "--listen", address, "--data-dir"].map(Into::into);
    let mut args = Vec::from(args);
    args.push(directory.etcd().into_os_string());
    Process {
        role: Role::Etcd,
        name: Role::Etcd.to_string(),
        program: own_program.to_owned(),
        args,
        env: Vec::new(),
        log: directory.log("etcd"),
    }
}

fn free_port() -> Result<u16, Failure> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|error| Failure::io("cannot find a free port on 127.0.0.1", &error))
}

async fn connect(endpoint: &str, log: &Path) -> Result<Etcd, Failure> {
    let options = EtcdOptions { endpoints: vec![endpoint.to_owned()], ..EtcdOptions::default() };
    let trying = async {
        loop {
            match Etcd::connect(&options).await {
                Ok(client) => return client,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    };
    tokio::time::timeout(START_TIMEOUT, trying).await.map_err(|_| {
        let log = log.display();
        Failure::unavailable(format!("etcd does not answer after {START_TIMEOUT:?}; see {log}"))
    })
}

async fn first_fatal(notices: &mut mpsc::Receiver<Notice>) -> Failure {
    while let Some(notice) = notices.recv().await {
        match notice {
            Notice::Fatal(failure) => return failure,
            Notice::Restart { .. } => {}
        }
    }
    std::future::pending().await
}
