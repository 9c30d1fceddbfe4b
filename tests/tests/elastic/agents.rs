//! Agents and their workers, under kills.

use std::fs;

use steadfast_tests::{EtcdServer, Process, Scene, Signal, free_address, program, within};

use crate::job::{ElasticJob, LIMIT, starts, together};

/// S003-20, S003-21, S003-22, S003-23: one command, with nothing else running, forms a round, runs the program in
/// its workers, and ends with it.
#[test]
fn a_program_runs_on_one_node_with_one_command() {
    let scene = Scene::new();
    let script = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR";
    let args = ["run", "--standalone", "--nproc-per-node", "2", "--", "sh", "-c", script];
    let ended = scene.start("run", "steadfast", &args).end(LIMIT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let mut lines: Vec<&str> = ended.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 0] 0 of 2 at 127.0.0.1", "[rank 1] 1 of 2 at 127.0.0.1"]);
    scene.leaves_no_process();
}

/// S002-4, S003-24, S003-25, S001-11: when a node waits, is lost or leaves, the agents form the next round, and
/// restart their workers in it. The oldest has rank 0, and none of this counts as a failure. An agent that is killed leaves nothing.
#[test]
fn nodes_come_and_go_and_the_oldest_has_rank_0() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:3", &["--last-call", "500ms"]);
    let mut a = job.agent("a");
    let mut b = job.agent("b");
    together(&[("a", &a), ("b", &b)]);
    let c = job.agent("c");
    let ranks = together(&[("a", &a), ("b", &b), ("c", &c)]);
    assert_eq!(ranks["c"].rank, 2);
    let (oldest, other) = if ranks["a"].rank == 0 { (&mut a, &b) } else { (&mut b, &a) };
    oldest.signal(Signal::SIGKILL);
    oldest.end(LIMIT);
    let ranks = together(&[("other", other), ("c", &c)]);
    assert_eq!((ranks["other"].rank, ranks["c"].rank), (0, 1));
    let d = job.agent("d");
    let ranks = together(&[("other", other), ("c", &c), ("d", &d)]);
    assert_eq!((ranks["other"].rank, ranks["d"].rank), (0, 2));
    d.signal(Signal::SIGTERM);
    let ranks = together(&[("other", other), ("c", &c)]);
    assert!(ranks.values().all(|it| it.restarts == 0), "{ranks:?}");
    within(LIMIT, "no worker of the killed agent is left", || {
        (scene.all_of("sleep").len() == 2).then_some(())
    });
}

/// S003-25: a worker that fails is restarted until no restart is left; then the agent fails.
#[test]
fn a_worker_that_fails_is_restarted_until_no_restart_is_left() {
    let scene = Scene::new();
    let script =
        "echo run $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; echo why >&2; exit 7";
    let args = ["run", "--standalone", "--max-restarts", "2", "--", "sh", "-c", script];
    let ended = scene.start("run", "steadfast", &args).end(LIMIT);
    assert_eq!(ended.code, Some(1));
    let runs: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!(runs, ["[rank 0] run 0 of 2", "[rank 0] run 1 of 2", "[rank 0] run 2 of 2"]);
    assert!(
        ended.stderr.contains("the worker of rank 0 ended with exit code 7"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("why"), "{}", ended.stderr);
}

/// S003-24: warm workers take the place of new processes, under the rules of all workers, and none of them is left.
#[test]
fn warm_workers_become_the_workers_of_the_next_round() {
    let scene = Scene::new();
    let script = scene.write("train.py", WAITS_FOR_A_FILE);
    let flags = ["run", "--standalone", "--nproc-per-node", "2", "--warm-workers", "3"];
    let logs = scene.path("logs").display().to_string();
    let more = ["--warm-imports", "json,decimal", "--log-dir", &logs, "--"];
    let [script, go] = [script, scene.path("go")].map(|path| path.display().to_string());
    let args = [&flags[..], &more, &["python3", "-u", &script, &go]].concat();
    let agent = scene.start("run", "steadfast", &args);
    let are_ready = |count| {
        within(LIMIT, "the workers are warm", || {
            (agent.stderr().matches("a warm worker is ready").count() == count).then_some(())
        });
    };
    are_ready(2);
    scene.write("go", "0.0");
    let lines = |restarts: u32| {
        within(LIMIT, "both workers run", || {
            let mut lines: Vec<String> = agent.stdout().lines().map(str::to_owned).collect();
            lines.retain(|line| line.ends_with(&format!("restarts {restarts}")));
            lines.sort_unstable();
            (lines.len() == 2).then_some(lines)
        })
    };
    let ranks = |imported: &str, restarts: u32| {
        ["0", "1"]
            .map(|rank| format!("[rank {rank}] rank {rank} json {imported} restarts {restarts}"))
    };
    assert_eq!(lines(0), ranks("False", 0));
    assert_eq!(lines(1), ranks("True", 1));
    assert_eq!(agent.stderr().matches("a warm worker begins").count(), 2);
    let file = fs::read_dir(scene.path("logs")).unwrap().next().unwrap().unwrap();
    let file = fs::read_to_string(file.path().join("2/1/stdout.log")).unwrap();
    assert_eq!(file, "rank 1 json True restarts 1\n");
    are_ready(4);
    // The exit code and the signals are those of the program.
    scene.write("go", "1.1");
    lines(2);
    assert!(agent.stderr().contains("the worker of rank 1 ended with exit code 7"));
    are_ready(6);
    agent.signal(Signal::SIGKILL);
    scene.leaves_no_process();
}

/// Says what its process has imported, and fails as soon as the file asks for its rank and restarts.
const WAITS_FOR_A_FILE: &str = r#"
import os, sys, time
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", rank, "json", "json" in sys.modules, "restarts", restarts)
while not (os.path.exists(sys.argv[1]) and open(sys.argv[1]).read() == f"{rank}.{restarts}"):
    time.sleep(0.02)
sys.exit(7)
"#;

/// Waits until the job waits for its last member, and another has succeeded.
fn until_closing(job: &ElasticJob<'_>) {
    job.until("the end waits for the other node", |status| {
        status["waiting"].to_string().contains("the end of the job waits")
    });
}

/// Prints `start`, and ends as soon as there is a file: with 0, but with 7 as rank 0 in its first run.
fn fails_first_as_rank_0(scene: &Scene) -> String {
    let go = scene.path("go");
    format!(
        "echo start; [ $RANK$TORCHELASTIC_RESTART_COUNT = 00 ] || exit 0; while [ ! -e {} ]; do sleep 0.05; done; exit 7",
        go.display()
    )
}

/// S003-25: the job has succeeded when each node has. A worker that fails when another node has finished, as in
/// its last save, brings both into another round.
#[test]
fn a_worker_that_fails_after_another_node_has_succeeded_runs_again_with_it() {
    let scene = Scene::new();
    let mut job = ElasticJob::start(&scene, "2:2", &[]);
    let script = fails_first_as_rank_0(&scene);
    let agents = ["a", "b"].map(|name| job.agent_of(name, &[], &["sh", "-c", &script]));
    until_closing(&job);
    scene.write("go", "");
    for mut agent in agents {
        let ended = agent.end(LIMIT);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert_eq!(ended.stdout.matches("start").count(), 2, "{}", ended.stderr);
    }
    assert_eq!(job.end().code, Some(0));
}

/// S003-25: if no restart is left, the job has failed, on each node and for its rendezvous.
#[test]
fn a_job_with_a_worker_that_fails_for_good_after_the_success_of_others_has_failed() {
    let scene = Scene::new();
    let mut job = ElasticJob::start(&scene, "2:2", &[]);
    let (script, flags) = (fails_first_as_rank_0(&scene), ["--max-restarts", "0"]);
    let agents = ["a", "b"].map(|name| job.agent_of(name, &flags, &["sh", "-c", &script]));
    until_closing(&job);
    scene.write("go", "");
    for mut agent in agents {
        let ended = agent.end(LIMIT);
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(!ended.stderr.contains("has succeeded"), "{}", ended.stderr);
    }
    let ended = job.end();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("gave up: round 1: the worker of rank 0 ended with exit code 7"));
}

/// S003-25: a node that is lost after the success of another, and that no node replaces.
#[test]
fn a_job_that_lost_a_node_for_good_after_the_success_of_another_has_failed() {
    let scene = Scene::new();
    let mut job = ElasticJob::start(&scene, "2:2", &["--join-timeout", "1s"]);
    let script = "[ $RANK = 0 ] && exec sleep 1000; exit 0";
    let agents = ["a", "b"].map(|name| job.agent_of(name, &[], &["sh", "-c", script]));
    let [a, b] = agents;
    let has_succeeded = |agent: &Process| agent.stderr().contains("this node's workers succeeded");
    within(LIMIT, "one node has succeeded", || {
        (has_succeeded(&a) || has_succeeded(&b)).then_some(())
    });
    let (mut lost, mut other) = if has_succeeded(&a) { (b, a) } else { (a, b) };
    lost.signal(Signal::SIGKILL);
    lost.end(LIMIT);
    let ended = other.end(LIMIT);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("did not succeed, others did"), "{}", ended.stderr);
    assert_eq!(job.end().code, Some(1));
}

/// S003-25: when the last node gives up, the job has failed; until then the failures of nodes that have left count.
#[test]
fn a_job_of_which_all_nodes_have_failed_has_failed() {
    let scene = Scene::new();
    let mut job = ElasticJob::start(&scene, "1:2", &["--last-call", "60s"]);
    let go = scene.path("go");
    let script = format!(
        "[ $WORLD_SIZE = 1 ] && while [ ! -e {} ]; do sleep 0.05; done; exit $WORLD_SIZE",
        go.display()
    );
    // Only the node of rank 0 gives up at once.
    let script = format!("[ $RANK = 1 ] && sleep 1000; {script}");
    let flags = ["--max-restarts", "0"];
    let agents = ["a", "b"].map(|name| job.agent_of(name, &flags, &["sh", "-c", &script]));
    let status = job.until("one node is left", |status| status["round"] == 2);
    assert_eq!(status["restarts_of_gone"], 1, "{status}");
    scene.write("go", "");
    for mut agent in agents {
        assert_eq!(agent.end(LIMIT).code, Some(1));
    }
    let ended = job.end();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("the job failed"), "{}", ended.stderr);
    assert!(ended.stderr.contains("the worker of rank 0 ended with exit code 1"));
}

/// A name that was used: nothing runs, and the exit code and the message say so.
#[test]
fn an_agent_of_a_job_that_is_over_runs_nothing_and_says_so() {
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let file = "name = \"job\"\nkind = \"elastic\"\n[nodes]\nmin = 1\nmax = 1\n";
    let file = scene.write("job.toml", file).display().to_string();
    let url = etcd.url();
    let args = ["--job", "job", "--job-file", &file, "--etcd-endpoints", &url];
    let mut master = scene.start("master", "steadfast-master", &args);
    let run = ["run", "--rdzv-endpoint", &url, "--rdzv-id", "job", "--", "echo", "ran"];
    let mut agent = scene.start("agent", "steadfast", &run);
    assert_eq!(agent.end(LIMIT).code, Some(0));
    assert_eq!(master.end(LIMIT).code, Some(0));
    let ended = scene.start("late", "steadfast", &run).end(LIMIT);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(9), ""), "{}", ended.stderr);
    for text in [
        "the job `job` is over: it succeeded at 2",
        "nothing was run",
        "choose another --rdzv-id, or delete the job: etcdctl del --prefix /jobs/job/",
    ] {
        assert!(ended.stderr.contains(text), "{}", ended.stderr);
    }
    let ended = scene.start("late-master", "steadfast-master", &args).end(LIMIT);
    assert!(ended.stderr.contains("it succeeded at 2"), "{}", ended.stderr);
}

/// A rendezvous that is started again with the data of a job that is over does not run it again.
#[test]
fn a_rendezvous_of_a_job_that_is_over_says_so() {
    let scene = Scene::new();
    let data = scene.path("data").display().to_string();
    let mut job = ElasticJob::start(&scene, "1:1", &["--data-dir", &data]);
    assert_eq!(job.agent_of("a", &[], &["true"]).end(LIMIT).code, Some(0));
    assert_eq!(job.end().code, Some(0));
    let listen = free_address().to_string();
    let args = ["rendezvous", "--rdzv-id", "job", "--nnodes", "1:1", "--listen", &listen];
    let args = [&args[..], &["--data-dir", &data]].concat();
    let ended = scene.start("again", "steadfast", &args).end(LIMIT);
    assert_eq!(ended.code, Some(9), "{}", ended.stderr);
    assert!(ended.stderr.contains("choose another --rdzv-id or --data-dir"), "{}", ended.stderr);
}

/// S003-25: a node that is lost after the first success has not succeeded: the others run again with the node that
/// takes its place.
#[test]
fn a_node_that_is_lost_after_the_success_of_another_is_replaced_before_the_job_succeeds() {
    let scene = Scene::new();
    let mut job = ElasticJob::start(&scene, "2:2", &[]);
    let go = scene.path("go");
    let script = format!("echo start; while [ ! -e {} ]; do sleep 0.05; done", go.display());
    let mut a = job.agent_of("a", &[], &["sh", "-c", &script]);
    let mut b = job.agent_of("b", &[], &["sh", "-c", "echo start; exec sleep 1000"]);
    job.until_running(2);
    within(LIMIT, "both workers run", || {
        let is_started = |it: &Process| it.stdout().contains("start");
        (is_started(&a) && is_started(&b)).then_some(())
    });
    scene.write("go", "");
    until_closing(&job);
    b.signal(Signal::SIGKILL);
    b.end(LIMIT);
    let mut c = job.agent_of("c", &[], &["true"]);
    for agent in [&mut a, &mut c] {
        let ended = agent.end(LIMIT);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
    assert_eq!(a.stdout().matches("start").count(), 2);
    assert_eq!(job.end().code, Some(0));
}

/// S003-8: another master goes on in the middle of a rendezvous, and while a round runs.
#[test]
fn a_standby_master_goes_on_in_the_middle_of_a_rendezvous() {
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let file =
        "name = \"job\"\nkind = \"elastic\"\n[nodes]\nmin = 2\nmax = 3\nlast_call = \"300ms\"\n";
    let file = scene.write("job.toml", file).display().to_string();
    let url = etcd.url();
    let master = |name: &str| {
        let args = ["--job", "job", "--job-file", &file, "--etcd-endpoints", &url];
        scene.start(name, "steadfast-master", &args)
    };
    let agent = |name: &str| {
        let script = "echo start $STEADFAST_ROUND $RANK $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT \
                      $MASTER_ADDR:$MASTER_PORT; exec sleep 1000";
        let args = ["run", "--rdzv-endpoint", &url, "--rdzv-id", "job", "--nnodes", "2:3", "--"];
        scene.start(name, "steadfast", &[&args[..], &["sh", "-c", script]].concat())
    };
    let mut first = master("first");
    within(LIMIT, "the first master acts", || {
        (!etcd.ctl(&["get", "--print-value-only", "/jobs/job/master/addr"]).is_empty())
            .then_some(())
    });
    let mut second = master("second");
    let a = agent("a");
    within(LIMIT, "a node waits for another", || {
        a.stderr().contains("to reach the minimum").then_some(())
    });
    first.signal(Signal::SIGKILL);
    first.end(LIMIT);
    let mut b = agent("b");
    let ranks = together(&[("a", &a), ("b", &b)]);
    assert_eq!(ranks["a"].round, 1);
    // The round goes on under a third master; then a node is lost, and one is added.
    let _third = master("third");
    second.signal(Signal::SIGKILL);
    second.end(LIMIT);
    let c = agent("c");
    together(&[("a", &a), ("b", &b), ("c", &c)]);
    b.signal(Signal::SIGKILL);
    b.end(LIMIT);
    let ranks = together(&[("a", &a), ("c", &c)]);
    assert!(ranks.values().all(|it| it.restarts == 0), "{ranks:?}");
    let rounds: Vec<u64> = starts(&a).iter().map(|it| it.round).collect();
    assert!(rounds.is_sorted_by(|one, next| one < next), "{rounds:?}");
}

/// S002-5: nodes that arrive one after another within the last call make one round.
#[test]
fn eight_nodes_that_arrive_one_after_another_make_one_round() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:8", &["--last-call", "20s"]);
    let names: Vec<String> = (0..8).map(|node| format!("n{node}")).collect();
    let mut agents = Vec::new();
    for (count, name) in names.iter().enumerate() {
        agents.push(job.agent(name));
        job.until("the node has arrived", |status| {
            status["nodes"].as_array().is_some_and(|nodes| count < nodes.len())
        });
    }
    let named: Vec<(&str, &Process)> = names.iter().map(String::as_str).zip(&agents).collect();
    let ranks = together(&named);
    assert!(ranks.values().all(|it| it.round == 1), "{ranks:?}");
    assert!(agents.iter().all(|agent| starts(agent).len() == 1));
}

/// Hang detection: workers that print nothing are asked for their stacks, and restarted as after a failure.
#[test]
fn workers_that_hang_print_their_stacks_and_are_restarted() {
    let scene = Scene::new();
    let script = "import faulthandler, os, signal, time\n\
                  faulthandler.register(signal.SIGUSR1)\n\
                  def stuck(): time.sleep(1000)\n\
                  print('run', flush=True)\n\
                  os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and stuck()\n";
    let args = ["run", "--standalone", "--hang-timeout", "2s", "--", "python3", "-c", script];
    let ended = scene.start("run", "steadfast", &args).end(LIMIT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout.matches("run").count(), 2);
    assert!(ended.stderr.contains("in stuck") && ended.stderr.contains("hang"), "{}", ended.stderr);
}

/// S003-25: a node that gives up at the exit says for whom it waited.
#[test]
fn an_agent_that_gives_up_at_the_exit_names_the_nodes_that_run() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "2:2", &[]);
    let script = "[ $RANK = 0 ] && exec sleep 1000; exit 0";
    let flags = ["--exit-barrier-timeout", "300ms"];
    let agents = ["a", "b"].map(|name| job.agent_of(name, &flags, &["sh", "-c", script]));
    let stderr = within(LIMIT, "one agent has given up", || {
        let given_up = agents.iter().map(Process::stderr);
        given_up.into_iter().find(|stderr| stderr.contains("gave up at the exit"))
    });
    assert!(stderr.contains("1 of 2 nodes entered; waits for 127.0.0.1"), "{stderr}");
    assert!(stderr.contains("(--exit-barrier-timeout)"), "{stderr}");
}

/// S003-8: a standby that starts with the first master, or before it, waits for the job, and does not take the lock.
#[test]
fn a_standby_waits_until_the_job_is_written() {
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let url = etcd.url();
    let standby = ["--job", "job", "--etcd-endpoints", &url];
    let limited = [&standby[..], &["--start-timeout", "300ms"]].concat();
    let ended = scene.start("in-vain", "steadfast-master", &limited).end(LIMIT);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("there is no job at /jobs/job/job after 300ms"),
        "{}",
        ended.stderr
    );
    let second = scene.start("second", "steadfast-master", &standby);
    within(LIMIT, "the standby waits for the job", || {
        second.stderr().contains("waits for a master with --job-file").then_some(())
    });
    let file = "name = \"job\"\nkind = \"elastic\"\n[nodes]\nmin = 1\nmax = 1\n";
    let file = scene.write("job.toml", file).display().to_string();
    let mut first =
        scene.start("first", "steadfast-master", &[&standby[..], &["--job-file", &file]].concat());
    within(LIMIT, "the first master acts, and the second waits for it", || {
        let acts = first.stderr().contains("this master acts");
        (acts && second.stderr().contains("standby: another master acts")).then_some(())
    });
    first.signal(Signal::SIGKILL);
    first.end(LIMIT);
    within(LIMIT, "the second master acts", || {
        second.stderr().contains("this master acts").then_some(())
    });
}

/// S003-20: a command of torchrun runs as it is, also with underscores and without `--`.
#[test]
fn a_command_of_torchrun_runs_as_it_is() {
    let scene = Scene::new();
    let show = "import os, sys\n\
                names = ['RANK', 'ROLE_NAME', 'MASTER_PORT']\n\
                print(*(os.environ[name] for name in names), *sys.argv[1:])\n";
    scene.write("show.py", show);
    let flags = ["run", "--standalone", "--nproc_per_node=1", "--role", "trainer", "--master_port"];
    let flags = [&flags[..], &["29517", "--start_method", "spawn", "--node_rank", "0"]].concat();
    for (name, command) in [
        ("script", &["show.py", "--lr", "1", "--nnodes", "9"][..]),
        ("module", &["-m", "show", "--lr", "1", "--nnodes", "9"]),
        ("words", &["--no-python", "python3", "show.py", "--lr", "1", "--nnodes", "9"]),
        ("dashes", &["--", "python3", "show.py", "--lr", "1", "--nnodes", "9"]),
    ] {
        let mut run = scene.start(name, "steadfast", &[&flags[..], command].concat());
        let ended = run.end(LIMIT);
        assert_eq!(ended.code, Some(0), "{name}: {}", ended.stderr);
        let expected = "[rank 0] 0 trainer 29517 --lr 1 --nnodes 9\n";
        assert_eq!(ended.stdout, expected, "{name}");
    }
}

/// S003-20: the flags of torchrun choose which output is printed, and which goes to files; runs do not mix theirs.
#[test]
fn output_goes_where_the_flags_of_torchrun_say_and_runs_keep_theirs_apart() {
    let scene = Scene::new();
    let script = "echo out $RANK; echo err $RANK >&2";
    let run = |name: &str, more: &[&str]| {
        let flags = ["run", "--standalone", "--nproc-per-node", "2", "--log-dir", "logs"];
        let args = [&flags[..], more, &["--", "sh", "-c", script]].concat();
        let ended = scene.start(name, "steadfast", &args).end(LIMIT);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended
    };
    let first = run("first", &["--redirects", "0:1", "--tee", "1:2"]);
    assert_eq!(first.stdout, "[rank 1] out 1\n");
    let printed = |text: &str| first.stderr.contains(text);
    assert!(printed("[rank 0] err 0") && printed("[rank 1] err 1"), "{}", first.stderr);
    let second = run("second", &["--local-ranks-filter", "1"]);
    assert_eq!(second.stdout, "[rank 1] out 1\n");
    let runs: Vec<_> =
        fs::read_dir(scene.path("logs")).unwrap().map(|it| it.unwrap().path()).collect();
    assert_eq!(runs.len(), 2, "{runs:?}");
    let read = |run: usize, file: &str| fs::read_to_string(runs[run].join("1").join(file)).ok();
    let is_second = |run: usize| read(run, "0/stderr.log").is_some();
    let (one, two) = if is_second(0) { (1, 0) } else { (0, 1) };
    let files = ["0/stdout.log", "0/stderr.log", "1/stdout.log", "1/stderr.log"];
    let text = |run: usize| files.map(|file| read(run, file));
    let some = |text: &str| Some(format!("{text}\n"));
    assert_eq!(text(one), [some("out 0"), None, None, some("err 1")]);
    assert_eq!(text(two), [some("out 0"), some("err 0"), some("out 1"), some("err 1")]);
}

/// The network interface can be chosen, also for the libraries of collective operations.
#[test]
fn a_node_is_reached_at_the_interface_that_was_chosen() {
    let scene = Scene::new();
    let show = "echo $MASTER_ADDR $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME";
    let args = ["run", "--standalone", "--nic", "lo", "--", "sh", "-c", show];
    let ended = scene.start("run", "steadfast", &args).end(LIMIT);
    assert_eq!(ended.stdout, "[rank 0] 127.0.0.1 lo lo\n", "{}", ended.stderr);
}

/// A debugger in the only worker reads the input of the agent.
#[test]
fn the_only_worker_reads_the_input_of_its_agent() {
    let scene = Scene::new();
    let input = scene.write("input", "continue\n");
    let mut command = std::process::Command::new("sh");
    let line = format!("exec {} run --standalone -- cat", program("steadfast").display());
    command.args(["-c", &format!("{line} < {}", input.display())]);
    command.current_dir(scene.directory());
    let ended = Process::start(scene.directory(), "run", &mut command).end(LIMIT);
    assert_eq!(ended.stdout, "[rank 0] continue\n", "{}", ended.stderr);
}

/// A traceback that was printed as it came is not printed again.
#[test]
fn the_last_lines_of_a_worker_are_shown_once() {
    let scene = Scene::new();
    let script = "echo the reason >&2; exit 7";
    for (name, more) in [("printed", &[][..]), ("quiet", &["--log-dir", "logs", "--quiet"])] {
        let flags = ["run", "--standalone", "--max-restarts", "0"];
        let args = [&flags[..], more, &["--", "sh", "-c", script]].concat();
        let ended = scene.start(name, "steadfast", &args).end(LIMIT);
        assert_eq!(ended.stderr.matches("the reason").count(), 1, "{name}: {}", ended.stderr);
    }
}
