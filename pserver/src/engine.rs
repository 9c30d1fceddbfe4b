//! The loop that owns the shard. Everybody else sends it events, or looks at what it published.

use std::sync::Arc;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Incarnation, Lane, Slot, Version};
use steadfast_common::layout::{Block, Layout};
use steadfast_common::records::GenerationRecord;
use steadfast_common::spec::Mode;
use steadfast_common::tally::TaskPiece;
use steadfast_host::task::{in_place, spawn};
use steadfast_pserver_core::contribution::{Contributed, Contribution, LaneEnd, Refusal};
use steadfast_pserver_core::shard::{Cut, Position, Rules, Shard};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::info;

/// Events that may wait for the loop; senders wait beyond that.
const EVENTS_MAX: usize = 256;

/// What the loop is told.
#[derive(Debug)]
pub enum Event {
    /// The job began another generation; the answer is what this slot has to do.
    Generation { record: GenerationRecord, reply: Reply<Begun> },
    /// The shard of a generation was loaded from its checkpoint.
    Restored { generation: Generation, layout: Arc<Layout>, cut: Cut },
    /// First values from the elected trainer.
    Init { generation: Generation, attempt: u64, first: FirstValues, reply: Reply<()> },
    Push {
        generation: Generation,
        name: PushName,
        contribution: Contribution,
        reply: Reply<Pushed>,
    },
    /// The global norm of the complete step that makes `version` old.
    Norm { generation: Generation, version: Version, norm: f64 },
    /// Everything at `version` (now, if none is named).
    Cut { generation: Generation, version: Option<Version>, reply: Reply<CutAnswer> },
}

/// What a slot has at the beginning of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// The values that it had.
    Kept,
    Nothing,
}

/// Where an answer goes. Nobody may be waiting any more.
pub type Reply<T> = oneshot::Sender<Result<T, EngineError>>;

/// Layout and values of an initialisation.
#[derive(Debug)]
pub struct FirstValues {
    pub layout: Arc<Layout>,
    /// One vector for each of the slot's blocks, in order.
    pub values: Vec<Vec<f32>>,
}

/// What a push is called; equal names carry equal bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushName {
    Lane { version: Version, lane: Lane, end: LaneEnd },
    Piece(TaskPiece),
}

/// The answer to a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    pub version: Version,
    pub outcome: Contributed,
}

/// The answer to a request for a cut.
#[derive(Debug)]
pub enum CutAnswer {
    Cut {
        layout: Arc<Layout>,
        cut: Cut,
    },
    /// The version is past.
    Past {
        present: Version,
    },
}

/// Why the loop refused an event.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineError {
    #[error("generation {found} was meant; this slot is in generation {present}")]
    OtherGeneration { found: Generation, present: Generation },
    #[error("the parameters are not initialised yet")]
    NotInitialised,
    #[error("the parameters were initialised by a later attempt, {latest}")]
    Superseded { latest: u64 },
    #[error("training has begun; the parameters cannot be initialised again")]
    InUse,
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the pserver is ending")]
    Ending,
}

impl EngineError {
    /// What the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OtherGeneration { .. } | Self::Superseded { .. } | Self::InUse => {
                ErrorKind::Stale
            }
            Self::NotInitialised => ErrorKind::NotYet,
            Self::Refused(refusal) => refusal.kind(),
            Self::Ending => ErrorKind::Unavailable,
        }
    }
}

/// What everybody may see of the shard, by reference.
#[derive(Clone, Debug, Default)]
pub struct Published {
    pub generation: Generation,
    /// Number of slots in this generation.
    pub slots: u32,
    /// The checkpoint that the generation starts from.
    pub checkpoint: Option<String>,
    /// Absent until the shard has values.
    pub shard: Option<PublishedShard>,
    /// The same at the version before (synchronous mode): another slot may still be there, and a
    /// trainer that comes now needs all of them at one version.
    pub previous: Option<PublishedShard>,
    /// Squared norms of the complete step that waits for the global norm.
    pub squares: Option<Squares>,
}

impl Published {
    /// The values at `version`; with [`Which::AtLeast`] also those of a later one.
    pub fn at(&self, version: Version, which: Which) -> Option<&PublishedShard> {
        let is_it = |it: &&PublishedShard| match which {
            Which::AtLeast => version <= it.position.version,
            Which::Exactly => version == it.position.version,
        };
        self.shard.as_ref().filter(is_it).or_else(|| self.previous.as_ref().filter(is_it))
    }
}

/// Which versions will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    AtLeast,
    Exactly,
}

/// Values at one version.
#[derive(Clone, Debug)]
pub struct PublishedShard {
    pub position: Position,
    pub blocks: Arc<Vec<(u32, Block)>>,
    pub values: Vec<Arc<Vec<f32>>>,
    /// Lanes that the present step waits for.
    pub missing: Vec<Lane>,
}

/// Squared norms of a step's blocks.
#[derive(Clone, Debug)]
pub struct Squares {
    pub version: Version,
    pub of: Arc<Vec<(u32, f64)>>,
}

/// A handle to the loop.
#[derive(Clone, Debug)]
pub struct Engine {
    events: mpsc::Sender<Event>,
    published: watch::Receiver<Arc<Published>>,
    pub slot: Slot,
    pub incarnation: Incarnation,
}

impl Engine {
    /// Starts the loop.
    pub fn start(slot: Slot, incarnation: Incarnation, rules: Rules) -> Self {
        let (events, inbox) = mpsc::channel(EVENTS_MAX);
        let (tx, published) = watch::channel(Arc::new(Published::default()));
        let owner = Owner { slot, rules, tx, stage: Stage::Idle, cuts: Vec::new(), clip: None };
        let owner = Owner { clip: owner.rules.optimizer.clip_norm, ..owner };
        // The loop ends by itself when the last handle is gone.
        spawn(owner.run(inbox));
        Self { events, published, slot, incarnation }
    }

    /// What the shard looks like now, and from now on.
    pub fn published(&self) -> watch::Receiver<Arc<Published>> {
        self.published.clone()
    }

    /// Sends an event that wants no answer.
    pub async fn tell(&self, event: Event) {
        // A loop that has ended needs no news.
        let _ = self.events.send(event).await;
    }

    /// Sends an event and waits for its answer.
    ///
    /// # Errors
    /// The loop's refusal.
    pub async fn ask<T>(&self, event: impl FnOnce(Reply<T>) -> Event) -> Result<T, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.events.send(event(reply)).await.map_err(|_| EngineError::Ending)?;
        answer.await.map_err(|_| EngineError::Ending)?
    }
}

enum Stage {
    /// No generation, or one whose values are not there yet.
    Idle,
    Ready {
        shard: Box<Shard>,
        init_attempt: u64,
    },
}

struct Owner {
    slot: Slot,
    rules: Rules,
    tx: watch::Sender<Arc<Published>>,
    stage: Stage,
    cuts: Vec<(Version, Reply<CutAnswer>)>,
    clip: Option<f32>,
}

impl Owner {
    async fn run(mut self, mut inbox: mpsc::Receiver<Event>) {
        while let Some(event) = inbox.recv().await {
            // An update of a large shard takes a while; the other tasks of this thread move on.
            in_place(|| self.handle(event));
        }
    }

    fn generation(&self) -> Generation {
        self.tx.borrow().generation
    }

    fn check(&self, found: Generation) -> Result<(), EngineError> {
        let present = self.generation();
        if found == present { Ok(()) } else { Err(EngineError::OtherGeneration { found, present }) }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Generation { record, reply } => {
                let _ = reply.send(Ok(self.begin(record)));
            }
            Event::Restored { generation, layout, cut } => self.restore(generation, layout, cut),
            Event::Init { generation, attempt, first, reply } => {
                let _ = reply.send(self.init(generation, attempt, first));
            }
            Event::Push { generation, name, contribution, reply } => {
                let _ = reply.send(self.push(generation, name, contribution));
                self.settle_cuts();
            }
            Event::Norm { generation, version, norm } => {
                self.norm(generation, version, norm);
                self.settle_cuts();
            }
            Event::Cut { generation, version, reply } => self.cut(generation, version, reply),
        }
    }

    fn begin(&mut self, record: GenerationRecord) -> Begun {
        if record.generation <= self.generation() {
            return self.has();
        }
        info!(generation = record.generation.0, checkpoint = ?record.checkpoint, "generation begins");
        let keeps =
            record.kept.contains(&self.slot) && record.slots.len() as u32 == self.tx.borrow().slots;
        if !keeps {
            self.stage = Stage::Idle;
        }
        self.cuts.clear();
        self.tx.send_replace(Arc::new(Published {
            generation: record.generation,
            slots: record.slots.len() as u32,
            checkpoint: record.checkpoint,
            shard: None,
            previous: None,
            squares: None,
        }));
        self.publish();
        self.has()
    }

    fn has(&self) -> Begun {
        match self.stage {
            Stage::Idle => Begun::Nothing,
            Stage::Ready { .. } => Begun::Kept,
        }
    }

    fn restore(&mut self, generation: Generation, layout: Arc<Layout>, cut: Cut) {
        if self.check(generation).is_err() {
            return;
        }
        let blocks = Shard::blocks_of(&layout, self.slot, self.tx.borrow().slots);
        info!(version = cut.position.version.0, "shard restored");
        let shard = Box::new(Shard::restore(layout, blocks, cut, self.rules.clone()));
        self.stage = Stage::Ready { shard, init_attempt: u64::MAX };
        self.publish();
    }

    fn init(
        &mut self,
        generation: Generation,
        attempt: u64,
        first: FirstValues,
    ) -> Result<(), EngineError> {
        self.check(generation)?;
        if let Stage::Ready { shard, init_attempt } = &self.stage {
            if attempt < *init_attempt {
                return Err(EngineError::Superseded { latest: *init_attempt });
            }
            // Repeated, or late. Training may have begun, and its first step must not be forgotten.
            if attempt == *init_attempt {
                return Ok(());
            }
            if shard.position().version != Version(0) {
                return Err(EngineError::InUse);
            }
        }
        let blocks = Shard::blocks_of(&first.layout, self.slot, self.tx.borrow().slots);
        check_first_values(&blocks, &first.values)?;
        let shard = Shard::new(first.layout, blocks, first.values, self.rules.clone());
        self.stage = Stage::Ready { shard: Box::new(shard), init_attempt: attempt };
        self.publish();
        Ok(())
    }

    fn push(
        &mut self,
        generation: Generation,
        name: PushName,
        contribution: Contribution,
    ) -> Result<Pushed, EngineError> {
        self.check(generation)?;
        let Stage::Ready { shard, .. } = &mut self.stage else {
            return Err(EngineError::NotInitialised);
        };
        let outcome = match name {
            PushName::Lane { version, lane, end } => {
                shard.contribute(version, lane, contribution, end)?
            }
            PushName::Piece(piece) => shard.apply(&piece, &contribution)?,
        };
        match (name, outcome) {
            (PushName::Lane { .. }, Contributed::Complete) => self.complete_step(),
            (PushName::Piece(_), Contributed::Complete) => self.publish(),
            (_, Contributed::Duplicate | Contributed::Waiting) => {}
        }
        let version = self.tx.borrow().shard.as_ref().map_or(Version(0), |it| it.position.version);
        Ok(Pushed { version, outcome })
    }

    /// Applies the step at once, or asks for the global norm first.
    fn complete_step(&mut self) {
        let Stage::Ready { shard, .. } = &mut self.stage else { return };
        if self.clip.is_none() {
            shard.finish_step(None);
            self.publish();
            return;
        }
        let numbers = shard.blocks().iter().map(|(number, _)| *number);
        let of = Arc::new(numbers.zip(shard.squares()).collect());
        let squares = Squares { version: shard.position().version, of };
        self.tx.send_modify(|published| {
            let mut next = Published::clone(published);
            next.squares = Some(squares);
            *published = Arc::new(next);
        });
    }

    fn norm(&mut self, generation: Generation, version: Version, norm: f64) {
        if self.check(generation).is_err() {
            return;
        }
        let Stage::Ready { shard, .. } = &mut self.stage else { return };
        if shard.position().version == version && shard.is_step_complete() {
            shard.finish_step(Some(norm));
            self.publish();
        }
    }

    fn cut(&mut self, generation: Generation, version: Option<Version>, reply: Reply<CutAnswer>) {
        let shard = match (self.check(generation), &self.stage) {
            (Err(error), _) => {
                let _ = reply.send(Err(error));
                return;
            }
            (Ok(()), Stage::Idle) => {
                let _ = reply.send(Err(EngineError::NotInitialised));
                return;
            }
            (Ok(()), Stage::Ready { shard, .. }) => shard,
        };
        let present = shard.position().version;
        match version {
            Some(wanted) if wanted < present => {
                let _ = reply.send(Ok(CutAnswer::Past { present }));
            }
            wanted => {
                self.cuts.push((wanted.unwrap_or(present), reply));
                self.settle_cuts();
            }
        }
    }

    /// Answers cuts whose version has come.
    fn settle_cuts(&mut self) {
        let Stage::Ready { shard, .. } = &self.stage else { return };
        let present = shard.position().version;
        let (due, later): (Vec<_>, Vec<_>) =
            self.cuts.drain(..).partition(|(version, _)| *version <= present);
        self.cuts = later;
        self.cuts.retain(|(_, reply)| !reply.is_closed());
        for (_, reply) in due {
            let answer = CutAnswer::Cut { layout: shard.layout().clone(), cut: shard.cut() };
            let _ = reply.send(Ok(answer));
        }
    }

    fn publish(&mut self) {
        let Stage::Ready { shard, .. } = &self.stage else { return };
        let shown = PublishedShard {
            position: shard.position().clone(),
            blocks: Arc::new(shard.blocks().to_vec()),
            values: shard.values().to_vec(),
            missing: shard.missing(),
        };
        let before = Version(shown.position.version.0.wrapping_sub(1));
        let keeps_previous = self.rules.mode == Mode::Sync;
        self.tx.send_modify(|published| {
            let mut next = Published::clone(published);
            let present = next.shard.replace(shown);
            next.previous = present.filter(|it| keeps_previous && it.position.version == before);
            // Peers may still ask for the squares of the step before.
            *published = Arc::new(next);
        });
    }
}

fn check_first_values(blocks: &[(u32, Block)], values: &[Vec<f32>]) -> Result<(), Refusal> {
    if blocks.len() != values.len() {
        return Err(Refusal::WrongBlocks { found: values.len(), wanted: blocks.len() });
    }
    for ((number, block), values) in blocks.iter().zip(values) {
        if values.len() != block.len {
            let (found, wanted) = (values.len() * 4, block.len * 4);
            return Err(Refusal::WrongLength { block: *number, found, wanted });
        }
        if values.iter().any(|value| !value.is_finite()) {
            return Err(Refusal::NotFinite { block: *number });
        }
    }
    Ok(())
}
