//! Workers that stay in their process while the ranks change. The test plays what `steadfast.elastic` does in them.

use std::time::{Duration, Instant};

use steadfast_proto::v1::suspect_reply::Verdict;
use steadfast_tests::{Process, Scene, Signal, within};
use tonic::Code;

use crate::job::{ElasticJob, LIMIT, stubborn};
use crate::played::{Played, call_with, hub};

/// Prints where its agent is, and then one line after the other.
const WORKER: &str = "echo agent $STEADFAST_AGENT; while :; do echo tick; sleep 0.05; done";

/// Prints where its agent is, and ends with the code in a file, as soon as there is one.
fn ends_as_told(scene: &Scene, file: &str) -> String {
    let file = scene.path(file);
    let file = file.display();
    format!(
        "echo agent $STEADFAST_AGENT; while [ ! -e {file} ]; do sleep 0.05; done; exit $(cat {file})"
    )
}

/// Writes the code by which a worker ends.
fn tell(scene: &Scene, file: &str, code: &str) {
    scene.write("code", code);
    std::fs::rename(scene.path("code"), scene.path(file)).expect("it was written");
}

/// S003-25, S003-52: a worker joins the next round without a restart of its process. What it prints has its rank in
/// that round before it.
#[test]
fn the_output_of_a_worker_that_stays_has_its_current_rank() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:2", &["--last-call", "500ms"]);
    let agents = ["a", "b"].map(|name| job.agent_of(name, &[], &["sh", "-c", WORKER]));
    job.until_running(2);
    let is_first = |agent: &Process| agent.stdout().contains("[rank 0] tick");
    within(LIMIT, "both print", || {
        agents.iter().all(|agent| agent.stdout().contains("tick")).then_some(())
    });
    let (mut first, stays) = match agents {
        [a, b] if is_first(&a) => (a, b),
        [a, b] => (b, a),
    };
    let worker = Played::of(&stays, 0);
    first.signal(Signal::SIGKILL);
    assert_eq!(worker.next_round(1).rank, 0);
    first.end(LIMIT);
    within(LIMIT, "its lines have the new rank", || is_first(&stays).then_some(()));
    let text = stays.stdout();
    assert_eq!(text.matches("agent ").count(), 1, "the worker was not restarted: {text}");
    assert!(text.starts_with("[rank 1] agent "), "{text}");
}

/// S001-22: only processes that can read the environment of a worker can call its agent.
#[test]
fn a_call_without_the_token_of_the_agent_is_refused() {
    let scene = Scene::new();
    let args = ["run", "--standalone", "--", "sh", "-c", WORKER];
    let agent = scene.start("run", "steadfast", &args);
    let right = hub(&agent).1;
    assert_eq!(right.len(), 32, "it is random");
    for wrong in ["", "x", &right[..31], &right.to_uppercase().replace(char::is_numeric, "x")] {
        let status = call_with(&agent, wrong);
        assert_eq!(status.code(), Code::PermissionDenied, "{status:?}");
        assert_eq!(status.message(), "the call lacks the token of this agent");
    }
    Played::of(&agent, 0);
}

/// S001-37: whether a failed operation is the fault of another worker is not a matter of time: the agent of that
/// worker reports its failure at once, even if its other workers take long to end.
#[test]
fn a_worker_learns_of_the_failure_of_another_before_the_next_round_is_asked_for() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "2:2", &[]);
    let a = job.agent_of("a", &["--lease-ttl", "60s"], &["sh", "-c", WORKER]);
    let stubborn = stubborn(&scene).display().to_string();
    let fails = ends_as_told(&scene, "b-ends");
    let script = format!("[ $LOCAL_RANK = 1 ] && exec sh {stubborn}; {fails}");
    let flags = ["--nproc-per-node", "2", "--grace", "1h"];
    let b = job.agent_of("b", &flags, &["sh", "-c", &script]);
    job.until_running(3);
    within(LIMIT, "both workers run", || b.stdout().contains("ready").then_some(()));
    hub(&b);
    let worker = Played::of(&a, 0);
    tell(&scene, "b-ends", "7");
    assert_eq!(worker.verdict(1, Duration::from_secs(10)), Verdict::Over, "{}", a.stderr());
    assert!(a.stderr().contains("has failed"), "{}", a.stderr());
    let status = job.until("the failure is shown", |status| !status["exits"].is_null());
    assert_eq!(status["state"], "running", "no member has asked for another round: {status}");
}

/// S001-37: a worker whose round goes on is told so when every loss would be known, and not before.
#[test]
fn a_worker_learns_that_its_round_goes_on_when_a_lease_has_passed() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "2:2", &[]);
    let flags = ["--lease-ttl", "2s"];
    let [a, _b] = ["a", "b"].map(|name| job.agent_of(name, &flags, &["sh", "-c", WORKER]));
    job.until_running(2);
    let worker = Played::of(&a, 0);
    let begun = Instant::now();
    assert_eq!(worker.verdict(1, Duration::from_secs(10)), Verdict::GoesOn, "{}", a.stderr());
    assert!(Duration::from_secs(2) <= begun.elapsed());
    assert_eq!(
        worker.verdict(1, Duration::ZERO),
        Verdict::Unknown,
        "the next question is a new one"
    );
}

/// S003-25: a worker that fails while its node waits for the next round counts at once.
#[test]
fn a_failure_between_rounds_counts_when_it_happens() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "2:2", &[]);
    let script = ends_as_told(&scene, "a-ends");
    let flags = ["--max-restarts", "0"];
    let mut a = job.agent_of("a", &flags, &["sh", "-c", &script]);
    let flags = ["--reset-timeout", "1h", "--grace", "1h"];
    let b = job.agent_of("b", &flags, &["sh", "-c", WORKER]);
    job.until_running(2);
    // The other node stays in the round, so the next one is not formed.
    let _stays = Played::of(&b, 0);
    // A worker that closes its connection does not wait for the next round any more.
    let waits = Played::of(&a, 0);
    waits.leave(1);
    job.until("one node waits", |status| status["state"] == "gathering");
    tell(&scene, "a-ends", "7");
    let ended = a.end(LIMIT);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("ended with exit code 7 between rounds"), "{}", ended.stderr);
}

/// S003-26: the time for the last commit is a part of the grace.
#[test]
fn an_orderly_leave_takes_one_grace() {
    const GRACE: Duration = Duration::from_secs(8);
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "2:2", &[]);
    let script = "trap 'echo asked' TERM; echo agent $STEADFAST_AGENT; while :; do sleep 0.1; done";
    let grace = format!("{}s", GRACE.as_secs());
    let mut a = job.agent_of("a", &["--grace", &grace], &["sh", "-c", script]);
    let _b = job.agent_of("b", &[], &["sh", "-c", WORKER]);
    job.until_running(2);
    let _connected = Played::of(&a, 0);
    let begun = Instant::now();
    a.signal(Signal::SIGTERM);
    within(LIMIT, "it is asked to end", || a.stdout().contains("asked").then_some(()));
    let asked = begun.elapsed();
    assert!(GRACE / 2 <= asked && asked < GRACE, "{asked:?}");
    let ended = a.end(LIMIT);
    assert_eq!(ended.code, Some(143), "{}", ended.stderr);
    let took = begun.elapsed();
    assert!(asked + Duration::from_secs(1) < took, "it has the rest of the grace: {took:?}");
    assert!(took < GRACE + Duration::from_secs(3), "{took:?}");
}

/// S003-25: workers that succeed while their agent waits for their last commit have succeeded for the job.
#[test]
fn a_success_while_the_agent_leaves_is_reported() {
    let scene = Scene::new();
    let mut job = ElasticJob::start(&scene, "2:2", &[]);
    let script = ends_as_told(&scene, "a-ends");
    let mut a = job.agent_of("a", &["--grace", "1h"], &["sh", "-c", &script]);
    let script = ends_as_told(&scene, "b-ends");
    let mut b = job.agent_of("b", &[], &["sh", "-c", &script]);
    job.until_running(2);
    let _connected = Played::of(&a, 0);
    a.signal(Signal::SIGTERM);
    within(LIMIT, "the worker takes part", || a.stderr().contains("take part").then_some(()));
    tell(&scene, "a-ends", "0");
    let ended = a.end(LIMIT);
    assert_eq!(ended.code, Some(143), "{}", ended.stderr);
    assert!(ended.stderr.contains("the master knows that the workers have succeeded"));
    tell(&scene, "b-ends", "0");
    let ended = b.end(LIMIT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout.matches("agent ").count(), 1, "it does not run again");
    assert_eq!(job.end().code, Some(0));
}

/// S003-25: a worker that is killed since it did not leave its round is no cause of that: the failure of the
/// collective counts.
#[test]
fn a_kill_of_a_worker_that_does_not_leave_its_round_excuses_no_failure() {
    let scene = Scene::new();
    let flags = ["run", "--standalone", "--nproc-per-node", "2", "--reset-timeout", "1s"];
    let args = [&flags[..], &["--max-restarts", "0", "--", "sh", "-c", WORKER]].concat();
    let mut agent = scene.start("run", "steadfast", &args);
    within(LIMIT, "both workers run", || {
        (agent.stdout().matches("agent ").count() == 2).then_some(())
    });
    let [leaves, _stays] = [0, 1].map(|local_rank| Played::of(&agent, local_rank));
    leaves.leave(1);
    let ended = agent.end(LIMIT);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    for text in [
        "the worker did not leave the round in time; killing it",
        "not counted as a failure",
        "it was killed",
        "a collective failed, and no node or worker was lost",
    ] {
        assert!(ended.stderr.contains(text), "{}", ended.stderr);
    }
}
