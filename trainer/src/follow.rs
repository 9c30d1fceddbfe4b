//! Follows the master: reports the position, and receives the lanes assigned to this trainer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_client::{ClientError, Pulled};
use steadfast_common::ids::{Generation, Lane, Pass, TaskId};
use steadfast_host::task::{Task, spawn};
use steadfast_proto::v1::{FollowReply, FollowRequest, Position};
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::context::Context;

/// How long one request waits at the master; also the interval of position reports.
const WAIT_MS: u64 = 100;

/// The current assignment of this trainer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    pub number: u64,
    pub lanes: Vec<Lane>,
    pub given_up: BTreeMap<Pass, BTreeSet<TaskId>>,
}

/// A background task that follows the master; stopped on drop.
pub struct Follower {
    assignment: watch::Receiver<Assignment>,
    position: watch::Sender<Option<Pulled>>,
    task: Task<()>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Follower {
    /// Starts to follow the master. If that fails, the sender of the assignment is dropped.
    pub fn start(context: Arc<Context>, generation: Generation) -> Self {
        let (tx, assignment) = watch::channel(Assignment::default());
        let (position, reported) = watch::channel(None);
        let task = spawn(follow(context, generation, tx, reported));
        Self { assignment, position, task }
    }

    /// Subscribes to the assignment.
    pub fn assignment(&self) -> watch::Receiver<Assignment> {
        self.assignment.clone()
    }

    /// Sets the position for the next report.
    pub fn report(&self, position: Pulled) {
        self.position.send_replace(Some(position));
    }
}

async fn follow(
    context: Arc<Context>,
    generation: Generation,
    tx: watch::Sender<Assignment>,
    position: watch::Receiver<Option<Pulled>>,
) {
    loop {
        let request = FollowRequest {
            caller: context.master.caller(generation),
            assignment: tx.borrow().number,
            wait_ms: WAIT_MS,
            position: position.borrow().map(wire),
            time_breakdown: Some(context.activity.time_breakdown()),
        };
        match context.master.follow(request).await {
            Ok(reply) => adopt(&tx, reply),
            Err(ClientError::NewGeneration | ClientError::JobOver) => return,
            Err(error) => {
                warn!(%error, "the master refused to assign lanes");
                return;
            }
        }
    }
}

fn adopt(tx: &watch::Sender<Assignment>, reply: FollowReply) {
    let given_up = reply
        .given_up
        .into_iter()
        .map(|it| (Pass(it.pass), it.tasks.into_iter().map(TaskId).collect::<BTreeSet<TaskId>>()));
    let assignment = Assignment {
        number: reply.assignment,
        lanes: reply.lanes.into_iter().map(Lane).collect(),
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

fn wire(position: Pulled) -> Position {
    Position {
        version: position.version.0,
        pass: position.pass.0,
        pass_start: position.pass_start.0,
        examples: position.examples,
        loss: position.loss,
    }
}
