//! Readiness of a process, with a reason if it is not ready; served by `/readyz` and `grpc.health.v1`.

use steadfast_host::task::{Task, spawn};
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};

/// Whether the process is ready to do its work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ready {
    Yes,
    /// Not ready, with a reason for the operator.
    No(String),
}

/// The readiness of a process, shared by all clones.
#[derive(Clone, Debug)]
pub struct Readiness {
    state: watch::Sender<Ready>,
}

impl Readiness {
    /// Creates a readiness that is not ready, for this reason.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { state: watch::Sender::new(Ready::No(reason.into())) }
    }

    pub fn set_ready(&self) {
        self.set(Ready::Yes);
    }

    pub fn set_not_ready(&self, reason: impl Into<String>) {
        self.set(Ready::No(reason.into()));
    }

    /// Sets the state. Subscribers are notified only if it changes.
    pub fn set(&self, ready: Ready) {
        self.state.send_if_modified(|state| {
            let changed = *state != ready;
            *state = ready;
            changed
        });
    }

    pub fn get(&self) -> Ready {
        self.state.borrow().clone()
    }

    /// Returns a receiver that is notified of every change.
    pub fn subscribe(&self) -> watch::Receiver<Ready> {
        self.state.subscribe()
    }
}

/// Updates the health service from a [`Readiness`]. When this is dropped, the service keeps its last
/// status.
#[derive(Debug)]
pub struct HealthTask(Task<()>);

impl Drop for HealthTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Creates the `grpc.health.v1` service of a gRPC port. It reports `readiness` for the whole server
/// (`""`) and for `service` (`steadfast.v1.Master`).
pub async fn health(
    service: &'static str,
    readiness: &Readiness,
) -> (HealthTask, HealthServer<impl Health>) {
    let (reporter, server) = tonic_health::server::health_reporter();
    let mut changes = readiness.subscribe();
    let first = serving(&changes.borrow_and_update());
    for name in ["", service] {
        reporter.set_service_status(name, first).await;
    }
    let task = spawn(async move {
        while changes.changed().await.is_ok() {
            let status = serving(&changes.borrow_and_update());
            for name in ["", service] {
                reporter.set_service_status(name, status).await;
            }
        }
    });
    (HealthTask(task), server)
}

fn serving(ready: &Ready) -> ServingStatus {
    match ready {
        Ready::Yes => ServingStatus::Serving,
        Ready::No(_) => ServingStatus::NotServing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use steadfast_net::TlsIdentity;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_check_response::ServingStatus as Served;
    use tonic_health::pb::health_client::HealthClient;

    #[tokio::test]
    async fn the_health_service_follows_readiness() {
        let readiness = Readiness::new("starting");
        let (_task, service) = health("steadfast.v1.Master", &readiness).await;
        let listener =
            crate::bind("127.0.0.1:0".parse().unwrap(), "--listen", &crate::Exposure::Loopback)
                .await
                .unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stop = tokio_util::sync::CancellationToken::new();
        let server = listener.serve(
            tonic::service::Routes::new(service),
            steadfast_proto::access,
            &TlsIdentity::default(),
            stop,
        );

        let channel = tonic::transport::Endpoint::try_from(url).unwrap().connect().await.unwrap();
        let mut client = HealthClient::new(channel);
        let request = HealthCheckRequest { service: "steadfast.v1.Master".to_owned() };
        let mut answers = client.watch(request).await.unwrap().into_inner();
        let mut next = async || answers.message().await.unwrap().unwrap().status();
        assert_eq!(next().await, Served::NotServing);
        readiness.set_ready();
        assert_eq!(next().await, Served::Serving);
        readiness.set_not_ready("draining");
        assert_eq!(next().await, Served::NotServing);
        server.abort();
    }
}
