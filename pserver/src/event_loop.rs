//! The event loop that owns the shard. Other tasks send it events or read its published state.

use std::sync::{Arc, OnceLock};

use steadfast_common::ids::{Generation, Incarnation, Lane, Slot, Version};
use steadfast_common::records::GenerationRecord;
use steadfast_common::records::contribution::{ContributionName, LanesName};
use steadfast_common::records::position::Position;
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::{Block, Layout};
use steadfast_common::tensor::placement::{Placement, PlacementRecord};
use steadfast_host::task::{in_place, spawn};
use steadfast_host::time::Instant;
use steadfast_pserver_core::block_store::ShardSnapshot;
use steadfast_pserver_core::buffer_pool::BufferPool;
use steadfast_pserver_core::contribution::{Contributed, Contribution, Refusal, ValidatedBlock};
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::shard::Shard;
use steadfast_pserver_core::sync_shard::SyncShard;
use steadfast_pserver_core::tables::{TablesHeld, TablesSnapshot};
use steadfast_pserver_storage::Usage;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info};

use crate::event::{
    Begun, Event, EventError, InitialValues, Pushed, Reply, SlotSnapshot, SnapshotAnswer,
};
use crate::lane_lags::LaneLags;
use crate::pulls::{Pulls, WaitingPull, WaitingRows};
use crate::row_files::SavedRows;
use crate::shard_file::LoadedShard;

/// Capacity of the event queue; senders wait while it is full.
const EVENTS_MAX: usize = 256;

/// The published state of the shard, by reference.
#[derive(Clone, Debug, Default)]
pub struct Published {
    pub generation: Generation,
    /// The slots of the blocks in this generation.
    pub placement: PlacementRecord,
    /// The checkpoint from which the generation starts.
    pub checkpoint: Option<String>,
    /// Absent until the shard has values.
    pub shard: Option<PublishedShard>,
    /// Squared norms of a complete step that waits for the global norm.
    pub squares: Option<Squares>,
}

/// Position and configuration of an initialized shard.
#[derive(Clone, Debug)]
pub struct PublishedShard {
    pub position: Position,
    pub blocks: Arc<Vec<(u32, Block)>>,
    /// Buffers for pushed gradients.
    pub buffers: BufferPool,
    pub tables: Arc<TablesHeld>,
    /// Number of rows of each table.
    pub rows: Vec<u64>,
    /// The memory and disk space that the rows take.
    pub usage: Usage,
    /// Encoding of pushed gradients.
    pub codec: Codec,
    /// Lanes that the current step waits for (synchronous mode).
    pub missing: Vec<Lane>,
    /// Time that past steps waited for each lane.
    pub lags: LaneLags,
}

/// Squared norms of the blocks of a step, and of the ranges of tables.
#[derive(Clone, Debug)]
pub struct Squares {
    pub version: Version,
    pub by_block: Arc<Vec<(u32, f64)>>,
}

/// A handle to the event loop.
#[derive(Clone, Debug)]
pub struct EventLoopHandle {
    events: mpsc::Sender<Event>,
    published: watch::Receiver<Arc<Published>>,
    failure: Arc<OnceLock<Refusal>>,
    pub slot: Slot,
    pub incarnation: Incarnation,
}

impl EventLoopHandle {
    /// Starts the event loop.
    pub fn start(slot: Slot, incarnation: Incarnation, rules: Rules) -> Self {
        let (events, inbox) = mpsc::channel(EVENTS_MAX);
        let (tx, published) = watch::channel(Arc::new(Published::default()));
        let failure = Arc::<OnceLock<Refusal>>::default();
        let owner = EventLoop {
            slot,
            rules,
            tx,
            stage: Stage::Idle,
            pulls: Pulls::default(),
            snapshots: Vec::new(),
            lags: LaneLags::default(),
            tables_read: None,
            failure: failure.clone(),
        };
        // The event loop ends when the last handle is dropped.
        spawn(owner.run(inbox));
        Self { events, published, failure, slot, incarnation }
    }

    /// Subscribes to the published state of the shard.
    pub fn published(&self) -> watch::Receiver<Arc<Published>> {
        self.published.clone()
    }

    /// Returns the reason why the event loop ended, if a failure ended it.
    pub fn failure(&self) -> Option<&Refusal> {
        self.failure.get()
    }

    /// Sends an event that has no reply.
    pub async fn send(&self, event: Event) {
        // The event loop may have ended.
        let _ = self.events.send(event).await;
    }

    /// Sends an event and waits for the reply.
    ///
    /// # Errors
    /// The error of the event loop.
    pub async fn call<T>(&self, event: impl FnOnce(Reply<T>) -> Event) -> Result<T, EventError> {
        let (reply, answer) = oneshot::channel();
        self.events.send(event(reply)).await.map_err(|_| EventError::ShuttingDown)?;
        answer.await.map_err(|_| EventError::ShuttingDown)?
    }
}

enum Stage {
    /// No generation, or one whose shard has no values yet.
    Idle,
    Ready {
        shard: Shard,
        init_attempt: u64,
        saved: Arc<SavedRows>,
    },
}

impl Stage {
    fn shard(&self) -> Option<&Shard> {
        match self {
            Self::Idle => None,
            Self::Ready { shard, .. } => Some(shard),
        }
    }

    fn shard_mut(&mut self) -> Option<&mut Shard> {
        match self {
            Self::Idle => None,
            Self::Ready { shard, .. } => Some(shard),
        }
    }

    fn sync_shard(&mut self) -> Option<&mut SyncShard> {
        match self {
            Self::Idle => None,
            Self::Ready { shard, .. } => shard.as_sync_mut(),
        }
    }
}

struct EventLoop {
    slot: Slot,
    rules: Rules,
    stage: Stage,
    pulls: Pulls,
    snapshots: Vec<(Version, Reply<SnapshotAnswer>)>,
    lags: LaneLags,
    /// The rows at a position, for readers of all rows.
    tables_read: Option<(Position, Arc<TablesSnapshot>)>,
    failure: Arc<OnceLock<Refusal>>,
    /// Dropped last: its receivers wait for the end.
    tx: watch::Sender<Arc<Published>>,
}

impl EventLoop {
    async fn run(mut self, mut inbox: mpsc::Receiver<Event>) {
        while let Some(event) = inbox.recv().await {
            // An update of a large shard takes time; the other tasks of this thread move to another one.
            if let Err(fatal) = in_place(|| self.handle(event)) {
                // The process ends with this event loop, and the job rolls back to its last checkpoint.
                error!(error = %fatal, "this step cannot be completed; discarding the shard");
                let _ = self.failure.set(fatal);
                return;
            }
        }
    }

    fn generation(&self) -> Generation {
        self.tx.borrow().generation
    }

    fn check(&self, found: Generation) -> Result<(), EventError> {
        let present = self.generation();
        if found == present { Ok(()) } else { Err(EventError::OtherGeneration { found, present }) }
    }

    /// Handles an event.
    ///
    /// # Errors
    /// The reason why the current step can never be completed.
    fn handle(&mut self, event: Event) -> Result<(), Refusal> {
        match event {
            Event::Generation { record, reply } => {
                let _ = reply.send(Ok(self.begin(record)?));
            }
            Event::Restored { generation, loaded } => self.restore(generation, loaded)?,
            Event::StorageFailed { error } => return Err(error.into()),
            Event::Init { generation, attempt, first, reply } => {
                answer(reply, self.init(generation, attempt, first))?;
            }
            Event::Part { generation, lanes, blocks } => self.part(generation, &lanes, blocks)?,
            Event::Push { generation, name, contribution, reply } => {
                answer(reply, self.push(generation, &name, contribution))?;
            }
            Event::Norm { generation, version, norm } => self.norm(generation, version, norm)?,
            Event::Pull { generation, versions, values, wait_mode, early, reply } => {
                match self.check(generation) {
                    Ok(()) => {
                        let pull = WaitingPull { versions, values, early, reply };
                        self.pulls.add(self.stage.shard(), pull, wait_mode);
                    }
                    Err(error) => drop(reply.send(Err(error))),
                }
            }
            Event::PullRows { generation, versions, ids, reply } => match self.check(generation) {
                Ok(()) => {
                    let pull = WaitingRows { versions, ids, reply };
                    self.pulls.add_rows(self.stage.shard_mut(), pull)?;
                }
                Err(error) => drop(reply.send(Err(error))),
            },
            Event::Applied { generation, reply } => {
                let shard = || self.stage.shard().ok_or(EventError::NotInitialized);
                let applied = self.check(generation).and_then(|()| shard());
                let applied = applied.map(|it| (it.applied_tasks(), it.blocks().layout().clone()));
                // The caller may be gone.
                let _ = reply.send(applied);
            }
            Event::ReadTables { generation, reply } => {
                answer(reply, self.read_tables(generation))?;
            }
            Event::Forget { generation, obsolete } => {
                if self.check(generation).is_ok()
                    && let Some(shard) = self.stage.shard_mut()
                {
                    shard.blocks_mut().forget(obsolete)?;
                }
            }
            Event::Snapshot { generation, version, reply } => {
                self.snapshot(generation, version, reply)?
            }
        }
        self.answer_snapshots()
    }

    fn read_tables(
        &mut self,
        generation: Generation,
    ) -> Result<(Position, Arc<TablesSnapshot>), EventError> {
        self.check(generation)?;
        let shard = self.stage.shard_mut().ok_or(EventError::NotInitialized)?;
        let position = shard.blocks().position();
        if let Some((_, tables)) = self.tables_read.as_ref().filter(|(it, _)| *it == position) {
            return Ok((position, tables.clone()));
        }
        let (_, tables) = shard.snapshot().map_err(Refusal::from)?;
        let tables = Arc::new(tables);
        self.tables_read = Some((position, tables.clone()));
        Ok((position, tables))
    }

    fn begin(&mut self, record: GenerationRecord) -> Result<Begun, Refusal> {
        if record.generation <= self.generation() {
            return Ok(self.begun());
        }
        info!(generation = record.generation.0, checkpoint = ?record.checkpoint, "generation begins");
        let is_kept =
            record.kept.contains(&self.slot) && record.placement == self.tx.borrow().placement;
        if !is_kept {
            self.stage = Stage::Idle;
            self.lags.end_step();
        }
        let (found, present) = (self.generation(), record.generation);
        let over = EventError::OtherGeneration { found, present };
        for (_, reply) in self.snapshots.drain(..) {
            // The master may have given the request up.
            let _ = reply.send(Err(over.clone()));
        }
        self.pulls.refuse_all(&over);
        self.tx.send_replace(Arc::new(Published {
            generation: record.generation,
            placement: record.placement,
            checkpoint: record.checkpoint,
            shard: None,
            squares: None,
        }));
        self.publish()?;
        Ok(self.begun())
    }

    fn begun(&self) -> Begun {
        match self.stage {
            Stage::Idle => Begun::Empty,
            Stage::Ready { .. } => Begun::Kept,
        }
    }

    fn restore(&mut self, generation: Generation, loaded: LoadedShard) -> Result<(), Refusal> {
        if self.check(generation).is_err() {
            return Ok(());
        }
        let LoadedShard { layout, snapshot, tables, saved } = loaded;
        info!(version = snapshot.position.version.0, "shard restored");
        let shard = Shard::restore(layout, snapshot, tables, self.rules.clone());
        self.stage = Stage::Ready { shard, init_attempt: u64::MAX, saved: saved.into() };
        self.publish()
    }

    fn init(
        &mut self,
        generation: Generation,
        attempt: u64,
        first: InitialValues,
    ) -> Result<(), EventError> {
        self.check(generation)?;
        if let Stage::Ready { shard, init_attempt, .. } = &self.stage {
            if attempt < *init_attempt {
                return Err(EventError::Superseded { latest: *init_attempt });
            }
            // Repeated or late. Training may have begun, and its first step must be preserved.
            if attempt == *init_attempt {
                return Ok(());
            }
            if shard.blocks().position().version != Version(0) {
                return Err(EventError::InUse);
            }
        }
        let InitialValues { layout, values, states } = first;
        let placement = Placement::of(&layout, &self.tx.borrow().placement);
        check_initial_values(&layout, placement.blocks_of(self.slot), &values)?;
        let first = ShardSnapshot::initial(&layout, &placement, self.slot, values, &self.rules);
        let (mut snapshot, tables) = first.map_err(Refusal::from)?;
        if !states.names.is_empty() {
            snapshot.begin_with(states, &self.rules.optimizer)?;
        }
        let shard = Shard::restore(layout, snapshot, tables, self.rules.clone());
        self.stage = Stage::Ready { shard, init_attempt: attempt, saved: Arc::default() };
        Ok(self.publish()?)
    }

    /// Adds blocks of a push. Errors of an invalid push are reported with its last message.
    fn part(
        &mut self,
        generation: Generation,
        lanes: &LanesName,
        blocks: Vec<ValidatedBlock>,
    ) -> Result<(), Refusal> {
        if self.check(generation).is_err() {
            return Ok(());
        }
        let Some(shard) = self.stage.sync_shard() else { return Ok(()) };
        let LanesName { version, first, shares, reductions } = lanes;
        shard.set_reductions(*version, *reductions)?;
        match shard.add_blocks(*version, *first, shares, blocks) {
            Err(error) if error.is_fatal() => return Err(error),
            Err(_) => {}
            Ok(()) => self.apply_early(),
        }
        Ok(())
    }

    /// Applies the step to the blocks that have all lanes.
    fn apply_early(&mut self) {
        let Some(shard) = self.stage.sync_shard() else { return };
        let applied = shard.apply_early();
        self.pulls.send_early(shard, &applied);
    }

    fn push(
        &mut self,
        generation: Generation,
        name: &ContributionName,
        contribution: Contribution,
    ) -> Result<Pushed, EventError> {
        self.check(generation)?;
        let Stage::Ready { shard, .. } = &mut self.stage else {
            return Err(EventError::NotInitialized);
        };
        let outcome = match (name, shard) {
            (ContributionName::Lanes(name), Shard::Sync(shard)) => {
                let LanesName { version, first, shares, reductions } = name;
                shard.set_reductions(*version, *reductions)?;
                shard.contribute(*version, *first, shares, contribution)?
            }
            (ContributionName::Range { range, .. }, Shard::Async(shard)) => {
                shard.apply(range, contribution)?
            }
            (ContributionName::Lanes(_), Shard::Async(_)) => {
                return Err(Refusal::WrongMode("asynchronous").into());
            }
            (ContributionName::Range { .. }, Shard::Sync(_)) => {
                return Err(Refusal::WrongMode("synchronous").into());
            }
        };
        match (name, outcome) {
            (ContributionName::Lanes(_), Contributed::Complete) => {
                self.record_arrivals(&[]);
                self.lags.end_step();
                self.complete_step()?;
            }
            (ContributionName::Range { .. }, Contributed::Complete) => self.publish()?,
            (ContributionName::Lanes(_), Contributed::Waiting) => {
                self.apply_early();
                self.publish_missing();
            }
            (_, Contributed::Duplicate | Contributed::Waiting) => {}
        }
        let version = self.tx.borrow().shard.as_ref().map_or(Version(0), |it| it.position.version);
        Ok(Pushed { version, outcome })
    }

    /// Applies the step at once, or publishes its squares to obtain the global norm first.
    fn complete_step(&mut self) -> Result<(), Refusal> {
        let Some(shard) = self.stage.sync_shard() else { return Ok(()) };
        if !shard.blocks().clips_by_norm() {
            return self.finish_step(None);
        }
        let by_block = Arc::new(shard.squares());
        let squares = Squares { version: shard.blocks().position().version, by_block };
        self.tx.send_modify(|published| {
            let mut next = Published::clone(published);
            next.squares = Some(squares);
            *published = Arc::new(next);
        });
        Ok(())
    }

    fn norm(&mut self, generation: Generation, version: Version, norm: f64) -> Result<(), Refusal> {
        if self.check(generation).is_err() {
            return Ok(());
        }
        let Some(shard) = self.stage.sync_shard() else { return Ok(()) };
        if shard.blocks().position().version == version && shard.is_step_complete() {
            self.finish_step(Some(norm))?;
        }
        Ok(())
    }

    fn finish_step(&mut self, norm: Option<f64>) -> Result<(), Refusal> {
        let Some(shard) = self.stage.sync_shard() else { return Ok(()) };
        shard.finish_step(norm)?;
        self.publish()
    }

    fn snapshot(
        &mut self,
        generation: Generation,
        version: Option<Version>,
        reply: Reply<SnapshotAnswer>,
    ) -> Result<(), Refusal> {
        let shard = match (self.check(generation), &self.stage) {
            (Err(error), _) => {
                let _ = reply.send(Err(error));
                return Ok(());
            }
            (Ok(()), Stage::Idle) => {
                let _ = reply.send(Err(EventError::NotInitialized));
                return Ok(());
            }
            (Ok(()), Stage::Ready { shard, .. }) => shard,
        };
        let present = shard.blocks().position().version;
        let is_partly_applied = shard.as_sync().is_some_and(SyncShard::is_partly_applied);
        match version {
            Some(wanted) if wanted < present => {
                let _ = reply.send(Ok(SnapshotAnswer::Past { present }));
            }
            // Some blocks already have the next version.
            wanted if wanted.unwrap_or(present) == present && is_partly_applied => {
                let _ = reply.send(Ok(SnapshotAnswer::Past { present }));
            }
            wanted => self.snapshots.push((wanted.unwrap_or(present), reply)),
        }
        Ok(())
    }

    /// Answers snapshot requests whose version is reached.
    fn answer_snapshots(&mut self) -> Result<(), Refusal> {
        let Stage::Ready { shard, saved, .. } = &mut self.stage else { return Ok(()) };
        let present = shard.blocks().position().version;
        let (due, later): (Vec<_>, Vec<_>) =
            self.snapshots.drain(..).partition(|(version, _)| *version <= present);
        self.snapshots = later;
        self.snapshots.retain(|(_, reply)| !reply.is_closed());
        for (_, reply) in due {
            let (snapshot, tables) = shard.snapshot()?;
            let (layout, saved) = (shard.blocks().layout().clone(), saved.clone());
            let snapshot = SlotSnapshot { layout, shard: snapshot, tables, saved };
            let answer = SnapshotAnswer::Snapshot(snapshot.into());
            let _ = reply.send(Ok(answer));
        }
        Ok(())
    }

    /// Records the arrival of the lanes that are no longer missing.
    fn record_arrivals(&mut self, still_missing: &[Lane]) {
        let published = self.tx.borrow();
        let before = published.shard.iter().flat_map(|it| &it.missing).copied();
        let arrived = before.filter(|lane| still_missing.binary_search(lane).is_err());
        self.lags.arrived(arrived, Instant::now());
    }

    /// Publishes the missing lanes without waking subscribers.
    fn publish_missing(&mut self) {
        let Some(shard) = self.stage.sync_shard() else { return };
        let missing = shard.missing();
        self.record_arrivals(&missing);
        self.tx.send_if_modified(|published| {
            if let Some(shown) = &mut Arc::make_mut(published).shard {
                shown.missing = missing;
                shown.lags.clone_from(&self.lags);
            }
            false
        });
    }

    fn publish(&mut self) -> Result<(), Refusal> {
        // While it exists, changes of rows take more memory.
        self.tables_read = None;
        let Stage::Ready { shard, .. } = &mut self.stage else { return Ok(()) };
        let shown = PublishedShard {
            tables: shard.blocks().tables().held().clone(),
            rows: shard.blocks().tables().row_counts(),
            usage: shard.blocks().tables().usage(),
            position: shard.blocks().position(),
            blocks: shard.blocks().list().clone(),
            buffers: shard.blocks().buffers().clone(),
            codec: shard.blocks().codec(),
            missing: shard.as_sync().map(SyncShard::missing).unwrap_or_default(),
            lags: self.lags.clone(),
        };
        self.tx.send_modify(|published| {
            // Peers may still request the squares of the previous step.
            let mut next = Published::clone(published);
            next.shard = Some(shown);
            *published = Arc::new(next);
        });
        self.pulls.answer_ready(shard)
    }
}

/// Sends a reply.
///
/// # Errors
/// The error of the reply, if the shard must be discarded after it.
fn answer<T>(reply: Reply<T>, answer: Result<T, EventError>) -> Result<(), Refusal> {
    let fatal = match &answer {
        Err(EventError::Refused(error)) if error.is_fatal() => Err(error.clone()),
        Ok(_) | Err(_) => Ok(()),
    };
    // The receiver may have stopped waiting.
    let _ = reply.send(answer);
    fatal
}

fn check_initial_values(
    layout: &Layout,
    numbers: &[u32],
    values: &[Vec<f32>],
) -> Result<(), Refusal> {
    if numbers.len() != values.len() {
        return Err(Refusal::WrongBlocks { found: values.len(), wanted: numbers.len() });
    }
    for (number, values) in numbers.iter().zip(values) {
        let len = layout.blocks()[*number as usize].len;
        if values.len() != len {
            let (found, wanted) = (size_of_val(&values[..]), len * size_of::<f32>());
            return Err(Refusal::WrongLength { block: *number, found, wanted });
        }
        if values.iter().any(|value| !value.is_finite()) {
            return Err(Refusal::NotFinite { block: *number });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
