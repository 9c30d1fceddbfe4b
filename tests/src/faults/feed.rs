//! A stream of files: a directory that gets a new file now and then, and loses those that the job needs no longer.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use steadfast_audit::history::Change;
use steadfast_common::ids::Pass;
use steadfast_common::job::spec::Mode;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::stream::StreamPassRecord;

use crate::{Job, Scene, examples};

/// Time between two files.
const EVERY: Duration = Duration::from_millis(350);

/// Records of a file.
pub const FILE_RECORDS: usize = 80;

/// The directory that the job follows, and the one that keeps all files, below the scene's.
const FOLLOWED: &str = "stream";
const KEPT: &str = "stream-kept";

/// Writes the files of a stream.
#[derive(Debug)]
pub struct Feed {
    followed: PathBuf,
    kept: PathBuf,
    header: String,
    records: Vec<String>,
    due: Instant,
    files: usize,
    /// The files of each pass that is in etcd.
    passes: BTreeMap<Pass, Vec<PathBuf>>,
}

impl Feed {
    /// Creates an empty directory.
    pub(super) fn start(scene: &Scene) -> Self {
        let text = fs::read_to_string(examples().join("data/digits.csv"));
        let text = text.expect("the example exists");
        let mut lines = text.lines().map(str::to_owned);
        let (followed, kept) = (scene.path(FOLLOWED), scene.path(KEPT));
        for directory in [&followed, &kept] {
            fs::create_dir_all(directory).expect("the directory of the test is writable");
        }
        Self {
            followed,
            kept,
            header: lines.next().expect("it has a header"),
            records: lines.collect(),
            due: Instant::now(),
            files: 0,
            passes: BTreeMap::new(),
        }
    }

    /// Returns a job that follows the directory of the scene.
    pub fn job(scene: &Scene, mode: Mode) -> Job {
        Self::job_of(&scene.path(FOLLOWED), mode)
    }

    /// Returns a job like that of [`Feed::job`], on all files that the stream has had so far.
    pub fn job_of_all(scene: &Scene, mode: Mode) -> Job {
        Self::job_of(&scene.path(KEPT), mode)
    }

    fn job_of(directory: &Path, mode: Mode) -> Job {
        let job = Job::stream(directory, mode);
        // With so many files, fewer checkpoints are enough.
        match mode {
            Mode::Sync => job.with("every_steps = 20", "every_steps = 40"),
            Mode::Async => job.with("every = \"1s\"", "every = \"2s\""),
        }
    }

    /// Adds a file if it is time.
    pub fn go_on(&mut self) {
        if Instant::now() < self.due {
            return;
        }
        let first = self.files * FILE_RECORDS;
        let record = |number: usize| &self.records[number % self.records.len()];
        let lines = (first..first + FILE_RECORDS).map(|number| format!("{}\n", record(number)));
        let text: String = [format!("{}\n", self.header)].into_iter().chain(lines).collect();
        let name = format!("{:07}.csv", self.files);
        let kept = self.kept.join(&name);
        fs::write(&kept, text).expect("there is space");
        // The same file under both names, so that a job reads both directories in the same order.
        fs::hard_link(&kept, self.followed.join(name)).expect("it is the same file system");
        self.files += 1;
        self.due = Instant::now() + EVERY;
    }

    /// Removes the files of passes that the job needs no longer, as it removes the passes themselves.
    pub fn changed(&mut self, keys: &Keys, change: &Change) {
        let Some(pass) = keys.stream_pass_of(&change.key) else { return };
        let Some(value) = &change.value else {
            for file in self.passes.remove(&pass).unwrap_or_default() {
                let _ = fs::remove_file(file);
            }
            return;
        };
        let record: StreamPassRecord = serde_json::from_str(value).expect("it is one of ours");
        let names = record.files.iter().filter_map(|file| file.url.rsplit('/').next());
        self.passes.insert(pass, names.map(|name| self.followed.join(name)).collect());
    }

    /// Returns the number of files so far.
    pub fn files(&self) -> usize {
        self.files
    }
}
