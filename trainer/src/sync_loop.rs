//! Synchronous training: computes the lanes assigned to this trainer, step by step.
//!
//! A contribution is named by step and lanes, and its bits depend on nothing else. Computing one that
//! another trainer computes as well is therefore harmless, and lanes that are assigned in the middle of a
//! step are simply computed for that step.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use steadfast_common::ids::{Lane, Pass, TaskId, Version};
use steadfast_common::job::dataset::Records;
use steadfast_common::job::schedule::{BatchPart, LaneSchedule, record_order};
use steadfast_common::records::applied_records::checksum;
use steadfast_common::records::position::Position;
use steadfast_common::status::TimeBreakdown;
use steadfast_common::tensor::lane_tree::{LaneSums, LaneTree, Node};
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::{ID_BYTES, Rows};
use steadfast_coord::backoff;
use steadfast_host::task::{TaskSet, in_place};
use steadfast_host::time::{Instant, sleep};
use steadfast_net::traces::TRACE;
use steadfast_trainer_core::record_search::RecordName;
use steadfast_trainer_core::{
    Batch, BatchIds, LaneBatches, MicroBatch, ModelError, Parameters, TableRows,
};
use steadfast_training_client::{
    Assignment, ClientError, ContributionName, FailedTask, FailureCause, FailureDecision,
    GenerationClient, Gradient, LaneEnd, LaneShare, LanesName, Pulled,
};
use tokio::sync::watch;
use tracing::{Instrument, debug, info, info_span, warn};

use crate::buffers::Buffers;
use crate::context::{Context, Destination, Evaluated, TrainError, TrainedModel};
use crate::suspects::{IdsRead, Suspects};
use crate::tasks::TaskError;
use crate::trial::TrialBatch;

/// Pause before unreadable data is retried, unless another trainer is to try first.
const RETRY: Duration = Duration::from_secs(1);

/// The most bytes of rows in a sum of lanes that is sent in one push; a pserver accepts twice as many.
const PUSH_ROWS_BYTES: usize = 32 << 20;

/// Number of steps whose data is loaded ahead.
const AHEAD: u64 = 2;

/// Number of schedules kept: the current pass and the next one.
const SCHEDULES_KEPT: usize = 2;

/// Trains until the job has completed all its passes (or steps).
///
/// # Errors
/// Another generation, the end of the job, or an error that requires user action.
pub async fn train(
    context: &Arc<Context>,
    generation: &GenerationClient,
) -> Result<TrainedModel, TrainError> {
    let activity = context.activity.clone();
    let follower = generation.follow_lanes(move || activity.time_breakdown());
    let mut worker = Worker {
        context,
        generation,
        assignment: follower.assignment(),
        tree: LaneTree::new(context.spec().sync.lanes),
        given_up: BTreeMap::new(),
        unreachable: BTreeSet::new(),
        tried: (Version(0), BTreeSet::new()),
        schedules: BTreeMap::new(),
        parameters: Parameters::zeros(context.layout().clone()),
        reductions: (Vec::new(), None),
        buffers: Buffers::new(context.layout().len()),
        pushes: TaskSet::default(),
        evaluation: TaskSet::default(),
    };
    let mut position = worker.begin().await?;
    loop {
        if worker.is_idle() {
            position = worker.begin().await?;
            continue;
        }
        follower.report(position);
        match worker.course_decided(&position).await? {
            Entered::Pass => {}
            Entered::End => break,
            Entered::Idle => continue,
        }
        if worker.is_last(&position) {
            break;
        }
        match worker.enter(position.pass).await? {
            Entered::Pass => {}
            Entered::End => break,
            Entered::Idle => continue,
        }
        worker.find_reductions(&position).await?;
        worker.evaluate_in_background(&position).await?;
        let (version, pass) = (position.version.0, position.pass.0);
        let span = info_span!(target: TRACE, parent: None, "step", version, pass);
        position = worker.step(position).instrument(span).await?;
    }
    follower.report(position);
    let position = Position { pass_start: position.version, ..position };
    Ok(TrainedModel { parameters: worker.parameters, position })
}

struct Worker<'a> {
    context: &'a Arc<Context>,
    generation: &'a GenerationClient,
    assignment: watch::Receiver<Assignment>,
    tree: LaneTree,
    /// Tasks given up according to replies to this trainer's own reports.
    given_up: BTreeMap<Pass, BTreeSet<TaskId>>,
    /// Tasks whose data this trainer could not reach.
    unreachable: BTreeSet<(Pass, TaskId)>,
    /// The lanes that processes of their own have computed, of the step from this version. The master may know only an
    /// earlier version, so suspected lanes are tried at each step until it takes its suspicion back.
    tried: (Version, BTreeSet<Lane>),
    /// Lane schedules of the current pass, and of the next one near its end.
    schedules: BTreeMap<Pass, LaneSchedule>,
    parameters: Parameters,
    /// The versions from which on the learning rate is reduced once more, and up to which they are complete, if known.
    reductions: (Vec<Version>, Option<Version>),
    /// Memory of the parameters and gradients of former steps.
    buffers: Buffers,
    /// Pushes in flight. Some are of earlier steps: a version can be complete before all its contributors
    /// have received their replies. Cancelling calls in every step would break the connection.
    pushes: TaskSet<Result<Version, ClientError>>,
    /// At most one evaluation; cancelled with the worker.
    evaluation: TaskSet<Result<(), TrainError>>,
}

/// The part of a step after this trainer's gradients were computed.
struct Waited {
    began: Instant,
    /// Time until the last push was acknowledged.
    pushed: Duration,
}

impl Waited {
    fn begin() -> Self {
        Self { began: Instant::now(), pushed: Duration::ZERO }
    }

    /// Returns the time breakdown once the next parameters were pulled.
    fn time_breakdown(&self, pulled: &Pulled) -> TimeBreakdown {
        let all = self.began.elapsed();
        let pull = pulled.transfer.min(all);
        let push = self.pushed.min(all - pull);
        TimeBreakdown {
            push: push.as_secs_f64(),
            pull: pull.as_secs_f64(),
            wait: (all - pull - push).as_secs_f64(),
            moved_bytes: pulled.bytes,
            ..TimeBreakdown::default()
        }
    }
}

/// One lane's part of a step.
struct LanePart {
    share: LaneShare,
    key: MicroBatch,
    records: Records,
    /// The distinct ids of each table, once the model has named them.
    ids: Vec<BatchIds>,
}

/// The sum of the gradients of some lanes.
struct Summed {
    /// Absent without any record.
    sum: Option<Gradient>,
    /// What the records of each lane count, where that is not their number.
    weights: BTreeMap<Lane, f64>,
}

/// Returns rows of zeros for the gradient of a batch, given rows of each table.
fn zeros(ids: &[BatchIds], rows: &[Rows]) -> Vec<TableRows> {
    ids.iter().zip(rows).map(|(ids, rows)| ids.zeros(rows.width())).collect()
}

/// When to retry a lane after one of its tasks failed.
enum AfterFailure {
    Again,
    Later,
}

/// What is known of the pass that a trainer waits for.
enum Entered {
    /// The records of the pass can be read.
    Pass,
    /// Training ends before the pass.
    End,
    /// No lane is assigned to this trainer any more.
    Idle,
}

impl Worker<'_> {
    /// Returns whether no lane is assigned to this trainer.
    fn is_idle(&self) -> bool {
        self.assignment.borrow().lanes.is_empty()
    }

    /// Waits until a lane is assigned, and pulls the current parameters. Until then this trainer causes no
    /// load: it pulls no parameters.
    async fn begin(&mut self) -> Result<Position, TrainError> {
        self.context.activity.note(|activity| {
            activity.lanes = Vec::new();
            activity.description = "waiting for a lane: there are more trainers than lanes";
        });
        while self.is_idle() {
            tokio::select! {
                biased;
                changed = self.assignment.changed() => {
                    changed.map_err(|_| ClientError::NewGeneration)?;
                }
                () = self.context.session.job_ended() => return Err(ClientError::JobEnded.into()),
            }
        }
        let mut values = vec![0.0; self.context.layout().len()];
        let pulled = self.generation.pservers().pull_step(Version(0), &mut values).await?;
        self.parameters = Parameters::new(self.context.layout().clone(), values);
        Ok(pulled.position)
    }

    fn is_last(&self, position: &Position) -> bool {
        let spec = &self.context.spec();
        spec.passes.is_some_and(|passes| passes <= position.pass.0)
            || spec.steps.is_some_and(|steps| steps <= position.version.0)
            || self.context.tasks.dataset().is_over(position.pass)
    }

    /// Waits until the evaluation at a position is known, if the course of the job depends on it. The trainer with the
    /// first lane evaluates; the parameters of the position stay on the pservers until it has done so, and another one
    /// does if it dies.
    async fn course_decided(&mut self, position: &Position) -> Result<Entered, TrainError> {
        let context = self.context;
        if !context.is_decisive(position) {
            return Ok(Entered::Pass);
        }
        loop {
            let assigned = self.assignment.borrow_and_update().lanes.clone();
            let is_ours = assigned.first() == Some(&Lane(0));
            if context.evaluations.is_over(position) {
                return Ok(Entered::End);
            }
            if context.evaluations.is_known(position.version) {
                return Ok(Entered::Pass);
            }
            if assigned.is_empty() {
                return Ok(Entered::Idle);
            }
            context.activity.note(|activity| {
                activity.description =
                    if is_ours { "evaluating" } else { "waiting for the evaluation" };
            });
            if is_ours {
                let is_suspected = self.assignment.borrow().evaluation_is_suspected;
                let (parameters, generation) = (&self.parameters, self.generation);
                context.decide(parameters, position, generation, is_suspected).await?;
            }
            tokio::select! {
                biased;
                () = context.evaluations.known(position.version) => {}
                changed = self.assignment.changed() => {
                    changed.map_err(|_| ClientError::NewGeneration)?;
                }
                () = context.session.job_ended() => return Err(ClientError::JobEnded.into()),
                () = sleep(RETRY), if is_ours => {}
            }
        }
    }

    /// Finds out how often evaluations have reduced the learning rate of the next step.
    async fn find_reductions(&mut self, position: &Position) -> Result<(), TrainError> {
        let context = self.context;
        if !context.session.job().may_reduce_rate() {
            return Ok(());
        }
        let (known, complete_to) = &mut self.reductions;
        // Where an evaluation decides, it is known by now.
        if context.is_decisive(position) {
            *known = context.evaluations.known_reductions();
        } else if complete_to.is_none_or(|it| it.0 + 1 != position.version.0) {
            let mut pauses = None;
            *known = loop {
                match context.evaluations.reductions().await {
                    Ok(reductions) => break reductions,
                    Err(error) if error.is_transient() => {
                        warn!(%error, "cannot read the latest evaluation; retrying");
                    }
                    Err(error) => return Err(ClientError::from(error).into()),
                }
                sleep(pauses.get_or_insert_with(backoff).next().unwrap_or(RETRY)).await;
            };
        }
        *complete_to = Some(position.version);
        Ok(())
    }

    /// Waits for the records of a pass: those of a stream may not exist yet.
    async fn enter(&mut self, pass: Pass) -> Result<Entered, TrainError> {
        if self.schedules.contains_key(&pass) {
            return Ok(Entered::Pass);
        }
        let context = self.context;
        if context.tasks.dataset().loaded(pass).is_none() {
            context
                .activity
                .note(|activity| activity.description = "waiting for files of the stream");
        }
        self.given_up.retain(|of, _| pass.0 <= of.0 + 1);
        self.unreachable.retain(|(of, _)| pass.0 <= of.0 + 1);
        loop {
            tokio::select! {
                biased;
                found = context.tasks.dataset().wait_for(pass) => {
                    return Ok(if found.is_some() { Entered::Pass } else { Entered::End });
                }
                changed = self.assignment.changed() => {
                    changed.map_err(|_| ClientError::NewGeneration)?;
                    if self.is_idle() {
                        return Ok(Entered::Idle);
                    }
                }
                () = context.session.job_ended() => return Err(ClientError::JobEnded.into()),
            }
        }
    }

    /// Computes the assigned lanes of one step and waits for the next version.
    async fn step(&mut self, position: Position) -> Result<Position, TrainError> {
        let assigned = self.assignment.borrow().lanes.clone();
        self.context.activity.note(|activity| {
            activity.pass = position.pass;
            activity.version = position.version;
            activity.lanes = assigned;
            activity.description = "training";
        });
        // The pull replaces every value.
        let mut next = self.buffers.take();
        let mut done = BTreeSet::new();
        let position = {
            let wanted = Version(position.version.0 + 1);
            let pservers = self.generation.pservers();
            let span = info_span!(target: TRACE, "pull");
            let mut pull = pin!(pservers.pull_step(wanted, &mut next).instrument(span));
            let mut waited: Option<Waited> = None;
            loop {
                let lanes = self.assignment.borrow_and_update().lanes.clone();
                let lanes: BTreeSet<Lane> =
                    BTreeSet::from_iter(lanes).difference(&done).copied().collect();
                for node in self.tree.cover(&lanes) {
                    done.append(&mut self.contribute(position, node).await?);
                }
                let is_done = lanes.is_subset(&done);
                let waited = waited.get_or_insert_with(Waited::begin);
                tokio::select! {
                    biased;
                    () = sleep(RETRY), if !is_done => {}
                    pulled = &mut pull => {
                        let pulled = pulled?;
                        self.context.metrics.pulled(waited.began.elapsed());
                        self.context.activity.add_time(waited.time_breakdown(&pulled));
                        break pulled.position;
                    }
                    changed = self.assignment.changed() => {
                        changed.map_err(|_| ClientError::NewGeneration)?;
                    }
                    Some(pushed) = self.pushes.join_next() => {
                        let of = pushed.map_err(|error| TrainError::TaskFailed(error.to_string()))??;
                        if of == position.version {
                            waited.pushed = waited.began.elapsed();
                        }
                    }
                }
            }
        };
        self.buffers.keep(&self.parameters.shared());
        self.parameters = Parameters::new(self.context.layout().clone(), next);
        Ok(position)
    }

    /// Computes the lanes of a node, adds them up and pushes the sums; returns the lanes that were pushed.
    /// Lanes whose data could not be loaded are missing; they must be retried while they remain assigned.
    async fn contribute(
        &mut self,
        position: Position,
        node: Node,
    ) -> Result<BTreeSet<Lane>, TrainError> {
        let mut loaded = BTreeMap::new();
        for lane in node.lanes() {
            if let Some(part) = self.load(position, lane).await? {
                loaded.insert(lane, part);
            }
        }
        // Before any code of the model gets their records.
        self.try_suspects(position, &loaded).await?;
        for LanePart { key, records, ids, .. } in loaded.values_mut() {
            *ids = self.context.ids(&Batch::from(&*records), Some(key))?;
        }
        if self.context.prepares() {
            self.prepare(&loaded)?;
        }
        let lanes = BTreeSet::from_iter(loaded.keys().copied());
        let Some(rows) = self.pull_rows(position.version, loaded.values()).await? else {
            // Others have contributed these lanes, and the step is complete.
            return Ok(lanes);
        };
        let nodes = self.tree.cover(&lanes).into_iter();
        for node in nodes.flat_map(|node| self.divided(node, &loaded)).collect::<Vec<_>>() {
            let parts: Vec<&LanePart> = node.lanes().map(|lane| &loaded[&lane]).collect();
            let Summed { sum, weights } = self.sum(&parts, &rows)?;
            let sum = sum.unwrap_or_default();
            self.buffers.keep(&sum.values);
            let weighted = |part: &&LanePart| {
                let weight = weights.get(&part.key.lane).copied();
                LaneShare { weight, ..part.share }
            };
            let shares = parts.iter().map(weighted).collect();
            let (version, first) = (position.version, node.first());
            let reductions = self.context.session.job().reductions_at(&self.reductions.0, version);
            let name = LanesName { version, first, shares, reductions };
            self.push(name, sum);
        }
        Ok(lanes)
    }

    /// Lets processes of their own compute the lanes that lost one trainer after another, before this process does. If a
    /// record ends them, waits until training goes on without it, in another generation.
    async fn try_suspects(
        &mut self,
        position: Position,
        loaded: &BTreeMap<Lane, LanePart>,
    ) -> Result<(), TrainError> {
        let suspected = self.assignment.borrow().suspected.clone();
        if self.tried.0 != position.version {
            self.tried = (position.version, BTreeSet::new());
        }
        let is_new = |lane: &&Lane| !self.tried.1.contains(lane);
        let lanes: Vec<Lane> =
            suspected.iter().filter(|it| loaded.contains_key(it)).filter(is_new).copied().collect();
        self.tried.1.extend(&lanes);
        let batches = lanes.iter().map(|lane| self.trial_batch(&loaded[lane])).collect::<Vec<_>>();
        let batches: Vec<_> = batches.into_iter().filter(|it| !it.records.is_empty()).collect();
        if batches.is_empty() {
            return Ok(());
        }
        info!(
            ?lanes,
            "trainers were lost with these lanes: a process of its own computes them first"
        );
        let suspects = Suspects {
            context: self.context,
            generation: self.generation,
            position,
            parameters: &self.parameters,
        };
        let ids = async {
            let mut ids = IdsRead::new(self.context);
            for LanePart { key, records, .. } in lanes.iter().map(|lane| &loaded[lane]) {
                ids.add(self.context, &Batch::from(records), Some(key))?;
            }
            Ok(ids)
        };
        suspects.search(&batches, ids).await
    }

    /// Names the records of a lane's part of a step.
    fn trial_batch(&mut self, part: &LanePart) -> TrialBatch {
        let MicroBatch { pass, step, lane, seed } = part.key;
        let given_up = self.given_up(pass);
        let mut records = Vec::new();
        for part in self.schedule(pass).micro_batch(lane, step, &given_up) {
            let (count, positions) = self.kept(pass, &part);
            let order = record_order(count, seed, pass, part.task);
            let named = positions.iter().filter_map(|it| order.get(*it as usize));
            records.extend(named.map(|record| RecordName { task: part.task, record: *record }));
        }
        TrialBatch { pass, step, lane, records, held_out: false }
    }

    /// Returns the number of records of a part's task, and the positions of the part without the records that the
    /// generation leaves out.
    fn kept(&self, pass: Pass, part: &BatchPart) -> (u32, Vec<u32>) {
        let manifest = self.context.tasks.dataset().loaded(pass).expect("it was waited for");
        let count = manifest.records_of(part.task) as u32;
        let positions = part.positions.clone();
        (count, self.generation.left_out().kept(pass, part.task, count, positions))
    }

    /// Lets the model prepare the batches of some lanes: those of this step, and those of the next one whose records are
    /// loaded.
    fn prepare(&mut self, loaded: &BTreeMap<Lane, LanePart>) -> Result<(), TrainError> {
        for part in loaded.values() {
            self.context.prepare(&part.records, &part.key)?;
        }
        for LanePart { key, .. } in loaded.values() {
            let key = MicroBatch { step: key.step + 1, ..*key };
            let given_up = self.given_up(key.pass);
            let parts = self.schedule(key.pass).micro_batch(key.lane, key.step, &given_up);
            let mut records = Records::default();
            let is_loaded = parts.iter().all(|part| {
                let task = self.context.tasks.get(key.pass, part.task).now_or_never();
                let Some(Ok(task)) = task else { return false };
                records.extend(&task.select(&self.kept(key.pass, part).1));
                true
            });
            if is_loaded {
                self.context.prepare(&records, &key)?;
            }
        }
        Ok(())
    }

    /// Divides a node whose sum may have too many rows for one push: how many lanes a trainer has must not decide
    /// whether it can push them.
    fn divided(&self, node: Node, loaded: &BTreeMap<Lane, LanePart>) -> Vec<Node> {
        let tables = self.context.layout().tables();
        let of_lane = |lane: Lane| -> usize {
            let ids = loaded[&lane].ids.iter().zip(tables);
            ids.map(|(ids, table)| ids.ids.len() * (ID_BYTES + table.width * size_of::<f32>()))
                .sum()
        };
        match node.halves() {
            Some((left, right)) if PUSH_ROWS_BYTES < node.lanes().map(of_lane).sum() => {
                [self.divided(left, loaded), self.divided(right, loaded)].concat()
            }
            Some(_) | None => vec![node],
        }
    }

    /// Pulls the rows of all ids of some lanes; `None` if the step is complete.
    async fn pull_rows(
        &self,
        version: Version,
        parts: impl Iterator<Item = &LanePart> + Clone,
    ) -> Result<Option<Vec<Rows>>, TrainError> {
        let tables = self.context.layout().tables().len();
        if tables == 0 {
            return Ok(Some(Vec::new()));
        }
        let of_table = |table: usize| {
            let all = parts.clone().filter_map(|part| part.ids.get(table));
            RowIds::distinct(all.flat_map(|ids| ids.ids.as_slice()).copied().collect())
        };
        let ids = (0..tables).map(of_table).collect();
        let started = Instant::now();
        let pull = info_span!(target: TRACE, "pull rows");
        let pservers = self.generation.pservers();
        let pulled = pservers.pull_rows(Some(version), ids).instrument(pull).await?;
        let (pull, moved_bytes) =
            (started.elapsed().as_secs_f64(), pulled.as_ref().map_or(0, |pulled| pulled.bytes));
        let spent = TimeBreakdown { pull, moved_bytes, ..TimeBreakdown::default() };
        self.context.activity.add_time(spent);
        Ok(pulled.map(|pulled| pulled.rows))
    }

    /// Begins to push the sum of a node.
    fn push(&mut self, name: LanesName, sum: Gradient) {
        let LanesName { version, first, .. } = name;
        let (pservers, context) = (self.generation.pservers().clone(), self.context.clone());
        let begun = context.pushing.begin();
        let push = async move {
            let _begun = begun;
            let started = Instant::now();
            let moved_bytes = pservers.push(ContributionName::Lanes(name), sum).await?;
            context.metrics.pushed(started.elapsed());
            context.activity.add_time(TimeBreakdown { moved_bytes, ..TimeBreakdown::default() });
            Ok(version)
        };
        let lane = first.0;
        self.pushes.spawn(push.instrument(info_span!(target: TRACE, "push", lane)));
    }

    /// Computes the gradients of all lanes of a node, and adds them up.
    fn sum(&mut self, parts: &[&LanePart], rows: &[Rows]) -> Result<Summed, TrainError> {
        let mut weights = BTreeMap::new();
        if let Some(sum) = self.sum_at_once(parts)? {
            return Ok(Summed { sum: Some(sum), weights });
        }
        let mut sums = LaneSums::new(self.tree);
        for part in parts {
            let computed = self.compute(part, rows)?;
            let weight = computed.as_ref().and_then(|(_, weight)| *weight);
            weights.extend(weight.map(|weight| (part.key.lane, weight)));
            let gradient = computed.map(|(gradient, _)| gradient);
            sums.put(self.tree.leaf(part.key.lane), gradient, |left, right| {
                self.buffers.keep(&right.values);
                in_place(|| self.generation.pservers().add(left, right))
            });
        }
        let sum = sums.into_held().next().and_then(|(_, sum)| sum);
        Ok(Summed { sum, weights })
    }

    /// Computes the sum of [`Worker::sum`], with the same bits, for several lanes that the model computes together.
    /// Returns `None` if fewer than two lanes have records, if the model has tables or cannot compute lanes together,
    /// or if values are rounded: they must be rounded before they are added.
    fn sum_at_once(&mut self, parts: &[&LanePart]) -> Result<Option<Gradient>, TrainError> {
        let has_several = 1 < parts.iter().filter(|part| !part.records.is_empty()).count();
        let has_tables = !self.context.layout().tables().is_empty();
        if !has_several || has_tables || self.generation.pservers().rounds() {
            return Ok(None);
        }
        let batches = parts.iter().map(|part| (part.key, Batch::from(&part.records))).collect();
        let batches = LaneBatches::new(self.tree, batches);
        let mut gradient = Parameters::new(self.context.layout().clone(), self.buffers.take());
        let loss_sum = self.context.gradient_of_lanes(&self.parameters, &batches, &mut gradient)?;
        let values = gradient.shared();
        let Some(loss_sum) = loss_sum else {
            self.buffers.keep(&values);
            return Ok(None);
        };
        let checksum = parts.iter().fold(0_u64, |sum, part| sum.wrapping_add(part.share.checksum));
        let (records, rows) = (batches.records() as u64, Vec::new());
        Ok(Some(Gradient { records, loss_sum, weight: None, checksum, values, rows }))
    }

    /// Computes the gradient of one lane, and what its records count if that is not their number; `None` without
    /// records.
    fn compute(
        &mut self,
        part: &LanePart,
        rows: &[Rows],
    ) -> Result<Option<(Gradient, Option<f64>)>, TrainError> {
        let LanePart { share, key, records, ids } = part;
        if records.is_empty() {
            return Ok(None);
        }
        let memory = Parameters::new(self.context.layout().clone(), self.buffers.take())
            .with_tables(zeros(ids, rows));
        let own = ids.iter().zip(rows).map(|(ids, rows)| ids.rows_of(rows));
        let parameters = self.parameters.clone().with_tables(own.collect());
        let computed = self.context.gradient(
            &parameters,
            &Batch::from(records),
            key,
            Destination::Replaced(memory),
        )?;
        let (mut values, rows) = computed.gradient.into_parts();
        let pservers = self.generation.pservers();
        // Other threads take over the tasks of this one only if there is work for it.
        if pservers.rounds() {
            in_place(|| pservers.round(&mut values));
        }
        let gradient = Gradient {
            records: share.records.into(),
            loss_sum: computed.loss_sum,
            weight: None,
            checksum: share.checksum,
            values: Arc::new(values),
            rows,
        };
        Ok(Some((gradient, computed.weight)))
    }

    /// Loads one lane's part of the step, if its data can be loaded.
    async fn load(
        &mut self,
        position: Position,
        lane: Lane,
    ) -> Result<Option<LanePart>, TrainError> {
        let step = position.version.0 - position.pass_start.0;
        let started = Instant::now();
        let read = info_span!(target: TRACE, "read", lane = lane.0);
        let records = self.records(position.pass, step, lane).instrument(read).await?;
        let data = started.elapsed().as_secs_f64();
        self.context.activity.add_time(TimeBreakdown { data, ..TimeBreakdown::default() });
        let Some((records, checksum)) = records else { return Ok(None) };
        let Some(end) = self.lane_end(position.pass, step, lane).await? else {
            return Ok(None);
        };
        let share = LaneShare { records: records.len() as u32, checksum, end, weight: None };
        let key = MicroBatch { seed: self.context.spec().seed, pass: position.pass, step, lane };
        Ok(Some(LanePart { share, key, records, ids: Vec::new() }))
    }

    /// Returns the records of a lane's micro-batch and the sum of their checksums. Reports a task that
    /// cannot be loaded; once the master gives it up, the lane continues without it. Returns `None` if the
    /// lane must wait or was reassigned.
    async fn records(
        &mut self,
        pass: Pass,
        step: u64,
        lane: Lane,
    ) -> Result<Option<(Records, u64)>, TrainError> {
        'again: loop {
            let given_up = self.given_up(pass);
            let parts = self.schedule(pass).micro_batch(lane, step, &given_up);
            let (mut records, mut sum) = (Records::default(), 0_u64);
            for part in &parts {
                match self.context.tasks.get(pass, part.task).await {
                    Ok(task) => {
                        let positions = self.kept(pass, part).1;
                        records.extend(&task.select(&positions));
                        let of_range = checksum(pass, part.task, positions);
                        sum = sum.wrapping_add(of_range);
                    }
                    Err(error) => match self.report_failure(pass, part.task, lane, &error).await? {
                        AfterFailure::Again => continue 'again,
                        AfterFailure::Later => return Ok(None),
                    },
                }
            }
            self.prefetch(pass, step, lane, &given_up);
            return Ok(Some((records, sum)));
        }
    }

    /// Returns whether the lane has records after `step`. Reads the next task first, so that all trainers give the
    /// same answer whatever they know of tasks given up: a lane whose last tasks cannot be read ends with its last
    /// record, not a step later. Returns `None` if the lane must wait or was reassigned.
    async fn lane_end(
        &mut self,
        pass: Pass,
        step: u64,
        lane: Lane,
    ) -> Result<Option<LaneEnd>, TrainError> {
        loop {
            let given_up = self.given_up(pass);
            let next = self.schedule(pass).micro_batch(lane, step + 1, &given_up);
            let Some(part) = next.first() else { return Ok(Some(LaneEnd::LastOfPass)) };
            let Err(error) = self.context.tasks.get(pass, part.task).await else {
                return Ok(Some(LaneEnd::MoreToCome));
            };
            match self.report_failure(pass, part.task, lane, &error).await? {
                AfterFailure::Again => {}
                AfterFailure::Later => return Ok(None),
            }
        }
    }

    /// Starts to load the lane's data for the next steps, including those of the next pass.
    fn prefetch(&mut self, pass: Pass, step: u64, lane: Lane, given_up: &BTreeSet<TaskId>) {
        for ahead in 1..=AHEAD {
            for part in self.schedule(pass).micro_batch(lane, step + ahead, given_up) {
                self.context.tasks.prefetch(pass, part.task);
            }
        }
        let left = self.schedule(pass).steps_of(lane, given_up).saturating_sub(step + 1);
        let next = Pass(pass.0 + 1);
        let is_last = self.context.spec().passes.is_some_and(|passes| passes <= next.0);
        if is_last || self.context.tasks.dataset().loaded(next).is_none() {
            return;
        }
        for step in 0..AHEAD.saturating_sub(left) {
            for part in self.schedule(next).micro_batch(lane, step, &BTreeSet::new()) {
                self.context.tasks.prefetch(next, part.task);
            }
        }
    }

    async fn report_failure(
        &mut self,
        pass: Pass,
        task: TaskId,
        lane: Lane,
        error: &TaskError,
    ) -> Result<AfterFailure, TrainError> {
        let (cause, reason) = (error.cause(), error.to_string());
        // The lane may come back from a trainer that cannot reach the data either.
        if cause == FailureCause::Transient && !self.unreachable.insert((pass, task)) {
            sleep(RETRY).await;
        }
        warn!(%task, %pass, %error, "task cannot be computed");
        self.context.metrics.failed();
        let failed = FailedTask { pass, task, lane, cause, reason };
        Ok(match (self.generation.fail_task(failed).await?, cause) {
            (FailureDecision::GivenUp, _) => {
                self.given_up.entry(pass).or_default().insert(task);
                AfterFailure::Again
            }
            (FailureDecision::Retry, FailureCause::Data) => AfterFailure::Again,
            (FailureDecision::Elsewhere, _) | (_, FailureCause::Transient) => AfterFailure::Later,
        })
    }

    fn given_up(&self, pass: Pass) -> BTreeSet<TaskId> {
        let mut all = self.given_up.get(&pass).cloned().unwrap_or_default();
        let assignment = self.assignment.borrow();
        all.extend(assignment.given_up.get(&pass).into_iter().flatten());
        all
    }

    fn schedule(&mut self, pass: Pass) -> &LaneSchedule {
        let context = self.context;
        let is_new = !self.schedules.contains_key(&pass);
        if is_new && SCHEDULES_KEPT <= self.schedules.len() {
            self.schedules.pop_first();
        }
        self.schedules.entry(pass).or_insert_with(|| {
            let manifest = context.tasks.dataset().loaded(pass).expect("it was waited for");
            LaneSchedule::of(context.spec(), &manifest, pass)
        })
    }

    /// Starts to evaluate the result of the previous pass at the beginning of a pass, if this trainer has the first
    /// lane. Returns the error of an earlier evaluation if it is one of the model's code, which every evaluation would
    /// have.
    async fn evaluate_in_background(&mut self, position: &Position) -> Result<(), TrainError> {
        let (is_ours, is_suspected) = {
            let assignment = self.assignment.borrow();
            let is_ours = assignment.lanes.first() == Some(&Lane(0));
            (is_ours, assignment.evaluation_is_suspected)
        };
        while let Some(evaluated) = self.evaluation.try_join_next() {
            evaluated.map_err(|error| TrainError::TaskFailed(error.to_string()))??;
        }
        let is_due = is_ours && self.context.is_evaluated(position);
        let is_due = is_due && !self.context.evaluation_at(position).decides();
        if !is_due || !self.evaluation.is_empty() {
            return Ok(());
        }
        let (context, generation, position) =
            (self.context.clone(), self.generation.clone(), *position);
        // The step needs the first lane, so the slots still have the averages, unless the lane has gone to another
        // trainer.
        let averaged = context.averaged(&self.parameters, position.version, &generation).await?;
        let Some(parameters) = averaged else { return Ok(()) };
        self.evaluation.spawn(async move {
            let evaluated = context.evaluate(&parameters, &position, &generation, is_suspected);
            match evaluated.await {
                // The mean over a part of the records could not be compared with those before.
                Ok(Evaluated { failed: Some(error), .. }) => warn!(%error, "evaluation failed"),
                Ok(Evaluated { sums, failed: None }) if 0 < sums.records => {
                    let record = context.evaluation_record(&sums, &position);
                    if let Err(error) = generation.report_evaluation(record).await {
                        debug!(%error, "evaluation not reported");
                    }
                }
                Ok(_) => {}
                Err(error @ TrainError::Model(ModelError::Failed { .. })) => return Err(error),
                Err(error) => warn!(%error, "evaluation failed"),
            }
            Ok(())
        });
        Ok(())
    }
}
