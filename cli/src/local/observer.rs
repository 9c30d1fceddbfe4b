//! Asks the acting master again and again how the job stands.

use std::time::Duration;

use steadfast_common::status::JobStatus;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::job_master::JobMaster;

const EVERY: Duration = Duration::from_millis(100);

/// What was last heard.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The last answer, if there ever was one.
    pub status: Option<JobStatus>,
    /// Whether and why the last question went unanswered.
    pub silence: Option<String>,
}

/// Observes a job until it is dropped.
#[derive(Debug)]
pub struct Observer {
    seen: watch::Receiver<Seen>,
    task: JoinHandle<()>,
}

impl Observer {
    /// Starts to ask.
    pub fn start(master: JobMaster) -> Self {
        let (tx, seen) = watch::channel(Seen::default());
        Self { seen, task: tokio::spawn(observe(master, tx)) }
    }

    /// Completes when there is news.
    pub async fn changed(&mut self) {
        if self.seen.changed().await.is_err() {
            // The task is gone, and with it all news.
            std::future::pending().await
        }
    }

    /// What was last heard.
    pub fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn observe(mut master: JobMaster, tx: watch::Sender<Seen>) {
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let answer = master.status().await;
        tx.send_modify(|seen| match answer {
            Ok(status) => *seen = Seen { status: Some(status), silence: None },
            Err(failure) => seen.silence = Some(failure.message),
        });
    }
}
