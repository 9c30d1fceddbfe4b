//! The thread that writes the log.

use crate::disk::Disk;
use crate::error::Error;
use crate::node::{Node, Stage};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use tracing::error;

/// Owns the log thread, which ends at the latest when this is dropped.
pub struct Committer {
    node: Arc<Node>,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

impl Committer {
    pub fn spawn(node: Arc<Node>, disk: Disk) -> Result<Self, Error> {
        let shared = node.clone();
        let thread = thread::Builder::new()
            .name("etcd-log".into())
            .spawn(move || run(&shared, disk))
            .map_err(|source| Error::Disk {
                action: "start the thread that writes",
                path: "log".into(),
                source,
            })?;
        Ok(Committer { node, thread: Some(thread) })
    }

    /// Writes the remaining facts, releases the data directory and returns any error.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.node.close();
        match self.thread.take() {
            Some(thread) => thread.join().unwrap_or(Err(Error::LogThread)),
            None => Ok(()),
        }
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            error!(%error, "log not written completely");
        }
    }
}

fn run(node: &Node, mut disk: Disk) -> Result<(), Error> {
    let stopped = StopOnDrop(node);
    let result = write_all(node, &mut disk);
    if result.is_err() {
        node.end(Stage::Failed);
    }
    drop(stopped);
    result
}

fn write_all(node: &Node, disk: &mut Disk) -> Result<(), Error> {
    while let Some(batch) = node.next_batch() {
        disk.append(&batch.facts)?;
        node.written(&batch, disk.bytes());
        if disk.is_snapshot_due() {
            let (image, batch) = node.take_with(|core| core.image());
            disk.replace(&image)?;
            node.written(&batch, disk.bytes());
        }
    }
    Ok(())
}

/// Ends all waits when the log thread ends, even if it panics.
struct StopOnDrop<'n>(&'n Node);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end(Stage::Stopped);
    }
}
