//! Synchronous training: computes the lanes in this trainer's care, step by step.
//!
//! A contribution is named by step and lane, and its bits depend on nothing else. So it does no
//! harm to compute one that somebody else computes too, and whenever lanes come to this trainer in
//! the middle of a step it simply computes them for that step.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use steadfast_client::{ClientError, Gradient, Name, Pservers, Pulled};
use steadfast_common::dataset::Records;
use steadfast_common::ids::{Lane, Pass, RequestId, TaskId, Version};
use steadfast_common::lane_tree::{LaneSums, LaneTree, Node};
use steadfast_common::schedule::LaneSchedule;
use steadfast_common::status::Spent;
use steadfast_common::tally::checksum;
use steadfast_host::chance;
use steadfast_host::task::{TaskSet, in_place};
use steadfast_host::time::{Instant, sleep};
use steadfast_host::traces::TRACE;
use steadfast_proto::v1::fail_task_request::Cause;
use steadfast_proto::v1::{FailTaskRequest, LaneShare};
use steadfast_trainer_core::{Batch, MicroBatch, Parameters};
use tokio::sync::watch;
use tracing::{Instrument, debug, info_span, warn};

use crate::context::{Context, Interrupt, Last};
use crate::follow::{Assignment, Follower};
use crate::tasks::TaskError;

/// Pause before data that could not be reached are tried again, unless another trainer tries first.
const RETRY: Duration = Duration::from_secs(1);

/// Steps whose data are loaded before they are due.
const AHEAD: u64 = 2;

/// The present pass and the next one.
const SCHEDULES_KEPT: usize = 2;

/// Trains until the job has all its passes (or steps).
///
/// # Errors
/// Another generation, the end of the job, or what a person has to act on.
pub async fn train(context: &Arc<Context>, pservers: &Pservers) -> Result<Last, Interrupt> {
    let follower = Follower::start(context.clone(), pservers.generation());
    let mut worker = Worker {
        context,
        pservers,
        assignment: follower.assignment(),
        tree: LaneTree::new(context.job.spec.sync.lanes),
        given_up: BTreeMap::new(),
        schedules: BTreeMap::new(),
        parameters: Parameters::zeros(context.layout.clone()),
        pushes: TaskSet::default(),
        evaluation: TaskSet::default(),
    };
    let mut position = worker.pull_first().await?;
    while !worker.is_last(&position) {
        follower.report(position);
        worker.evaluate_in_background(&position);
        let (version, pass) = (position.version.0, position.pass.0);
        let span = info_span!(target: TRACE, parent: None, "step", version, pass);
        position = worker.step(position).instrument(span).await?;
    }
    follower.report(position);
    Ok(Last {
        parameters: worker.parameters,
        pass: position.pass,
        version: position.version,
        examples: position.examples,
        loss: position.loss,
    })
}

struct Worker<'a> {
    context: &'a Arc<Context>,
    pservers: &'a Pservers,
    assignment: watch::Receiver<Assignment>,
    tree: LaneTree,
    /// Tasks given up, as the master or our own reports told.
    given_up: BTreeMap<Pass, BTreeSet<TaskId>>,
    /// Of the present pass, and of the next one when it is near.
    schedules: BTreeMap<Pass, LaneSchedule>,
    parameters: Parameters,
    /// Pushes that were not answered yet. Some are of earlier steps: a version can be there before all who
    /// contributed to it have heard so. Calls that are given up in each step would break the connection.
    pushes: TaskSet<Result<Version, ClientError>>,
    /// At most one; ends with the worker.
    evaluation: TaskSet<()>,
}

/// The part of a step after our gradients were computed.
struct Waited {
    began: Instant,
    /// Until our last push was answered.
    pushed: Duration,
}

impl Waited {
    fn begin() -> Self {
        Self { began: Instant::now(), pushed: Duration::ZERO }
    }

    /// What it went to, now that the next parameters are here.
    fn spent(&self, pulled: &Pulled) -> Spent {
        let all = self.began.elapsed();
        let pull = pulled.transfer.min(all);
        let push = self.pushed.min(all - pull);
        Spent {
            push: push.as_secs_f64(),
            pull: pull.as_secs_f64(),
            wait: (all - pull - push).as_secs_f64(),
            moved_bytes: pulled.bytes,
            ..Spent::default()
        }
    }
}

/// When a lane is to be tried again after one of its tasks failed.
enum AfterFailure {
    Again,
    Later,
}

impl Worker<'_> {
    async fn pull_first(&mut self) -> Result<Pulled, Interrupt> {
        let mut values = vec![0.0; self.context.layout.len()];
        let position = self.pservers.pull_step(Version(0), &mut values).await?;
        self.parameters = Parameters::new(self.context.layout.clone(), values);
        Ok(position)
    }

    fn is_last(&self, position: &Pulled) -> bool {
        let spec = &self.context.job.spec;
        spec.passes.is_some_and(|passes| passes <= position.pass.0)
            || spec.steps.is_some_and(|steps| steps <= position.version.0)
    }

    /// Computes our lanes of one step and waits for the next version.
    async fn step(&mut self, position: Pulled) -> Result<Pulled, Interrupt> {
        let assigned = self.assignment.borrow().lanes.clone();
        self.context.view.note(|facts| {
            facts.pass = position.pass;
            facts.version = position.version;
            facts.lanes = assigned;
            facts.doing = "training";
        });
        let mut next = vec![0.0; self.context.layout.len()];
        let mut done = BTreeSet::new();
        let pulled = {
            let wanted = Version(position.version.0 + 1);
            let pservers = self.pservers.clone();
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
                        self.context.view.spend(waited.spent(&pulled));
                        break pulled;
                    }
                    changed = self.assignment.changed() => {
                        changed.map_err(|_| ClientError::NewGeneration)?;
                    }
                    Some(pushed) = self.pushes.join_next() => {
                        let of = pushed.map_err(|error| Interrupt::Broken(error.to_string()))??;
                        if of == position.version {
                            waited.pushed = waited.began.elapsed();
                        }
                    }
                }
            }
        };
        self.parameters = Parameters::new(self.context.layout.clone(), next);
        Ok(pulled)
    }

    /// Computes the lanes of a node, adds them up and sends them off; says which. Those are missing
    /// whose data could not be loaded: if they stay ours they are to be tried again.
    async fn contribute(
        &mut self,
        position: Pulled,
        node: Node,
    ) -> Result<BTreeSet<Lane>, Interrupt> {
        let (mut sums, mut shares) = (LaneSums::new(self.tree), BTreeMap::new());
        for lane in node.lanes() {
            if let Some((share, gradient)) = self.compute(position, lane).await? {
                in_place(|| {
                    sums.put(self.tree.leaf(lane), gradient, |left, right| {
                        self.pservers.add(left, right)
                    })
                });
                shares.insert(lane, share);
            }
        }
        for (node, sum) in sums.into_held() {
            let sum = sum.unwrap_or_default();
            let shares = node.lanes().filter_map(|lane| shares.get(&lane).copied()).collect();
            let name = Name::Lanes { version: position.version, first: node.first(), shares };
            let (pservers, context) = (self.pservers.clone(), self.context.clone());
            let begun = context.pushing.begin();
            let push = async move {
                let _begun = begun;
                let started = Instant::now();
                let moved_bytes = pservers.push(name, sum).await?;
                context.metrics.pushed(started.elapsed());
                context.view.spend(Spent { moved_bytes, ..Spent::default() });
                Ok(position.version)
            };
            let lane = node.first().0;
            self.pushes.spawn(push.instrument(info_span!(target: TRACE, "push", lane)));
        }
        Ok(shares.into_keys().collect())
    }

    /// Computes one lane's part of the step, if its data can be loaded; no gradient if it has no
    /// record.
    async fn compute(
        &mut self,
        position: Pulled,
        lane: Lane,
    ) -> Result<Option<(LaneShare, Option<Gradient>)>, Interrupt> {
        let step = position.version.0 - position.pass_start.0;
        let started = Instant::now();
        let read = info_span!(target: TRACE, "read", lane = lane.0);
        let records = self.records(position.pass, step, lane).instrument(read).await?;
        let data = started.elapsed().as_secs_f64();
        self.context.view.spend(Spent { data, ..Spent::default() });
        let Some((records, checksum)) = records else { return Ok(None) };
        let given_up = self.given_up(position.pass);
        let last = self.schedule(position.pass).steps_of(lane, &given_up) <= step + 1;
        let share = LaneShare { records: records.len() as u32, last, checksum };
        if records.is_empty() {
            return Ok(Some((share, None)));
        }
        let key = MicroBatch { seed: self.context.job.spec.seed, pass: position.pass, step, lane };
        let zeros = Parameters::zeros(self.context.layout.clone());
        let computed =
            self.context.gradient(&self.parameters, &Batch::from(&records), &key, zeros)?;
        let mut values = computed.gradient.into_values();
        in_place(|| self.pservers.round(&mut values));
        let gradient = Gradient {
            records: share.records.into(),
            loss_sum: computed.loss_sum,
            checksum,
            values: Arc::new(values),
        };
        Ok(Some((share, Some(gradient))))
    }

    /// The records of a lane's micro-batch, and the sum of their checksums. A task that cannot be
    /// loaded is reported; once the master gives it up the lane goes on without it. Nothing if the
    /// lane has to wait, or is another trainer's now.
    async fn records(
        &mut self,
        pass: Pass,
        step: u64,
        lane: Lane,
    ) -> Result<Option<(Records, u64)>, Interrupt> {
        'again: loop {
            let given_up = self.given_up(pass);
            let pieces = self.schedule(pass).micro_batch(lane, step, &given_up);
            let (mut records, mut sum) = (Records::default(), 0_u64);
            for piece in &pieces {
                match self.context.tasks.get(pass, piece.task).await {
                    Ok(task) => {
                        let positions: Vec<u32> = piece.positions.clone().collect();
                        records.extend(&task.select(&positions));
                        let of_piece = checksum(pass, piece.task, piece.positions.clone());
                        sum = sum.wrapping_add(of_piece);
                    }
                    Err(error) => {
                        match self.report_failure(pass, piece.task, lane, &error).await? {
                            AfterFailure::Again => continue 'again,
                            AfterFailure::Later => return Ok(None),
                        }
                    }
                }
            }
            self.prefetch(pass, step, lane, &given_up);
            return Ok(Some((records, sum)));
        }
    }

    /// Begins to load what the lane computes in the next steps, be they of the next pass.
    fn prefetch(&mut self, pass: Pass, step: u64, lane: Lane, given_up: &BTreeSet<TaskId>) {
        for ahead in 1..=AHEAD {
            for piece in self.schedule(pass).micro_batch(lane, step + ahead, given_up) {
                self.context.tasks.prefetch(pass, piece.task);
            }
        }
        let left = self.schedule(pass).steps_of(lane, given_up).saturating_sub(step + 1);
        let next = Pass(pass.0 + 1);
        if self.context.job.spec.passes.is_some_and(|passes| passes <= next.0) {
            return;
        }
        for step in 0..AHEAD.saturating_sub(left) {
            for piece in self.schedule(next).micro_batch(lane, step, &BTreeSet::new()) {
                self.context.tasks.prefetch(next, piece.task);
            }
        }
    }

    async fn report_failure(
        &mut self,
        pass: Pass,
        task: TaskId,
        lane: Lane,
        error: &TaskError,
    ) -> Result<AfterFailure, Interrupt> {
        warn!(%task, %pass, %error, "task cannot be computed");
        self.context.metrics.failed();
        let request = FailTaskRequest {
            caller: self.context.master.caller(self.pservers.generation()),
            request_id: RequestId(chance::uuid()).0.to_string(),
            pass: pass.0,
            task: task.0,
            reason: error.to_string(),
            cause: error.cause().into(),
            lane: lane.0,
        };
        let reply = self.context.master.fail_task(request).await?;
        if reply.given_up {
            self.given_up.entry(pass).or_default().insert(task);
            return Ok(AfterFailure::Again);
        }
        match error.cause() {
            Cause::Data if !reply.elsewhere => Ok(AfterFailure::Again),
            Cause::Data | Cause::Transient => Ok(AfterFailure::Later),
        }
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
            let spec = &context.job.spec;
            let (lanes, micro_batch) = (spec.sync.lanes, spec.sync.micro_batch);
            LaneSchedule::new(context.tasks.manifest(), spec.seed, pass, lanes, micro_batch)
        })
    }

    /// At the beginning of a pass the owner of the first lane evaluates what the last one brought.
    fn evaluate_in_background(&mut self, position: &Pulled) {
        let begins = position.version == position.pass_start && 0 < position.pass.0;
        let is_ours = self.assignment.borrow().lanes.first() == Some(&Lane(0));
        while self.evaluation.try_join_next().is_some() {}
        let is_due = begins && is_ours && self.context.evaluates_after(position.pass.0);
        if !is_due || !self.evaluation.is_empty() {
            return;
        }
        let (context, parameters) = (self.context.clone(), self.parameters.clone());
        let (generation, position) = (self.pservers.generation(), *position);
        self.evaluation.spawn(async move {
            match context.evaluate(&parameters).await {
                Ok(Some(sums)) => {
                    let figures = context.wire(&sums, position.pass, position.version);
                    if let Err(error) = context.master.report_evaluation(generation, figures).await
                    {
                        debug!(%error, "evaluation not reported");
                    }
                }
                Ok(None) => {}
                Err(error) => warn!(%error, "no evaluation"),
            }
        });
    }
}
