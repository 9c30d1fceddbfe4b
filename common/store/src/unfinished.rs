//! Deletes incomplete files of crashed writers from a local directory. The library writes to `name#number`,
//! renames the file when it is complete, and does not list incomplete files. Other stores do not list
//! incomplete objects either, and have lifecycle rules for unfinished uploads.

use std::fs::{read_dir, remove_file};
use std::io;
use std::path::Path;
use std::time::SystemTime;

use steadfast_host::task::blocking;
use url::Url;

use crate::error::StoreError;
use crate::location::Location;

impl Location {
    /// Deletes incomplete files directly in this location, if it is a local directory, that were last modified
    /// before `before`; returns their names. Does nothing in other stores.
    ///
    /// # Errors
    /// If a file cannot be inspected or deleted.
    pub async fn delete_unfinished(&self, before: SystemTime) -> Result<Vec<String>, StoreError> {
        let url = Url::parse(self.url()).ok().filter(|url| url.scheme() == "file");
        let Some(directory) = url.and_then(|url| url.to_file_path().ok()) else {
            return Ok(Vec::new());
        };
        let failed = |cause| StoreError::Failed {
            url: self.url().to_owned(),
            operation: "cleaning up",
            source: cause,
        };
        let deleted = blocking(move || delete(&directory, before)).await;
        deleted.map_err(|broken| failed(broken.into()))?.map_err(|error| failed(error.into()))
    }
}

fn delete(directory: &Path, before: SystemTime) -> io::Result<Vec<String>> {
    let entries = match read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut deleted = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_complete = name.split_once('#').is_none_or(|(_, number)| {
            number.is_empty() || !number.bytes().all(|digit| digit.is_ascii_digit())
        });
        if is_complete {
            continue;
        }
        // A writer may complete and rename the file concurrently.
        match entry.metadata().and_then(|it| it.modified()) {
            Ok(modified) if modified < before && entry.file_type()?.is_file() => {}
            Ok(_) => continue,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        }
        remove_file(entry.path())?;
        deleted.push(name);
    }
    Ok(deleted)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::Duration;

    use super::*;
    use crate::open;

    #[tokio::test]
    async fn only_old_unfinished_files_are_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        let (old, new) = (now - Duration::from_secs(100), now);
        let files = [("a#1", old), ("b#12", new), ("c", old), ("d#x", old), ("e#", old)];
        for (name, modified) in files {
            let file = File::create(directory.path().join(name)).unwrap();
            file.set_modified(modified).unwrap();
        }
        let place = open(directory.path().to_str().unwrap()).unwrap();
        let deleted = place.delete_unfinished(now - Duration::from_secs(50)).await.unwrap();
        assert_eq!(deleted, ["a#1"]);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 4);
        let nowhere = place.child("nowhere").unwrap();
        assert!(nowhere.delete_unfinished(now).await.unwrap().is_empty());
        assert!(open("memory://m/x").unwrap().delete_unfinished(now).await.unwrap().is_empty());
    }

    /// Detects changes of the names that the library gives to incomplete files.
    #[tokio::test]
    async fn an_unfinished_write_leaves_the_file_that_we_look_for() {
        use object_store::local::LocalFileSystem;
        use object_store::{ObjectStoreExt, path::Path};
        let directory = tempfile::tempdir().unwrap();
        let store = LocalFileSystem::new_with_prefix(directory.path()).unwrap();
        let mut upload = store.put_multipart(&Path::from("it")).await.unwrap();
        upload.put_part("half".into()).await.unwrap();
        let place = open(directory.path().to_str().unwrap()).unwrap();
        assert!(place.list().await.unwrap().is_empty());
        let later = SystemTime::now() + Duration::from_secs(1);
        let deleted = place.delete_unfinished(later).await.unwrap();
        assert!(deleted.len() == 1 && deleted[0].starts_with("it#"), "{deleted:?}");
    }
}
