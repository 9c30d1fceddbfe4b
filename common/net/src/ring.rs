//! A byte stream in shared memory: one process writes, another reads.
//!
//! A ring of bytes with two counters, of the bytes written and of those read since the start. Each side
//! advances its own counter and reads the other's, as in a queue of one producer and one consumer (Lamport
//! 1983). Beside each counter is a flag by which its side asks the other one to wake it up.
//!
//! The other process is not trusted: whatever it writes into the shared memory, accesses stay within the
//! ring.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::MmapRaw;

/// The shared state of a ring, before its data. All zeros: an empty ring.
#[repr(C)]
struct Header {
    writer: Side,
    reader: Side,
}

/// The state that one side of a ring sets, in cache lines of its own.
#[repr(C, align(128))]
struct Side {
    /// Bytes written, or read, since the start.
    done: AtomicU64,
    /// Not zero while this side waits for the other one.
    waits: AtomicU32,
}

const HEADER_BYTES: usize = size_of::<Header>();

/// Which of the two processes this one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Server,
    Client,
}

/// Returns the size of shared memory with a ring for each direction.
pub(crate) const fn memory_bytes(capacity: usize) -> usize {
    2 * (HEADER_BYTES + capacity)
}

/// Returns one process's sides of the rings in `memory`, which has [`memory_bytes`] bytes that were zero
/// before either process used them. `capacity`, the bytes that a ring holds, is a power of two.
pub(crate) fn sides(memory: MmapRaw, capacity: usize, end: End) -> (Writer, Reader) {
    assert!(capacity.is_power_of_two() && align_of::<Header>() <= capacity, "{capacity}");
    assert_eq!(memory.len(), memory_bytes(capacity));
    let memory = Arc::new(memory);
    let ring =
        |index| Ring { memory: memory.clone(), at: index * (HEADER_BYTES + capacity), capacity };
    let (outgoing, incoming) = match end {
        End::Server => (0, 1),
        End::Client => (1, 0),
    };
    (Writer { ring: ring(outgoing), written: 0 }, Reader { ring: ring(incoming), read: 0 })
}

#[derive(Debug)]
struct Ring {
    memory: Arc<MmapRaw>,
    /// Offset of the ring's header in the memory.
    at: usize,
    capacity: usize,
}

impl Ring {
    fn header(&self) -> &Header {
        let header = self.memory.as_ptr().wrapping_add(self.at).cast::<Header>();
        // SAFETY: `sides` has checked that it lies in the memory, which is mapped while `self.memory` lives.
        // A map begins at a page and `at` is a multiple of the alignment. All bits are valid for atomics.
        unsafe { &*header }
    }

    /// Returns where the `count` bytes after the first `done` bytes of the stream are: two runs of memory if
    /// they wrap around the end.
    fn runs(&self, done: u64, count: usize) -> [(*mut u8, usize); 2] {
        assert!(count <= self.capacity, "{count}");
        let data = self.memory.as_mut_ptr().wrapping_add(self.at + HEADER_BYTES);
        let from = done as usize % self.capacity;
        let first = count.min(self.capacity - from);
        [(data.wrapping_add(from), first), (data, count - first)]
    }

    /// Returns how many bytes are in the ring.
    fn filled(&self, written: u64, read: u64) -> io::Result<usize> {
        match written.wrapping_sub(read) {
            filled if filled <= self.capacity as u64 => Ok(filled as usize),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "counters of shared memory are wrong",
            )),
        }
    }
}

impl Side {
    fn ask(&self) {
        self.waits.store(1, Ordering::SeqCst);
    }

    /// Returns whether this side waits; it counts as woken up then.
    fn is_to_be_woken(&self) -> bool {
        self.waits.load(Ordering::SeqCst) != 0 && self.waits.swap(0, Ordering::SeqCst) != 0
    }
}

/// The side of a ring that writes.
#[derive(Debug)]
pub(crate) struct Writer {
    ring: Ring,
    written: u64,
}

impl Writer {
    /// Returns how many bytes can be written now.
    ///
    /// # Errors
    /// If the other process has corrupted the shared state.
    pub(crate) fn free(&self) -> io::Result<usize> {
        let read = self.ring.header().reader.done.load(Ordering::SeqCst);
        Ok(self.ring.capacity - self.ring.filled(self.written, read)?)
    }

    /// Writes as much of `bytes` as there is space for; returns how much that was.
    ///
    /// # Errors
    /// Returns the errors of [`Writer::free`].
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.free()?);
        if count == 0 {
            return Ok(0);
        }
        let (mut rest, runs) = (bytes, self.ring.runs(self.written, count));
        for (to, len) in runs {
            let (run, after) = rest.split_at(len);
            // SAFETY: `runs` lie in the mapped ring. The reader reads these bytes only once they are counted;
            // a process that does not keep to that only receives garbage.
            unsafe { ptr::copy_nonoverlapping(run.as_ptr(), to, len) };
            rest = after;
        }
        self.written = self.written.wrapping_add(count as u64);
        self.ring.header().writer.done.store(self.written, Ordering::SeqCst);
        Ok(count)
    }

    /// Asks for a wake-up once there is space. Space that there already is must be checked for afterwards.
    pub(crate) fn ask(&self) {
        self.ring.header().writer.ask();
    }

    /// Returns whether the reader waits and must be woken up, since there are bytes to read.
    pub(crate) fn reader_is_to_be_woken(&self) -> bool {
        self.ring.header().reader.is_to_be_woken()
    }
}

/// The side of a ring that reads.
#[derive(Debug)]
pub(crate) struct Reader {
    ring: Ring,
    read: u64,
}

impl Reader {
    /// Returns how many bytes can be read now.
    ///
    /// # Errors
    /// If the other process has corrupted the shared state.
    pub(crate) fn filled(&self) -> io::Result<usize> {
        self.ring.filled(self.ring.header().writer.done.load(Ordering::SeqCst), self.read)
    }

    /// Reads into `buffer` as much as there is, in order; returns how many bytes of it are initialized now.
    ///
    /// # Errors
    /// Returns the errors of [`Reader::filled`].
    pub(crate) fn read(&mut self, buffer: &mut [MaybeUninit<u8>]) -> io::Result<usize> {
        let count = buffer.len().min(self.filled()?);
        if count == 0 {
            return Ok(0);
        }
        let mut rest = buffer;
        for (from, len) in self.ring.runs(self.read, count) {
            let (run, after) = rest.split_at_mut(len);
            // SAFETY: `runs` lie in the mapped ring. The writer writes these bytes again only once they are
            // counted as read; with a process that does not keep to that, the bytes are garbage.
            unsafe { ptr::copy_nonoverlapping(from.cast(), run.as_mut_ptr(), len) };
            rest = after;
        }
        self.read = self.read.wrapping_add(count as u64);
        self.ring.header().reader.done.store(self.read, Ordering::SeqCst);
        Ok(count)
    }

    /// Asks for a wake-up once there is something to read. What there already is must be checked for
    /// afterwards.
    pub(crate) fn ask(&self) {
        self.ring.header().reader.ask();
    }

    /// Returns whether the writer must be woken up. It waits until half of the ring is free: waking it up for each
    /// piece would cost more than the piece.
    ///
    /// # Errors
    /// Returns the errors of [`Reader::filled`].
    pub(crate) fn writer_is_to_be_woken(&self) -> io::Result<bool> {
        Ok(self.filled()? <= self.ring.capacity / 2 && self.ring.header().writer.is_to_be_woken())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: usize = 128;

    /// Returns the two ends of new shared memory.
    fn ends() -> [(Writer, Reader); 2] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(memory_bytes(CAPACITY) as u64).unwrap();
        [End::Server, End::Client].map(|end| sides(MmapRaw::map_raw(&file).unwrap(), CAPACITY, end))
    }

    fn read(reader: &mut Reader, most: usize) -> Vec<u8> {
        let mut bytes = vec![MaybeUninit::new(0); most];
        let count = reader.read(&mut bytes).unwrap();
        // SAFETY: all were initialized.
        bytes[..count].iter().map(|byte| unsafe { byte.assume_init() }).collect()
    }

    /// Pieces of any sizes arrive complete and in order, over many rounds of the ring, in both directions.
    #[test]
    fn bytes_arrive_once_and_in_order() {
        let [(mut out, mut back_in), (mut back, mut incoming)] = ends();
        let (mut sent, mut received) = (0_u8, 0_u8);
        for turn in 0..2_000_usize {
            let piece: Vec<u8> =
                (0..turn * 7 % 180).map(|it| sent.wrapping_add(it as u8)).collect();
            let count = out.write(&piece).unwrap();
            sent = sent.wrapping_add(count as u8);
            for byte in read(&mut incoming, turn * 5 % 80) {
                assert_eq!(byte, received);
                received = received.wrapping_add(1);
            }
            assert_eq!(back.write(&[turn as u8]).unwrap(), 1);
            assert_eq!(read(&mut back_in, 8), [turn as u8]);
        }
        assert!(CAPACITY < usize::from(received) + 1_000);
    }

    #[test]
    fn a_full_ring_takes_no_more_and_an_empty_one_gives_nothing() {
        let [(mut out, _), (_, mut incoming)] = ends();
        assert!(read(&mut incoming, 8).is_empty());
        assert_eq!(out.write(&[1; CAPACITY + 1]).unwrap(), CAPACITY);
        assert_eq!(out.write(&[2]).unwrap(), 0);
        assert_eq!(read(&mut incoming, 1), [1]);
        assert_eq!(out.write(&[2, 2]).unwrap(), 1);
    }

    /// A side that asks is woken up once: the reader for any byte, the writer once half of the ring is free.
    #[test]
    fn a_side_that_waits_is_woken_up_once() {
        let [(mut out, _), (_, mut incoming)] = ends();
        assert!(!out.reader_is_to_be_woken());
        incoming.ask();
        out.write(&[1; CAPACITY]).unwrap();
        assert_eq!([out.reader_is_to_be_woken(), out.reader_is_to_be_woken()], [true, false]);
        out.ask();
        read(&mut incoming, CAPACITY / 2 - 1);
        assert!(!incoming.writer_is_to_be_woken().unwrap());
        read(&mut incoming, 1);
        assert!(incoming.writer_is_to_be_woken().unwrap());
        assert!(!incoming.writer_is_to_be_woken().unwrap());
    }

    /// Counters that another process has overwritten are an error, and no access outside of the ring.
    #[test]
    fn wrong_counters_are_an_error() {
        let too_many = [CAPACITY as u64 + 1, 1 << 63, u64::MAX];
        for (written, read) in too_many.into_iter().zip([1, 1 << 63, CAPACITY as u64 + 1]) {
            let [(mut out, mut back_in), (back, incoming)] = ends();
            back.ring.header().writer.done.store(written, Ordering::SeqCst);
            incoming.ring.header().reader.done.store(read, Ordering::SeqCst);
            let errors = [
                out.write(&[1]).unwrap_err(),
                back_in.read(&mut [MaybeUninit::uninit()]).unwrap_err(),
                back_in.writer_is_to_be_woken().unwrap_err(),
            ];
            assert!(errors.iter().all(|it| it.kind() == io::ErrorKind::InvalidData));
        }
    }
}
