//! Measures the outage after each unexpected end of a process: the time to the next completed step.

use serde::{Deserialize, Serialize};
use steadfast_common::status::Recovery;

/// The unexpected end of a process, and how long training stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outage {
    /// The process, and how it ended.
    pub cause: String,
    /// Time to the next completed step; absent if training did not stop, or no step followed.
    pub seconds: Option<f64>,
}

/// All outages of a run.
#[derive(Debug, Default)]
pub struct Outages {
    outages: Vec<(u64, Outage)>,
}

impl Outages {
    /// Records that a process ended at `unix_ms`.
    pub fn add(&mut self, cause: String, unix_ms: u64) {
        self.outages.push((unix_ms, Outage { cause, seconds: None }));
    }

    /// Matches the recoveries reported by the master with the outages: an outage lasts until the end of the
    /// first recovery that ends after it began.
    pub fn follow(&mut self, recoveries: &[Recovery]) {
        for (began, outage) in self.outages.iter_mut().filter(|(_, it)| it.seconds.is_none()) {
            let ended = recoveries.iter().map(|it| it.ended_unix_ms).find(|ended| *began <= *ended);
            outage.seconds = ended.map(|ended| (ended - *began) as f64 / 1000.0);
        }
    }

    /// Returns all outages, in order.
    pub fn outages(self) -> Vec<Outage> {
        self.outages.into_iter().map(|(_, outage)| outage).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_lasts_until_the_first_recovery_that_ends_after_it() {
        let mut outages = Outages::default();
        let recovery =
            |ended_unix_ms| Recovery { cause: "slot 0".to_owned(), seconds: 0.1, ended_unix_ms };
        outages.follow(&[recovery(500)]);
        outages.add("pserver-0 killed".to_owned(), 1_000);
        outages.follow(&[recovery(500)]);
        outages.add("master-0 killed".to_owned(), 2_500);
        outages.follow(&[recovery(500), recovery(1_700)]);
        let seconds: Vec<Option<f64>> = outages.outages().iter().map(|it| it.seconds).collect();
        assert_eq!(seconds, [Some(0.7), None]);
    }
}
