//! Lets the policy choose the number of workers, or says what it would choose.

use std::sync::Arc;

use steadfast_common::ids::{Millis, Round};
use steadfast_common::machine::Moment;
use steadfast_common::records::scale::{ScaleMemory, ScaleMode, ScaleReason, ScaleRecord};
use steadfast_common::status::ScaleStatus;
use steadfast_common::status::format::plural;
use steadfast_coord::now;
use steadfast_host::time::unix_ms;
use steadfast_master_core::rendezvous::Fact;
use steadfast_master_core::scaling::{Situation, decide, next_try};

use super::machine::ElasticJob;

/// Holds what one master knows of the number of workers beside the record.
#[derive(Debug, Default)]
pub(super) struct Scaling {
    /// The round, and how often its speed had been measured, when the policy decided last.
    decided: (Round, usize),
    /// Says what it would do next.
    advice: Option<String>,
    /// The time of the record by the policy's clock, and when that was.
    clock: (u64, Millis),
}

impl Scaling {
    /// Goes on from a record that was read or written now.
    pub fn follow(&mut self, now: Millis, record: &ScaleRecord) {
        self.clock = (record.memory.at_ms, now);
    }

    /// Returns the time by the policy's clock.
    fn time(&self, now: Millis) -> u64 {
        let (at, since) = self.clock;
        at.saturating_add(now.0.saturating_sub(since.0))
    }
}

impl ElasticJob {
    /// Returns what the policy decides after a measurement.
    pub(super) fn scale_by_speed(&mut self, moment: Moment) -> Vec<Fact> {
        let Some(round) = self.state.round() else { return Vec::new() };
        let (present, measured) = (round.world_size, (round.round, self.speeds.samples_of_round()));
        if self.scaling.decided == measured {
            return Vec::new();
        }
        self.scaling.decided = measured;
        self.scaling.advice = None;
        let record = self.state.scale_record();
        let speed = self.speeds.of_round(moment.now, present);
        let Some(speed) = speed.filter(|_| record.mode != ScaleMode::Off) else {
            return Vec::new();
        };
        let possible = self.state.worker_counts(&self.settings);
        let (ms, possible) = (self.scaling.time(moment.now), possible.as_slice());
        let there = self.state.workers_there();
        let situation = Situation { ms, present, speed, possible, there };
        self.scaling.advice =
            next_try(&record, &situation).map(|(workers, reason)| advice(workers, reason));
        match decide(&record, &situation) {
            Some(next) if record.mode == ScaleMode::Auto && self.state.is_intact() => {
                self.scaling.advice = None;
                vec![Fact::Scaled(Arc::new(next))]
            }
            Some(_) | None => Vec::new(),
        }
    }

    /// Returns what the status says about the number of workers: nothing while no number and no mode was chosen, and
    /// nothing is measured.
    pub(super) fn scale_status(&self) -> Option<ScaleStatus> {
        let (stored, advice) = (self.state.scale(), self.scaling.advice.clone());
        if stored.is_none() && advice.is_none() {
            return None;
        }
        let record = self.state.scale_record();
        let pause = record.memory.next_try_ms.saturating_sub(self.scaling.time(now()));
        let is_pausing = record.mode == ScaleMode::Auto && 0 < pause;
        Some(ScaleStatus {
            record: ScaleRecord { memory: ScaleMemory::default(), ..record },
            advice,
            next_try_unix_ms: is_pausing.then(|| unix_ms().saturating_add(pause)),
        })
    }
}

/// Says what the policy would do.
fn advice(workers: u32, reason: ScaleReason) -> String {
    let workers = plural(workers as usize, "worker");
    match reason {
        ScaleReason::TriesMore => format!("{workers}, to see whether more pay"),
        ScaleReason::TriesFewer => format!("{workers}, to see whether fewer suffice"),
        reason => format!("{workers}: {reason}"),
    }
}
