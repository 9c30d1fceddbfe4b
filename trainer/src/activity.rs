//! The current activity of a trainer, shown on its admin port.

use std::sync::{Arc, Mutex};

use serde::Serialize;
use steadfast_common::ids::{Generation, Lane, Pass, TaskId, TrainerId, Version};
use steadfast_common::status::TimeBreakdown;

/// The current activity of a trainer.
#[derive(Clone, Debug, Serialize)]
pub struct Activity {
    pub id: TrainerId,
    pub generation: Generation,
    pub pass: Pass,
    /// The version of the parameters in use.
    pub version: Version,
    /// Lanes assigned to it (synchronous mode).
    pub lanes: Vec<Lane>,
    /// The task in progress (asynchronous mode).
    pub task: Option<TaskId>,
    /// Describes the activity to users.
    #[serde(rename = "doing")]
    pub description: &'static str,
    pub time_breakdown: TimeBreakdown,
}

/// The activity, shared with the admin port.
#[derive(Clone, Debug)]
pub struct SharedActivity {
    /// The mutex is held for a few assignments at a time.
    activity: Arc<Mutex<Activity>>,
}

impl SharedActivity {
    /// Creates the activity of a trainer that joins the job.
    pub fn new(id: TrainerId) -> Self {
        let activity = Activity {
            id,
            generation: Generation(0),
            pass: Pass(0),
            version: Version(0),
            lanes: Vec::new(),
            task: None,
            description: "joining the job",
            time_breakdown: TimeBreakdown::default(),
        };
        Self { activity: Arc::new(Mutex::new(activity)) }
    }

    /// Applies a change.
    pub fn note(&self, change: impl FnOnce(&mut Activity)) {
        change(&mut self.activity.lock().expect("no holder panics"));
    }

    /// Adds to the time breakdown.
    pub fn add_time(&self, time_breakdown: TimeBreakdown) {
        self.note(|activity| activity.time_breakdown += time_breakdown);
    }

    /// Returns the time breakdown since the start.
    pub fn time_breakdown(&self) -> TimeBreakdown {
        self.activity.lock().expect("no holder panics").time_breakdown
    }

    pub fn activity(&self) -> Activity {
        self.activity.lock().expect("no holder panics").clone()
    }
}
