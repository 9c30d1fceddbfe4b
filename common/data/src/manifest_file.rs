//! The dataset manifest in a job's store, named by its digest.

use bytes::Bytes;
use futures::TryStreamExt;
use steadfast_common::job::dataset::Manifest;
use steadfast_store::{Created, Location, StoreError};

use crate::error::DataError;

/// Stores a manifest under the name that its digest gives. An existing object of that name is equal, unless its upload
/// was interrupted; then it is replaced.
///
/// # Errors
/// If the store fails.
pub async fn store_manifest(store: &Location, manifest: &Manifest) -> Result<(), DataError> {
    store_manifest_as(store, &Manifest::object_name(&manifest.digest()), manifest).await
}

/// Stores a manifest as [`store_manifest`] does, but under another name.
///
/// # Errors
/// If the store fails.
pub async fn store_manifest_as(
    store: &Location,
    name: &str,
    manifest: &Manifest,
) -> Result<(), DataError> {
    let place = store.child(name)?;
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
/// If it does not exist, or does not match the digest.
pub async fn load_manifest(store: &Location, digest: &str) -> Result<Manifest, DataError> {
    load_manifest_of(store, &Manifest::object_name(digest), digest).await
}

/// Loads a manifest as [`load_manifest`] does, but from the object `name`.
///
/// # Errors
/// If it does not exist, or does not match the digest.
pub async fn load_manifest_of(
    store: &Location,
    name: &str,
    digest: &str,
) -> Result<Manifest, DataError> {
    let place = store.child(name)?;
    let nothing = || StoreError::NotFound { url: place.url().to_owned() };
    let size = place.size().await?.ok_or_else(nothing)?;
    let json = place.read_in_chunks(size).try_collect().await?;
    Manifest::parse(json, digest).map_err(|reason| DataError::BadManifest {
        reason: format!("{} is damaged: {reason}", place.url()),
    })
}
