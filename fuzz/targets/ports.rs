//! Arbitrary bytes to the gRPC port and the admin port of a process: each connection ends, uses little
//! memory and gets a short response, and the next one is served.

#![no_main]

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use prometheus_client::registry::Registry;
use steadfast_fuzz::seeds;
use steadfast_net::TlsIdentity;
use steadfast_process::{
    Admin, AdminContent, AdminServer, Exposure, HealthTask, Readiness, Shutdown, bind, health,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);
const ANSWER_MAX: usize = 256 << 10;
const TIMEOUT: Duration = Duration::from_secs(15);
/// Interval, in inputs, of checks that the port still serves.
const EVERY: u8 = 16;

static PORTS: LazyLock<Ports> = LazyLock::new(Ports::open);

fuzz_target!(init: begin(), |data: &[u8]| {
    let Some((port, bytes)) = data.split_first() else { return };
    let ports = &*PORTS;
    ports.runtime.block_on(async {
        let address = if port & 1 == 0 { ports.admin.local_addr() } else { ports.calls };
        let answer = visit(address, bytes).await;
        assert!(answer.len() <= ANSWER_MAX, "{} bytes", answer.len());
        if port / 2 % EVERY == 0 {
            let alive = visit(ports.admin.local_addr(), ALIVE).await;
            assert!(alive.starts_with(b"HTTP/1.1 200"));
        }
    });
});

const ALIVE: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n";

struct Ports {
    runtime: Runtime,
    admin: AdminServer,
    calls: SocketAddr,
    _health: HealthTask,
}

impl Ports {
    fn open() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("the runtime starts");
        let (admin, calls, _health) = runtime.block_on(async {
            let readiness = Readiness::new("begins");
            let content = AdminContent {
                shutdown: Some(Shutdown::manual()),
                role: "master",
                job: "it".to_owned(),
                id: Box::new(Default::default),
                readiness: readiness.clone(),
                metrics: Registry::default(),
                token: Some("0123456789abcdef".to_owned()),
                status: Box::new(|| serde_json::json!({ "step": 1 })),
                page: None,
            };
            let admin =
                Admin::bind(LOOPBACK.into(), Exposure::Loopback).await.expect("a port is free");
            let port = bind(LOOPBACK.into(), "--listen", &Exposure::Loopback)
                .await
                .expect("a port is free");
            let calls = port.local_addr().expect("the port is bound");
            let (task, service) = health("steadfast.v1.Master", &readiness).await;
            let stop = CancellationToken::new();
            // Serves until the process exits.
            std::mem::forget(port.serve(
                Routes::new(service),
                steadfast_proto::access,
                &TlsIdentity::default(),
                stop,
            ));
            (admin.serve(content), calls, task)
        });
        Self { runtime, admin, calls, _health }
    }
}

/// Sends bytes and closes the sending side; returns the response up to the end of the connection.
async fn visit(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut answer = Vec::new();
    let met = timeout(TIMEOUT, async {
        let mut stream = TcpStream::connect(address).await.expect("the port listens");
        // A connection that is rejected early may fail while it is written.
        let _ = stream.write_all(bytes).await;
        let _ = stream.shutdown().await;
        let _ = stream.read_to_end(&mut answer).await;
    });
    assert!(met.await.is_ok(), "the connection does not end");
    answer
}

fn begin() {
    seeds("ports", well_formed());
    LazyLock::force(&PORTS);
}

fn well_formed() -> Vec<Vec<u8>> {
    let get = |path: &str, header: &str| {
        format!("\0GET {path} HTTP/1.1\r\nHost: it\r\n{header}\r\n\r\n").into_bytes()
    };
    let name = |name: &str, value: &str| {
        [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    };
    let frame = |kind: u8, flags: u8, stream: u8, body: &[u8]| {
        [&[0, 0, body.len() as u8, kind, flags, 0, 0, 0, stream], body].concat()
    };
    let headers = [
        name(":method", "POST"),
        name(":scheme", "http"),
        name(":path", "/grpc.health.v1.Health/Check"),
        name(":authority", "it"),
        name("content-type", "application/grpc"),
        name("te", "trailers"),
    ];
    let call = [
        b"\x01PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 4, 1, &headers.concat()),
        frame(0, 1, 1, &[0; 5]),
    ];
    vec![
        get("/healthz", "Connection: close"),
        get("/readyz", "X: y"),
        get("/metrics", "Authorization: Bearer 0123456789abcdef"),
        get("/", "Authorization: Basic YTowMTIzNDU2Nzg5YWJjZGVm"),
        get("/status", "Content-Length: 5\r\n\r\nhello"),
        call.concat(),
    ]
}
