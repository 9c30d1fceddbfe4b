//! A TCP proxy that drops, delays or cuts traffic on request of a test.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Maximum delay behind schedule that a slow link catches up.
const LATE_MAX: Duration = Duration::from_millis(20);

/// How the proxy treats the data of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Open,
    /// Data pass after a delay.
    Delay(Duration),
    /// Data pass at this rate in bytes per second, per connection and direction.
    Slow(u32),
    /// Requests pass, replies are held.
    HoldReplies,
    /// Requests pass, replies are dropped.
    DropReplies,
    /// Data of both directions are dropped, and closed connections are not reported: each side sees
    /// silence.
    Drop,
    /// All connections are closed; new ones are closed at once.
    Cut,
    /// Connections are closed as by [`Mode::Cut`], but by a TCP reset: data in flight are lost.
    Reset,
}

impl Mode {
    fn is_cut(self) -> bool {
        matches!(self, Self::Cut | Self::Reset)
    }

    fn holds(self, direction: Direction) -> bool {
        self == Self::HoldReplies && direction == Direction::Reply
    }

    fn drops(self, direction: Direction) -> bool {
        self == Self::Drop || self == Self::DropReplies && direction == Direction::Reply
    }
}

/// Direction of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Request,
    Reply,
}

/// A proxy between clients and a server; runs until it is dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port and forwards to the server of a URL.
    pub async fn start(url: &str) -> Self {
        Self::start_at("127.0.0.1", url).await
    }

    /// Listens on a free port of a local address.
    pub async fn start_at(host: &str, url: &str) -> Self {
        let target: SocketAddr =
            url.trim_start_matches("http://").parse().expect("the URL has an address");
        let listener = TcpListener::bind((host, 0)).await.expect("the host has free ports");
        let address = listener.local_addr().expect("it is bound");
        let mode = watch::Sender::new(Mode::Open);
        let task = tokio::spawn(accept(listener, target, mode.clone()));
        Self { address, mode, task }
    }

    /// Returns the address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Forwards data again. Connections that have lost data are closed.
    pub fn open(&self) {
        self.mode.send_replace(Mode::Open);
    }

    /// Forwards all data with a delay.
    pub fn delay(&self, by: Duration) {
        self.mode.send_replace(Mode::Delay(by));
    }

    /// Forwards all data at a limited rate, per connection and direction.
    pub fn slow(&self, bytes_per_second: u32) {
        self.mode.send_replace(Mode::Slow(bytes_per_second));
    }

    /// Forwards requests and holds replies.
    pub fn hold_replies(&self) {
        self.mode.send_replace(Mode::HoldReplies);
    }

    /// Forwards requests and drops replies.
    pub fn drop_replies(&self) {
        self.mode.send_replace(Mode::DropReplies);
    }

    /// Drops all data silently; connections are half-open from now on.
    pub fn drop_all(&self) {
        self.mode.send_replace(Mode::Drop);
    }

    /// Closes all connections, drops held replies, and refuses new connections.
    pub fn cut(&self) {
        self.mode.send_replace(Mode::Cut);
    }

    /// Resets all connections, including new ones.
    pub fn reset(&self) {
        self.mode.send_replace(Mode::Reset);
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
        if *mode.borrow() == Mode::Reset {
            // Closing with a linger time of zero sends a reset.
            let _ = client.set_zero_linger();
        }
        if !mode.borrow().is_cut() {
            tokio::spawn(forward(client, target, mode.subscribe()));
        }
    }
}

async fn forward(mut client: TcpStream, target: SocketAddr, mode: watch::Receiver<Mode>) {
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    // Without this, small writes would wait for acknowledgements (Nagle).
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let mut until_cut = mode.clone();
    tokio::select! {
        _ = until_cut.wait_for(|mode| mode.is_cut()) => {}
        () = pass(from_client, to_server, Direction::Request, mode.clone()) => {}
        () = pass(from_server, to_client, Direction::Reply, mode.clone()) => {}
    }
    if *mode.borrow() == Mode::Reset {
        let _ = client.set_zero_linger();
        let _ = server.set_zero_linger();
    }
}

/// Forwards data in one direction until the connection ends.
async fn pass(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    direction: Direction,
    mut mode: watch::Receiver<Mode>,
) {
    let mut buffer = vec![0; 64 << 10];
    let mut free_at = Instant::now();
    loop {
        let count = from.read(&mut buffer).await.unwrap_or(0);
        let now = *mode.borrow();
        match now {
            Mode::Delay(by) => tokio::time::sleep(by).await,
            Mode::Slow(rate) => {
                // Paced by the clock, because sleeps are only accurate to a millisecond.
                let takes = Duration::from_secs_f64(count as f64 / f64::from(rate));
                free_at = free_at.max(Instant::now() - LATE_MAX) + takes;
                tokio::time::sleep_until(free_at.into()).await;
            }
            _ => {}
        }
        let _ = mode.wait_for(|mode| !mode.holds(direction)).await;
        let now = *mode.borrow();
        if now.drops(direction) {
            return swallow(from, direction, mode).await;
        }
        if count == 0 || now.is_cut() || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

/// Drops data and the end of the stream until the mode changes. After a gap the stream is useless, so the
/// connection is closed.
async fn swallow(mut from: ReadHalf<'_>, direction: Direction, mut mode: watch::Receiver<Mode>) {
    let mut buffer = vec![0; 64 << 10];
    let read_on = async {
        while 0 < from.read(&mut buffer).await.unwrap_or(0) {}
        std::future::pending::<()>().await;
    };
    tokio::select! {
        _ = mode.wait_for(|mode| !mode.drops(direction)) => {}
        () = read_on => {}
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpListener as StdListener;

    use super::*;

    /// Starts an echo server and a proxied connection to it.
    async fn echo() -> (Proxy, TcpStream) {
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.split();
                    let _ = tokio::io::copy(&mut from, &mut to).await;
                });
            }
        });
        let proxy = Proxy::start(&url).await;
        let mut client = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(ask(&mut client).await.unwrap(), b"ping");
        (proxy, client)
    }

    async fn ask(client: &mut TcpStream) -> std::io::Result<Vec<u8>> {
        client.write_all(b"ping").await?;
        let mut answer = vec![0; 4];
        let count = client.read(&mut answer).await?;
        answer.truncate(count);
        Ok(answer)
    }

    /// Returns whether a request gets no reply while the connection stays open.
    async fn is_silent(client: &mut TcpStream) -> bool {
        tokio::time::timeout(Duration::from_millis(200), ask(client)).await.is_err()
    }

    #[tokio::test]
    async fn dropped_bytes_vanish_silently_and_end_the_connection() {
        for drop in [Proxy::drop_all, Proxy::drop_replies] {
            let (proxy, mut client) = echo().await;
            drop(&proxy);
            assert!(is_silent(&mut client).await);
            proxy.open();
            assert_eq!(client.read(&mut [0; 4]).await.unwrap(), 0, "it has a gap");
            let mut another = TcpStream::connect(proxy.address()).await.unwrap();
            assert_eq!(ask(&mut another).await.unwrap(), b"ping");
        }
    }

    #[tokio::test]
    async fn a_cut_closes_the_connection_in_order_and_a_reset_does_not() {
        let (proxy, mut client) = echo().await;
        proxy.reset();
        let error = client.read(&mut [0; 4]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        let (proxy, mut client) = echo().await;
        proxy.cut();
        assert_eq!(client.read(&mut [0; 4]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn held_or_delayed_bytes_arrive_later() {
        let (proxy, mut client) = echo().await;
        proxy.hold_replies();
        assert!(is_silent(&mut client).await);
        proxy.open();
        assert_eq!(client.read(&mut [0; 4]).await.unwrap(), 4);
        proxy.delay(Duration::from_millis(300));
        assert!(is_silent(&mut client).await);
        assert_eq!(client.read(&mut [0; 4]).await.unwrap(), 4);
    }
}
