//! What a trainer is doing, for those who look at its admin port.

use std::sync::{Arc, Mutex};

use serde::Serialize;
use steadfast_common::ids::{Generation, Lane, Pass, TaskId, TrainerId, Version};
use steadfast_common::status::Spent;
use steadfast_proto::v1;

/// What a trainer is doing.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    pub id: TrainerId,
    pub generation: Generation,
    pub pass: Pass,
    /// The version of the parameters that it computes on.
    pub version: Version,
    /// Lanes in its care (synchronous mode).
    pub lanes: Vec<Lane>,
    /// The task in work (asynchronous mode).
    pub task: Option<TaskId>,
    pub doing: &'static str,
    pub spent: Spent,
}

/// The same, shared with the admin port.
#[derive(Clone, Debug)]
pub struct View {
    /// Guards a few assignments at a time.
    facts: Arc<Mutex<Facts>>,
}

impl View {
    /// A trainer that has not begun.
    pub fn new(id: TrainerId) -> Self {
        let facts = Facts {
            id,
            generation: Generation(0),
            pass: Pass(0),
            version: Version(0),
            lanes: Vec::new(),
            task: None,
            doing: "joining the job",
            spent: Spent::default(),
        };
        Self { facts: Arc::new(Mutex::new(facts)) }
    }

    /// Notes a change.
    pub fn note(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock().expect("no holder panics"));
    }

    /// Notes what time went to.
    pub fn spend(&self, spent: Spent) {
        self.note(|facts| facts.spent += spent);
    }

    /// What time went to since the start.
    pub fn spent(&self) -> v1::Spent {
        let Spent { data, compute, push, wait, pull, moved_bytes } = self.facts().spent;
        v1::Spent { data, compute, push, wait, pull, moved_bytes }
    }

    /// How it is now.
    pub fn facts(&self) -> Facts {
        self.facts.lock().expect("no holder panics").clone()
    }
}
