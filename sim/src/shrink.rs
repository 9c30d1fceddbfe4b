//! Finds out how little still fails.

use crate::plan::Plan;
use crate::run::{Outcome, run};

/// A plan that still fails, with less in it.
pub struct Smaller {
    pub plan: Plan,
    /// Which of the seed's faults are left.
    pub only: Vec<usize>,
    /// Whether it fails without trouble for single calls and requests, too.
    pub is_fair: bool,
}

/// Leaves out whatever can be left out of a plan that failed, so that it fails in the same way.
///
/// Faults go by halves, then by quarters, and so on to single ones, after Zeller's delta debugging
/// ("Yesterday, my program worked. Today, it does not. Why?", 1999).
pub fn shrink(plan: &Plan, outcome: &Outcome) -> Smaller {
    let kind = kind(outcome);
    let fails = |plan: &Plan| self::kind(&run(plan)) == kind;
    let only = least(plan.faults.len(), |only| fails(&plan.clone().with_only(only)));
    let smaller = plan.clone().with_only(&only);
    let fair = smaller.clone().in_fair_weather();
    let is_fair = fails(&fair);
    Smaller { plan: if is_fair { fair } else { smaller }, only, is_fair }
}

/// As few of the numbers below `count` as still fail; none of them can be left out alone.
fn least(count: usize, fails: impl Fn(&[usize]) -> bool) -> Vec<usize> {
    let mut only: Vec<usize> = (0..count).collect();
    let mut chunk = only.len();
    while 0 < chunk {
        let (mut start, mut was_fewer) = (0, false);
        while start < only.len() {
            let end = only.len().min(start + chunk);
            let fewer: Vec<usize> = [&only[..start], &only[end..]].concat();
            if fails(&fewer) {
                (only, was_fewer) = (fewer, true);
            } else {
                start = end;
            }
        }
        // What could not go before may go now.
        chunk = if chunk == 1 && was_fewer { 1 } else { chunk / 2 };
    }
    only
}

/// What kind of failure it is: the first word, which names the invariant.
fn kind(outcome: &Outcome) -> Option<String> {
    let first = outcome.broken.first()?;
    Some(first.split_whitespace().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_what_it_takes() {
        let needs = |wanted: &'static [usize]| {
            move |only: &[usize]| wanted.iter().all(|it| only.contains(it))
        };
        assert_eq!(least(12, needs(&[2, 7])), [2, 7]);
        assert_eq!(least(12, needs(&[])), Vec::<usize>::new());
        assert_eq!(least(1, needs(&[0])), [0]);
        // Any three will do.
        assert_eq!(least(10, |only| 3 <= only.len()).len(), 3);
    }
}
