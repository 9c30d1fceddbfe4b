//! Rules of the driver, with a machine that adds numbers, and a twin of etcd in memory.

use std::collections::BTreeMap;
use std::future::pending;

use steadfast_common::error::ErrorKind;
use steadfast_common::machine::Size;

use super::*;

/// Adds numbers to named sums.
#[derive(Debug, Default)]
struct Sums {
    sums: BTreeMap<String, u64>,
    /// Sums that are doubled when they are due.
    to_double: Vec<String>,
    shows_commits: bool,
    is_over: bool,
}

#[derive(Debug)]
enum Input {
    Add {
        name: String,
        number: u64,
    },
    /// A change of nothing.
    Read(String),
    /// Doubles sums, one after another.
    Double(Vec<String>),
    /// Leads to another input.
    Lead(Box<Input>),
    /// Takes as many bytes as are asked for.
    Large(usize),
    ShowCommits,
    /// Makes this many facts, and then two, that are committed ahead of one other.
    Ahead(u64),
    End,
}

#[derive(Debug, PartialEq, Eq)]
struct Sum {
    name: String,
    sum: u64,
    padding: usize,
}

#[derive(Debug)]
enum Effect {
    Answer(String),
    Lead(Box<Input>),
}

impl Sums {
    fn set(&mut self, name: String, sum: u64, decision: &mut Decision<Self>) {
        self.sums.insert(name.clone(), sum);
        decision.effects.push(Effect::Answer(format!("{name}={sum}")));
        decision.facts.push(Sum { name, sum, padding: 0 });
    }
}

impl Machine for Sums {
    type Input = Input;
    type Fact = Sum;
    type Effect = Effect;

    fn handle(&mut self, _: Moment, input: Input, decision: &mut Decision<Self>) {
        match input {
            Input::Add { name, number } => {
                let sum = self.sums.get(&name).copied().unwrap_or(0) + number;
                self.set(name, sum, decision);
            }
            Input::Read(name) => {
                let sum = self.sums.get(&name).copied().unwrap_or(0);
                decision.effects.push(Effect::Answer(format!("{name}={sum}")));
            }
            Input::Double(names) => self.to_double = names,
            Input::Lead(input) => decision.effects.push(Effect::Lead(input)),
            Input::Large(padding) => {
                let name = format!("large {}", self.sums.len());
                self.sums.insert(name.clone(), 0);
                decision.facts.push(Sum { name, sum: 0, padding });
            }
            Input::Ahead(count) => {
                let sums = (0..count).map(|it| Sum { name: format!("{it}"), sum: 0, padding: 0 });
                decision.ahead.push(sums.collect());
                // A key that is in the first list and sorts before it.
                let again =
                    ["+", "0"].map(|name| Sum { name: name.to_owned(), sum: 1, padding: 0 });
                decision.ahead.push(again.into());
                self.set("last".to_owned(), count, decision);
            }
            Input::ShowCommits => self.shows_commits = true,
            Input::End => self.is_over = true,
        }
    }

    fn committed(&mut self, moment: Moment, effects: &mut Vec<Effect>) {
        if self.shows_commits {
            effects.push(Effect::Answer(format!("commit {}", moment.revision)));
        }
    }

    fn due(&mut self, _: Moment, decision: &mut Decision<Self>) {
        if let Some(name) = self.to_double.pop() {
            let sum = 2 * self.sums.get(&name).copied().unwrap_or(0);
            self.set(name, sum, decision);
        }
    }

    fn size_max(&self, input: &Input) -> Size {
        let bytes = if let Input::Large(bytes) = input { 100 + bytes } else { 100 };
        Size { changes: 1, bytes }
    }

    fn is_over(&self) -> bool {
        self.is_over
    }
}

/// What the tests observe, in order: `commit a b` and `answer`.
#[derive(Debug, Default)]
struct Outside {
    inputs: VecDeque<Input>,
    answers: Vec<String>,
}

/// Commits to memory until the scripted failure.
#[derive(Debug)]
struct Memory {
    commits: mpsc::UnboundedSender<Vec<String>>,
    revision: i64,
    revision_max: i64,
}

impl Commit for Memory {
    async fn commit(&mut self, ops: &[Op]) -> Result<i64, CoordError> {
        if self.revision == self.revision_max {
            return Err(CoordError::LeaseLost);
        }
        self.revision += 1;
        let keys = ops.iter().map(|op| op.key().to_owned()).collect();
        self.commits.send(keys).expect("the test reads them");
        Ok(self.revision)
    }
}

impl Host for Outside {
    type Machine = Sums;
    type Error = CoordError;

    async fn next(&mut self, _: &Sums) -> Result<Input, CoordError> {
        match self.inputs.pop_front() {
            Some(input) => Ok(input),
            None => pending().await,
        }
    }

    fn write(&self, fact: &Sum, transaction: &mut Transaction) {
        let value = vec![0; fact.padding];
        transaction.add(Op::put_leased(&fact.name, value, 0));
    }

    async fn perform(&mut self, _: &Sums, effect: Effect) -> Result<Option<Input>, CoordError> {
        match effect {
            Effect::Answer(answer) => {
                self.answers.push(answer);
                Ok(None)
            }
            Effect::Lead(input) => Ok(Some(*input)),
        }
    }
}

/// The result of a run: the keys of each transaction, the answers, and whether the term ended without an error.
struct Ran {
    commits: Vec<Vec<String>>,
    answers: Vec<String>,
    end: Result<End<Sums>, CoordError>,
}

/// Runs a term until all is decided; the commit after `commits_max` others fails.
async fn run(inputs: Vec<Input>, requests: Vec<Input>, commits_max: i64) -> Ran {
    let (commits, mut committed) = mpsc::unbounded_channel();
    let memory = Memory { commits, revision: 0, revision_max: commits_max };
    let (term, tx) = Term::new(Sums::default(), memory);
    for request in requests {
        tx.try_send(request).expect("there is room");
    }
    let mut outside = Outside { inputs: inputs.into(), answers: Vec::new() };
    let end = term.run(&mut outside, pending()).await;
    let mut commits = Vec::new();
    while let Ok(keys) = committed.try_recv() {
        commits.push(keys);
    }
    Ran { commits, answers: outside.answers, end }
}

fn add(name: &str, number: u64) -> Input {
    Input::Add { name: name.to_owned(), number }
}

fn read(name: &str) -> Input {
    Input::Read(name.to_owned())
}

#[tokio::test]
async fn requests_that_wait_are_decided_in_order_and_committed_together() {
    let requests = vec![add("a", 1), add("b", 2), add("a", 3), read("b"), Input::End];
    let ran = run(Vec::new(), requests, 9).await;
    assert_eq!(ran.commits, [["a", "b"]]);
    assert_eq!(ran.answers, ["a=1", "b=2", "a=4", "b=2"]);
    assert!(matches!(ran.end, Ok(End::Over(_))));
}

#[tokio::test]
async fn a_failed_commit_ends_the_term_and_releases_no_answer() {
    for commits_max in 0..3 {
        let inputs = vec![add("a", 1), add("a", 1), add("a", 1), Input::End];
        let ran = run(inputs, Vec::new(), commits_max).await;
        assert_eq!(ran.commits.len(), commits_max as usize);
        assert_eq!(ran.answers.len(), commits_max as usize);
        assert_eq!(ran.end.unwrap_err().kind(), ErrorKind::Stale);
    }
}

#[tokio::test]
async fn decisions_without_facts_commit_nothing() {
    let ran = run(vec![read("a"), Input::End], Vec::new(), 0).await;
    assert_eq!((ran.commits.len(), ran.answers), (0, vec!["a=0".to_owned()]));
    assert!(ran.end.is_ok());
}

/// Neither the number of changes nor the bytes of a transaction exceed their limits, and no request is lost or
/// overtakes another.
#[tokio::test]
async fn a_request_without_room_comes_next() {
    let count = 3 * crate::OPS_MAX as u64 + 7;
    let mut requests: Vec<Input> = (0..count).map(|it| add(&format!("{it:04}"), it)).collect();
    requests.push(Input::End);
    let ran = run(Vec::new(), requests, 9).await;
    let sizes: Vec<usize> = ran.commits.iter().map(Vec::len).collect();
    assert_eq!(sizes, [crate::OPS_MAX, crate::OPS_MAX, crate::OPS_MAX, 7]);
    let answers: Vec<String> = (0..count).map(|it| format!("{it:04}={it}")).collect();
    assert_eq!(ran.answers, answers);

    let mut requests: Vec<Input> = (0..5).map(|_| Input::Large(500 * 1024)).collect();
    requests.push(Input::End);
    let ran = run(Vec::new(), requests, 9).await;
    let sizes: Vec<usize> = ran.commits.iter().map(Vec::len).collect();
    assert_eq!(sizes, [2, 2, 1]);
}

/// A request that is left over does not keep the others from being heard, and stays the first of the requests.
#[tokio::test]
async fn other_inputs_come_before_requests() {
    let large = || Input::Large(1000 * 1024);
    let requests = vec![large(), large(), read("a"), Input::End];
    let ran = run(vec![add("a", 1), add("a", 2)], requests, 9).await;
    let first = ran.commits.iter().map(|keys| keys[0].as_str());
    assert_eq!(first.collect::<Vec<_>>(), ["a", "a", "large 1", "large 2"]);
    assert_eq!(ran.answers, ["a=1", "a=3", "a=3"]);
}

#[tokio::test]
async fn what_is_due_is_committed_until_nothing_is() {
    let names = vec!["a".to_owned(), "b".to_owned(), "a".to_owned()];
    let inputs = vec![add("a", 1), add("b", 1), Input::Double(names), read("a"), Input::End];
    let ran = run(inputs, Vec::new(), 9).await;
    assert_eq!(ran.commits, [["a"], ["b"], ["a"], ["b"], ["a"]]);
    assert_eq!(ran.answers, ["a=1", "b=1", "a=2", "b=2", "a=4", "a=4"]);
}

/// Nothing is answered before the last transaction, without which the others have no effect.
#[tokio::test]
async fn facts_ahead_are_committed_list_by_list_in_as_many_transactions_as_needed() {
    let count = crate::OPS_MAX as u64 + 3;
    let ran = run(vec![Input::Ahead(count), Input::End], Vec::new(), 9).await;
    let sizes: Vec<usize> = ran.commits.iter().map(Vec::len).collect();
    assert_eq!(sizes, [crate::OPS_MAX, 3, 2, 1]);
    assert_eq!(ran.answers, [format!("last={count}")]);
    for commits_max in 0..4 {
        let ran = run(vec![Input::Ahead(count), Input::End], Vec::new(), commits_max).await;
        assert_eq!((ran.answers.len(), ran.end.is_err()), (0, true));
    }
}

#[tokio::test]
async fn a_machine_learns_of_each_commit_and_its_revision() {
    let inputs = vec![add("a", 1), Input::ShowCommits, add("a", 1), read("a"), Input::End];
    let ran = run(inputs, Vec::new(), 9).await;
    assert_eq!(ran.answers, ["a=1", "commit 2", "a=2", "a=2"]);
}

/// An effect that reads something returns what it found as the next input.
#[tokio::test]
async fn an_input_that_an_effect_leads_to_is_decided_before_all_others() {
    let lead = Input::Lead(Box::new(add("a", 1)));
    let ran = run(vec![lead, add("a", 10)], vec![add("a", 100), Input::End], 9).await;
    assert_eq!(ran.answers, ["a=1", "a=11", "a=111"]);
}

#[tokio::test]
async fn a_term_ends_when_its_process_leaves() {
    let memory = Memory { commits: mpsc::unbounded_channel().0, revision: 0, revision_max: 0 };
    let (term, tx) = Term::new(Sums::default(), memory);
    tx.try_send(add("a", 1)).expect("there is room");
    let end = term.run(&mut Outside::default(), std::future::ready(())).await;
    let Ok(End::Left(machine)) = end else { panic!("{end:?}") };
    assert!(machine.sums.is_empty());
}
