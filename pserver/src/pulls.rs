//! Pulls that wait for their version, and the parameters of the previous one.

use steadfast_common::ids::Version;
use steadfast_pserver_core::shard::{EarlyBlock, Parameters, Shard};
use tokio::sync::mpsc;

use crate::event::{EngineError, Pulled, Reply, WaitMode, Which};

/// A pull whose version is not reached yet.
pub(crate) struct WaitingPull {
    pub version: Version,
    pub which: Which,
    /// Receives blocks that reach the version before the other blocks.
    pub early: mpsc::UnboundedSender<EarlyBlock>,
    pub reply: Reply<Pulled>,
}

impl WaitingPull {
    /// Sends blocks that are one version ahead of the shard, if the pull waits for them.
    fn send_early(&self, shard: &Shard, blocks: &[EarlyBlock]) {
        let next = Version(shard.position().version.0 + 1);
        if self.which == Which::Exactly && self.version == next {
            // The receiver may have stopped waiting.
            blocks.iter().for_each(|block| drop(self.early.send(block.clone())));
        }
    }
}

/// The waiting pulls.
#[derive(Default)]
pub(crate) struct Pulls {
    waiting: Vec<WaitingPull>,
    /// The values of the previous version, or of the current one while a step is in progress (synchronous
    /// mode): another slot may still be at that version, and a trainer that joins now needs all slots at
    /// one version.
    kept: Option<Parameters>,
}

impl Pulls {
    /// Keeps the current values before a step changes the first block. By then that block has all lanes,
    /// so every slot has reached the current version: the previous one is obsolete, and its memory is
    /// reused for the next.
    pub fn keep(&mut self, shard: &Shard) {
        if !shard.is_under_way() {
            self.kept = None;
            self.kept = Some(shard.parameters());
        }
    }

    /// Answers a pull, or queues it.
    pub fn take(&mut self, shard: Option<&Shard>, pull: WaitingPull, wait_mode: WaitMode) {
        if self.waiting.len() == self.waiting.capacity() {
            // Instead of growing: some receivers may have stopped waiting.
            self.waiting.retain(|pull| !pull.reply.is_closed());
        }
        match (shard.and_then(|shard| self.answer_to(shard, &pull)), wait_mode) {
            (Some(answer), _) => drop(pull.reply.send(Ok(answer))),
            (None, WaitMode::UntilReady) => {
                shard.iter().for_each(|shard| pull.send_early(shard, &shard.early()));
                self.waiting.push(pull);
            }
            (None, WaitMode::Immediate) => {
                let present = shard.map(|it| it.position().version).unwrap_or_default();
                drop(pull.reply.send(Ok(Pulled::NotThere { present })));
            }
        }
    }

    /// Sends blocks that are one version ahead of the shard to the pulls that wait for them.
    pub fn send_early(&self, shard: &Shard, blocks: &[EarlyBlock]) {
        self.waiting.iter().for_each(|pull| pull.send_early(shard, blocks));
    }

    /// Answers the pulls whose version is reached.
    pub fn settle(&mut self, shard: &Shard) {
        for pull in std::mem::take(&mut self.waiting) {
            match self.answer_to(shard, &pull) {
                Some(answer) => drop(pull.reply.send(Ok(answer))),
                None => self.waiting.push(pull),
            }
        }
    }

    /// Refuses all waiting pulls and drops the kept values.
    pub fn end(&mut self, why: &EngineError) {
        self.kept = None;
        for pull in self.waiting.drain(..) {
            let _ = pull.reply.send(Err(why.clone()));
        }
    }

    /// Returns the answer to a pull; `None` before its version is reached.
    fn answer_to(&self, shard: &Shard, pull: &WaitingPull) -> Option<Pulled> {
        let present = shard.position().version;
        if present < pull.version {
            return None;
        }
        let kept = self.kept.as_ref().filter(|it| it.position.version == pull.version);
        let found = match pull.which {
            Which::Exactly if pull.version < present => kept.cloned(),
            // The current values are a mix of two versions.
            Which::Exactly | Which::AtLeast if shard.is_under_way() => self.kept.clone(),
            Which::Exactly | Which::AtLeast => Some(shard.parameters()),
        };
        Some(found.map_or(Pulled::NotThere { present }, Pulled::Parameters))
    }
}
