//! The event loop that owns the shard. Other tasks send it events or read its published state.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use steadfast_common::ids::{Generation, Incarnation, Lane, Slot, Version};
use steadfast_common::records::GenerationRecord;
use steadfast_common::records::applied_records::TaskRanges;
use steadfast_common::records::contribution::{ContributionName, LanesName};
use steadfast_common::records::position::Position;
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::{Block, Layout};
use steadfast_common::tensor::placement::{Placement, PlacementRecord};
use steadfast_host::task::{in_place, spawn};
use steadfast_host::time::{Instant, sleep_until};
use steadfast_pserver_core::block_store::ShardSnapshot;
use steadfast_pserver_core::buffer_pool::BufferPool;
use steadfast_pserver_core::contribution::{Contributed, Contribution, Refusal, ValidatedBlock};
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::shard::Shard;
use steadfast_pserver_core::sync_shard::SyncShard;
use steadfast_pserver_core::tables::{TablesHeld, TablesSnapshot};
use steadfast_pserver_storage::Usage;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info, warn};

use crate::event::{
    Begun, Event, EventError, FollowStart, InitialValues, Keeper, OfFollower, Pushed, Reply,
    SlotSnapshot, SnapshotAnswer,
};
use crate::follower::{Applicant, Follower, PublishedFollower};
use crate::handover::Handover;
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
    pub follower: Option<PublishedFollower>,
    /// Whether slots of the next generation may need a state that this slot keeps.
    pub hands_over: bool,
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
            follower: None,
            applicant: None,
            completed: None,
            held: VecDeque::new(),
            lags: LaneLags::default(),
            tables_read: None,
            handover: None,
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
    snapshots: Vec<WaitingSnapshot>,
    follower: Option<Follower>,
    /// Who waits for a snapshot to follow the slot.
    applicant: Option<(Applicant, Reply<FollowStart>)>,
    /// The norm of a complete step that waits for the follower.
    completed: Option<Option<f64>>,
    /// Replies that wait until the follower has all steps before a version (asynchronous mode).
    held: VecDeque<(Version, HeldReply)>,
    lags: LaneLags,
    /// The rows at a position, for readers of all rows.
    tables_read: Option<(Position, Arc<TablesSnapshot>)>,
    /// Holds what the slots of the next generation need.
    handover: Option<Handover>,
    failure: Arc<OnceLock<Refusal>>,
    /// Dropped last: its receivers wait for the end.
    tx: watch::Sender<Arc<Published>>,
}

/// A request for a snapshot.
struct WaitingSnapshot {
    version: Version,
    keeper: Keeper,
    reply: Reply<SnapshotAnswer>,
}

/// A reply that says what all slots have, together with the follower.
enum HeldReply {
    Pushed(Reply<Pushed>, Pushed),
    Applied(Reply<(TaskRanges, Arc<Layout>)>, TaskRanges, Arc<Layout>),
    /// It may become a part of a checkpoint, behind which the job does not go back.
    Snapshot(Reply<SnapshotAnswer>, SnapshotAnswer),
}

impl HeldReply {
    /// Refuses the call.
    fn refuse(self, why: &EventError) {
        match self {
            Self::Pushed(reply, _) => drop(reply.send(Err(why.clone()))),
            Self::Applied(reply, ..) => drop(reply.send(Err(why.clone()))),
            Self::Snapshot(reply, _) => drop(reply.send(Err(why.clone()))),
        }
    }

    /// Sends the reply. The caller may be gone.
    fn send(self) {
        match self {
            Self::Pushed(reply, pushed) => drop(reply.send(Ok(pushed))),
            Self::Applied(reply, applied, layout) => drop(reply.send(Ok((applied, layout)))),
            Self::Snapshot(reply, answer) => drop(reply.send(Ok(answer))),
        }
    }
}

impl EventLoop {
    async fn run(mut self, mut inbox: mpsc::Receiver<Event>) {
        loop {
            let overdue = async {
                match self.due() {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let event = tokio::select! {
                biased;
                event = inbox.recv() => match event {
                    Some(event) => Some(event),
                    None => return,
                },
                () = overdue => None,
            };
            // An update of a large shard takes time; the other tasks of this thread move to another one.
            let handled = in_place(|| match event {
                Some(event) => self.handle(event),
                None => self.overdue(),
            });
            if let Err(fatal) = handled {
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
            Event::GenerationWithout { record } => {
                drop(self.handover.take_if(|it| !it.begin(&record)));
            }
            Event::Restored { generation, loaded } => self.restore(generation, loaded)?,
            Event::StorageFailed { error } => return Err(error.into()),
            Event::Init { generation, attempt, first, reply } => {
                answer(reply, self.init(generation, attempt, first))?;
            }
            Event::Part { generation, lanes, blocks } => self.part(generation, &lanes, blocks)?,
            Event::Push { generation, name, contribution, reply } => {
                match self.push(generation, &name, contribution) {
                    Ok(pushed) => self.hold(HeldReply::Pushed(reply, pushed)),
                    Err(error) => answer(reply, Err(error))?,
                }
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
                match applied.map(|it| (it.applied_tasks(), it.blocks().layout().clone())) {
                    Ok((tasks, layout)) => self.hold(HeldReply::Applied(reply, tasks, layout)),
                    // The caller may be gone.
                    Err(error) => drop(reply.send(Err(error))),
                }
            }
            Event::Follow { generation, applicant, reply } => {
                self.apply_to_follow(generation, applicant, reply);
            }
            Event::FollowStep { follower, request, reply } => {
                let known = self.follower.as_mut().filter(|it| it.applicant.id == follower);
                let asked = known.is_some_and(|known| known.ask(request));
                let refused = EventError::NotFollowed { found: follower };
                let _ = reply.send(asked.then_some(()).ok_or(refused));
            }
            Event::Report { follower, comparison, report } => {
                if let Some(known) = &mut self.follower
                    && known.applicant.id == follower
                {
                    known.compared(comparison, report);
                }
            }
            Event::NotRecorded => drop(self.follower.take_if(|it| it.is_leaving())),
            Event::FollowerGone { follower } => {
                if self.follower.as_ref().is_some_and(|it| it.applicant.id == follower) {
                    self.dismiss("its lease has ended");
                }
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
            Event::Snapshot { generation, version, keeper, reply } => {
                self.snapshot(generation, version, keeper, reply);
            }
            Event::ReadHandover { version, reply } => {
                let state = self.handover.as_ref().and_then(|it| it.state(version));
                let _ = reply.send(state.ok_or(EventError::NoHandover { found: version }));
            }
            Event::HandoverSent { reader, slots } => {
                if let Some(handover) = &mut self.handover {
                    handover.sent(reader, slots);
                }
            }
        }
        self.settle()
    }

    /// Does what may have become due: shows a step that the follower has, answers who waits for it, and takes
    /// snapshots.
    fn settle(&mut self) -> Result<(), Refusal> {
        let version = self.stage.shard().map_or(Version(0), |it| it.blocks().position().version);
        self.show_step(version)?;
        self.answer_snapshots()?;
        while let Some((version, _)) = self.held.front()
            && self.admits(Version(version.0.saturating_sub(1)))
        {
            self.held.pop_front().into_iter().for_each(|(_, reply)| reply.send());
        }
        let waits = self.completed.is_some() || !self.held.is_empty();
        if let Some(follower) = &mut self.follower {
            follower.note_waiting(waits);
        }
        self.admit_applicant()?;
        self.publish_follower();
        drop(self.handover.take_if(|it| it.ends().is_some_and(|at| at <= Instant::now())));
        self.publish_handover();
        Ok(())
    }

    /// Returns whether the step from `version` on may be shown.
    fn admits(&self, version: Version) -> bool {
        self.follower.as_ref().is_none_or(|follower| follower.admits(version))
    }

    /// Sends a reply, in asynchronous mode once the follower has what it says.
    fn hold(&mut self, reply: HeldReply) {
        match self.stage.shard() {
            Some(Shard::Async(shard)) => {
                self.held.push_back((shard.blocks().position().version, reply));
            }
            Some(Shard::Sync(_)) | None => reply.send(),
        }
    }

    /// Returns when something is to be done without an event.
    fn due(&self) -> Option<Instant> {
        let patience = self.follower.as_ref().and_then(Follower::patience_ends);
        let handover = self.handover.as_ref().and_then(Handover::ends);
        patience.into_iter().chain(handover).min()
    }

    /// Gives up on a follower that a step has waited for too long, and drops a state that is not needed any more.
    fn overdue(&mut self) -> Result<(), Refusal> {
        let patience = self.follower.as_ref().and_then(Follower::patience_ends);
        if patience.is_some_and(|at| at <= Instant::now()) {
            self.dismiss("it did not take a step in time");
        }
        self.settle()
    }

    fn dismiss(&mut self, reason: &'static str) {
        let Some(follower) = self.follower.as_mut().filter(|it| !it.is_leaving()) else { return };
        warn!(follower = %follower.applicant.id, reason, "the slot is no longer followed");
        if follower.leave() {
            self.follower = None;
        }
        if let Some(shard) = self.stage.sync_shard() {
            shard.keep_sums(false);
        }
    }

    fn apply_to_follow(
        &mut self,
        generation: Generation,
        applicant: Applicant,
        reply: Reply<FollowStart>,
    ) {
        if self.follower.as_ref().is_some_and(|it| it.applicant.id == applicant.id) {
            self.dismiss("it begins again");
        }
        let others = [
            self.follower.as_ref().filter(|it| !it.is_replaceable()).map(|it| it.applicant.id),
            self.applicant.as_ref().filter(|it| !it.1.is_closed()).map(|it| it.0.id),
        ];
        let refused = match (self.check(generation), &self.stage) {
            (Err(error), _) => Some(error),
            (Ok(()), Stage::Idle) => Some(EventError::NotInitialized),
            (Ok(()), Stage::Ready { .. }) => others
                .into_iter()
                .flatten()
                .find(|by| *by != applicant.id)
                .map(|by| EventError::Followed { by }),
        };
        match refused {
            Some(error) => drop(reply.send(Err(error))),
            None => self.applicant = Some((applicant, reply)),
        }
    }

    /// Lets a pserver follow the slot, unless a step is partly applied: then it waits for the next version.
    fn admit_applicant(&mut self) -> Result<(), Refusal> {
        let Stage::Ready { shard, saved, .. } = &mut self.stage else { return Ok(()) };
        let is_between = !shard.as_sync().is_some_and(SyncShard::is_partly_applied);
        let is_free =
            self.follower.as_ref().is_none_or(|it| !it.is_following() && !it.is_leaving());
        if !is_between || !is_free || self.completed.is_some() {
            return Ok(());
        }
        let Some((applicant, reply)) = self.applicant.take().filter(|it| !it.1.is_closed()) else {
            return Ok(());
        };
        let (snapshot, tables) = shard.snapshot()?;
        let version = snapshot.position.version;
        info!(follower = %applicant.id, version = version.0, "a spare begins to follow the slot");
        let (layout, saved) = (shard.blocks().layout().clone(), saved.clone());
        let tables = Arc::new(tables);
        let snapshot = SlotSnapshot { layout, shard: snapshot, tables, saved };
        let placement = self.tx.borrow().placement.clone();
        let (follower, token) = Follower::new(applicant, version);
        if let Some(shard) = shard.as_sync_mut() {
            shard.keep_sums(true);
        }
        self.follower = Some(follower);
        let _ = reply.send(Ok(FollowStart { snapshot, placement, token }));
        Ok(())
    }

    /// Publishes what is known of the follower. Wakes subscribers only if its record in etcd may have to change.
    fn publish_follower(&mut self) {
        let next = self.follower.as_ref().map(Follower::published);
        self.tx.send_if_modified(|published| {
            if published.follower == next {
                return false;
            }
            let recorded = |it: &Option<PublishedFollower>| {
                it.as_ref().map(|it| (it.applicant.clone(), it.is_following, it.is_leaving))
            };
            let is_recorded_so = recorded(&published.follower) == recorded(&next);
            Arc::make_mut(published).follower = next;
            !is_recorded_so
        });
    }

    /// Publishes whether this slot keeps a state for others.
    fn publish_handover(&mut self) {
        let hands_over = self.handover.is_some();
        self.tx.send_if_modified(|published| {
            let changes = published.hands_over != hands_over;
            if changes {
                Arc::make_mut(published).hands_over = hands_over;
            }
            changes
        });
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
        let (found, present) = (self.generation(), record.generation);
        let over = EventError::OtherGeneration { found, present };
        if !is_kept {
            self.dismiss("the job began another generation");
            self.stage = Stage::Idle;
            self.completed = None;
            self.held.drain(..).for_each(|(_, reply)| reply.refuse(&over));
            self.lags.end_step();
        }
        drop(self.handover.take_if(|it| !it.begin(&record)));
        if let Some((_, reply)) = self.applicant.take() {
            let _ = reply.send(Err(over.clone()));
        }
        for waiting in self.snapshots.drain(..) {
            // The master may have given the request up.
            let _ = waiting.reply.send(Err(over.clone()));
        }
        self.pulls.refuse_all(&over);
        let before = self.tx.borrow().clone();
        self.tx.send_replace(Arc::new(Published {
            generation: record.generation,
            placement: record.placement,
            checkpoint: record.checkpoint,
            shard: None,
            // A complete step may still wait for its norm, and peers may need the squares of the previous one.
            squares: before.squares.clone().filter(|_| is_kept),
            follower: before.follower.clone(),
            hands_over: before.hands_over,
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
        self.dismiss("the shard was restored");
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
        self.dismiss("the parameters were initialized again");
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
        if let Some(follower) = &mut self.follower {
            follower.add(shard.blocks().position().version, shard.take_applied_sums());
        }
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
                let before = shard.blocks().position().version;
                let sent = self.follower.is_some().then(|| (name.clone(), contribution.clone()));
                let outcome = shard.apply(range, contribution)?;
                let is_new = outcome == Contributed::Complete;
                if let (Some(sent), Some(follower), true) = (sent, &mut self.follower, is_new) {
                    follower.end(before, sent, None);
                }
                outcome
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
                if self.follower.is_some() {
                    // Trainers get these blocks while the follower does.
                    self.apply_early();
                }
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

    /// Completes the step at once, or publishes its squares to obtain the global norm first.
    fn complete_step(&mut self) -> Result<(), Refusal> {
        let Some(shard) = self.stage.sync_shard() else { return Ok(()) };
        if !shard.blocks().clips_by_norm() {
            return self.send_step(None);
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
        let is_present = shard.blocks().position().version == version;
        if is_present && shard.is_step_complete() && self.completed.is_none() {
            self.send_step(Some(norm))?;
        }
        Ok(())
    }

    /// Sends a complete step to the follower, and shows it as soon as the follower has it.
    fn send_step(&mut self, norm: Option<f64>) -> Result<(), Refusal> {
        let Some(shard) = self.stage.sync_shard() else { return Ok(()) };
        let version = shard.blocks().position().version;
        if let Some(follower) = &mut self.follower {
            let (name, rest) = shard.whole_step();
            follower.end(version, (ContributionName::Lanes(name), rest), norm);
        }
        self.completed = Some(norm);
        self.show_step(version)
    }

    /// Shows the complete step from `version` on, if the follower has it.
    fn show_step(&mut self, version: Version) -> Result<(), Refusal> {
        if self.admits(version)
            && let Some(norm) = self.completed.take()
        {
            self.finish_step(norm)?;
        }
        Ok(())
    }

    fn finish_step(&mut self, norm: Option<f64>) -> Result<(), Refusal> {
        let Some(shard) = self.stage.sync_shard() else { return Ok(()) };
        shard.finish_step(norm)?;
        // The follower has them.
        drop(shard.take_applied_sums());
        self.publish()
    }

    fn snapshot(
        &mut self,
        generation: Generation,
        version: Option<Version>,
        keeper: Keeper,
        reply: Reply<SnapshotAnswer>,
    ) {
        let shard = match (self.check(generation), &self.stage) {
            (Err(error), _) => return drop(reply.send(Err(error))),
            (Ok(()), Stage::Idle) => {
                return drop(reply.send(Err(EventError::NotInitialized)));
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
            wanted => {
                let version = wanted.unwrap_or(present);
                self.snapshots.push(WaitingSnapshot { version, keeper, reply });
            }
        }
    }

    /// Answers snapshot requests whose version is reached.
    fn answer_snapshots(&mut self) -> Result<(), Refusal> {
        let Stage::Ready { shard, saved, .. } = &mut self.stage else { return Ok(()) };
        let present = shard.blocks().position().version;
        let (due, later): (Vec<_>, Vec<_>) =
            self.snapshots.drain(..).partition(|it| it.version <= present);
        self.snapshots = later;
        self.snapshots.retain(|it| !it.reply.is_closed());
        let mut answers = Vec::new();
        for WaitingSnapshot { keeper, reply, .. } in due {
            let (snapshot, tables) = shard.snapshot()?;
            let (layout, saved) = (shard.blocks().layout().clone(), saved.clone());
            let tables = Arc::new(tables);
            let snapshot = SlotSnapshot { layout, shard: snapshot, tables, saved };
            let mut of_follower = None;
            match keeper {
                Keeper::Caller => {}
                Keeper::Checkpoint { upload_after } => {
                    // A checkpoint of rows has those that changed since the one before, and only the slot knows them.
                    let save_after = (!snapshot.tables.has_tables()).then_some(upload_after);
                    of_follower = self.follower.as_mut().and_then(|known| {
                        let report = known.compare(present, save_after)?;
                        let (follower, saves) = (known.applicant.id, save_after.is_some());
                        Some(OfFollower { follower, saves, report })
                    });
                }
                Keeper::Slot => {
                    let of = self.tx.borrow().generation;
                    self.handover = Some(Handover::new(of, snapshot.clone()));
                }
            }
            let answer = SnapshotAnswer::Snapshot { snapshot: snapshot.into(), of_follower };
            answers.push(HeldReply::Snapshot(reply, answer));
        }
        answers.into_iter().for_each(|answer| self.hold(answer));
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
