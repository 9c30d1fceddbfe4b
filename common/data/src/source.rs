//! The files of a dataset.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_common::job::spec::DatasetSpec;
use steadfast_common::records::stream::StreamFile;
use steadfast_store::{Expanded, Listed, Location, expand, list_matching};
use tracing::warn;

use crate::error::DataError;

/// The reason why a file that matches a source is none of its files.
pub const ODD_NAME: &str = "its name cannot be part of a path: it is not UTF-8, or has a control character or an \
                            empty part; rename it";

/// Expands the sources in order. The files of each source are sorted; duplicates are dropped.
pub(crate) async fn files(
    sources: &[String],
    base: Option<&str>,
) -> Result<Vec<Location>, DataError> {
    let mut files = Vec::new();
    let mut seen = BTreeSet::new();
    for source in sources {
        let Expanded { locations, skipped } = expand(&resolve(source, base)).await?;
        for file in skipped {
            warn!(file, reason = ODD_NAME, "file skipped");
        }
        for file in locations {
            if seen.insert(file.url().to_owned()) {
                files.push(file);
            }
        }
    }
    Ok(files)
}

/// The files of a stream as they are now.
#[derive(Clone, Debug, Default)]
pub struct StreamListing {
    /// The files that can be read, each once.
    pub files: Vec<StreamFile>,
    /// Files that cannot be read because of their names, see [`ODD_NAME`].
    pub skipped: BTreeSet<String>,
}

/// Lists the files of a stream as they are now. Files without content are left out until they have some; so are pipes
/// and devices, from which nothing could be read again.
///
/// # Errors
/// If a store fails.
pub fn stream_files<'a>(
    spec: &'a DatasetSpec,
    base: Option<&'a str>,
) -> BoxFuture<'a, Result<StreamListing, DataError>> {
    let listing = async move {
        let (mut files, mut skipped) = (BTreeMap::new(), BTreeSet::new());
        for source in &spec.source {
            let matching = list_matching(&resolve(source, base)).await?;
            skipped.extend(matching.skipped);
            for Listed { location, size_bytes, modified } in matching.objects {
                if size_bytes == 0 {
                    continue;
                }
                let url = location.url().to_owned();
                let modified_unix_ms = unix_ms_of(modified);
                files.insert(url.clone(), StreamFile { modified_unix_ms, url, size_bytes });
            }
        }
        Ok(StreamListing { files: files.into_values().collect(), skipped })
    };
    listing.boxed()
}

/// Returns the milliseconds since 1970; 0 for earlier times.
pub(crate) fn unix_ms_of(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Returns the path or URL of a source: a relative one is resolved against `base`, a path or a URL.
pub fn resolve(source: &str, base: Option<&str>) -> String {
    match base {
        Some(base) if !source.contains("://") && !source.starts_with('/') => {
            format!("{}/{source}", base.trim_end_matches('/'))
        }
        Some(_) | None => source.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_relative_source_is_resolved_against_the_directory_of_the_job_file() {
        assert_eq!(resolve("a/*.csv", Some("/jobs/")), "/jobs/a/*.csv");
        assert_eq!(resolve("a.csv", Some("s3://b/jobs")), "s3://b/jobs/a.csv");
        assert_eq!(resolve("/a.csv", Some("/jobs")), "/a.csv");
        assert_eq!(resolve("s3://b/a.csv", Some("/jobs")), "s3://b/a.csv");
        assert_eq!(resolve("a.csv", None), "a.csv");
    }
}
