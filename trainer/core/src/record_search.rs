//! The search for a record whose gradient ends the process that computes it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use steadfast_common::ids::TaskId;

/// A record, named so that it can be read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RecordName {
    pub task: TaskId,
    /// The number of the record within its task, in the order of the files, from 0.
    pub record: u32,
}

/// Tells what became of a process that computed gradients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It computed them, or reported an error of the model.
    Survived,
    /// It ended while it computed them.
    Died(String),
    /// It ended for another reason, or did not end in time.
    Unknown(String),
}

/// Stands in for a process that computes the gradient of some records.
pub type TrialStandIn = Arc<dyn Fn(&[RecordName]) -> Outcome + Send + Sync>;

/// Tells how a search ended: with the index of an item and how its process ended, or with the reason why it found none.
pub type Found = Result<(usize, String), String>;

/// Narrows items that end a process together down to one that does so alone, twice. The caller lets a process compute
/// [`RecordSearch::next`], and passes what became of it to [`RecordSearch::note`].
#[derive(Clone, Debug)]
pub struct RecordSearch {
    /// Fewer items are not tried alone, if there are others that do no harm.
    min: usize,
    /// One of them ends a process.
    suspects: Vec<usize>,
    harmless: Vec<usize>,
    tries: Tries,
}

/// Which of the suspects are tried next.
#[derive(Clone, Debug)]
enum Tries {
    All,
    /// The suspects but these.
    Left {
        right: Vec<usize>,
    },
    /// These, after the suspects, which ended a process or did not.
    Right {
        right: Vec<usize>,
        left_died: bool,
    },
    /// The only one, once more.
    Again,
}

impl RecordSearch {
    /// Begins a search among the items 0 to `count`, for a model that needs `min` of them.
    pub fn new(count: usize, min: usize) -> Self {
        Self { min, suspects: (0..count).collect(), harmless: Vec::new(), tries: Tries::All }
    }

    /// Returns the items to compute next, ascending.
    pub fn next(&self) -> Vec<usize> {
        let tried = match &self.tries {
            Tries::All | Tries::Left { .. } | Tries::Again => &self.suspects,
            Tries::Right { right, .. } => right,
        };
        let more = self.min.saturating_sub(tried.len()).min(self.harmless.len());
        let mut all = [tried, &self.harmless[..more]].concat();
        all.sort_unstable();
        all
    }

    /// Notes what became of the process that computed these items; returns how the search ends, if it does.
    pub fn note(&mut self, outcome: Outcome) -> Option<Found> {
        let died = match outcome {
            Outcome::Survived => None,
            Outcome::Died(how) => Some(how),
            Outcome::Unknown(why) => return Some(Err(why)),
        };
        match (std::mem::replace(&mut self.tries, Tries::Again), died) {
            (Tries::All, None) => {
                return Some(Err("a process survived the same computation".to_owned()));
            }
            (Tries::Again, None) => {
                return Some(Err("a second process survived the same record".to_owned()));
            }
            (Tries::Again, Some(how)) => return Some(Ok((self.suspects[0], how))),
            (Tries::All, Some(_)) => {}
            (Tries::Left { right }, died) => {
                // What one item needs besides is among those that do no harm.
                let needs_harmless = self.harmless.len() + 1 < self.min;
                if died.is_none() || needs_harmless {
                    self.tries = Tries::Right { right, left_died: died.is_some() };
                    return None;
                }
            }
            (Tries::Right { right, left_died: true }, None) => self.harmless.extend(right),
            (Tries::Right { left_died: true, .. }, Some(_)) => {}
            (Tries::Right { right, left_died: false }, Some(_)) => {
                self.harmless.append(&mut self.suspects);
                self.suspects = right;
            }
            (Tries::Right { right, left_died: false }, None) => {
                let count = self.suspects.len() + right.len();
                let why = format!("{count} records end a process together, and no half of them");
                return Some(Err(why));
            }
        }
        if 1 < self.suspects.len() {
            let right = self.suspects.split_off(self.suspects.len() / 2);
            self.tries = Tries::Left { right };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a search among `count` items of which `bad` end a process; returns how it ended, and the number of runs.
    fn search(
        count: usize,
        min: usize,
        mut bad: impl FnMut(&[usize]) -> bool,
    ) -> (Result<usize, String>, usize) {
        let mut search = RecordSearch::new(count, min);
        for runs in 1.. {
            let chosen = search.next();
            assert!(chosen.is_sorted() && !chosen.is_empty());
            let outcome = match bad(&chosen) {
                true => Outcome::Died("signal 6".to_owned()),
                false => Outcome::Survived,
            };
            if let Some(found) = search.note(outcome) {
                return (found.map(|(index, _)| index), runs);
            }
        }
        unreachable!("the search ends")
    }

    /// F9: the search takes a number of processes that is logarithmic in the number of records.
    #[test]
    fn one_record_is_found_among_many_in_a_logarithmic_number_of_runs() {
        for count in [1, 2, 3, 64, 1000] {
            for bad in [0, count / 3, count - 1] {
                let (found, runs) = search(count, 1, |chosen| chosen.contains(&bad));
                assert_eq!(found, Ok(bad), "of {count}");
                let most = 2 + 2 * count.next_power_of_two().trailing_zeros() as usize;
                assert!(runs <= most, "{runs} of {most} runs for {count} records");
            }
        }
    }

    /// F9: a model may need several records for a gradient; fewer are an error, which ends no process.
    #[test]
    fn a_record_is_found_for_a_model_that_takes_no_fewer_than_two() {
        for bad in 0..8 {
            let is_bad = |chosen: &[usize]| 2 <= chosen.len() && chosen.contains(&bad);
            assert_eq!(search(8, 2, is_bad).0, Ok(bad));
        }
    }

    /// F9: of two records one is found, and the other one after it.
    #[test]
    fn one_of_two_records_is_found() {
        let found = search(100, 1, |chosen| chosen.contains(&20) || chosen.contains(&70)).0;
        assert_eq!(found, Ok(20));
    }

    /// F9, I7: what does not repeat was chance.
    #[test]
    fn nothing_is_found_where_a_process_survives() {
        assert!(search(10, 1, |_| false).0.unwrap_err().contains("survived"));
        let together = search(10, 1, |chosen| chosen.len() == 10).0;
        assert!(together.unwrap_err().contains("10 records end a process together"));
        let mut runs = 0;
        let once = |chosen: &[usize]| {
            runs += 1;
            // The record that is left does it no second time.
            chosen.contains(&0) && runs < 3
        };
        assert!(search(2, 1, once).0.unwrap_err().contains("second process survived"));
    }

    /// F9, I7: what others do to a process decides nothing.
    #[test]
    fn a_process_that_others_end_finds_nothing() {
        let mut search = RecordSearch::new(4, 1);
        let ended = search.note(Outcome::Unknown("ended by others".to_owned()));
        assert_eq!(ended, Some(Err("ended by others".to_owned())));
    }
}
