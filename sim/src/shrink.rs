//! Shrinks failing plans.

use crate::plan::Plan;
use crate::run::{Outcome, run};

/// A smaller plan that still fails.
pub struct Smaller {
    pub plan: Plan,
    /// Numbers of the remaining faults of the seed.
    pub only: Vec<usize>,
    /// Whether it also fails without failures of single calls and requests.
    pub is_fair: bool,
}

/// Removes everything from a failing plan that is not needed for the same kind of failure.
///
/// Removes halves of the faults, then quarters, down to single faults, after Zeller's delta debugging
/// ("Yesterday, my program worked. Today, it does not. Why?", 1999).
pub fn shrink(plan: &Plan, outcome: &Outcome) -> Smaller {
    let kind = kind(outcome);
    let fails = |plan: &Plan| self::kind(&run(plan)) == kind;
    let only = least(plan.faults.len(), |only| fails(&plan.clone().with_only(only)));
    let smaller = plan.clone().with_only(&only);
    let fair = smaller.clone().without_network_faults();
    let is_fair = fails(&fair);
    Smaller { plan: if is_fair { fair } else { smaller }, only, is_fair }
}

/// Returns a subset of the numbers below `count` that still fails and of which no single number can be
/// removed.
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
        // Numbers that could not be removed before may be removable now.
        chunk = if chunk == 1 && was_fewer { 1 } else { chunk / 2 };
    }
    only
}

/// Returns the kind of a failure: the first word, which names the invariant.
fn kind(outcome: &Outcome) -> Option<String> {
    let first = outcome.broken.first()?;
    Some(first.split_whitespace().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shrinking_keeps_exactly_the_deviations_that_are_needed() {
        let needs = |wanted: &'static [usize]| {
            move |only: &[usize]| wanted.iter().all(|it| only.contains(it))
        };
        assert_eq!(least(12, needs(&[2, 7])), [2, 7]);
        assert_eq!(least(12, needs(&[])), Vec::<usize>::new());
        assert_eq!(least(1, needs(&[0])), [0]);
        // Any three numbers fail.
        assert_eq!(least(10, |only| 3 <= only.len()).len(), 3);
    }
}
