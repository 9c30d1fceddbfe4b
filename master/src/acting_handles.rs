//! The handles of an acting master that its services share.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::status::{Document, JobStatus, Metric, Wait};
use steadfast_coord::now;
use steadfast_master_core::rate::Rate;
use steadfast_store::Location;

use crate::checkpoint::coordinator::{Checkpoints, Health};
use crate::event_loop::handle::EventLoopHandle;
use crate::stream::StreamHandle;
use crate::table_watch::Tables;

/// The handles of an acting master that its services share. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ActingHandles {
    pub handle: EventLoopHandle,
    pub checkpoints: Checkpoints,
    /// Holds the model and the list of given-up tasks.
    pub store: Location,
    pub task_deadline: Duration,
    pub max_staleness: Option<u32>,
    pub source: Arc<StatusSource>,
    /// The follower of the stream, if the dataset is followed.
    pub stream: Option<StreamHandle>,
    pub tables: Tables,
}

/// Sources of a status, beside the status snapshot of the event loop.
#[derive(Debug)]
pub struct StatusSource {
    pub address: String,
    /// Records in one pass.
    pub records: u64,
    /// Whether the gradients come from closures: the job has no files.
    pub has_closures: bool,
    /// The mutex guards only the rate.
    pub rate: Mutex<Rate>,
}

impl ActingHandles {
    /// Returns the status: the event loop's, and what only the other tasks of this master know.
    pub fn status(&self) -> JobStatus {
        let snapshot = self.handle.snapshot.borrow().clone();
        let mut status = snapshot.status.clone();
        let source = &self.source;
        {
            let mut rate = source.rate.lock().expect("no holder panics");
            // After a takeover, the first report restores the count and must not count as progress.
            if snapshot.are_examples_current {
                rate.note(now(), status.examples);
            }
            status.examples_per_second = rate.per_second();
        }
        {
            let timeline = self.handle.timeline.lock().expect("no holder panics");
            (status.events, status.points) = (timeline.events(), timeline.points());
        }
        status.examples_total = status.passes.map(|passes| u64::from(passes) * source.records);
        let left = status.examples_total.map(|total| total.saturating_sub(status.examples));
        let left = left.map(|left| left as f64 / status.examples_per_second);
        status.seconds_left = left.filter(|seconds| seconds.is_finite());
        status.master.address.clone_from(&source.address);
        let Health { committed, failures_in_a_row, error, .. } = self.checkpoints.health();
        (status.checkpoints_committed, status.checkpoint_error) = (committed, error);
        status.checkpoint_failures = failures_in_a_row;
        status.tables = self.tables.latest();
        if let Some(stream) = self.stream.as_ref().filter(|_| !source.has_closures) {
            status.waits.extend(stream.waiting(&snapshot).map(|why| Wait::of_job("", why)));
            status.stream = Some(stream.status(&snapshot));
        }
        status.waiting = status.waits.iter().map(|wait| wait.why.clone()).collect();
        status
    }

    /// Describes the status, with the metrics that change all the time.
    pub fn document(&self) -> Document {
        let mut document = self.status().document();
        let help = "Time since this master committed a checkpoint";
        let age = self.checkpoints.health().last.map(|last| last.elapsed().as_secs_f64());
        let age = age.map(|age| Metric::gauge("steadfast_checkpoint_age_seconds", help, age));
        document.metrics.extend(age);
        document
    }
}
