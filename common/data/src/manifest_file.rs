//! The dataset manifest in a job's store, named by its digest.

use bytes::Bytes;
use futures::TryStreamExt;
use steadfast_common::dataset::Manifest;
use steadfast_store::{Created, Location, StoreError};

use crate::error::DataError;

/// Stores a manifest. One that is there already is the same, unless an upload of it was cut short:
/// then it is stored anew, for nobody could ever load it.
///
/// # Errors
/// If the store does not take it.
pub async fn store_manifest(store: &Location, manifest: &Manifest) -> Result<(), DataError> {
    let place = store.child(&Manifest::object_name(&manifest.digest()))?;
    let json = Bytes::from(serde_json::to_vec(manifest).expect("a manifest is plain data"));
    match place.create(json.clone()).await? {
        Created::Now => {}
        Created::Already if place.read().await? == json => {}
        Created::Already => place.write(json).await?,
    }
    Ok(())
}

/// Loads the manifest with this digest.
///
/// # Errors
/// If it is not there, or is not what the digest says.
pub async fn load_manifest(store: &Location, digest: &str) -> Result<Manifest, DataError> {
    let place = store.child(&Manifest::object_name(digest))?;
    let nothing = || StoreError::NotFound { url: place.url().to_owned() };
    let size = place.size().await?.ok_or_else(nothing)?;
    let json = place.read_in_pieces(size).try_collect().await?;
    Manifest::parse(json, digest).map_err(|reason| DataError::BadManifest {
        reason: format!("{} is damaged: {reason}", place.url()),
    })
}
