//! The history of an etcd, revision by revision.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::time::Duration;

use steadfast_audit::history::{Change, Revision, etcdctl};

use crate::etcd::watch_command;
use crate::{Process, Scene, within};

/// Records all changes below a prefix, also across failures of etcd members.
#[derive(Debug)]
pub struct Recorder<'a> {
    scene: &'a Scene,
    urls: String,
    prefix: String,
    /// The watch process, and the number of bytes of its output that were read.
    watch: Process,
    read: u64,
    /// An incomplete line of the output.
    rest: String,
    starts: u32,
    /// All complete lines so far.
    lines: String,
    revisions: BTreeMap<i64, Vec<Change>>,
}

impl<'a> Recorder<'a> {
    /// Starts with the first change below `prefix`. The history must not be compacted.
    pub fn start(scene: &'a Scene, urls: &[String], prefix: &str) -> Self {
        let (urls, prefix) = (urls.join(","), prefix.to_owned());
        let watch = start_watch(scene, &urls, &prefix, 1, 1);
        let (rest, lines, revisions) = (String::new(), String::new(), BTreeMap::new());
        Self { scene, urls, prefix, watch, read: 0, rest, starts: 1, lines, revisions }
    }

    /// Returns the changes so far, in order.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.revisions.values().flatten()
    }

    /// Returns the last change of a key, and its revision.
    pub fn last_of(&self, key: &str) -> Option<(i64, &Change)> {
        let all = self.revisions.iter().rev();
        let mut of_key = all.flat_map(|(at, changes)| changes.iter().map(|it| (*at, it)));
        of_key.find(|(_, change)| change.key == key)
    }

    /// Returns the output of `etcdctl watch` so far.
    pub fn lines(&self) -> &str {
        &self.lines
    }

    /// Returns the last recorded revision.
    pub fn last(&self) -> i64 {
        self.revisions.keys().next_back().copied().unwrap_or_default()
    }

    /// Reads new output; returns the new changes.
    pub fn read(&mut self) -> Vec<Change> {
        let ended = !self.watch.is_running();
        let mut text = std::mem::take(&mut self.rest);
        let mut file = File::open(self.watch.stdout_path()).expect("it was created at the start");
        file.seek(SeekFrom::Start(self.read)).expect("a file can be read from anywhere");
        self.read += file.read_to_string(&mut text).expect("etcdctl writes text") as u64;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        self.rest = text.split_off(whole);
        let mut new = Vec::new();
        for Revision { revision, changes } in etcdctl::parse(&text).expect("etcdctl wrote it") {
            new.extend(changes.iter().cloned());
            self.revisions.entry(revision).or_default().extend(changes);
        }
        self.lines.push_str(&text);
        if ended {
            self.go_on();
        }
        new
    }

    /// Restarts the watch after an error, from the last recorded revision.
    fn go_on(&mut self) {
        let stderr = self.watch.stderr();
        assert!(
            !stderr.contains("compacted"),
            "history was compacted before it was seen: {stderr}"
        );
        self.starts += 1;
        let next = self.last() + 1;
        self.watch = start_watch(self.scene, &self.urls, &self.prefix, next, self.starts);
        (self.read, self.rest) = (0, String::new());
    }
}

fn start_watch(scene: &Scene, urls: &str, prefix: &str, first: i64, number: u32) -> Process {
    let mut command = watch_command(scene, urls, prefix, first);
    Process::start(scene.directory(), &format!("watch-{number}"), &mut command)
}

/// Returns all changes below `prefix` up to a revision. The history must not be compacted.
pub fn history(scene: &Scene, url: &str, prefix: &str, last: i64) -> Vec<Revision> {
    let mut recorder = Recorder::start(scene, &[url.to_owned()], prefix);
    within(Duration::from_secs(30), "the history is read", || {
        recorder.read();
        (last <= recorder.last()).then_some(())
    });
    let seen = recorder.revisions.range(..=last);
    seen.map(|(at, it)| Revision { revision: *at, changes: it.clone() }).collect()
}
