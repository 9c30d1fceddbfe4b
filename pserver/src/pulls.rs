//! Pulls that wait for their version.

use steadfast_common::ids::Version;
use steadfast_common::records::position::Position;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_proto::{PullAnswer, PullValues, VersionMatch};
use steadfast_pserver_core::block_store::Parameters;
use steadfast_pserver_core::contribution::Refusal;
use steadfast_pserver_core::shard::Shard;
use steadfast_pserver_core::sync_shard::{EarlyBlock, SyncShard};
use tokio::sync::mpsc;

use crate::event::{EventError, PositionedRows, Reply, WaitMode};

/// A pull whose version is not reached yet.
pub(crate) struct WaitingPull {
    pub versions: VersionMatch,
    pub values: PullValues,
    /// Receives blocks that reach the version before the other blocks.
    pub early: mpsc::UnboundedSender<EarlyBlock>,
    pub reply: Reply<PullAnswer<Parameters>>,
}

impl WaitingPull {
    /// Returns the answer to the pull, or `None` while its version is not reached.
    fn answer(&self, shard: &Shard) -> Option<PullAnswer<Parameters>> {
        let present = shard.blocks().position().version;
        if present < self.versions.version() {
            return None;
        }
        let found = match (self.values, self.versions) {
            (PullValues::Parameters, VersionMatch::Exactly(version)) => {
                shard.parameters_at(version)
            }
            (PullValues::Parameters, VersionMatch::AtLeast(_)) => Some(shard.parameters()),
            (PullValues::Averages, VersionMatch::Exactly(version)) => shard.averages_at(version),
            (PullValues::Averages, VersionMatch::AtLeast(_)) => shard.averages_at(present),
        };
        Some(found.map_or(PullAnswer::Past { present }, PullAnswer::Ready))
    }

    /// Sends blocks that are one version ahead of the shard, if the pull waits for them.
    fn send_early(&self, shard: &SyncShard, blocks: &[EarlyBlock]) {
        let next = Version(shard.blocks().position().version.0 + 1);
        if self.values == PullValues::Parameters && self.versions == VersionMatch::Exactly(next) {
            // The receiver may have stopped waiting.
            blocks.iter().for_each(|block| drop(self.early.send(block.clone())));
        }
    }
}

/// A request for rows whose version is not reached yet.
pub(crate) struct WaitingRows {
    pub versions: VersionMatch,
    /// The requested ids of each table.
    pub ids: Vec<RowIds>,
    pub reply: Reply<PullAnswer<PositionedRows>>,
}

impl WaitingRows {
    fn is_reached(&self, shard: &Shard) -> bool {
        self.versions.version() <= shard.blocks().position().version
    }

    /// Answers the request, whose version is reached.
    fn answer(self, shard: &mut Shard) -> Result<(), Refusal> {
        // Rows may have to be read from a disk.
        if self.reply.is_closed() {
            return Ok(());
        }
        let position = shard.blocks().position();
        let version = match self.versions {
            VersionMatch::Exactly(version) => version,
            VersionMatch::AtLeast(_) => position.version,
        };
        let found = shard.rows_at(version, self.ids).map_err(Refusal::from);
        let error = found.as_ref().err().cloned();
        let answer = found.map(|rows| match rows {
            // Of the position of an earlier version, only the version is known.
            Some(rows) => PullAnswer::Ready((Position { version, ..position }, rows)),
            None => PullAnswer::Past { present: position.version },
        });
        let _ = self.reply.send(answer.map_err(EventError::from));
        error.map_or(Ok(()), Err)
    }
}

/// The waiting pulls.
#[derive(Default)]
pub(crate) struct Pulls {
    waiting: Vec<WaitingPull>,
    rows: Vec<WaitingRows>,
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
                drop(pull.reply.send(Ok(PullAnswer::NotYet { present })));
            }
        }
    }

    /// Sends blocks that are one version ahead of the shard to the pulls that wait for them.
    pub fn send_early(&self, shard: &SyncShard, blocks: &[EarlyBlock]) {
        self.waiting.iter().for_each(|pull| pull.send_early(shard, blocks));
    }

    /// Answers a request for rows, or queues it.
    ///
    /// # Errors
    /// If the rows cannot be read.
    pub fn add_rows(
        &mut self,
        shard: Option<&mut Shard>,
        pull: WaitingRows,
    ) -> Result<(), Refusal> {
        self.rows.retain(|pull| !pull.reply.is_closed());
        match shard {
            Some(shard) if pull.is_reached(shard) => pull.answer(shard),
            Some(_) | None => {
                self.rows.push(pull);
                Ok(())
            }
        }
    }

    /// Answers the pulls whose version is reached.
    ///
    /// # Errors
    /// If rows cannot be read.
    pub fn answer_ready(&mut self, shard: &mut Shard) -> Result<(), Refusal> {
        for pull in std::mem::take(&mut self.waiting) {
            match pull.answer(shard) {
                Some(answer) => drop(pull.reply.send(Ok(answer))),
                None => self.waiting.push(pull),
            }
        }
        let (ready, later): (Vec<_>, Vec<_>) =
            self.rows.drain(..).partition(|pull| pull.is_reached(shard));
        self.rows = later;
        ready.into_iter().try_for_each(|pull| pull.answer(shard))
    }

    /// Refuses all waiting pulls.
    pub fn refuse_all(&mut self, why: &EventError) {
        for pull in self.waiting.drain(..) {
            let _ = pull.reply.send(Err(why.clone()));
        }
        for pull in self.rows.drain(..) {
            let _ = pull.reply.send(Err(why.clone()));
        }
    }
}
