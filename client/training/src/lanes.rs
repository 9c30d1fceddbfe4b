//! Follows the master in synchronous mode: reports the position, and receives the lanes of this trainer.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{Lane, Pass, TaskId};
use steadfast_common::records::position::Position;
use steadfast_common::status::TimeBreakdown;
use steadfast_host::task::{Task, spawn};
use steadfast_proto::v1;
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::generation::time_breakdown;
use crate::master::FOLLOW_WAIT;
use crate::{ClientError, GenerationClient};

/// The current assignment of a trainer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    number: u64,
    pub lanes: Vec<Lane>,
    /// Lists those of `lanes` that lost trainers one after another at one step.
    pub suspected: BTreeSet<Lane>,
    /// Whether trainers that evaluate were lost one after another.
    pub evaluation_is_suspected: bool,
    pub given_up: BTreeMap<Pass, BTreeSet<TaskId>>,
}

/// A background task that follows the master; stopped on drop.
#[derive(Debug)]
pub struct LaneFollower {
    assignment: watch::Receiver<Assignment>,
    position: watch::Sender<Option<Position>>,
    task: Task<()>,
}

impl Drop for LaneFollower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl LaneFollower {
    pub(crate) fn start(
        generation: GenerationClient,
        spent: impl Fn() -> TimeBreakdown + Send + 'static,
    ) -> Self {
        let (tx, assignment) = watch::channel(Assignment::default());
        let (position, reported) = watch::channel(None);
        let task = spawn(follow(generation, spent, tx, reported));
        Self { assignment, position, task }
    }

    /// Subscribes to the assignment. The channel closes when the generation or the job ends.
    pub fn assignment(&self) -> watch::Receiver<Assignment> {
        self.assignment.clone()
    }

    /// Sets the position for the next report.
    pub fn report(&self, position: Position) {
        self.position.send_replace(Some(position));
    }
}

async fn follow(
    generation: GenerationClient,
    spent: impl Fn() -> TimeBreakdown,
    tx: watch::Sender<Assignment>,
    position: watch::Receiver<Option<Position>>,
) {
    loop {
        let request = v1::FollowRequest {
            caller: generation.caller(),
            assignment: tx.borrow().number,
            wait_ms: FOLLOW_WAIT.as_millis() as u64,
            position: position.borrow().map(v1::Position::from),
            time_breakdown: Some(time_breakdown(spent())),
        };
        match generation.master.follow(request).await {
            Ok(reply) => publish(&tx, reply),
            Err(ClientError::NewGeneration | ClientError::JobEnded) => return,
            Err(error) => {
                warn!(%error, "cannot follow the assignment of lanes");
                return;
            }
        }
    }
}

fn publish(tx: &watch::Sender<Assignment>, reply: v1::FollowReply) {
    let given_up = reply
        .given_up
        .into_iter()
        .map(|it| (Pass(it.pass), it.tasks.into_iter().map(TaskId).collect::<BTreeSet<TaskId>>()));
    let assignment = Assignment {
        number: reply.assignment,
        lanes: reply.lanes.into_iter().map(Lane).collect(),
        suspected: reply.suspected.into_iter().map(Lane).collect(),
        evaluation_is_suspected: reply.evaluation_is_suspected,
        given_up: given_up.collect(),
    };
    tx.send_if_modified(|present| {
        if *present == assignment {
            return false;
        }
        if present.lanes != assignment.lanes {
            info!(lanes = ?assignment.lanes, "lanes assigned");
        }
        debug!(number = assignment.number, "assignment");
        *present = assignment;
        true
    });
}
