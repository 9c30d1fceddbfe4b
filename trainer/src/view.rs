//! What a trainer is doing, for those who look at its admin port.

use std::sync::{Arc, Mutex};

use serde::Serialize;
use steadfast_common::ids::{Generation, Lane, Pass, TaskId, TrainerId, Version};

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
        };
        Self { facts: Arc::new(Mutex::new(facts)) }
    }

    /// Notes a change.
    pub fn note(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock().expect("no holder panics"));
    }

    /// How it is now.
    pub fn facts(&self) -> Facts {
        self.facts.lock().expect("no holder panics").clone()
    }
}
