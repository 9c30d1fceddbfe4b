//! Writes objects piece by piece.

use bytes::BytesMut;
use object_store::MultipartUpload;

use crate::error::StoreError;
use crate::location::{Created, Location, PART_BYTES, PARTS_IN_FLIGHT};

/// Parts after which they get twice as large: stores take 10 000 at most.
const PARTS_OF_A_SIZE: usize = 1_000;

/// An object that is being written. Four parts are in memory, of 8 MiB each, and larger ones beyond 8 GiB; for plain
/// HTTP servers, which take objects as a whole, all bytes. Readers see the object once it is whole.
///
/// One that is not ended is to be aborted: otherwise its parts occupy space in the store until a lifecycle rule deletes
/// them.
#[derive(Debug)]
pub struct ObjectWriter {
    place: Location,
    /// Bytes that are not sent yet.
    buffer: BytesMut,
    upload: Option<Box<dyn MultipartUpload>>,
    /// Parts that were sent.
    parts: usize,
    /// Whether some bytes may be missing.
    is_broken: bool,
}

impl ObjectWriter {
    /// Begins an object.
    pub fn new(place: Location) -> Self {
        Self { place, buffer: BytesMut::new(), upload: None, parts: 0, is_broken: false }
    }

    /// Returns where the object will be.
    pub fn place(&self) -> &Location {
        &self.place
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// If the store fails. The object can only be aborted then.
    pub async fn push(&mut self, mut bytes: &[u8]) -> Result<(), StoreError> {
        loop {
            let room = match self.place.takes_parts() {
                true => self.part_bytes() * PARTS_IN_FLIGHT - self.buffer.len(),
                false => usize::MAX,
            };
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.buffer.extend_from_slice(now);
            if now.len() < room {
                return Ok(());
            }
            self.send().await?;
            bytes = later;
        }
    }

    fn part_bytes(&self) -> usize {
        PART_BYTES << (self.parts / PARTS_OF_A_SIZE).min(10)
    }

    /// Sends what is in the buffer.
    async fn send(&mut self) -> Result<(), StoreError> {
        self.is_broken = true;
        let (bytes, size) = (self.buffer.split().freeze(), self.part_bytes());
        let upload = match &mut self.upload {
            Some(upload) => upload,
            None => self.upload.insert(self.place.begin_parts().await?),
        };
        self.parts += bytes.len().div_ceil(size);
        self.place.send_parts(&mut **upload, &bytes.into(), size).await?;
        self.is_broken = false;
        Ok(())
    }

    /// Ends the object, which replaces another one of its name. On return it is durable.
    ///
    /// # Errors
    /// If the store fails.
    ///
    /// # Panics
    /// If a push has failed.
    pub async fn finish(mut self) -> Result<(), StoreError> {
        assert!(!self.is_broken, "{} lacks bytes", self.place);
        if self.upload.is_none() {
            return self.place.write(self.buffer.freeze()).await;
        }
        let sent = self.send().await;
        match self.upload {
            Some(upload) => self.place.end_parts(upload, sent).await,
            None => sent,
        }
    }

    /// Ends the object, unless there is one of its name. Not atomic for one that was sent in parts: of two concurrent
    /// calls, the later one may replace the object of the other.
    ///
    /// # Errors
    /// If the store fails.
    ///
    /// # Panics
    /// If a push has failed.
    pub async fn finish_new(self) -> Result<Created, StoreError> {
        assert!(!self.is_broken, "{} lacks bytes", self.place);
        if self.upload.is_none() {
            return self.place.create(self.buffer.freeze()).await;
        }
        match self.place.size().await {
            Ok(None) => self.finish().await.map(|()| Created::Now),
            Ok(Some(_)) => {
                self.abort().await;
                Ok(Created::Already)
            }
            Err(error) => {
                self.abort().await;
                Err(error)
            }
        }
    }

    /// Gives the object up. Parts that the store does not delete now are left to its lifecycle rules.
    pub async fn abort(self) {
        if let Some(upload) = self.upload {
            self.place.abort_parts(upload).await;
        }
    }
}
