//! Lets the policy choose the number of workers of a job, or says what it would choose.

use std::sync::Arc;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Millis;
use steadfast_common::records::scale::{
    ScaleMemory, ScaleMode, ScaleReason, ScaleRecord, ScaleWish, WORKERS_MAX, WORTH_PERCENT,
};
use steadfast_common::status::format::plural;
use steadfast_common::status::{ScaleStatus, SpeedStatus};
use steadfast_coord::now;
use steadfast_host::time::unix_ms;
use steadfast_master_core::scaling::{Situation, decide, next_try};
use steadfast_master_core::speeds::{Speed, Speeds, WorkerSet};
use steadfast_proto::status;
use steadfast_proto::v1::{ScaleReply, ScaleRequest, scale_request};
use tonic::Status;

/// Holds what one master knows of the number of workers beside the record.
#[derive(Debug)]
pub(crate) struct Scaling {
    /// The name of a worker, for users.
    worker: &'static str,
    /// The workers, and how often they had been measured, when the policy decided last.
    decided: (WorkerSet, usize),
    /// Says what it would do next.
    advice: Option<String>,
    /// The time of the record by the policy's clock, and when that was.
    clock: (u64, Millis),
}

impl Scaling {
    pub fn new(worker: &'static str) -> Self {
        Self { worker, decided: Default::default(), advice: None, clock: Default::default() }
    }

    /// Goes on from the record that was read or written now.
    pub fn follow(&mut self, now: Millis, record: Option<&Arc<ScaleRecord>>) {
        self.clock = (record.map_or(0, |it| it.memory.at_ms), now);
    }

    /// Returns the time by the policy's clock.
    fn time(&self, now: Millis) -> u64 {
        let (at, since) = self.clock;
        at.saturating_add(now.0.saturating_sub(since.0))
    }

    /// Returns what the policy decides after a measurement. `workers` returns the numbers of workers that there can be, in
    /// ascending order, and how many there are now.
    pub fn decide(
        &mut self,
        now: Millis,
        stored: Option<&Arc<ScaleRecord>>,
        speeds: &Speeds,
        workers: impl FnOnce() -> (Vec<u32>, u32),
    ) -> Option<ScaleRecord> {
        let measured = speeds.measured();
        if self.decided == measured {
            return None;
        }
        self.decided = measured;
        self.advice = None;
        let record = stored.map_or_else(ScaleRecord::default, |it| ScaleRecord::clone(it));
        let speed = speeds.of_present(now).filter(|_| record.mode != ScaleMode::Off)?;
        let (possible, there) = workers();
        let (ms, present) = (self.time(now), measured.0.workers);
        let situation = Situation { ms, present, speed, possible: &possible, there };
        let advice = |(workers, reason)| advice(workers, self.worker, reason);
        self.advice = next_try(&record, &situation).map(advice);
        let next = decide(&record, &situation).filter(|_| record.mode == ScaleMode::Auto)?;
        self.advice = None;
        Some(next)
    }

    /// Returns what the status says about the number of workers: nothing while no number and no mode was chosen, and
    /// nothing is measured.
    pub fn status(&self, stored: Option<&Arc<ScaleRecord>>) -> Option<ScaleStatus> {
        let advice = self.advice.clone();
        if stored.is_none() && advice.is_none() {
            return None;
        }
        let record = stored.map_or_else(ScaleRecord::default, |it| ScaleRecord::clone(it));
        let pause = record.memory.next_try_ms.saturating_sub(self.time(now()));
        let is_pausing = record.mode == ScaleMode::Auto && 0 < pause;
        Some(ScaleStatus {
            record: ScaleRecord { memory: ScaleMemory::default(), ..record },
            advice,
            next_try_unix_ms: is_pausing.then(|| unix_ms().saturating_add(pause)),
        })
    }
}

/// Returns the speeds that were measured lately.
pub(crate) fn speeds_status(speeds: &Speeds) -> Vec<SpeedStatus> {
    let all = speeds.all(now()).into_iter();
    all.map(|Speed { workers, records_per_second }| SpeedStatus { workers, records_per_second })
        .collect()
}

/// Says what the policy would do.
fn advice(workers: u32, worker: &str, reason: ScaleReason) -> String {
    let workers = plural(workers as usize, worker);
    match reason {
        ScaleReason::TriesMore => format!("{workers}, to see whether more pay"),
        ScaleReason::TriesFewer => format!("{workers}, to see whether fewer suffice"),
        reason => format!("{workers}: {reason}"),
    }
}

/// Reads what a person asks for.
///
/// # Errors
/// A number that cannot be used is `Invalid`.
pub(crate) fn scale_wish(request: &ScaleRequest) -> Result<ScaleWish, Status> {
    let mode = match request.mode() {
        scale_request::Mode::Kept => None,
        scale_request::Mode::Off => Some(ScaleMode::Off),
        scale_request::Mode::Advise => Some(ScaleMode::Advise),
        scale_request::Mode::Auto => Some(ScaleMode::Auto),
    };
    let ScaleRequest { workers, worth_percent, startable, .. } = *request;
    let given = workers.into_iter().chain(startable);
    if let Some(workers) = given.max().filter(|workers| WORKERS_MAX < *workers) {
        let message = format!("{workers} workers are too many; use at most {WORKERS_MAX}");
        return Err(status(ErrorKind::Invalid, message));
    }
    if let Some(percent) = worth_percent.filter(|percent| !WORTH_PERCENT.contains(percent)) {
        let (least, most) = (WORTH_PERCENT.start(), WORTH_PERCENT.end());
        let message = format!("{percent} % is no such part; use {least} to {most}");
        return Err(status(ErrorKind::Invalid, message));
    }
    let none_if_0 = |number: u32| Some(number).filter(|number| *number != 0);
    let (workers, startable) = (workers.map(none_if_0), startable.map(none_if_0));
    Ok(ScaleWish { mode, workers, worth_percent, startable })
}

/// Returns the reply to a person.
///
/// # Errors
/// `Internal` if the record cannot be written.
pub(crate) fn scale_reply(record: &ScaleRecord) -> Result<ScaleReply, Status> {
    let json = serde_json::to_vec(record)
        .map_err(|error| status(ErrorKind::Internal, error.to_string()))?;
    Ok(ScaleReply { json: json.into() })
}
