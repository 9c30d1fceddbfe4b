//! Pulls that wait for their version, and the values that they may have meanwhile.

use steadfast_common::ids::Version;
use steadfast_pserver_core::shard::{EarlyBlock, Parameters, Shard};
use tokio::sync::mpsc;

use crate::event::{EngineError, Patience, Pulled, Reply, Which};

/// A pull whose version has not come yet.
pub(crate) struct WaitingPull {
    pub version: Version,
    pub which: Which,
    /// Where blocks go that have come to the version before others have.
    pub early: mpsc::UnboundedSender<EarlyBlock>,
    pub reply: Reply<Pulled>,
}

impl WaitingPull {
    /// Passes on blocks that are one version ahead of the shard, if it waits for them.
    fn send_early(&self, shard: &Shard, blocks: &[EarlyBlock]) {
        let next = Version(shard.position().version.0 + 1);
        if self.which == Which::Exactly && self.version == next {
            // Whoever has stopped waiting wants none.
            blocks.iter().for_each(|block| drop(self.early.send(block.clone())));
        }
    }
}

/// Pulls that wait.
#[derive(Default)]
pub(crate) struct Pulls {
    waiting: Vec<WaitingPull>,
    /// The values at the version before, or while a step is under way at the present one (synchronous
    /// mode): another slot may still be there, and a trainer that comes now needs all of them at one
    /// version.
    kept: Option<Parameters>,
}

impl Pulls {
    /// Keeps the present values before any block of them is changed by a step. That happens when all
    /// lanes are in of the block, so every slot has come to the present version: nobody needs the one
    /// before any more, and its memory becomes that of the next one.
    pub fn keep(&mut self, shard: &Shard) {
        if !shard.is_under_way() {
            self.kept = None;
            self.kept = Some(shard.parameters());
        }
    }

    /// Answers a pull, or has it wait.
    pub fn take(&mut self, shard: Option<&Shard>, pull: WaitingPull, patience: Patience) {
        if self.waiting.len() == self.waiting.capacity() {
            // Before there is room for more: somebody may have stopped waiting.
            self.waiting.retain(|pull| !pull.reply.is_closed());
        }
        match (shard.and_then(|shard| self.answer_to(shard, &pull)), patience) {
            (Some(answer), _) => drop(pull.reply.send(Ok(answer))),
            (None, Patience::Waits) => {
                shard.iter().for_each(|shard| pull.send_early(shard, &shard.early()));
                self.waiting.push(pull);
            }
            (None, Patience::None) => {
                let present = shard.map(|it| it.position().version).unwrap_or_default();
                drop(pull.reply.send(Ok(Pulled::NotThere { present })));
            }
        }
    }

    /// Passes on blocks that are one version ahead of the shard.
    pub fn send_early(&self, shard: &Shard, blocks: &[EarlyBlock]) {
        self.waiting.iter().for_each(|pull| pull.send_early(shard, blocks));
    }

    /// Answers those whose version has come.
    pub fn settle(&mut self, shard: &Shard) {
        for pull in std::mem::take(&mut self.waiting) {
            match self.answer_to(shard, &pull) {
                Some(answer) => drop(pull.reply.send(Ok(answer))),
                None => self.waiting.push(pull),
            }
        }
    }

    /// Refuses all, and forgets what was kept.
    pub fn end(&mut self, why: &EngineError) {
        self.kept = None;
        for pull in self.waiting.drain(..) {
            let _ = pull.reply.send(Err(why.clone()));
        }
    }

    /// Nothing before its version has come.
    fn answer_to(&self, shard: &Shard, pull: &WaitingPull) -> Option<Pulled> {
        let present = shard.position().version;
        if present < pull.version {
            return None;
        }
        let kept = self.kept.as_ref().filter(|it| it.position.version == pull.version);
        let found = match pull.which {
            Which::Exactly if pull.version < present => kept.cloned(),
            // They are those of no version now.
            Which::Exactly | Which::AtLeast if shard.is_under_way() => self.kept.clone(),
            Which::Exactly | Which::AtLeast => Some(shard.parameters()),
        };
        Some(found.map_or(Pulled::NotThere { present }, Pulled::Parameters))
    }
}
