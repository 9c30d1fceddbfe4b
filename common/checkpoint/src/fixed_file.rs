//! The tensors that a model has beside its parameters, and that training does not change: frozen parameters, constant
//! buffers, and further names of shared tensors.

use std::collections::BTreeMap;

use bytes::Bytes;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use steadfast_common::job::dataset::sha256;
use steadfast_common::records::FixedRecord;
use steadfast_store::{Location, StoreError};

/// The entry of the metadata with further names, a JSON object.
const ALIASES: &str = "aliases";

/// A decoded file of fixed tensors.
#[derive(Debug)]
pub(crate) struct FixedFile<'a> {
    tensors: SafeTensors<'a>,
    /// The tensor or parameter of each further name.
    pub(crate) aliases: BTreeMap<String, String>,
}

impl<'a> FixedFile<'a> {
    /// Decodes a file.
    ///
    /// # Errors
    /// The reason, if it is no safetensors file, or its aliases cannot be parsed.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self, String> {
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
        let aliases = match header.metadata().as_ref().and_then(|entries| entries.get(ALIASES)) {
            None => BTreeMap::new(),
            Some(json) => serde_json::from_str(json)
                .map_err(|error| format!("its `{ALIASES}` cannot be parsed: {error}"))?,
        };
        Ok(Self { tensors, aliases })
    }

    pub(crate) fn tensors(&self) -> Vec<(String, TensorView<'a>)> {
        self.tensors.tensors()
    }
}

/// An object with fixed tensors that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FixedError {
    #[error("{url} does not exist")]
    Missing { url: String },
    #[error("{url} is damaged: its SHA-256 is {found}, not {expected}")]
    Damaged { url: String, found: String, expected: String },
    #[error(transparent)]
    Store(StoreError),
}

/// Returns which of the `names` in a file are fixed tensors that the file has otherwise; then those that the model does not
/// have.
pub(crate) fn compare(
    fixed: &[u8],
    file: &SafeTensors<'_>,
    names: &[String],
) -> Result<(Vec<String>, Vec<String>), String> {
    let fixed = FixedFile::decode(fixed)?;
    let (mut differing, mut unknown) = (Vec::new(), Vec::new());
    for name in names {
        match (fixed.tensors.tensor(name), file.tensor(name)) {
            (Ok(own), Ok(given)) if own != given => differing.push(name.clone()),
            (Err(_), _) if !fixed.aliases.contains_key(name) => unknown.push(name.clone()),
            (Ok(_) | Err(_), Ok(_) | Err(_)) => {}
        }
    }
    Ok((differing, unknown))
}

/// Returns the name of the object with the fixed tensors of a job, and its record.
pub fn describe_fixed(job: &str, bytes: &[u8]) -> FixedRecord {
    let sha256 = sha256(bytes);
    let object = format!("fixed-{job}-{}.safetensors", &sha256[..16]);
    FixedRecord { object, size_bytes: bytes.len() as u64, sha256 }
}

/// Reads the object with the fixed tensors of a job.
///
/// # Errors
/// If it does not exist, is not the one of `record`, or the store does not answer.
pub async fn read_fixed(store: &Location, record: &FixedRecord) -> Result<Bytes, FixedError> {
    let place = store.child(&record.object).map_err(FixedError::Store)?;
    let bytes = match place.read().await {
        Ok(bytes) => bytes,
        Err(StoreError::NotFound { url }) => return Err(FixedError::Missing { url }),
        Err(error) => return Err(FixedError::Store(error)),
    };
    let found = sha256(&bytes);
    if found != record.sha256 {
        let (url, expected) = (place.url().to_owned(), record.sha256.clone());
        return Err(FixedError::Damaged { url, found, expected });
    }
    Ok(bytes)
}
