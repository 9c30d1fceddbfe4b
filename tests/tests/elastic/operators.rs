//! What operators see of an elastic job, and what they can do with it, through the command line.

use std::path::Path;
use std::process::Command;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::Value;
use steadfast_common::ids::{NodeId, Round};
use steadfast_common::records::keys::Keys;
use steadfast_tests::{
    Certificates, Ended, EtcdServer, Process, Recorder, Scene, Signal, etcdctl, free_address,
    program, within,
};

use crate::job::{ElasticJob, LIMIT, starts};

/// Fails once when a file says so, and otherwise runs until it is stopped.
const WORKER: &str = "echo start $STEADFAST_ROUND; \
                      while :; do [ ! -e fail ] || { rm fail; exit 7; }; sleep 0.05; done";

/// A job file with short waits, without its numbers of nodes.
const JOB_FILE: &str = "name = \"job\"\nkind = \"elastic\"\n[nodes]\nlast_call = \"300ms\"\n";

/// Runs `steadfast` on the only job of an etcd.
fn tool(url: &str, args: &[&str], more: &[&str]) -> Ended {
    let mut command = Command::new(program("steadfast"));
    command.args(args).args(["--etcd-endpoints", url]).args(more);
    let output = command.output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it is text");
    Ended {
        code: output.status.code(),
        signal: None,
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Returns the output of a command that succeeds.
#[track_caller]
fn shown(url: &str, args: &[&str]) -> String {
    let ended = tool(url, args, &[]);
    assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
    ended.stdout
}

#[track_caller]
fn until_shown(url: &str, args: &[&str], wanted: &str) -> String {
    within(LIMIT, &format!("{args:?} shows {wanted}"), || {
        let ended = tool(url, args, &[]);
        ended.stdout.contains(wanted).then_some(ended.stdout)
    })
}

fn json(url: &str, command: &str) -> Value {
    serde_json::from_str(&shown(url, &[command, "--json"])).expect("it is JSON")
}

fn url(job: &ElasticJob<'_>) -> String {
    format!("http://{}", job.etcd)
}

/// Returns the id of the node that waits for a rank, or has it.
fn id_of(status: &Value, rank: u64) -> String {
    let nodes = status["nodes"].as_array().expect("it lists nodes");
    let node = nodes.iter().find(|node| node["rank"] == rank).expect("the rank is taken");
    node["node"].as_str().expect("it has an id").to_owned()
}

/// Who is waited for is named, whatever a round waits for; members are listed by rank with what
/// their workers do, and failures with their reason.
#[test]
fn status_and_why_name_the_nodes_and_who_is_waited_for() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "2:3", &["--last-call", "300ms"]);
    let url = &url(&job);
    assert_eq!(shown(url, &["why"]), "no node has joined\n");
    let a = job.agent_of("a", &[], &["sh", "-c", WORKER]);
    for command in ["status", "why"] {
        until_shown(url, &[command], "waits for 1 more node to reach the minimum");
    }
    let b = job.agent_of("b", &[], &["sleep", "1000"]);
    let running = until_shown(url, &["status"], "job job: running (elastic)");
    assert!(running.contains("nodes       2 members; 2 to 3 are allowed"), "{running}");
    let text = until_shown(url, &["status"], "  member  1 running  1  ");
    assert!(text.contains("  0 of 3  "), "{text}");
    assert_eq!(shown(url, &["why"]), "not blocked: round 1 runs with 2 workers\n");

    // The agent that does not answer, and whose lease goes on for a while, is named.
    let rank_of_a: u64 = if a.stdout().contains("[rank 0] start") { 0 } else { 1 };
    let other = id_of(&json(url, "status"), 1 - rank_of_a);
    b.signal(Signal::SIGSTOP);
    scene.write("fail", "");
    let text = until_shown(url, &["status"], "failure ");
    let exit = format!("round 1: the worker of rank {rank_of_a} ended with exit code 7");
    assert!(text.contains(&exit), "{text}");
    let why = shown(url, &["why"]);
    let wanted = format!("node {other} (");
    assert!(why.contains(&wanted) && why.contains("is a member with rank"), "{why}");
    assert!(why.contains("does not answer"), "{why}");
    b.signal(Signal::SIGCONT);
    until_shown(url, &["status"], "restarts    1 after failures; 1 round after the first");
}

/// `top` shows an elastic job in a terminal.
#[test]
fn top_shows_an_elastic_job_until_a_key_is_pressed() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:2", &["--last-call", "300ms"]);
    let _agents = [job.agent("a"), job.agent("b")];
    job.until_running(2);
    let script = scene.write("terminal.py", include_str!("../terminal.py"));
    let mut python = scene.command(Path::new("python3"));
    python.arg(script).arg("elastic,round,workers,restarts,running,formed,quits");
    python.arg(program("steadfast")).args(["top", "--etcd-endpoints", &url(&job)]);
    let output = python.output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Without a master, the same is read from etcd.
#[test]
fn without_a_master_status_and_why_show_what_etcd_holds() {
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let (file, url) = (format!("{JOB_FILE}min = 2\nmax = 3\n"), etcd.url());
    let file = scene.write("job.toml", file).display().to_string();
    let ran = tool(&url, &["status"], &["--job", "job"]);
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    let run = ["run", "--rdzv-endpoint", &url, "--rdzv-id", "job", "--nnodes", "2:3", "--"];
    let agent = |name| scene.start(name, "steadfast", &[&run[..], &["sleep", "1000"]].concat());
    let _a = agent("a");
    for command in ["status", "why"] {
        within(LIMIT, "the agent waits for a master", || {
            let ended = tool(&url, &[command], &["--job", "job"]);
            let text = ended.stdout + &ended.stderr;
            text.contains("1 agent of job job registered, and no master has accepted it")
                .then_some(())
        });
    }
    let args = ["--job", "job", "--job-file", &file, "--etcd-endpoints", &url];
    let mut master = scene.start("master", "steadfast-master", &args);
    until_shown(&url, &["status"], "waits for 1 more node to reach the minimum");
    master.signal(Signal::SIGKILL);
    master.end(LIMIT);
    let text = until_shown(&url, &["status"], "job job: no master answers (elastic)");
    assert!(text.contains("  why         "), "{text}");
    assert!(text.contains("waits for 1 more node to reach the minimum"), "{text}");
    assert!(text.contains("  waiting  1  "), "{text}");
    let why = shown(&url, &["why"]);
    assert!(why.starts_with("the job waits for\n  an acting master: "), "{why}");
    assert!(why.contains("waits for 1 more node to reach the minimum"), "{why}");
    let status = json(&url, "status");
    assert_eq!((&status["master"], &status["state"]), (&Value::Null, &"gathering".into()));
}

/// Commands for training jobs name what to do instead; `members`, `drain` and `doctor` know agents.
#[test]
fn other_commands_work_on_agents_or_name_what_to_do_instead() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:2", &["--last-call", "300ms"]);
    let url = &url(&job);
    let mut agents = [job.agent("a"), job.agent("b")];
    let status = job.until_running(2);
    for (args, message) in [
        (&["slots"][..], "`steadfast status` shows its nodes"),
        (&["tasks"], "`steadfast status` shows its rounds"),
        (&["scale", "--slots", "2"], "it has no slots; use --workers"),
        (&["checkpoint", "list"], "its program writes its own"),
        (&["checkpoint", "now"], "its program writes its own"),
        (&["audit"], "pass --history history.json"),
        (&["audit", "--now"], "it has no checkpoints to audit"),
    ] {
        let ended = tool(url, args, &[]);
        assert_eq!(ended.code, Some(2), "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.contains("job job is elastic: "), "{}", ended.stderr);
        assert!(ended.stderr.contains(message), "{}", ended.stderr);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    }
    let members = shown(url, &["members"]);
    assert_eq!(members.matches("agent    ").count(), 2, "{members}");
    let doctor = shown(url, &["doctor"]);
    assert_eq!(doctor.matches(": is ready at ").count(), 3, "{doctor}");
    let last = id_of(&status, 1);
    let drained = shown(url, &["drain", "agent", &last[..8]]);
    assert!(drained.contains("has left; the others form a round without it"), "{drained}");
    job.until_running(1);
    within(LIMIT, "the agent of that node ends", || {
        let running = agents.iter_mut().filter_map(|agent| agent.is_running().then_some(()));
        (running.count() == 1).then_some(())
    });
}

/// S002-11: the history of etcd proves that the rounds obeyed their rules; one that lacks a round does not.
#[test]
fn the_history_of_an_elastic_job_is_audited() {
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let (file, url) = (format!("{JOB_FILE}min = 1\nmax = 3\n"), etcd.url());
    let file = scene.write("job.toml", file).display().to_string();
    let keys = Keys::of_job("job");
    let mut recorder =
        Recorder::start(&scene, std::slice::from_ref(&url), &format!("{}/", keys.root()));
    let args = ["--job", "job", "--job-file", &file, "--etcd-endpoints", &url];
    let _master = scene.start("master", "steadfast-master", &args);
    let run = ["run", "--rdzv-endpoint", &url, "--rdzv-id", "job", "--nnodes", "1:3", "--"];
    let script = "until [ -e go ]; do sleep 0.05; done";
    let run = [&run[..], &["sh", "-c", script]].concat();
    let mut a = scene.start("a", "steadfast", &run);
    until_shown(&url, &["status"], "round       1, 1 worker");
    let mut b = scene.start("b", "steadfast", &run);
    until_shown(&url, &["status"], "round       2, 2 workers");
    scene.write("go", "");
    assert_eq!((a.end(LIMIT).code, b.end(LIMIT).code), (Some(0), Some(0)));
    within(LIMIT, "the history is read", || {
        recorder.read();
        recorder.last_of(&keys.result()).map(|_| ())
    });
    let history = scene.write("history.json", recorder.lines()).display().to_string();
    let clean = shown(&url, &["audit", "--history", &history]);
    assert!(clean.contains("2 rounds\n") && clean.ends_with("history clean\n"), "{clean}");
    let report: Value =
        serde_json::from_str(&shown(&url, &["audit", "--json", "--history", &history])).unwrap();
    assert_eq!((&report["clean"], &report["history"]["rounds"]), (&true.into(), &2.into()));

    let (first, lines) = (line_of(recorder.lines(), &keys.formed_round()), recorder.lines());
    let without: Vec<&str> = lines.lines().filter(|line| *line != first).collect();
    let broken = scene.write("broken.json", without.join("\n")).display().to_string();
    let ended = tool(&url, &["audit", "--history", &broken], &[]);
    assert_eq!(ended.code, Some(1), "{}", ended.stdout);
    assert!(ended.stdout.contains("round 2 follows round 0"), "{}", ended.stdout);
}

/// Returns the first line of a history that changes a key.
fn line_of<'a>(lines: &'a str, key: &str) -> &'a str {
    let wanted = BASE64_STANDARD.encode(key);
    lines.lines().find(|line| line.contains(&wanted)).expect("the key was written")
}

/// F50: with only the etcd permissions that `steadfast etcd-users` grants, an elastic job and its launcher run to
/// their end; their certificate does not allow changes to what the master decides.
#[test]
fn agents_and_launchers_need_no_more_of_etcd_than_they_are_granted() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let etcd = EtcdServer::secured(&scene, &certificates);
    let url = etcd.url();
    let of = |role: &str| certificates.of(role).display().to_string();
    let admin = of("admin");
    within(LIMIT, "etcd has a leader", || etcd.ctl_as("admin", &["get", "x"]).ok());
    let made = tool(&url, &["etcd-users", "--job", "job"], &["--tls", &admin]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let file = format!("{JOB_FILE}min = 1\nmax = 2\n");
    let file = scene.write("job.toml", file).display().to_string();
    let args = ["--job", "job", "--job-file", &file, "--etcd-endpoints", &url];
    let _master =
        scene.start("master", "steadfast-master", &[&args[..], &["--tls", &of("master")]].concat());
    let args = ["launch", "--hosts", "localhost:1,127.0.0.1:1", "--rdzv-endpoint", &url];
    let more = ["--rdzv-id", "job", "--tls", &of("trainer"), "--", "sleep", "1"];
    let ended = scene.start("launch", "steadfast", &[&args[..], &more].concat()).end(LIMIT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let status = tool(&url, &["status"], &["--tls", &admin]);
    assert!(status.stdout.contains("job job: finished (elastic)"), "{status:?}");
    assert!(status.stdout.contains("launcher    2 agents started"), "{status:?}");
    let keys = Keys::of_job("job");
    let put = |role: &str, key: &str| etcd.ctl_as(role, &["put", key, "x"]).is_ok();
    for key in [keys.formed_round(), keys.node(NodeId::of_address("a:1")), keys.result()] {
        assert!(!put("trainer", &key) && !put("pserver", &key), "{key}");
    }
    let entry = keys.tags_prefix(Round(1));
    assert!(!put("trainer", &entry) && !put("pserver", &keys.launch_lock()));
    assert!(put("trainer", &keys.launch_host("a")));
}

/// The master of `steadfast rendezvous` is reached at the address that the user states.
#[test]
fn a_rendezvous_advertises_the_address_of_its_master() {
    let scene = Scene::new();
    let etcd = free_address().to_string();
    let start = |advertised: &str| {
        let args = ["rendezvous", "--rdzv-id", "job", "--nnodes", "1:2", "--listen", &etcd];
        let more = ["--master-listen", "0.0.0.0:0", "--insecure-allow-plaintext"];
        let args = [&args[..], &more, &["--advertise", advertised]].concat();
        scene.start("rendezvous", "steadfast", &args)
    };
    let ended = start("node 7").end(LIMIT);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("use `host`, `host:port`"), "{}", ended.stderr);
    let _rendezvous = start("node-7");
    within(LIMIT, "the master is advertised", || {
        std::net::TcpStream::connect(&etcd).ok()?;
        let key = Keys::of_job("job").master_addr();
        let record = etcdctl(&format!("http://{etcd}"), &["get", "--print-value-only", &key]);
        record.contains("\"address\":\"node-7:").then_some(())
    });
}

/// S002-10: an operator gives a job fewer workers while it runs, and more again; a node that had to go takes the place of
/// one that is lost.
#[test]
fn the_number_of_workers_is_changed_while_the_job_runs() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:4", &["--last-call", "300ms"]);
    let url = &url(&job);
    let mut agents: Vec<Process> = ["a", "b", "c"].map(|name| job.agent(name)).into();
    job.until_running(3);
    let scaled = shown(url, &["scale", "--workers", "2"]);
    assert_eq!(scaled, "job job: workers at most 2, chosen by a person (mode advise)\n");
    job.until_running(2);
    until_shown(url, &["why"], "waits for a place: round 2 is to have at most 2 workers");
    let text = shown(url, &["status"]);
    assert!(text.contains("at most 2, chosen by a person"), "{text}");
    // The node that waits takes the place of a member that dies.
    let waiting = within(LIMIT, "two nodes start workers in round 2", || {
        let is_member = |agent: &Process| starts(agent).iter().any(|it| it.round == 2);
        let waiting: Vec<usize> = (0..3).filter(|it| !is_member(&agents[*it])).collect();
        (waiting.len() == 1).then(|| waiting[0])
    });
    let lost = agents.remove((waiting + 1) % 3);
    lost.signal(Signal::SIGKILL);
    job.until("a round without the lost node runs", |status| {
        status["state"] == "running" && status["world_size"] == 2 && status["round"] == 3
    });
    assert!(shown(url, &["scale", "--workers", "all"]).contains("as many as there are"));
    agents.push(job.agent("d"));
    job.until_running(3);
    // What makes no sense is refused with the way out.
    for (args, wanted) in [
        (&["scale", "--workers", "0"][..], "use a number from 1 to"),
        (&["scale", "--worth", "0"], "use a number from 1 to 100"),
        (&["scale", "--slots", "2"], "use --workers"),
        (&["scale"], "--slots"),
    ] {
        let ended = tool(url, args, &[]);
        assert_eq!(ended.code, Some(2), "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(wanted), "{args:?}: {}", ended.stderr);
    }
    assert!(shown(url, &["scale", "--auto"]).contains("(mode auto)"));
}

/// S002-10: a command starts and stops nodes when the job is to have another number of workers; one that fails runs again.
#[test]
fn a_command_follows_the_number_of_workers() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:4", &["--last-call", "300ms"]);
    let url = &url(&job);
    let _first = job.agent("a");
    job.until_running(1);
    shown(url, &["scale", "--workers", "2"]);
    let script = "[ -e tried ] || { touch tried; exit 3; }\necho $1 $STEADFAST_WORKERS >> wanted\n";
    let script = scene.write("platform.sh", script).display().to_string();
    let args = ["scale", "--follow", "--most", "3", "--etcd-endpoints", url];
    let args = [&args[..], &["--", "sh", &script, "{nodes}"]].concat();
    let mut follower = scene.start("follower", "steadfast", &args);
    let until_wanted = |last: &str| {
        within(LIMIT, &format!("the command is told {last}"), || {
            let told = std::fs::read_to_string(scene.path("wanted")).ok()?;
            (told.lines().last() == Some(last)).then_some(())
        })
    };
    until_wanted("2 2");
    assert!(follower.stdout().contains("the command failed, and runs again: exit status: 3"));
    let _second = job.agent("b");
    job.until_running(2);
    // All means as many as can be started.
    shown(url, &["scale", "--workers", "all"]);
    until_wanted("3 3");
    shown(url, &["scale", "--workers", "1"]);
    until_wanted("1 1");
    let key = Keys::of_job("job").workers_desired();
    let record = || etcdctl(url, &["get", "--print-value-only", &key]);
    assert!(record().contains("\"startable\":3"), "{}", record());
    follower.signal(Signal::SIGTERM);
    assert_eq!(follower.end(LIMIT).code, Some(0));
    assert!(!record().contains("startable"), "{}", record());
    for (args, wanted) in [
        (&["scale", "--follow", "--most", "2"][..], "COMMAND"),
        (&["scale", "--follow", "--most", "2", "--workers", "1", "--", "true"], "--workers"),
    ] {
        let ended = tool(url, args, &[]);
        assert_eq!(ended.code, Some(2), "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(wanted), "{args:?}: {}", ended.stderr);
    }
    let ended = tool(url, &["scale", "--follow", "--most", "1"], &["--", "no-such-program"]);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(ended.stderr.contains("there is no program `no-such-program`"), "{}", ended.stderr);
}
