//! An embedded server in this process, which can be stopped or aborted.

use std::net::SocketAddr;
use std::path::Path;
use steadfast_etcd::{Config, Error, Server};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub struct Embedded {
    pub address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), Error>>,
}

pub fn config(data_dir: &Path) -> Config {
    Config::new("127.0.0.1:0".parse().unwrap(), data_dir)
}

impl Embedded {
    pub async fn start(data_dir: &Path) -> Self {
        Self::start_with(config(data_dir)).await
    }

    pub async fn start_with(config: Config) -> Self {
        let server = Server::bind(config).await.unwrap();
        let address = server.local_addr();
        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            let _ = stopped.await;
        };
        Embedded { address, stop, task: tokio::spawn(server.serve(shutdown)) }
    }

    /// Stops the server gracefully.
    pub async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap().unwrap();
    }

    /// Aborts the server without a shutdown.
    pub async fn tear_down(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}
