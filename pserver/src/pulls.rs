//! Pulls that wait for their version.

use steadfast_common::ids::Version;
use steadfast_pserver_core::shard::Shard;
use steadfast_pserver_core::sync_shard::{EarlyBlock, SyncShard};
use tokio::sync::mpsc;

use crate::event::{EventError, Pulled, Reply, VersionMatch, WaitMode};

/// A pull whose version is not reached yet.
pub(crate) struct WaitingPull {
    pub version: Version,
    pub which: VersionMatch,
    /// Receives blocks that reach the version before the other blocks.
    pub early: mpsc::UnboundedSender<EarlyBlock>,
    pub reply: Reply<Pulled>,
}

impl WaitingPull {
    /// Returns the answer; `None` before the version is reached.
    fn answer(&self, shard: &Shard) -> Option<Pulled> {
        let present = shard.blocks().position().version;
        if present < self.version {
            return None;
        }
        let found = match self.which {
            VersionMatch::Exactly => shard.parameters_at(self.version),
            VersionMatch::AtLeast => Some(shard.parameters()),
        };
        Some(found.map_or(Pulled::OtherVersion { present }, Pulled::Parameters))
    }

    /// Sends blocks that are one version ahead of the shard, if the pull waits for them.
    fn send_early(&self, shard: &SyncShard, blocks: &[EarlyBlock]) {
        let next = Version(shard.blocks().position().version.0 + 1);
        if self.which == VersionMatch::Exactly && self.version == next {
            // The receiver may have stopped waiting.
            blocks.iter().for_each(|block| drop(self.early.send(block.clone())));
        }
    }
}

/// The waiting pulls.
#[derive(Default)]
pub(crate) struct Pulls {
    waiting: Vec<WaitingPull>,
}

impl Pulls {
    /// Answers a pull, or queues it.
    pub fn add(&mut self, shard: Option<&Shard>, pull: WaitingPull, wait_mode: WaitMode) {
        if self.waiting.len() == self.waiting.capacity() {
            // Instead of growing: some receivers may have stopped waiting.
            self.waiting.retain(|pull| !pull.reply.is_closed());
        }
        match (shard.and_then(|shard| pull.answer(shard)), wait_mode) {
            (Some(answer), _) => drop(pull.reply.send(Ok(answer))),
            (None, WaitMode::UntilReady) => {
                let shard = shard.and_then(Shard::as_sync);
                shard.iter().for_each(|shard| pull.send_early(shard, &shard.early()));
                self.waiting.push(pull);
            }
            (None, WaitMode::Immediate) => {
                let present = shard.map(|it| it.blocks().position().version).unwrap_or_default();
                drop(pull.reply.send(Ok(Pulled::OtherVersion { present })));
            }
        }
    }

    /// Sends blocks that are one version ahead of the shard to the pulls that wait for them.
    pub fn send_early(&self, shard: &SyncShard, blocks: &[EarlyBlock]) {
        self.waiting.iter().for_each(|pull| pull.send_early(shard, blocks));
    }

    /// Answers the pulls whose version is reached.
    pub fn answer_ready(&mut self, shard: &Shard) {
        for pull in std::mem::take(&mut self.waiting) {
            match pull.answer(shard) {
                Some(answer) => drop(pull.reply.send(Ok(answer))),
                None => self.waiting.push(pull),
            }
        }
    }

    /// Refuses all waiting pulls.
    pub fn refuse_all(&mut self, why: &EventError) {
        for pull in self.waiting.drain(..) {
            let _ = pull.reply.send(Err(why.clone()));
        }
    }
}
