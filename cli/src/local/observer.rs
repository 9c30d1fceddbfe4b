//! Polls the acting master for the status of the job.

use std::time::Duration;

use steadfast_common::status::JobStatus;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::job_master::JobMaster;

const EVERY: Duration = Duration::from_millis(100);

/// Latest result of the polling.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    /// The last status received, if any.
    pub status: Option<JobStatus>,
    /// Why the last request failed, if it did.
    pub error: Option<String>,
}

/// Polls a job until it is dropped.
#[derive(Debug)]
pub struct Observer {
    seen: watch::Receiver<Observation>,
    task: JoinHandle<()>,
}

impl Observer {
    pub fn start(master: JobMaster) -> Self {
        let (tx, seen) = watch::channel(Observation::default());
        Self { seen, task: tokio::spawn(observe(master, tx)) }
    }

    /// Completes after the next request has been answered or has failed.
    pub async fn changed(&mut self) {
        if self.seen.changed().await.is_err() {
            // The polling task has ended: there are no further updates.
            std::future::pending().await
        }
    }

    pub fn seen(&self) -> Observation {
        self.seen.borrow().clone()
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn observe(mut master: JobMaster, tx: watch::Sender<Observation>) {
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let answer = master.status().await;
        tx.send_modify(|seen| match answer {
            Ok(status) => *seen = Observation { status: Some(status), error: None },
            Err(failure) => seen.error = Some(failure.message),
        });
    }
}
