//! A snapshot: the whole store in one file, written to a temporary file and renamed into place.

use super::file::{self, MAGIC};
use super::frame;
use super::wire::{Assembly, SnapshotBatch, SnapshotEnd, WireLease, WireWrite};
use crate::core::Image;
use crate::error::Error;
use prost::Message;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A frame is closed at this size, which bounds the buffers of writer and reader.
const FRAME_BYTES: usize = 1 << 20;

/// Writes a snapshot to `path` atomically and returns its size.
pub fn write(path: &Path, image: &Image) -> Result<u64, Error> {
    let temporary = path.with_extension("tmp");
    let mut file = file::create(&temporary)?;
    let mut writer = Writer::new(BufWriter::new(&mut file));
    writer.image(image).map_err(Error::disk("write", &temporary))?;
    let bytes = writer.bytes;
    drop(writer);
    file.sync_all().map_err(Error::disk("sync", &temporary))?;
    fs::rename(&temporary, path).map_err(Error::disk("rename into", path))?;
    let dir = path.parent().expect("a snapshot lies in the data directory");
    file::sync_dir(dir)?;
    Ok(bytes)
}

/// Reads a snapshot. It was complete before it was renamed into place, so any error in it is corruption.
pub fn read(path: &Path, bytes: &[u8]) -> Result<Image, Error> {
    if !bytes.starts_with(MAGIC) {
        return Err(file::corrupt(path, 0, "not a snapshot of this version"));
    }
    let mut assembly = Assembly::default();
    let mut offset = MAGIC.len();
    while offset < bytes.len() {
        let payload = frame::payload(&bytes[offset..])
            .ok_or_else(|| file::corrupt(path, offset, "checksum mismatch"))?;
        let batch = SnapshotBatch::decode(payload).map_err(|error| error.to_string());
        batch
            .and_then(|batch| assembly.add(batch))
            .map_err(|reason| file::corrupt(path, offset, reason))?;
        offset += frame::HEADER_BYTES + payload.len();
    }
    assembly.finish().map_err(|reason| file::corrupt(path, offset, reason))
}

/// Encodes an image into frames.
struct Writer<W: Write> {
    out: W,
    batch: SnapshotBatch,
    batch_bytes: usize,
    bytes: u64,
}

impl<W: Write> Writer<W> {
    fn new(out: W) -> Self {
        Writer { out, batch: SnapshotBatch::default(), batch_bytes: 0, bytes: 0 }
    }

    fn image(&mut self, image: &Image) -> io::Result<()> {
        self.write(MAGIC)?;
        for kv in &image.history.kept {
            self.batch.kept.push(kv.as_ref().clone());
            self.grow(kv.encoded_len())?;
        }
        for write in &image.history.writes {
            let write = WireWrite::from(write.as_ref());
            let bytes = write.encoded_len();
            self.batch.writes.push(write);
            self.grow(bytes)?;
        }
        for lease in &image.leases {
            self.batch.leases.push(WireLease::from(*lease));
            self.grow(size_of::<WireLease>())?;
        }
        let (revision, compacted) = (image.history.revision, image.history.compacted);
        self.batch.end = Some(SnapshotEnd { revision, compacted });
        self.close_frame()?;
        self.out.flush()
    }

    fn grow(&mut self, bytes: usize) -> io::Result<()> {
        self.batch_bytes += bytes;
        if self.batch_bytes < FRAME_BYTES { Ok(()) } else { self.close_frame() }
    }

    fn close_frame(&mut self) -> io::Result<()> {
        let payload = std::mem::take(&mut self.batch).encode_to_vec();
        self.batch_bytes = 0;
        self.write(&frame::header(&payload))?;
        self.write(&payload)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes += u64::try_from(bytes.len()).expect("a length fits 64 bits");
        self.out.write_all(bytes)
    }
}
