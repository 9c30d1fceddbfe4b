//! Recovery times: how long training is interrupted by a failure, from its detection to the completion of the
//! next step that began after it.

use std::collections::VecDeque;

use steadfast_common::ids::{Millis, Version};
use steadfast_common::status::Recovery;
use tracing::info;

/// Maximum number of recoveries that are kept.
const REMEMBERED: usize = 20;

/// Recoveries of this term.
#[derive(Debug, Default)]
pub(crate) struct Recoveries {
    open: Option<Open>,
    past: VecDeque<Recovery>,
    count: u64,
}

#[derive(Debug)]
struct Open {
    cause: String,
    since: Millis,
    /// The version that ends the recovery; `None` until a first version is known.
    until: Option<Version>,
}

impl Recoveries {
    /// Records a failure that occurred at `version`, if that is known. The step in progress may still
    /// complete from contributions sent before the failure, so the recovery ends with the step after it.
    pub fn notice(&mut self, cause: impl Into<String>, now: Millis, version: Option<Version>) {
        let until = version.map(after_the_next);
        match &mut self.open {
            Some(open) => open.until = open.until.max(until),
            None => self.open = Some(Open { cause: cause.into(), since: now, until }),
        }
    }

    /// Records that training resumes from `version` in a new generation, which earlier contributions cannot
    /// reach: the next step ends the recovery.
    pub fn resume_from(&mut self, version: Version) {
        if let Some(open) = &mut self.open {
            open.until = Some(Version(version.0 + 1));
        }
    }

    /// Records that the parameters reached `version` at the wall-clock time `unix_ms`.
    pub fn progress(&mut self, version: Version, now: Millis, unix_ms: u64) {
        let is_over =
            |open: &mut Open| *open.until.get_or_insert(after_the_next(version)) <= version;
        let Some(open) = self.open.take_if(is_over) else { return };
        let seconds = now.0.saturating_sub(open.since.0) as f64 / 1000.0;
        info!(cause = open.cause, seconds, "training resumed");
        self.count += 1;
        self.past.push_back(Recovery { cause: open.cause, seconds, ended_unix_ms: unix_ms });
        if REMEMBERED < self.past.len() {
            self.past.pop_front();
        }
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the latest completed recoveries, oldest first.
    pub fn past(&self) -> Vec<Recovery> {
        self.past.iter().cloned().collect()
    }
}

fn after_the_next(version: Version) -> Version {
    Version(version.0 + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_lasts_until_a_step_that_began_after_it_is_completed() {
        let mut recoveries = Recoveries::default();
        recoveries.notice("a trainer was lost", Millis(1000), Some(Version(7)));
        recoveries.progress(Version(8), Millis(1100), 0);
        assert_eq!(recoveries.past(), []);
        recoveries.progress(Version(9), Millis(1500), 0);
        let past = recoveries.past();
        assert_eq!((recoveries.count(), past.len(), past[0].seconds), (1, 1, 0.5));
    }

    #[test]
    fn after_going_back_the_first_step_counts() {
        let mut recoveries = Recoveries::default();
        recoveries.notice("a pserver was lost", Millis(0), Some(Version(70)));
        recoveries.notice("another one", Millis(500), Some(Version(70)));
        recoveries.resume_from(Version(40));
        recoveries.progress(Version(41), Millis(2000), 0);
        assert_eq!(recoveries.past().len(), 1);
        assert_eq!(recoveries.past()[0].seconds, 2.0);
        recoveries.progress(Version(42), Millis(2100), 0);
        assert_eq!(recoveries.past().len(), 1);
    }

    #[test]
    fn a_new_master_counts_from_the_first_version_that_it_hears_of() {
        let mut recoveries = Recoveries::default();
        recoveries.notice("the master ended", Millis(0), None);
        recoveries.progress(Version(30), Millis(100), 0);
        recoveries.progress(Version(31), Millis(200), 0);
        assert_eq!(recoveries.past(), []);
        recoveries.progress(Version(32), Millis(300), 0);
        assert_eq!(recoveries.past().len(), 1);
    }
}
