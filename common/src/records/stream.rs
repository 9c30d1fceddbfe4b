//! Streams: a dataset of files that appear while it is trained on.
//!
//! The passes of a stream are its files, in the order in which they were found: each pass has a manifest of its
//! own, which never changes, and is trained on once. In synchronous mode a pass is one file, so that the result
//! depends on the sequence of files alone and not on when they were found. In asynchronous mode, in which a pass
//! ends when all its tasks are done, it is all files that waited.

use serde::{Deserialize, Serialize};

use crate::ids::Pass;

/// The most files of one pass.
pub const PASS_FILES_MAX: usize = 256;

/// `stream/head`: the passes so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamRecord {
    /// The pass that the next files become: the number of passes so far.
    pub next: Pass,
    /// The first pass that is still known. Those before are part of every checkpoint, so that no trainer needs
    /// them again.
    pub first: Pass,
    /// The pass before which training ends, once the job is drained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<Pass>,
    /// The files that could not be read when the stream ended.
    #[serde(default, skip_serializing_if = "LeftOut::is_empty")]
    pub left_out: LeftOut,
    /// Files and records of all passes so far.
    pub files: u64,
    pub records: u64,
    /// SHA-256 of the object with the names of the files of passes before `first`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forgotten: Option<String>,
}

impl StreamRecord {
    /// Returns whether training ends before `pass`.
    pub fn is_over(&self, pass: Pass) -> bool {
        self.end.is_some_and(|end| end <= pass)
    }
}

/// Files of a stream that cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    pub files: u64,
    /// The URLs of the first few, and the reasons.
    pub listed: Vec<(String, String)>,
}

impl LeftOut {
    pub fn is_empty(&self) -> bool {
        self.files == 0
    }
}

/// A file of a stream.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StreamFile {
    /// Modification time in milliseconds since 1970, by the clock of its store. The first field, because files are
    /// ordered by it.
    pub modified_unix_ms: u64,
    pub url: String,
    pub size_bytes: u64,
}

/// `stream/passes/<pass>`: one pass. It never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPassRecord {
    /// SHA-256 of the manifest.
    pub manifest: String,
    pub files: Vec<StreamFile>,
    pub tasks: u32,
    pub records: u64,
    /// Records of all passes before.
    pub records_before: u64,
}

impl StreamPassRecord {
    /// Returns the name of the object with the manifest of a pass. Each job has objects of its own, because it deletes
    /// them.
    pub fn object_name(job: &str, pass: Pass, digest: &str) -> String {
        format!("{}/{:09}-{digest}.json", Self::folder(job), pass.0)
    }

    /// Returns the folder of the objects of a job's stream.
    pub fn folder(job: &str) -> String {
        format!("streams/{job}")
    }

    /// Returns the pass whose manifest is in an object, which is named relative to the folder; `None` if it is another
    /// object.
    pub fn pass_of(object: &str) -> Option<Pass> {
        object.split('-').next()?.parse().ok().map(Pass)
    }
}

/// The object with the names of the files of passes that are no longer known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgottenFiles {
    /// For each file, when it was last listed, in milliseconds since 1970. One that was not listed for a day is
    /// left out.
    pub files: Vec<(String, u64)>,
}

impl ForgottenFiles {
    /// Returns the name of the object with this digest.
    pub fn object_name(job: &str, digest: &str) -> String {
        format!("streams/{job}/files-{digest}.json")
    }
}
