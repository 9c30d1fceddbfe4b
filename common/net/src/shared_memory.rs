//! Connections between processes of one machine through shared memory: bytes are copied in and out once,
//! without the kernel.
//!
//! The memory belongs to a Unix socket. Over it the server sends the descriptor of the memory, each side
//! wakes up the other one (by a byte, whose value means nothing), and each notices the end of the other
//! one.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker, ready};

use futures::task::AtomicWaker;
use memmap2::MmapRaw;
use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, send, sendmsg,
};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio_util::either::Either;
use tracing::debug;

use crate::ring::{End, Reader, Writer, memory_bytes, sides};

/// Bytes that each direction holds: few enough to stay in the caches, enough that wake-ups are rare.
const CAPACITY: usize = 512 << 10;

/// The byte that a server sends first: which memory comes with it. Another layout gets another number.
/// Not 0, with which HTTP/2 begins: a server that knows no shared memory is taken for no answer.
const NO_MEMORY: u8 = 2;
const TWO_RINGS: u8 = 1;

/// A connection to a process of this machine: through shared memory where the system has it, and through
/// the socket alone otherwise.
pub(crate) type Local = Either<SharedMemory, UnixStream>;

/// Sets up a connection to the client behind `socket`.
///
/// # Errors
/// The I/O error of the system.
pub(crate) fn accept(socket: UnixStream) -> io::Result<Local> {
    let (first, memory) = match new_memory() {
        Ok(memory) => (TWO_RINGS, Some(memory)),
        Err(error) => {
            debug!(%error, "no shared memory; using the Unix socket alone");
            (NO_MEMORY, None)
        }
    };
    let file = memory.as_ref().map(|(file, _)| [file.as_fd()]);
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut descriptors = SendAncillaryBuffer::new(&mut space);
    if let Some(file) = &file {
        descriptors.push(SendAncillaryMessage::ScmRights(file));
    }
    sendmsg(&socket, &[IoSlice::new(&[first])], &mut descriptors, SendFlags::NOSIGNAL)?;
    Ok(match memory {
        Some((_, map)) => Either::Left(SharedMemory::new(socket, map, End::Server)),
        None => Either::Right(socket),
    })
}

/// Sets up a connection to the server behind `socket`.
///
/// # Errors
/// The I/O error of the system, or one that says what is wrong with the memory.
pub(crate) async fn connect(socket: UnixStream) -> io::Result<Local> {
    let (first, file) = socket.async_io(Interest::READABLE, || receive(&socket)).await?;
    match (first, file) {
        (NO_MEMORY, None) => Ok(Either::Right(socket)),
        (TWO_RINGS, Some(file)) => {
            let map = checked(file.into())?;
            Ok(Either::Left(SharedMemory::new(socket, map, End::Client)))
        }
        _ => Err(invalid("the server of a Unix socket offers memory of an unknown layout")),
    }
}

/// Creates memory that cannot change its size: access to a part that is gone would end the process.
fn new_memory() -> io::Result<(File, MmapRaw)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("steadfast", flags)?);
    file.set_len(memory_bytes(CAPACITY) as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let map = MmapRaw::map_raw(&file)?;
    Ok((file, map))
}

/// Maps memory of another process, if its size is right and cannot change.
fn checked(file: File) -> io::Result<MmapRaw> {
    let is_sealed = fcntl_get_seals(&file)?.contains(SealFlags::SHRINK | SealFlags::GROW);
    if !is_sealed || file.metadata()?.len() != memory_bytes(CAPACITY) as u64 {
        return Err(invalid(
            "the server of a Unix socket offers memory of a wrong or variable size",
        ));
    }
    MmapRaw::map_raw(&file)
}

fn receive(socket: &UnixStream) -> io::Result<(u8, Option<OwnedFd>)> {
    let mut first = [0];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut messages = RecvAncillaryBuffer::new(&mut space);
    let mut buffers = [IoSliceMut::new(&mut first)];
    if recvmsg(socket, &mut buffers, &mut messages, RecvFlags::CMSG_CLOEXEC)?.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let file = messages.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    Ok((first[0], file))
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// A stream of bytes in both directions through shared memory.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    socket: UnixStream,
    writer: Writer,
    reader: Reader,
    /// Whether the other side has closed its end: what it wrote before can still be read.
    is_closed: bool,
    tasks: Arc<Tasks>,
    woken: Waker,
}

/// The tasks that read and write. A byte on the socket wakes up both, since it does not say for which it is.
#[derive(Debug, Default)]
struct Tasks {
    reads: AtomicWaker,
    writes: AtomicWaker,
}

impl Wake for Tasks {
    fn wake(self: Arc<Self>) {
        self.reads.wake();
        self.writes.wake();
    }
}

impl SharedMemory {
    fn new(socket: UnixStream, memory: MmapRaw, end: End) -> Self {
        let (writer, reader) = sides(memory, CAPACITY, end);
        let tasks = Arc::new(Tasks::default());
        let woken = Waker::from(tasks.clone());
        Self { socket, writer, reader, is_closed: false, tasks, woken }
    }

    fn wake_other(&self) -> io::Result<()> {
        // Not through the runtime, which does not write to a socket before it was told that it can.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match retry_on_intr(|| send(&self.socket, &[0], flags)) {
            Ok(_) => Ok(()),
            // It has not received earlier bytes yet, which do the same. If it is gone, reading says so.
            Err(Errno::AGAIN | Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Completes once the other side has woken up this one, or is gone.
    fn poll_woken(&mut self) -> Poll<io::Result<()>> {
        loop {
            ready!(self.socket.poll_read_ready(&mut Context::from_waker(&self.woken)))?;
            match self.socket.try_read(&mut [0; 64]) {
                Ok(0) => {
                    self.is_closed = true;
                    return Poll::Ready(Ok(()));
                }
                Ok(_) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    self.is_closed = true;
                    return Poll::Ready(Ok(()));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncRead for SharedMemory {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            // SAFETY: `read` uninitializes nothing.
            let count = this.reader.read(unsafe { buffer.unfilled_mut() })?;
            if count != 0 {
                // SAFETY: `read` has initialized that many bytes.
                unsafe { buffer.assume_init(count) };
                buffer.advance(count);
                if this.reader.writer_is_to_be_woken()? {
                    this.wake_other()?;
                }
                return Poll::Ready(Ok(()));
            }
            if this.is_closed || buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            this.tasks.reads.register(context.waker());
            this.reader.ask();
            if this.reader.filled()? == 0 {
                ready!(this.poll_woken())?;
            }
        }
    }
}

impl AsyncWrite for SharedMemory {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        loop {
            if this.is_closed {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let mut count = 0;
            for piece in pieces {
                let written = this.writer.write(piece)?;
                count += written;
                if written < piece.len() {
                    break;
                }
            }
            if count != 0 || pieces.iter().all(|piece| piece.is_empty()) {
                if this.writer.reader_is_to_be_woken() {
                    this.wake_other()?;
                }
                return Poll::Ready(Ok(count));
            }
            this.tasks.writes.register(context.waker());
            this.writer.ask();
            if this.writer.free()? == 0 {
                ready!(this.poll_woken())?;
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Closes both directions: the other side reads what was written, and can write no more.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf, split};
    use tokio::time::timeout;

    use super::*;

    /// Longer than any of these tests takes.
    const LIMIT: Duration = Duration::from_secs(30);

    async fn connected() -> (Local, Local) {
        let (server, client) = UnixStream::pair().unwrap();
        let server = accept(server).unwrap();
        (server, connect(client).await.unwrap())
    }

    /// Returns bytes that differ from any shifted copy of themselves.
    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|it| (it * it / 7 + it) as u8).collect()
    }

    async fn write(mut to: WriteHalf<Local>, bytes: Vec<u8>) -> WriteHalf<Local> {
        // Pieces of many sizes, smaller and larger than a ring.
        let mut sizes = [1, 77, 4 << 10, 3 * CAPACITY / 2, CAPACITY].into_iter().cycle();
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(sizes.next().unwrap().min(rest.len()));
            to.write_all(piece).await.unwrap();
            rest = after;
        }
        to
    }

    async fn read(mut from: ReadHalf<Local>, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        from.read_exact(&mut bytes).await.unwrap();
        bytes
    }

    /// Both sides write more than a ring holds, at the same time and in tasks of their own: every side that
    /// waits, for bytes or for space, is woken up.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn both_directions_move_more_bytes_than_a_ring_holds() {
        let (server, client) = connected().await;
        assert!(matches!((&server, &client), (Either::Left(_), Either::Left(_))));
        let ((from_client, to_client), (from_server, to_server)) = (split(server), split(client));
        let (there, back) = (bytes(20 * CAPACITY + 13), bytes(9 * CAPACITY));
        let writes = [
            tokio::spawn(write(to_server, there.clone())),
            tokio::spawn(write(to_client, back.clone())),
        ];
        let reads = [
            tokio::spawn(read(from_client, there.len())),
            tokio::spawn(read(from_server, back.len())),
        ];
        let [at_server, at_client] = reads.map(|it| timeout(LIMIT, it));
        assert!(at_server.await.expect("no wake-up is lost").unwrap() == there);
        assert!(at_client.await.expect("no wake-up is lost").unwrap() == back);
        for write in writes {
            write.await.unwrap();
        }
    }

    /// Messages that wait for each other's answer: each one needs a wake-up.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn small_messages_go_back_and_forth() {
        let (mut server, mut client) = connected().await;
        let echo = tokio::spawn(async move {
            let mut bytes = [0; 100];
            while server.read_exact(&mut bytes).await.is_ok() {
                server.write_all(&bytes).await.unwrap();
            }
        });
        let turns = async {
            for turn in 0..5_000 {
                let (sent, mut received) = ([turn as u8; 100], [0; 100]);
                client.write_all(&sent).await.unwrap();
                client.read_exact(&mut received).await.unwrap();
                assert_eq!(received, sent);
            }
        };
        timeout(LIMIT, turns).await.expect("no wake-up is lost");
        drop(client);
        timeout(LIMIT, echo).await.expect("the end of a process is noticed").unwrap();
    }

    /// What a side wrote before its end arrives; then there is an end, and nothing more can be written.
    #[tokio::test]
    async fn the_end_of_a_side_comes_after_its_last_bytes() {
        let (mut server, mut client) = connected().await;
        client.write_all(&bytes(1_000)).await.unwrap();
        drop(client);
        let mut received = Vec::new();
        timeout(LIMIT, server.read_to_end(&mut received)).await.unwrap().unwrap();
        assert_eq!(received, bytes(1_000));
        assert_eq!(server.write(&[0]).await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    /// A side that waits for space ends with the other side, too.
    #[tokio::test]
    async fn a_writer_does_not_wait_for_a_side_that_is_gone() {
        let (mut server, client) = connected().await;
        let full = tokio::spawn(async move { server.write_all(&bytes(3 * CAPACITY)).await });
        tokio::task::yield_now().await;
        drop(client);
        let written = timeout(LIMIT, full).await.unwrap().unwrap();
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn after_a_shutdown_the_other_side_reads_the_end() {
        let (mut server, mut client) = connected().await;
        client.write_all(b"last").await.unwrap();
        client.shutdown().await.unwrap();
        let mut received = Vec::new();
        timeout(LIMIT, server.read_to_end(&mut received)).await.unwrap().unwrap();
        assert_eq!(received, b"last");
    }

    /// The first wake-up may come before the runtime knows that the socket can be written.
    #[tokio::test]
    async fn a_new_connection_wakes_the_other_side() {
        let (one, mut other) = net::UnixStream::pair().unwrap();
        one.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        let (socket, (_, memory)) = (UnixStream::from_std(one).unwrap(), new_memory().unwrap());
        SharedMemory::new(socket, memory, End::Server).wake_other().unwrap();
        assert_eq!(io::Read::read(&mut other, &mut [0; 2]).unwrap(), 1);
    }

    fn offer(socket: &UnixStream, first: u8, file: Option<&File>) {
        let file = file.map(|it| [it.as_fd()]);
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut descriptors = SendAncillaryBuffer::new(&mut space);
        if let Some(file) = &file {
            descriptors.push(SendAncillaryMessage::ScmRights(file));
        }
        sendmsg(socket, &[IoSlice::new(&[first])], &mut descriptors, SendFlags::NOSIGNAL).unwrap();
    }

    /// A server whose system has no shared memory is served through the socket.
    #[tokio::test]
    async fn without_memory_the_socket_carries_the_bytes() {
        let (mut server, client) = UnixStream::pair().unwrap();
        offer(&server, NO_MEMORY, None);
        let Ok(Either::Right(mut client)) = connect(client).await else { panic!("no socket") };
        client.write_all(b"bytes").await.unwrap();
        let mut received = [0; 5];
        server.read_exact(&mut received).await.unwrap();
        assert_eq!(&received, b"bytes");
    }

    /// Memory that its owner could cut off, which would end the process that uses it, is refused; so is one
    /// of another size, a first byte that means nothing, and a server that says nothing.
    #[tokio::test]
    async fn memory_that_could_vanish_is_refused() {
        let refused = |first: u8, file: Option<File>| async move {
            let (server, client) = UnixStream::pair().unwrap();
            offer(&server, first, file.as_ref());
            connect(client).await.unwrap_err().kind()
        };
        let unsealed = tempfile::tempfile().unwrap();
        unsealed.set_len(memory_bytes(CAPACITY) as u64).unwrap();
        let resizable = File::from(memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap());
        resizable.set_len(memory_bytes(CAPACITY) as u64).unwrap();
        let short = File::from(memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap());
        short.set_len(4096).unwrap();
        fcntl_add_seals(&short, SealFlags::SHRINK).unwrap();
        for file in [unsealed, resizable, short] {
            let kind = refused(TWO_RINGS, Some(file)).await;
            assert!(
                [io::ErrorKind::InvalidData, io::ErrorKind::InvalidInput].contains(&kind),
                "{kind}"
            );
        }
        assert_eq!(refused(TWO_RINGS, None).await, io::ErrorKind::InvalidData);
        assert_eq!(
            refused(NO_MEMORY, Some(new_memory().unwrap().0)).await,
            io::ErrorKind::InvalidData
        );
        assert_eq!(refused(b'P', None).await, io::ErrorKind::InvalidData);
        let (server, client) = UnixStream::pair().unwrap();
        drop(server);
        assert_eq!(connect(client).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
