//! The number of trainers that work.

use std::fs;
use std::time::Duration;

use serde_json::Value;
use steadfast_tests::{Cluster, Job, Run, Scene, Signal, eventually};

/// Longer than any test.
const LONG: &str = "600s";

const LIMIT: Duration = Duration::from_secs(60);

/// Returns how many lanes each trainer has, in ascending order.
fn lanes(status: &Value) -> Vec<usize> {
    let trainers = status["trainers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut lanes: Vec<usize> =
        trainers.iter().filter_map(|it| it["lanes"].as_array().map(Vec::len)).collect();
    lanes.sort_unstable();
    lanes
}

fn scale(cluster: &Cluster, args: &[&str]) -> String {
    let output = cluster.steadfast(&[&["scale"], args].concat());
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

/// S002-10, S004-34, I7: trainers beyond the number wait, one of them takes the place of a lost one at once, and the result
/// has the same bits.
#[test]
fn trainers_beyond_the_number_wait() {
    let scene = Scene::new();
    let job = Job::long().with("passes = 300", "passes = 900");
    let expected = Run::to_end(&scene, &job, "alone", &[])["parameters_sha256"].clone();

    let cluster = Cluster::new(&scene, &job, 1, LONG);
    let _master = cluster.master("master");
    eventually("a master acts", || cluster.acting_now());
    assert!(scale(&cluster, &["--trainers", "1"]).contains("at most 1, chosen by a person"));
    let first = cluster.trainer("first");
    cluster.until("it is registered", |it| lanes(it).len() == 1);
    let _others = ["second", "third"].map(|it| cluster.trainer(it));
    let status = cluster.until("one works, and two wait", |it| lanes(it) == [0, 0, 8]);
    let trainers = status["trainers"].as_array().expect("they are listed");
    let waiting = trainers.iter().filter(|it| it["is_surplus"] == true).count();
    assert_eq!(waiting, 2, "{status}");
    // Only now can training begin.
    let _pserver = cluster.pserver("pserver");
    first.signal(Signal::SIGKILL);
    cluster.until("the next one works", |it| lanes(it) == [0, 8]);
    assert!(scale(&cluster, &["--trainers", "all"]).contains("as many as there are"));
    cluster.until("all work", |it| lanes(it) == [4, 4]);
    assert_eq!(cluster.result()["parameters_sha256"], expected);
}

/// S002-10: a command that follows the number is called for each, and the master knows that more trainers can be started.
#[test]
fn a_command_follows_the_number_of_trainers() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, LONG);
    let _master = cluster.master("master");
    eventually("a master acts", || cluster.acting_now());
    let script = "echo $1 $STEADFAST_WORKERS >> asked\n";
    let script = scene.write("platform.sh", script).display().to_string();
    let url = cluster.etcd.url();
    let args = ["scale", "--follow", "--most", "6", "--job", "digits", "--etcd-endpoints", &url];
    let args = [&args[..], &["--", "sh", &script, "{trainers}"]].concat();
    let mut follower = scene.start("follower", "steadfast", &args);
    let asked = |expected: &str| {
        eventually(&format!("the command was asked for {expected:?}"), || {
            let found = fs::read_to_string(scene.path("asked")).unwrap_or_default();
            (found == expected).then_some(())
        });
    };
    asked("6 6\n");
    scale(&cluster, &["--trainers", "2"]);
    asked("6 6\n2 2\n");
    let desired = cluster.value(&cluster.keys.trainers_desired()).expect("it was chosen");
    assert_eq!((&desired["workers"], &desired["startable"]), (&2.into(), &6.into()));
    follower.signal(Signal::SIGTERM);
    assert_eq!(follower.end(LIMIT).code, Some(0));
    let desired = cluster.value(&cluster.keys.trainers_desired()).expect("it was chosen");
    assert!(desired["startable"].is_null(), "{desired}");
}

/// S002-10: what is asked of a job of another kind is refused with the way out.
#[test]
fn a_number_that_a_job_does_not_have_is_refused() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, LONG);
    let _master = cluster.master("master");
    eventually("a master acts", || cluster.acting_now());
    let refused = scale(&cluster, &["--workers", "2"]);
    assert!(refused.contains("is not elastic: use --trainers or --slots"), "{refused}");
}
