//! The reference for transfers: plain tokio TCP or Unix sockets that move the same bytes between as many
//! processes, into the same sums.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use futures::future::join_all;
use steadfast_tests::{Process, Proxy, Scene, within};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::either::Either;

use crate::rig::{Via, slow_link};
use crate::sample::Sample;
use crate::watch::Watch;
use crate::wire::{SLOTS, SLOW_STEPS, STEP_VALUES, STEPS, TRAINERS, VALUES, step_bytes};

/// Bytes per read.
const READ_BYTES: usize = 256 << 10;

/// Operations of a connection.
const PUSH: u8 = 1;
const PULL: u8 = 2;
const PUSH_WHOLE: u8 = 3;
const PUSH_INTO_COPY: u8 = 4;

/// How a gradient is added to the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adds {
    /// On arrival; an interrupted transfer is added in part.
    AsItComes,
    /// On arrival, into a copy: the previous sum is preserved.
    IntoCopy,
    /// As a whole or not at all: after the last byte.
    Whole,
}

/// Serves until it is killed: receives and adds gradients, or sends the sum. Prints its address first.
pub async fn serve() -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let unix = UnixListener::bind(unix_name(address))?;
    println!("{address}");
    loop {
        let stream = tokio::select! {
            biased;
            accepted = listener.accept() => {
                let (stream, _) = accepted?;
                stream.set_nodelay(true)?;
                Either::Left(stream)
            }
            accepted = unix.accept() => Either::Right(accepted?.0),
        };
        tokio::spawn(serve_one(stream));
    }
}

type Stream = Either<TcpStream, UnixStream>;

/// Returns the name of the Unix socket that belongs to a TCP address.
fn unix_name(address: SocketAddr) -> String {
    format!("\0steadfast-bench-{address}")
}

async fn serve_one(mut stream: Stream) -> std::io::Result<()> {
    let values = stream.read_u64().await? as usize;
    let mut sum = vec![0.0_f32; values];
    let mut buffer = vec![0; READ_BYTES];
    let (mut before, mut whole) = (Vec::new(), Vec::new());
    loop {
        match stream.read_u8().await? {
            PUSH => {
                for sums in sum.chunks_mut(READ_BYTES / size_of::<f32>()) {
                    let bytes = &mut buffer[..size_of_val(sums)];
                    stream.read_exact(bytes).await?;
                    add(sums, bytes);
                }
                stream.write_u8(PUSH).await?;
            }
            PUSH_INTO_COPY => {
                before.resize(sum.len(), 0.0);
                std::mem::swap(&mut sum, &mut before);
                let len = READ_BYTES / size_of::<f32>();
                for (sums, before) in sum.chunks_mut(len).zip(before.chunks(len)) {
                    let bytes = &mut buffer[..size_of_val(sums)];
                    stream.read_exact(bytes).await?;
                    sums.copy_from_slice(before);
                    add(sums, bytes);
                }
                stream.write_u8(PUSH_INTO_COPY).await?;
            }
            PUSH_WHOLE => {
                whole.resize(size_of_val(&sum[..]), 0);
                for bytes in whole.chunks_mut(READ_BYTES) {
                    stream.read_exact(bytes).await?;
                }
                tokio::task::block_in_place(|| add(&mut sum, &whole));
                stream.write_u8(PUSH_WHOLE).await?;
            }
            _ => stream.write_all(bytemuck::cast_slice(&sum)).await?,
        }
    }
}

fn add(sums: &mut [f32], bytes: &[u8]) {
    for (sum, value) in sums.iter_mut().zip(bytes.as_chunks().0) {
        *sum -= 0.001 * f32::from_le_bytes(*value);
    }
}

/// Receivers, each connected to every sender.
struct Peers {
    processes: Vec<Process>,
    senders: Vec<Sender>,
    _scene: Scene,
}

/// The connections of a trainer, one to each receiver.
struct Sender {
    streams: Vec<Stream>,
    _links: Vec<Proxy>,
    values: Vec<f32>,
}

impl Peers {
    async fn start(senders: usize, values: usize, via: Via) -> Self {
        let scene = Scene::new();
        let own = std::env::current_exe().expect("we run");
        let (mut processes, mut addresses) = (Vec::new(), Vec::new());
        for slot in 0..SLOTS {
            let mut command = scene.command(&own);
            command.arg("serve-raw").stdin(Stdio::null());
            let process = Process::start(scene.directory(), &format!("raw-{slot}"), &mut command);
            let address: SocketAddr = within(Duration::from_secs(10), "it listens", || {
                process.stdout().trim().parse().ok()
            });
            addresses.push(address);
            processes.push(process);
        }
        let mut all = Vec::new();
        for _ in 0..senders {
            all.push(Sender::connect(&addresses, values, via).await);
        }
        Self { processes, senders: all, _scene: scene }
    }

    fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|it| it.pid().as_raw()).collect()
    }

    async fn push(&mut self, adds: Adds) {
        join_all(self.senders.iter_mut().map(|sender| sender.push(adds))).await;
    }

    async fn pull(&mut self) {
        join_all(self.senders.iter_mut().map(Sender::pull)).await;
    }
}

impl Sender {
    async fn connect(addresses: &[SocketAddr], values: usize, via: Via) -> Self {
        let (mut streams, mut links) = (Vec::new(), Vec::new());
        for address in addresses {
            let mut stream = match via {
                // References have no TLS.
                Via::Tcp | Via::Tls => Either::Left(connect(*address).await),
                Via::SlowTcp => {
                    let link = slow_link(&address.to_string()).await;
                    let stream = connect(link.address()).await;
                    links.push(link);
                    Either::Left(stream)
                }
                Via::Local => {
                    let stream = UnixStream::connect(unix_name(*address)).await;
                    Either::Right(stream.expect("it listens"))
                }
            };
            stream.write_u64((values / SLOTS) as u64).await.expect("it is there");
            streams.push(stream);
        }
        Self { streams, _links: links, values: vec![0.5; values] }
    }

    async fn push(&mut self, adds: Adds) {
        let what = match adds {
            Adds::AsItComes => PUSH,
            Adds::IntoCopy => PUSH_INTO_COPY,
            Adds::Whole => PUSH_WHOLE,
        };
        let shares = self.values.chunks(self.values.len() / SLOTS);
        join_all(self.streams.iter_mut().zip(shares).map(async |(stream, share)| {
            stream.write_u8(what).await.expect("it is there");
            stream.write_all(bytemuck::cast_slice(share)).await.expect("it is there");
            stream.read_u8().await.expect("it answers");
        }))
        .await;
    }

    async fn pull(&mut self) {
        let share = self.values.len() / SLOTS;
        let shares = self.values.chunks_mut(share);
        join_all(self.streams.iter_mut().zip(shares).map(async |(stream, share)| {
            stream.write_u8(PULL).await.expect("it is there");
            stream.read_exact(bytemuck::cast_slice_mut(share)).await.expect("it answers");
        }))
        .await;
    }
}

async fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).await.expect("it listens");
    stream.set_nodelay(true).expect("it is a socket");
    stream
}

/// Measures gradients of [`VALUES`] to [`SLOTS`] processes that add them up.
pub async fn push(via: Via, adds: Adds) -> Sample {
    let mut peers = Peers::start(1, VALUES, via).await;
    peers.push(adds).await;
    let watch = Watch::start(peers.pids());
    for _ in 0..via.rounds() {
        peers.push(adds).await;
    }
    watch.stop((via.rounds() * VALUES * size_of::<f32>()) as f64)
}

/// Measures parameters of [`VALUES`] from [`SLOTS`] processes.
pub async fn pull(via: Via) -> Sample {
    let mut peers = Peers::start(1, VALUES, via).await;
    peers.pull().await;
    let watch = Watch::start(peers.pids());
    for _ in 0..via.rounds() {
        peers.pull().await;
    }
    watch.stop((via.rounds() * VALUES * size_of::<f32>()) as f64)
}

/// Moves as many bytes as slow steps: the gradient, then the parameters.
pub async fn slow_steps() -> Sample {
    let mut peers = Peers::start(1, VALUES, Via::SlowTcp).await;
    peers.push(Adds::AsItComes).await;
    peers.pull().await;
    let watch = Watch::start(peers.pids());
    for _ in 0..SLOW_STEPS {
        peers.push(Adds::AsItComes).await;
        peers.pull().await;
    }
    watch.stop(SLOW_STEPS as f64)
}

/// Moves the bytes of whole steps: all gradients, then all parameters.
pub async fn steps() -> Sample {
    let mut peers = Peers::start(TRAINERS, STEP_VALUES, Via::Tcp).await;
    peers.push(Adds::AsItComes).await;
    peers.pull().await;
    let watch = Watch::start(peers.pids());
    for _ in 0..STEPS {
        peers.push(Adds::AsItComes).await;
        peers.pull().await;
    }
    watch.stop(STEPS as f64 * step_bytes())
}
