//! The limit of the wire: tokio's TCP and nothing above it, moving the same bytes between as many
//! processes, into the same sums.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use futures::future::join_all;
use steadfast_tests::{Process, Scene, within};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::sample::Sample;
use crate::watch::Watch;
use crate::wire::{ROUNDS, SLOTS, VALUES};

/// Bytes that each receiver takes of one gradient.
const SHARE_BYTES: usize = VALUES / SLOTS * size_of::<f32>();

/// Bytes of one read.
const READ_BYTES: usize = 256 << 10;

/// What a connection is for.
const PUSH: u8 = 1;
const PULL: u8 = 2;

/// Receives gradients and adds them up, or gives the sum away, until it is killed. Says first where.
pub async fn serve() -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let (mut stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let mut sum = vec![0.0_f32; SHARE_BYTES / size_of::<f32>()];
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match stream.read_u8().await? {
            PUSH => {
                for sums in sum.chunks_mut(READ_BYTES / size_of::<f32>()) {
                    let bytes = &mut buffer[..size_of_val(sums)];
                    stream.read_exact(bytes).await?;
                    for (sum, value) in sums.iter_mut().zip(bytes.as_chunks().0) {
                        *sum -= 0.001 * f32::from_le_bytes(*value);
                    }
                }
                stream.write_u8(PUSH).await?;
            }
            _ => stream.write_all(bytemuck::cast_slice(&sum)).await?,
        }
    }
}

/// Receivers, connected to.
struct Peers {
    processes: Vec<Process>,
    streams: Vec<TcpStream>,
    _scene: Scene,
}

impl Peers {
    async fn start() -> Self {
        let scene = Scene::new();
        let own = std::env::current_exe().expect("we run");
        let (mut processes, mut streams) = (Vec::new(), Vec::new());
        for slot in 0..SLOTS {
            let mut command = scene.command(&own);
            command.arg("serve-raw").stdin(Stdio::null());
            let process = Process::start(scene.folder(), &format!("raw-{slot}"), &mut command);
            let address: SocketAddr = within(Duration::from_secs(10), "it listens", || {
                process.stdout().trim().parse().ok()
            });
            let stream = TcpStream::connect(address).await.expect("it listens");
            stream.set_nodelay(true).expect("it is a socket");
            processes.push(process);
            streams.push(stream);
        }
        Self { processes, streams, _scene: scene }
    }

    fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|it| it.pid().as_raw()).collect()
    }

    async fn push(&mut self, bytes: &[u8]) {
        let shares = bytes.chunks(SHARE_BYTES);
        join_all(self.streams.iter_mut().zip(shares).map(async |(stream, share)| {
            stream.write_u8(PUSH).await.expect("it is there");
            stream.write_all(share).await.expect("it is there");
            stream.read_u8().await.expect("it answers");
        }))
        .await;
    }

    async fn pull(&mut self, bytes: &mut [u8]) {
        let shares = bytes.chunks_mut(SHARE_BYTES);
        join_all(self.streams.iter_mut().zip(shares).map(async |(stream, share)| {
            stream.write_u8(PULL).await.expect("it is there");
            stream.read_exact(share).await.expect("it answers");
        }))
        .await;
    }
}

/// Gradients of [`VALUES`] to [`SLOTS`] processes that add them up.
pub async fn push() -> Sample {
    let mut peers = Peers::start().await;
    let gradient = vec![0.5_f32; VALUES];
    let bytes = bytemuck::cast_slice(&gradient);
    peers.push(bytes).await;
    let watch = Watch::start(peers.pids());
    for _ in 0..ROUNDS {
        peers.push(bytes).await;
    }
    watch.stop((ROUNDS * bytes.len()) as f64)
}

/// Parameters of [`VALUES`] from [`SLOTS`] processes.
pub async fn pull() -> Sample {
    let mut peers = Peers::start().await;
    let mut parameters = vec![0.5_f32; VALUES];
    let bytes = bytemuck::cast_slice_mut(&mut parameters);
    peers.pull(bytes).await;
    let watch = Watch::start(peers.pids());
    for _ in 0..ROUNDS {
        peers.pull(bytes).await;
    }
    watch.stop((ROUNDS * bytes.len()) as f64)
}
