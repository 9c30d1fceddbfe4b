//! The history of an elastic job's training that survived, and its rules.
//!
//! Each round continues from a commit, and what was done after that commit is undone: by the last round one
//! sequence of steps and commits is left. It must have every step and every commit exactly once.

use std::collections::{BTreeMap, BTreeSet};

use super::logs::{Entry, Moment};

/// What is left, and what was done again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    pub rounds: usize,
    pub commits: u64,
    /// Steps that were undone: they were after the last commit.
    pub steps_undone: u64,
    /// How often a worker went back to its last commit.
    pub restores: u64,
    /// Accuracy at the end.
    pub accuracy: f64,
    /// The loss of each step, as rank 0 saw it.
    pub losses: Vec<f64>,
}

/// What the workers of one round did.
#[derive(Debug, Default)]
struct Round<'a> {
    begin: Option<&'a Moment>,
    steps: BTreeMap<u64, (&'a str, f64)>,
    commits: BTreeMap<u64, &'a Moment>,
    /// Commits that all workers of the round have saved: one of them went on after it.
    complete: BTreeSet<u64>,
}

/// A step or a commit that was not undone.
#[derive(Debug)]
enum Done<'a> {
    Step { step: u64, loss: f64 },
    Commit(&'a Moment, bool),
}

/// Checks what all workers logged, and returns what survived.
///
/// # Errors
/// The first rule that is broken.
pub fn check<'a>(
    entries: impl IntoIterator<Item = &'a Entry>,
    steps: u64,
) -> Result<History, String> {
    let entries: Vec<&Entry> = entries.into_iter().collect();
    let rounds = rounds(&entries)?;
    let mut history = History { rounds: rounds.len(), ..History::default() };
    let initial = rounds.values().next().and_then(|round| round.begin);
    let initial = initial.ok_or("no worker has begun")?;
    if (initial.commit, initial.step) != (0, 0) {
        return Err(format!("the first round began with {initial:?}"));
    }
    // The initial state is commit 0.
    let mut done = vec![Done::Commit(initial, true)];
    for (number, round) in &rounds {
        let begin = round.begin.ok_or(format!("round {number} did not begin"))?;
        history.steps_undone += go_back(&mut done, begin)?;
        go_on(&mut done, begin, round)?;
    }
    check_restores(&entries, initial, &rounds, &mut history)?;
    check_whole(&done, steps, &mut history)?;
    check_ends(&entries, &done, &mut history)?;
    Ok(history)
}

/// Groups the entries by round. All ranks must agree on each state.
fn rounds<'a>(entries: &[&'a Entry]) -> Result<BTreeMap<u64, Round<'a>>, String> {
    let mut rounds: BTreeMap<u64, Round<'a>> = BTreeMap::new();
    // The last commit of each worker, until it goes on after it. Entries of one worker are in order.
    let mut saving: Option<&Moment> = None;
    for entry in entries {
        match entry {
            Entry::Start { .. } => saving = None,
            Entry::Begin(moment) => {
                saving = None;
                let known = rounds.entry(moment.round).or_default().begin.get_or_insert(moment);
                agree("begin a round", known, moment)?;
            }
            Entry::Step { moment, loss } => {
                let round = rounds.entry(moment.round).or_default();
                round.complete.extend(saving.take().map(|it| it.commit));
                let (sha, known) = round.steps.entry(moment.step).or_insert((&moment.sha, *loss));
                if *sha != moment.sha {
                    return Err(format!("the ranks have different weights: {moment:?}, {sha}"));
                }
                if moment.rank == 0 {
                    *known = *loss;
                }
            }
            Entry::Commit(moment) => {
                saving = Some(moment);
                let round = rounds.entry(moment.round).or_default();
                let known = *round.commits.entry(moment.commit).or_insert(moment);
                agree("commit", known, moment)?;
            }
            Entry::Restore(_) => saving = None,
            Entry::End { moment, .. } => {
                let round = rounds.entry(moment.round).or_default();
                round.complete.extend(saving.take().map(|it| it.commit));
            }
        }
    }
    Ok(rounds)
}

fn agree(what: &str, one: &Moment, other: &Moment) -> Result<(), String> {
    match is_same(one, other) {
        true => Ok(()),
        false => Err(format!("the ranks {what} with different states: {one:?}, {other:?}")),
    }
}

fn is_same(one: &Moment, other: &Moment) -> bool {
    (one.commit, one.step, &one.sha) == (other.commit, other.step, &other.sha)
}

/// Undoes what was done after the commit from which a round goes on. Returns the number of undone steps.
fn go_back(done: &mut Vec<Done<'_>>, begin: &Moment) -> Result<u64, String> {
    let at = done.iter().rposition(|it| match it {
        Done::Commit(commit, _) => is_same(commit, begin),
        Done::Step { .. } => false,
    });
    let at = at.ok_or(format!("a round goes on from a commit that had been undone: {begin:?}"))?;
    let mut undone = 0;
    for it in done.drain(at + 1..) {
        match it {
            Done::Step { .. } => undone += 1,
            Done::Commit(commit, true) => {
                return Err(format!("{commit:?} was complete, and was lost: next is {begin:?}"));
            }
            Done::Commit(_, false) => {}
        }
    }
    Ok(undone)
}

/// Adds what was done in a round.
fn go_on<'a>(done: &mut Vec<Done<'a>>, begin: &'a Moment, round: &Round<'a>) -> Result<(), String> {
    let (mut step, mut commit) = (begin.step, begin.commit);
    let mut steps = round.steps.iter().peekable();
    let mut commits = round.commits.values().peekable();
    loop {
        if let Some(moment) = commits.next_if(|it| it.step <= step) {
            if (moment.commit, moment.step) != (commit + 1, step) {
                return Err(format!("commit {commit} of step {step} is followed by {moment:?}"));
            }
            commit += 1;
            done.push(Done::Commit(moment, round.complete.contains(&commit)));
        } else if let Some((next, (_, loss))) = steps.next() {
            if *next != step + 1 {
                return Err(format!("round {}: step {next} follows step {step}", begin.round));
            }
            step = *next;
            done.push(Done::Step { step, loss: *loss });
        } else if let Some(moment) = commits.next() {
            return Err(format!("no worker has done the step of {moment:?}"));
        } else {
            return Ok(());
        }
    }
}

/// Checks that a worker that goes back to a commit goes back to the weights that the commit had.
fn check_restores(
    entries: &[&Entry],
    initial: &Moment,
    rounds: &BTreeMap<u64, Round<'_>>,
    history: &mut History,
) -> Result<(), String> {
    for entry in entries {
        let Entry::Restore(moment) = entry else { continue };
        history.restores += 1;
        let mut commits = rounds.values().filter_map(|round| round.commits.get(&moment.commit));
        if !is_same(initial, moment) && !commits.any(|commit| is_same(commit, moment)) {
            return Err(format!("a worker went back to a state that no commit has: {moment:?}"));
        }
    }
    Ok(())
}

/// Checks that every step and every commit is there exactly once.
fn check_whole(done: &[Done<'_>], steps: u64, history: &mut History) -> Result<(), String> {
    let (mut next_step, mut next_commit) = (1, 0);
    for it in done {
        match it {
            Done::Step { step, loss } => {
                if *step != next_step {
                    return Err(format!("step {step} is where step {next_step} is due"));
                }
                next_step += 1;
                history.losses.push(*loss);
            }
            Done::Commit(moment, _) => {
                if moment.commit != next_commit {
                    return Err(format!("{moment:?} is where commit {next_commit} is due"));
                }
                next_commit += 1;
            }
        }
    }
    history.commits = next_commit - 1;
    match next_step - 1 == steps {
        true => Ok(()),
        false => Err(format!("the job has {} steps, not {steps}", next_step - 1)),
    }
}

/// Checks that workers that trained to the end have the weights of the last commit.
fn check_ends(entries: &[&Entry], done: &[Done<'_>], history: &mut History) -> Result<(), String> {
    let last = done.iter().rev().find_map(|it| match it {
        Done::Commit(moment, _) => Some(*moment),
        Done::Step { .. } => None,
    });
    let last = last.ok_or("there is no commit")?;
    let mut accuracies = Vec::new();
    for entry in entries {
        let Entry::End { moment, accuracy } = entry else { continue };
        if (moment.step, &moment.sha) != (last.step, &last.sha) {
            return Err(format!("a worker ended with {moment:?}; the last commit is {last:?}"));
        }
        accuracies.push(*accuracy);
    }
    history.accuracy = accuracies.into_iter().reduce(f64::min).ok_or("no worker has ended")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(round: u64, rank: u32, commit: u64, step: u64, sha: &str) -> Moment {
        Moment { round, rank, commit, step, sha: sha.to_owned() }
    }

    fn step(round: u64, rank: u32, commit: u64, step: u64, sha: &str) -> Entry {
        Entry::Step { moment: at(round, rank, commit, step, sha), loss: 0.5 }
    }

    fn end(round: u64, commit: u64, step: u64, sha: &str) -> Entry {
        Entry::End { moment: at(round, 0, commit, step, sha), accuracy: 0.9 }
    }

    /// Returns the log of two steps in round 1, of which the second is undone, and done again in round 2.
    fn job() -> Vec<Entry> {
        vec![
            Entry::Begin(at(1, 0, 0, 0, "s0")),
            step(1, 0, 0, 1, "s1"),
            Entry::Commit(at(1, 0, 1, 1, "s1")),
            step(1, 0, 1, 2, "other"),
            Entry::Restore(at(1, 0, 1, 1, "s1")),
            Entry::Begin(at(2, 0, 1, 1, "s1")),
            step(2, 0, 1, 2, "s2"),
            Entry::Commit(at(2, 0, 2, 2, "s2")),
            end(2, 2, 2, "s2"),
        ]
    }

    fn broken(change: impl FnOnce(&mut Vec<Entry>)) -> String {
        let mut entries = job();
        change(&mut entries);
        check(&entries, 2).unwrap_err()
    }

    #[test]
    fn what_follows_the_last_commit_is_done_again() {
        let history = check(&job(), 2).unwrap();
        assert_eq!((history.rounds, history.commits, history.steps_undone), (2, 2, 1));
        assert_eq!((history.restores, history.losses.len()), (1, 2));
    }

    #[test]
    fn a_round_must_not_go_on_from_a_commit_that_was_undone() {
        let undone = broken(|entries| {
            entries.insert(4, Entry::Commit(at(1, 0, 2, 2, "other")));
            entries.push(Entry::Begin(at(3, 1, 2, 2, "other")));
        });
        assert!(undone.contains("had been undone"), "{undone}");
    }

    #[test]
    fn a_commit_that_is_complete_must_not_be_lost() {
        let lost = broken(|entries| {
            entries[4] = Entry::Commit(at(1, 0, 2, 2, "other"));
            entries.insert(5, step(1, 0, 2, 3, "s3"));
        });
        assert!(lost.contains("was lost"), "{lost}");
    }

    #[test]
    fn a_worker_goes_back_to_the_weights_of_a_commit() {
        let error = broken(|entries| entries[4] = Entry::Restore(at(1, 0, 1, 1, "half")));
        assert!(error.contains("no commit has"), "{error}");
    }

    #[test]
    fn all_ranks_have_the_same_weights_at_each_step_commit_and_begin() {
        let error = broken(|entries| entries.push(step(2, 1, 1, 2, "other")));
        assert!(error.contains("different weights"), "{error}");
        let error = broken(|entries| entries.push(Entry::Commit(at(2, 1, 2, 2, "other"))));
        assert!(error.contains("ranks commit"), "{error}");
        let error = broken(|entries| entries.push(Entry::Begin(at(2, 1, 0, 0, "s0"))));
        assert!(error.contains("ranks begin"), "{error}");
    }

    #[test]
    fn every_step_and_commit_is_done_once() {
        let error = broken(|entries| drop(entries.remove(6)));
        assert!(error.contains("no worker has done the step"), "{error}");
        let error = broken(|entries| entries[7] = Entry::Commit(at(2, 0, 3, 2, "s2")));
        assert!(error.contains("is followed by"), "{error}");
        assert!(check(&job(), 3).unwrap_err().contains("2 steps, not 3"));
    }

    #[test]
    fn workers_end_with_the_weights_of_the_last_commit() {
        let error = broken(|entries| entries.push(end(2, 2, 2, "other")));
        assert!(error.contains("a worker ended"), "{error}");
        let error = broken(|entries| drop(entries.pop()));
        assert!(error.contains("no worker has ended"), "{error}");
    }
}
