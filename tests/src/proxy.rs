//! A TCP proxy that loses replies and cuts connections when a test says so.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Open,
    /// Requests pass, replies wait.
    HoldReplies,
    /// All connections are closed, and new ones at once.
    Cut,
}

/// Stands between a client and a server until it is dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port and forwards to the server of an URL.
    pub async fn start(url: &str) -> Self {
        let target: SocketAddr =
            url.trim_start_matches("http://").parse().expect("the URL has an address");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
        let address = listener.local_addr().expect("it is bound");
        let mode = watch::Sender::new(Mode::Open);
        let task = tokio::spawn(accept(listener, target, mode.clone()));
        Self { address, mode, task }
    }

    /// The URL at which clients reach it.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Forwards again.
    pub fn open(&self) {
        self.mode.send_replace(Mode::Open);
    }

    /// Lets requests through and keeps the replies.
    pub fn hold_replies(&self) {
        self.mode.send_replace(Mode::HoldReplies);
    }

    /// Closes all connections, with the replies that were held, and refuses new ones.
    pub fn cut(&self) {
        self.mode.send_replace(Mode::Cut);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.mode.send_replace(Mode::Cut);
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, mode: watch::Sender<Mode>) {
    while let Ok((client, _)) = listener.accept().await {
        if *mode.borrow() != Mode::Cut {
            tokio::spawn(forward(client, target, mode.subscribe()));
        }
    }
}

async fn forward(mut client: TcpStream, target: SocketAddr, mode: watch::Receiver<Mode>) {
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let mut until_cut = mode.clone();
    let replies = async {
        let mut buffer = vec![0; 64 << 10];
        let mut until_open = mode.clone();
        loop {
            let count = from_server.read(&mut buffer).await.unwrap_or(0);
            let _ = until_open.wait_for(|mode| *mode != Mode::HoldReplies).await;
            let is_over = count == 0 || *mode.borrow() == Mode::Cut;
            if is_over || to_client.write_all(&buffer[..count]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        _ = until_cut.wait_for(|mode| *mode == Mode::Cut) => {}
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
        () = replies => {}
    }
}
