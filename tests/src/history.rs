//! What happened in an etcd, revision by revision.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::time::Duration;

use steadfast_audit::history::{Change, Revision, etcdctl};

use crate::etcd::watch_command;
use crate::{Process, Scene, within};

/// Writes down what happens below a prefix. It outlives members of etcd that die or stop.
#[derive(Debug)]
pub struct Recorder<'a> {
    scene: &'a Scene,
    urls: String,
    prefix: String,
    /// A watch, and the bytes of its output that were read.
    watch: Process,
    read: u64,
    /// A line of it that is not whole yet.
    rest: String,
    starts: u32,
    /// All whole lines so far.
    lines: String,
    revisions: BTreeMap<i64, Vec<Change>>,
}

impl<'a> Recorder<'a> {
    /// Begins with what was first put below `prefix`. Nothing may have been compacted.
    pub fn start(scene: &'a Scene, urls: &[String], prefix: &str) -> Self {
        let (urls, prefix) = (urls.join(","), prefix.to_owned());
        let watch = start_watch(scene, &urls, &prefix, 1, 1);
        let (rest, lines, revisions) = (String::new(), String::new(), BTreeMap::new());
        Self { scene, urls, prefix, watch, read: 0, rest, starts: 1, lines, revisions }
    }

    /// What was seen so far, in its order.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.revisions.values().flatten()
    }

    /// The last change of a key, and its revision.
    pub fn last_of(&self, key: &str) -> Option<(i64, &Change)> {
        let all = self.revisions.iter().rev();
        let mut of_key = all.flat_map(|(at, changes)| changes.iter().map(|it| (*at, it)));
        of_key.find(|(_, change)| change.key == key)
    }

    /// What was seen so far, as `etcdctl watch` wrote it.
    pub fn lines(&self) -> &str {
        &self.lines
    }

    /// The last revision that was seen.
    pub fn last(&self) -> i64 {
        self.revisions.keys().next_back().copied().unwrap_or_default()
    }

    /// Reads on; returns the changes that are new.
    pub fn look(&mut self) -> Vec<Change> {
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

    /// A watch ends when it cannot go on; another one begins where it ended.
    fn go_on(&mut self) {
        let said = self.watch.stderr();
        assert!(!said.contains("compacted"), "history was compacted before it was seen: {said}");
        self.starts += 1;
        let next = self.last() + 1;
        self.watch = start_watch(self.scene, &self.urls, &self.prefix, next, self.starts);
        (self.read, self.rest) = (0, String::new());
    }
}

fn start_watch(scene: &Scene, urls: &str, prefix: &str, first: i64, number: u32) -> Process {
    let mut command = watch_command(scene, urls, prefix, first);
    Process::start(scene.folder(), &format!("watch-{number}"), &mut command)
}

/// All changes below `prefix` up to a revision. Nothing may have been compacted.
pub fn history(scene: &Scene, url: &str, prefix: &str, last: i64) -> Vec<Revision> {
    let mut recorder = Recorder::start(scene, &[url.to_owned()], prefix);
    within(Duration::from_secs(30), "the history was read", || {
        recorder.look();
        (last <= recorder.last()).then_some(())
    });
    let seen = recorder.revisions.range(..=last);
    seen.map(|(at, it)| Revision { revision: *at, changes: it.clone() }).collect()
}
