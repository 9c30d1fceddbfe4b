//! Whole jobs with `steadfast local`: real programs, real processes, real kills.

use std::sync::OnceLock;
use std::time::Duration;

use safetensors::SafeTensors;
use serde_json::Value;
use steadfast_tests::{Cluster, EtcdServer, Job, Run, Scene, Signal, eventually};

fn sha(summary: &Value) -> String {
    summary["parameters_sha256"].as_str().expect("a finished job has parameters").to_owned()
}

/// Returns the SHA-256 of the small job, trained with one trainer and one pserver.
fn small_sha() -> &'static str {
    static SHA: OnceLock<String> = OnceLock::new();
    SHA.get_or_init(|| {
        let scene = Scene::new();
        let more = ["--trainers", "1", "--pservers", "1"];
        sha(&Run::to_end(&scene, &Job::small(), "data", &more))
    })
}

/// Returns the SHA-256 of the long job after an undisturbed run.
fn long_sha() -> String {
    sha(&Run::undisturbed(&Job::long()))
}

/// S004-50, D5, F43, I7
#[test]
fn a_synchronous_result_is_the_same_for_any_number_of_trainers_and_pservers() {
    let expected = small_sha();
    let scene = Scene::new();
    for (trainers, pservers) in [("2", "1"), ("1", "2"), ("3", "2"), ("2", "3"), ("3", "3")] {
        let data = format!("data-{trainers}x{pservers}");
        let more = ["--trainers", trainers, "--pservers", pservers];
        let summary = Run::to_end(&scene, &Job::small(), &data, &more);
        assert_eq!(sha(&summary), expected, "{trainers} trainers, {pservers} pservers");
    }
}

/// S004-50
#[test]
fn a_synchronous_result_is_the_same_with_a_real_etcd() {
    let expected = small_sha();
    let scene = Scene::new();
    let etcd = EtcdServer::real(&scene);
    let summary = Run::to_end(&scene, &Job::small(), "data", &["--etcd", &etcd.url()]);
    assert_eq!(sha(&summary), expected);
}

/// S004-50
#[test]
fn a_synchronous_result_with_a_clipped_norm_is_the_same_for_any_number_of_processes() {
    let job = Job::small().with("kind = \"adam\"", "kind = \"adam\"\nclip_norm = 0.5");
    let unclipped = small_sha();
    let scene = Scene::new();
    let run = |data: &str, trainers: &str, pservers: &str| {
        sha(&Run::to_end(&scene, &job, data, &["--trainers", trainers, "--pservers", pservers]))
    };
    let alone = run("data-1x1", "1", "1");
    assert_eq!(run("data-2x3", "2", "3"), alone);
    assert_ne!(alone, unclipped, "the norm was clipped");
}

/// S004-50: compression is lossy, but deterministic for any placement.
#[test]
fn a_synchronous_result_with_compressed_gradients_is_the_same_for_any_number_of_processes() {
    let exact = small_sha();
    let scene = Scene::new();
    for form in ["bf16", "f16", "int8"] {
        let compression = format!("[gradients]\ncompression = \"{form}\"\n\n[sync]");
        let job = Job::small().with("[sync]", &compression);
        let run = |trainers: &str, pservers: &str| {
            let data = format!("data-{form}-{trainers}x{pservers}");
            let more = ["--trainers", trainers, "--pservers", pservers];
            Run::to_end(&scene, &job, &data, &more)
        };
        let alone = run("1", "1");
        assert_eq!(sha(&run("3", "2")), sha(&alone), "{form}");
        assert_ne!(sha(&alone), exact, "{form}");
        let accuracy = alone["metric"].as_f64().expect("it is evaluated");
        assert!(0.9 < accuracy, "{form}: {accuracy}");
    }
}

/// Asynchronous training learns from a tenth of the gradient, because the rest is carried over to the
/// next one.
#[test]
fn an_asynchronous_job_learns_from_compressed_gradients() {
    let scene = Scene::new();
    for form in ["compression = \"int8\"", "compression = \"top_k\"\nkeep = 0.1"] {
        let compression = format!("[gradients]\n{form}\n\n[async]");
        let job = Job::asynchronous().with("[async]", &compression);
        let data = format!("data-{}", form.len());
        let summary = Run::to_end(&scene, &job, &data, &[]);
        let accuracy = summary["metric"].as_f64().expect("it is evaluated");
        assert!(0.9 < accuracy, "{form}: {accuracy}");
    }
}

/// S004-1, S004-2
#[test]
fn the_synchronous_example_learns_the_digits() {
    let scene = Scene::new();
    let summary = Run::to_end(&scene, &Job::example("digits"), "data", &[]);
    assert_eq!(summary["metric_name"], "accuracy");
    assert!(0.97 <= summary["metric"].as_f64().unwrap(), "{summary}");
    assert_eq!(summary["passes"], 120);
    assert_eq!(summary["steps"], 1440);
    assert_eq!(summary["examples"], 172_800);
    assert_eq!(summary["discarded"]["tasks"], 0);
}

/// S004-51, S004-52
#[test]
fn the_asynchronous_example_learns_the_digits() {
    let scene = Scene::new();
    let summary = Run::to_end(&scene, &Job::asynchronous(), "data", &[]);
    assert!(0.94 <= summary["metric"].as_f64().unwrap(), "{summary}");
    assert_eq!(summary["mode"], "async");
}

#[test]
fn the_linear_example_finds_the_line() {
    let scene = Scene::new();
    let summary = Run::to_end(&scene, &Job::example("linear"), "data", &[]);
    assert_eq!(summary["metric_name"], "rmse");
    assert!(summary["metric"].as_f64().unwrap() < 0.05, "{summary}");
}

/// S004-36
#[test]
fn the_model_is_a_safetensors_file_with_names_and_shapes_of_its_layers() {
    let scene = Scene::new();
    let summary = Run::to_end(&scene, &Job::small(), "data", &[]);
    let path = summary["model"].as_str().expect("a finished job has a model");
    let bytes = std::fs::read(path).expect("the model is where the summary says");
    let model = SafeTensors::deserialize(&bytes).expect("it is a safetensors file");
    let mut tensors: Vec<(String, Vec<usize>)> =
        model.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec())).collect();
    tensors.sort();
    let expected = [
        ("layers.0.bias", vec![16]),
        ("layers.0.weight", vec![16, 64]),
        ("layers.1.bias", vec![10]),
        ("layers.1.weight", vec![10, 16]),
    ];
    assert_eq!(tensors, expected.map(|(name, shape)| (name.to_owned(), shape)));
}

/// Kills one process of a role during training; the result must not change.
fn a_killed_process_changes_nothing(role: &str, more: &[&str]) {
    let expected = long_sha();
    let scene = Scene::new();
    let mut run = Run::start(&scene, &Job::long(), more);
    run.until_step(300);
    run.kill_one(role);
    assert_eq!(sha(&run.finish()), expected);
    scene.leaves_no_process();
}

/// S004-2, S004-33, S004-34, F7, F42
#[test]
fn a_killed_trainer_does_not_change_a_synchronous_result() {
    a_killed_process_changes_nothing("trainer", &[]);
}

/// S004-2, S004-46, D14, F4
#[test]
fn a_killed_pserver_does_not_change_a_synchronous_result() {
    a_killed_process_changes_nothing("pserver", &[]);
}

/// S004-2, S004-21, S004-24, F1, S004-32
#[test]
fn a_killed_master_does_not_change_a_synchronous_result() {
    a_killed_process_changes_nothing("master", &["--masters", "1"]);
}

/// S004-2, S004-20
#[test]
fn kills_of_every_role_one_after_another_do_not_change_a_synchronous_result() {
    let expected = long_sha();
    let scene = Scene::new();
    let mut run = Run::start(&scene, &Job::long(), &["--masters", "2", "--trainers", "3"]);
    for (step, role) in [(200, "trainer"), (500, "pserver"), (800, "master"), (1100, "trainer")] {
        run.until_step(step);
        scene.kill(&scene.one_of(role));
    }
    assert_eq!(sha(&run.finish()), expected);
    scene.leaves_no_process();
}

/// S004-2, S004-16, S004-34
#[test]
fn an_asynchronous_job_survives_a_killed_trainer() {
    let scene = Scene::new();
    let job = Job::asynchronous().with("passes = 30", "passes = 40");
    let mut run = Run::start(&scene, &job, &[]);
    run.until_pass(5);
    run.kill_one("trainer");
    let summary = run.finish();
    assert!(0.94 <= summary["metric"].as_f64().unwrap(), "{summary}");
    scene.leaves_no_process();
}

/// S004-2, S004-46, S004-70
#[test]
fn an_asynchronous_job_survives_a_killed_pserver() {
    let scene = Scene::new();
    let job = Job::asynchronous().with("every = \"10s\"", "every = \"500ms\"");
    let mut run = Run::start(&scene, &job, &[]);
    run.until("a checkpoint exists", |it| it["checkpoint"].is_string());
    run.kill_one("pserver");
    let summary = run.finish();
    assert!(0.94 <= summary["metric"].as_f64().unwrap(), "{summary}");
    scene.leaves_no_process();
}

/// The other trainer waits at the staleness gate until the lease of the stopped one expires.
fn a_stopped_trainer_does_not_block_the_others_forever(max_staleness: u32) {
    let scene = Scene::new();
    let bound = format!("max_staleness = {max_staleness}");
    // So many passes that the other trainer is seen alone.
    let job =
        Job::asynchronous().with("max_staleness = 8", &bound).with("passes = 30", "passes = 50");
    let mut run = Run::start(&scene, &job, &["--trainers", "2"]);
    run.until_pass(1);
    let trainer = scene.one_of("trainer");
    scene.signal(&trainer, Signal::SIGSTOP);
    run.until("the stopped trainer counts as lost", |it| {
        it["trainers"].as_array().is_some_and(|it| it.len() == 1)
    });
    scene.kill(&trainer);
    let summary = run.finish();
    assert_eq!(summary["passes"], 50);
    scene.leaves_no_process();
}

/// S004-51
#[test]
fn a_trainer_stopped_in_lock_step_does_not_block_the_others_forever() {
    a_stopped_trainer_does_not_block_the_others_forever(0);
}

/// S004-51
#[test]
fn a_trainer_stopped_within_a_staleness_of_two_does_not_block_the_others_forever() {
    a_stopped_trainer_does_not_block_the_others_forever(2);
}

/// S004-2, S004-42, S004-45
#[test]
fn an_interrupted_run_prints_how_to_resume_and_resumes_to_the_same_result() {
    let expected = long_sha();
    let scene = Scene::new();
    let job = Job::long().with("every_steps = 200", "every = \"1h\"");
    let mut run = Run::start(&scene, &job, &[]);
    run.until_step(500);
    run.signal(Signal::SIGINT);
    let ended = run.end();
    scene.leaves_no_process();
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert_eq!(ended.summary()["state"], "drained");
    assert!(ended.stderr.contains("took checkpoint "), "{}", ended.stderr);
    assert!(ended.stderr.contains("resume it with the same command: "), "{}", ended.stderr);

    let mut run = Run::start(&scene, &job, &[]);
    let status = run.until("it trains", |it| it["state"] == "training");
    assert!(status["version"].as_u64() >= Some(500), "it started from the beginning: {status}");
    assert_eq!(sha(&run.finish()), expected);
    scene.leaves_no_process();
}

/// S004-2, S004-42
#[test]
fn a_killed_run_leaves_no_process_and_resumes_to_the_same_result() {
    let expected = long_sha();
    let scene = Scene::new();
    let mut run = Run::start(&scene, &Job::long(), &[]);
    run.until("a checkpoint exists", |it| it["checkpoint"].is_string());
    run.signal(Signal::SIGKILL);
    run.end();
    scene.leaves_no_process();
    assert_eq!(sha(&Run::start(&scene, &Job::long(), &[]).finish()), expected);
    scene.leaves_no_process();
}

/// S004-24
#[test]
fn the_command_of_a_finished_job_prints_the_same_summary_again() {
    let scene = Scene::new();
    let first = Run::to_end(&scene, &Job::small(), "data", &[]);
    let again = Run::start_in(&scene, &Job::small(), "data", &[]).end();
    assert_eq!((again.code, again.summary()), (Some(0), first.clone()));
    // It says that it trains nothing.
    assert!(
        again
            .stderr
            .contains("nothing is started, since job digits has ended before: it succeeded at")
    );
    eventually("nothing is left", || scene.processes().is_empty().then_some(()));
    assert!(Duration::ZERO < Duration::from_secs_f64(first["wall_seconds"].as_f64().unwrap()));
}

/// F18: processes may start before etcd. They say what they wait for, leave when they are told to, and begin when
/// it answers.
#[test]
fn processes_that_start_before_etcd_wait_for_it() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::small(), 1, "2s");
    cluster.etcd.signal(Signal::SIGSTOP);
    let members =
        [cluster.master("master"), cluster.pserver("pserver"), cluster.trainer("trainer")];
    let mut leaver = cluster.trainer("leaver");
    for member in members.iter().chain([&leaver]) {
        eventually("it says that it waits", || {
            let ready = member.ask("/readyz")?;
            ready.body.contains("waiting for etcd").then_some(())
        });
        assert_eq!(member.ask("/healthz").map(|it| it.code), Some(200));
    }
    leaver.signal(Signal::SIGTERM);
    assert_eq!(leaver.end().code, Some(0));
    cluster.etcd.signal(Signal::SIGCONT);
    assert_eq!(cluster.result()["state"], "finished");
}

/// The exit code of the probe reports the state of the admin port to container supervisors.
#[test]
fn a_probe_distinguishes_alive_ready_and_dead() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::small(), 1, "2s");
    let first = cluster.master("first");
    eventually("the first master acts", || first.is_ready().then_some(()));
    let second = cluster.master("second");
    eventually("the second one is alive", || second.ask("/healthz"));
    let probe = |args: &[&str]| {
        let output = cluster.command("steadfast").arg("probe").args(args).output();
        let output = output.expect("the program starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(probe(&[&first.admin]).0, Some(0));
    assert_eq!(probe(&[&first.admin, "--ready"]).0, Some(0));
    assert_eq!(probe(&[&second.admin]).0, Some(0));
    let (code, reason) = probe(&[&second.admin, "--ready"]);
    assert!(code == Some(6) && reason.contains("not ready: "), "{code:?} {reason}");
    let (code, reason) = probe(&[&steadfast_tests::free_address().to_string()]);
    assert!(code == Some(6) && reason.contains("does not answer"), "{code:?} {reason}");
    let (code, reason) = probe(&["no address"]);
    assert!(code == Some(2) && reason.contains("HOST:PORT"), "{code:?} {reason}");
}
