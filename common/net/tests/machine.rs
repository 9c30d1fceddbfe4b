//! Tests of the network interface on a real machine.

use std::time::Duration;

use steadfast_host::time::{TimedOut, timeout};
use steadfast_net::{Port, Probe, TlsIdentity, probe};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

const SOON: Duration = Duration::from_millis(20);

/// A probe distinguishes a closed port from a silent peer, and detects when the connection closes.
#[tokio::test]
async fn a_probe_sees_whether_a_port_is_open_and_when_it_closes() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let Probe::Open(closed) = probe(&address).await else { panic!("refused") };
    let (stream, _) = listener.accept().await.unwrap();
    let mut closed = std::pin::pin!(closed);
    assert_eq!(timeout(SOON, &mut closed).await, Err(TimedOut));
    drop(stream);
    timeout(Duration::from_secs(10), closed).await.expect("the peer has closed");
    drop(listener);
    assert!(matches!(probe(&address).await, Probe::Refused));
}

/// A served port closes when it is stopped.
#[tokio::test]
async fn a_port_is_served_until_it_is_stopped() {
    let port = Port::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = port.local_addr().unwrap().to_string();
    let stop = CancellationToken::new();
    let serving = port.serve(Routes::default(), |_| &[], &TlsIdentity::default(), stop.clone());
    stop.cancel();
    serving.await.unwrap().unwrap();
    assert!(matches!(probe(&address).await, Probe::Refused));
}
