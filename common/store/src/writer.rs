//! Writes objects piece by piece.

use bytes::{Bytes, BytesMut};
use object_store::MultipartUpload;

use crate::error::StoreError;
use crate::location::{Created, Location, PART_BYTES, PARTS_IN_FLIGHT};

/// Bytes that are collected before they are sent. Of a store that takes at most 10 000 parts, objects have at most
/// 78 GiB.
const SENT_TOGETHER: usize = PART_BYTES * PARTS_IN_FLIGHT;

/// An object that is being written, in bounded memory (plain HTTP servers excepted, which take objects as a whole).
/// Readers see it once it is whole.
#[derive(Debug)]
pub struct ObjectWriter {
    place: Location,
    /// Bytes that are not sent yet.
    buffer: BytesMut,
    upload: Option<Box<dyn MultipartUpload>>,
}

impl ObjectWriter {
    /// Begins an object.
    pub fn new(place: Location) -> Self {
        Self { place, buffer: BytesMut::new(), upload: None }
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// If the store fails. The object cannot be continued then.
    pub async fn push(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.buffer.extend_from_slice(bytes);
        while SENT_TOGETHER <= self.buffer.len() && self.place.takes_parts() {
            let sent = self.buffer.split_to(SENT_TOGETHER).freeze();
            let mut upload = match self.upload.take() {
                Some(upload) => upload,
                None => self.place.begin_parts().await?,
            };
            match self.place.send_parts(&mut *upload, &sent.into(), PART_BYTES).await {
                Ok(()) => self.upload = Some(upload),
                failed => return self.place.end_parts(upload, failed).await,
            }
        }
        Ok(())
    }

    /// Ends the object, which replaces another one of its name. On return it is durable.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn finish(self) -> Result<(), StoreError> {
        let Self { place, buffer, upload } = self;
        match upload {
            None => place.write(buffer.freeze()).await,
            Some(upload) => end(&place, buffer.freeze(), upload).await,
        }
    }

    /// Ends the object, unless there is one of its name. Not atomic for one that was sent in parts: of two concurrent
    /// calls, the later one may replace the object of the other.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn finish_new(self) -> Result<Created, StoreError> {
        let Self { place, buffer, upload } = self;
        let Some(mut upload) = upload else { return place.create(buffer.freeze()).await };
        if place.size().await?.is_some() {
            // Parts that are left are those of a store with lifecycle rules.
            let _ = upload.abort().await;
            return Ok(Created::Already);
        }
        end(&place, buffer.freeze(), upload).await.map(|()| Created::Now)
    }
}

async fn end(
    place: &Location,
    rest: Bytes,
    mut upload: Box<dyn MultipartUpload>,
) -> Result<(), StoreError> {
    let sent = place.send_parts(&mut *upload, &rest.into(), PART_BYTES).await;
    place.end_parts(upload, sent).await
}
