//! How long training stood still after each death of a process, from the death itself to the next
//! step that was completed.

use serde::{Deserialize, Serialize};
use steadfast_common::status::Recovery;

/// A death, and how long training stood still.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outage {
    /// Who died, and of what.
    pub cause: String,
    /// From the death to the next completed step; absent where none was held up by it, or none came.
    pub seconds: Option<f64>,
}

/// All deaths of a run.
#[derive(Debug, Default)]
pub struct Deaths {
    outages: Vec<(u64, Outage)>,
}

impl Deaths {
    /// Somebody died at `unix_ms`.
    pub fn add(&mut self, cause: String, unix_ms: u64) {
        self.outages.push((unix_ms, Outage { cause, seconds: None }));
    }

    /// What the master says of the pauses that it noticed: a pause that ended after a death and began
    /// at its end at the latest is over for that death.
    pub fn follow(&mut self, recoveries: &[Recovery]) {
        for (died, outage) in self.outages.iter_mut().filter(|(_, it)| it.seconds.is_none()) {
            let ended = recoveries.iter().map(|it| it.ended_unix_ms).find(|ended| *died <= *ended);
            outage.seconds = ended.map(|ended| (ended - *died) as f64 / 1000.0);
        }
    }

    /// All of them, in order.
    pub fn outages(self) -> Vec<Outage> {
        self.outages.into_iter().map(|(_, outage)| outage).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_lasts_until_the_first_pause_that_ends_after_it() {
        let mut deaths = Deaths::default();
        let recovery =
            |ended_unix_ms| Recovery { cause: "slot 0".to_owned(), seconds: 0.1, ended_unix_ms };
        deaths.follow(&[recovery(500)]);
        deaths.add("pserver-0 killed".to_owned(), 1_000);
        deaths.follow(&[recovery(500)]);
        deaths.add("master-0 killed".to_owned(), 2_500);
        deaths.follow(&[recovery(500), recovery(1_700)]);
        let seconds: Vec<Option<f64>> = deaths.outages().iter().map(|it| it.seconds).collect();
        assert_eq!(seconds, [Some(0.7), None]);
    }
}
