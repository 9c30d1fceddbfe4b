//! Runs the deployment of `deploy/compose.yaml`.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use steadfast_tests::{
    Agents, Deployment, Job, Run, Scene, Signal, docker, free_address, program, within,
};

/// Timeout of the job.
const JOB_MAX: Duration = Duration::from_secs(400);

/// Longest time that all processes together may take to exit.
const LEAVE_MAX: Duration = Duration::from_secs(20);

/// S004-1, S004-50, I7, F1, F4, F7, F22, F40: `up --wait` starts a job with certificates, etcd users and
/// checkpoints in S3. All processes exit and are restarted. The profile `chaos` disturbs the job;
/// processes are killed from the host, one is paused, one is disconnected, one loses only etcd, trainers
/// join. The job ends with the same bits as an undisturbed run on one machine, and no record is counted
/// twice.
#[test]
fn a_deployment_survives_failures_of_containers() {
    let scene = Scene::new();
    let job = Job::long().with("passes = 300", "passes = 1200").with("= 3500", "= 13500");
    let Some(deployment) = Deployment::up(&scene, &job) else { return };
    let status = || deployment.steadfast(&["status", "--json"]);
    let after = |more: u64| {
        let start = within(JOB_MAX, "there is a status", || status()?["version"].as_u64());
        within(JOB_MAX, "training continues", || {
            status().filter(|it| it["version"].as_u64() >= Some(start + more))
        })
    };
    let of = |service: &str, address: &Value| {
        let address = address.as_str().unwrap_or_default().to_owned();
        let found = deployment.running(service);
        let is_meant = |it: &str| address.starts_with(&format!("{it}:"));
        found.into_iter().find(|it| is_meant(&it.address)).expect("it runs")
    };

    let until = |what: &str, holds: &dyn Fn(&Value) -> bool| {
        within(JOB_MAX, what, || status().filter(|it| holds(it)).map(|_| ()));
    };

    after(100);
    // All processes receive SIGTERM at once, and none waits for one that has exited.
    let began = Instant::now();
    deployment.compose(&["stop", "master", "pserver", "trainer"]);
    assert!(began.elapsed() < LEAVE_MAX, "they exited after {:?}", began.elapsed());
    deployment.compose(&["up", "--detach", "--no-recreate", "--no-build"]);
    after(100);
    let disturbed = deployment.disturb(2);
    assert_eq!(disturbed.matches("chaos: ").count(), 2, "{disturbed}");
    let now = after(200);
    of("master", &now["master"]["address"]).kill();
    let now = after(200);
    of("pserver", &now["slots"][0]["address"]).kill();
    deployment.running("trainer")[0].kill();
    deployment.compose(&["up", "--detach", "--no-recreate", "--no-build", "--scale", "trainer=4"]);
    let now = after(200);

    let paused = deployment.running("trainer").remove(1);
    docker(&["pause", &paused.id]);
    let own = format!("{}:", paused.address);
    let is_its = |it: &Value| it["admin"].as_str().is_some_and(|it| it.starts_with(&own));
    until("its lanes are with others", &|it| {
        it["trainers"].as_array().is_some_and(|all| !all.iter().any(is_its))
    });
    docker(&["unpause", &paused.id]);
    let held = now["slots"][1]["address"].clone();
    let cut = of("pserver", &held);
    docker(&["network", "disconnect", &deployment.network(), &cut.id]);
    until("another one has its slot", &|it| {
        let holder = &it["slots"][1]["address"];
        holder.is_string() && *holder != held
    });
    docker(&["network", "connect", &deployment.network(), &cut.id]);
    let now = after(200);
    let acting = now["master"]["address"].clone();
    let deaf = of("master", &acting);
    deaf.in_its_network(&[
        "iptables", "-A", "OUTPUT", "-p", "tcp", "--dport", "2379", "-j", "DROP",
    ]);
    until("another master acts", &|it| {
        let master = &it["master"]["address"];
        master.is_string() && *master != acting
    });
    deaf.in_its_network(&["iptables", "-F", "OUTPUT"]);

    for service in ["master", "pserver", "trainer"] {
        let codes = within(JOB_MAX, "the job is over", || deployment.exit_codes(service));
        assert!(codes.iter().all(|code| *code == 0), "{service}: {codes:?}");
    }
    let audit = deployment.steadfast(&["audit", "--json"]).expect("there is an audit");
    assert_eq!(audit["clean"], true, "{audit}");
    let status = deployment.steadfast(&["status", "--json"]).expect("there is a result");
    let result = &status["result"];
    assert_eq!(result["state"], "finished", "{result}");
    let model = result["model"].as_str().expect("there is a model");
    assert!(model.starts_with("s3://steadfast/"), "{model}");
    let expected = Run::to_end(&scene, &job, "local", &["--pservers", "3"]);
    assert_eq!(result["parameters_sha256"], expected["parameters_sha256"]);
}

/// S002-10: `docker compose up --scale` starts and stops agents as the number of workers of their job changes.
#[test]
fn compose_follows_the_number_of_workers() {
    let scene = Scene::new();
    let endpoint = free_address().to_string();
    let Some(agents) = Agents::of(&endpoint) else { return };
    let rendezvous = ["rendezvous", "--rdzv-id", "grow", "--nnodes", "1:4", "--listen", &endpoint];
    let _rendezvous = scene.start("rendezvous", "steadfast", &rendezvous);
    let of_job = ["--job", "grow", "--etcd-endpoints", &endpoint];
    let up = agents.command(&["up", "--detach", "--no-recreate", "--scale", "agent={nodes}"]);
    let up: Vec<&str> = up.iter().map(String::as_str).collect();
    let steadfast = |args: &[&str]| {
        let mut command = Command::new(program("steadfast"));
        command.args(args).args(of_job).output().expect("it starts").stdout
    };
    let members = || {
        let status: Value = serde_json::from_slice(&steadfast(&["status", "--json"])).ok()?;
        let nodes = status["nodes"].as_array()?;
        Some(nodes.iter().filter(|it| it["state"] == "member").count())
    };
    within(JOB_MAX, "a master acts", || members().map(|_| ()));
    let follow = [&["scale", "--follow", "--most", "3"], &of_job[..], &["--"], &up].concat();
    let mut follower = scene.start("follower", "steadfast", &follow);
    for (workers, expected) in [("all", 3), ("2", 2), ("3", 3), ("1", 1)] {
        steadfast(&["scale", "--workers", workers]);
        within(JOB_MAX, &format!("a round and containers of {expected}"), || {
            (members() == Some(expected) && agents.running() == expected).then_some(())
        });
    }
    follower.signal(Signal::SIGTERM);
    assert_eq!(follower.end(JOB_MAX).code, Some(0));
}
