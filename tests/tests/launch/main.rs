//! `steadfast launch` on hosts that a fake remote shell plays, and on those of a real sshd.

#![allow(clippy::unwrap_used)]

mod site;
mod sshd;

use std::fs;
use std::time::Duration;

use steadfast_tests::{
    Ended, Process, Signal, etcdctl, eventually, free_address, get, program, within,
};

use site::Site;
use sshd::Sshd;

/// Timeout of the end of a launcher, for a busy machine.
const END_MAX: Duration = Duration::from_secs(60);

fn succeeds(mut launcher: Process) -> Ended {
    let ended = launcher.end(END_MAX);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended
}

/// S001-1: `host:slots`, and `host` with the default slots.
#[test]
fn each_host_runs_the_program_once_for_each_of_its_slots() {
    let site = Site::new();
    let launcher = site.launch(&["--hosts", "a:2,b"]);
    let world = site.world(3);
    let of = |host: &str| world.iter().filter(|it| it.as_str() == host).count();
    assert_eq!((of("a"), of("b")), (2, 1), "{world:?}");
    site.finish();
    let ended = succeeds(launcher);
    assert!(ended.stdout.contains("[a] [rank "), "{}", ended.stdout);
    assert!(ended.stdout.contains("[b] [rank "), "{}", ended.stdout);
    site.scene.leaves_no_process();
}

/// S001-11: hosts that start together are ranked in the order of the list, also if the first one is the slowest.
#[test]
fn hosts_that_start_together_are_ranked_in_the_order_of_the_list() {
    let site = Site::new();
    // The hosts before `c` start once it has registered.
    let wait = "[ \"$1\" = c ] || until [ -s c-runs ]; do sleep 0.1; done";
    site.script("slow", &format!("{wait}\nexec ./rsh \"$@\""));
    let address = free_address().to_string();
    let etcd = ["--rdzv-id", "job", "--insecure-allow-plaintext", "--listen", &address];
    let hosts = ["--nnodes", "3", "--hosts", "b:1,a:1,c:1", "--remote-shell", "./slow"];
    let launcher = site.start("launch", &[&etcd[..], &hosts].concat());
    let agents = ["get", "--prefix", "--keys-only", "/jobs/job/agents/"];
    within(END_MAX, "the agent of c is registered", || {
        std::net::TcpStream::connect(&address).ok()?;
        (!etcdctl(&format!("http://{address}"), &agents).trim().is_empty()).then_some(())
    });
    site.scene.write("c-runs", "yes");
    assert_eq!(site.world(3), ["b", "a", "c"]);
    site.finish();
    succeeds(launcher);
}

/// Hosts that are this machine need neither ssh nor a flag.
#[test]
fn hosts_that_are_this_machine_are_started_directly() {
    let site = Site::new();
    let hosts = ["--hosts", "localhost:1,127.0.0.1:1"];
    let launcher = site.start("local", &[&hosts[..], &["--rdzv-id", "job"]].concat());
    site.world(2);
    site.finish();
    succeeds(launcher);
    site.scene.leaves_no_process();
}

/// S001-1, S001-7, S001-8, S001-11: lists with IPv6 addresses, comments and CRLF; hosts are added and removed, slots change.
#[test]
fn hosts_that_discovery_adds_and_removes_join_and_leave_the_job() {
    let site = Site::new();
    site.hosts("# the first\r\nfd00::1:1\r\n");
    let launcher = site.launch_script(&[]);
    let ended = launcher_error(launcher, 2);
    assert!(ended.contains("line 2 of the hosts: `fd00::1:1` may end in slots or not"), "{ended}");
    site.hosts("# the first\r\n[fd00::1]:1\r\n\r\n");
    let launcher = site.launch_script(&[]);
    assert_eq!(site.world(1), ["fd00::1"]);
    site.hosts("b\r\nfd00::1:1 # nonsense\r\n");
    eventually("a warning", || launcher.stderr().contains("line 2 of the hosts").then_some(()));
    site.hosts("b\r\n[fd00::1]:1 # older\r\n");
    assert_eq!(site.world(2), ["fd00::1", "b"]);
    site.hosts("b:2\r\nfd00::1\n");
    assert_eq!(site.world(3).len(), 3);
    site.hosts("b:2\r\n");
    assert_eq!(site.world(2), ["b", "b"]);
    site.finish();
    succeeds(launcher);
    site.scene.leaves_no_process();
}

/// S001-20: nothing is started with fewer than the fewest workers; S001-11: surplus slots stay free.
#[test]
fn the_number_of_workers_stays_between_its_limits() {
    let site = Site::new();
    site.hosts("a:1\n");
    let limits = ["--min-np", "2", "--max-np", "3", "--elastic-timeout", "60"];
    let launcher = site.launch_script(&limits);
    eventually("a poll", || launcher.stderr().contains("hosts discovered").then_some(()));
    assert_eq!(site.started(), 0);
    site.hosts("a:1\nb:9\n");
    let world = site.world(3);
    assert_eq!(world.iter().filter(|it| *it == "b").count(), 2, "{world:?}");
    site.finish();
    succeeds(launcher);
}

/// S001-12: the job ends if too few slots are found for the elastic timeout.
#[test]
fn too_few_slots_for_too_long_end_the_job() {
    let site = Site::new();
    site.hosts("a:1\n");
    let launcher = site.launch_script(&["--min-np", "2", "--elastic-timeout", "2"]);
    let error = launcher_error(launcher, 6);
    assert!(error.contains("too few slots for 2 s: found 1 of 2 slots on a:1"), "{error}");
    assert_eq!(site.started(), 0);
}

/// S001-5: the texts of horovodrun, and one clear message for each other mistake.
#[test]
fn bad_usage_is_refused_with_one_clear_message() {
    let site = Site::new();
    let executable = site.script("ok.sh", "echo a:1");
    let plain = site.scene.write("plain.sh", "echo a:1");
    let (executable, plain) = (executable.to_str().unwrap(), plain.to_str().unwrap());
    let one = "Cannot run in fault tolerance mode with fewer than 2 hosts.";
    let cases: &[(&[&str], i32, &str)] = &[
        (&["--hosts", "a:2"], 2, one),
        (&["--hosts", "a:2,a:2"], 2, one),
        (&[], 2, "One of --host-discovery-script, --hosts, or --hostnames must be provided"),
        (
            &["--hosts", "a,b", "--host-discovery-script", executable],
            2,
            "--hosts and --host-discovery-script exclude each other; give one of them",
        ),
        (&["--hosts", "a:x,b"], 2, "entry 1 of the hosts: `x` is not a number of slots"),
        (
            &["--hosts", "a,b", "--min-np", "3", "--max-np", "2"],
            2,
            "--min-np 3 is more than --max-np 2",
        ),
        (
            &["--host-discovery-script", "./no.sh"],
            3,
            "--host-discovery-script: there is no program `./no.sh`",
        ),
        (&["--host-discovery-script", plain], 2, "plain.sh is not executable; use `chmod +x"),
        (&["--hosts", "a,b", "--remote-shell", "'ssh"], 2, "the quote ' is not closed"),
        (&["--hosts", "a,b"], 2, "host a is not this machine"),
    ];
    for (args, code, message) in cases {
        let mut launcher = site.start("usage", &[*args, &["--rdzv-id", "job"]].concat());
        let ended = launcher.end(END_MAX);
        assert_eq!(ended.code, Some(*code), "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(message), "{args:?}: {}", ended.stderr);
        assert_eq!(ended.stderr.lines().count(), 1, "{args:?}: {}", ended.stderr);
    }
}

/// S001-2, S001-3: the first failure is fatal; a script that hangs is killed with its children.
#[test]
fn the_first_discovery_must_succeed() {
    let site = Site::new();
    let cases = [
        ("echo oh no >&2; exit 3", "it ended with exit code 3: oh no"),
        ("sleep 1000 & sleep 1000", "it has not ended, or not closed its output, after 1s"),
        ("echo 'a b'", "line 1 of the hosts: `a b` is not a host"),
        ("printf '\\377\\n'", "line 1 of the hosts: the text is not UTF-8"),
        ("yes aaaaaaaaaaaaaaaaaaaaaaaaa", "it printed more than 1048576 bytes"),
    ];
    for (script, message) in cases {
        site.script("hosts.sh", script);
        let error = launcher_error(site.launch_script(&["--discovery-timeout", "1s"]), 2);
        let start = "misconfiguration: the first discovery of hosts failed: ";
        assert!(error.contains(start) && error.contains(message), "{script}: {error}");
        site.scene.leaves_no_process();
    }
}

/// S001-3: later failures are warnings, until the timeout.
#[test]
fn later_failures_of_discovery_are_warnings_until_the_timeout() {
    let site = Site::new();
    site.hosts("a\nb\n");
    let launcher = site.launch_script(&["--discovery-timeout", "1s", "--elastic-timeout", "8"]);
    site.world(2);
    for script in ["exit 3", "sleep 1000", "echo '!'"] {
        let before = launcher.stderr().matches("discovery of hosts failed, and is retried").count();
        site.script("hosts.sh", script);
        eventually("a warning", || {
            let warnings =
                launcher.stderr().matches("discovery of hosts failed, and is retried").count();
            (before < warnings).then_some(())
        });
    }
    site.script("hosts.sh", "cat hosts.txt");
    site.hosts("a\n");
    assert_eq!(site.world(1), ["a"]);
    site.script("hosts.sh", "exit 4");
    let error = launcher_error(launcher, 6);
    assert!(error.contains("the discovery of hosts has failed for"), "{error}");
    assert!(error.contains("it ended with exit code 4"), "{error}");
    site.scene.leaves_no_process();
}

/// S001-9, S001-10: a host whose agent fails gets no other until its cool-down is over.
#[test]
fn a_host_that_fails_comes_back_after_its_cool_down() {
    let site = Site::new();
    site.scene.write("down-b", "");
    let launcher = site.launch(&["--hosts", "a,b", "--blacklist-cooldown-range", "2s:1m"]);
    assert_eq!(site.world(1), ["a"]);
    eventually("the blacklist", || {
        launcher.stderr().contains("the host is on the blacklist").then_some(())
    });
    assert!(launcher.stderr().contains("exit code 255: rsh: host b is down"));
    fs::remove_file(site.scene.path("down-b")).unwrap();
    site.world(2);
    // The end of the agent's connection is a failure, too.
    site.kill_agent("b");
    assert_eq!(site.world(1), ["a"]);
    site.world(2);
    site.finish();
    succeeds(launcher);
    assert!((3..=5).contains(&site.calls("b")), "{}", site.calls("b"));
    assert_eq!(site.calls("a"), 1);
    site.scene.leaves_no_process();
}

/// S001-10: operators see which hosts are on the blacklist, and for how long.
#[test]
fn the_blacklist_is_shown_with_the_time_that_is_left() {
    let site = Site::new();
    let rendezvous = site.rendezvous();
    let admin = free_address().to_string();
    site.scene.write("down-b", "");
    let args = ["--hosts", "a,b", "--blacklist-cooldown-range", "1h:2h", "--admin-listen", &admin];
    let launcher = site.launch(&[&args[..], &["--rdzv-endpoint", &rendezvous.endpoint]].concat());
    assert_eq!(site.world(1), ["a"]);
    let shown = |command: &str| {
        let url = format!("http://{}", rendezvous.endpoint);
        let mut tool = site.scene.command(&program("steadfast"));
        let output = tool.args([command, "--etcd-endpoints", &url]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let (text, left) = eventually("the blacklist in the status", || {
        // The agent reports its worker some time after the round has begun.
        let text = Some(shown("status")).filter(|it| it.contains("  member  1 running  "))?;
        let (_, blacklist) = text.split_once("  blacklist   1 host\n")?;
        let left = blacklist.lines().nth(1)?.trim().strip_prefix("b     1         ")?.to_owned();
        Some((text, left))
    });
    // Of one to two hours, less the seconds since.
    assert!(["59m ", "1h ", "2h 00m "].iter().any(|it| left.starts_with(it)), "{text}");
    assert!(left.ends_with(" left"), "{text}");
    assert!(text.contains("launcher    2 agents started, "), "{text}");
    let node = text.lines().find(|line| line.contains("  member  1 running  ")).expect(&text);
    assert!(node.split_whitespace().any(|cell| cell == "a"), "{text}");
    assert!(shown("why").contains("host b is on the blacklist after 1 failure, "));
    let ask = |path: &str| get(&admin, path).expect("the launcher answers");
    assert_eq!(ask("/readyz").code, 200);
    assert!(ask("/metrics").body.contains("steadfast_launcher_blacklisted_hosts 1"));
    assert!(ask("/status").body.contains("\"launches\":2"), "{}", ask("/status").body);
    site.finish();
    succeeds(launcher);
}

/// S001-42: if the agents of all hosts fail, the job fails, and says why.
#[test]
fn a_job_fails_when_all_hosts_have_failed() {
    let site = Site::new();
    site.scene.write("down-a", "");
    site.scene.write("down-b", "");
    let error = launcher_error(site.launch(&["--hosts", "a,b"]), 1);
    for line in [
        "the agents of all hosts failed: a, b",
        "a: exit code 255: rsh: host a is down",
        "b: exit code 255: rsh: host b is down",
    ] {
        assert!(error.contains(line), "{error}");
    }
}

#[test]
fn a_job_whose_program_fails_ends_when_no_restart_is_left() {
    let site = Site::new();
    site.script("job.sh", "exit 7");
    let error = launcher_error(site.launch(&["--hosts", "a,b", "--max-restarts", "0"]), 1);
    assert!(error.contains("no restart is left (--max-restarts) reason="), "{error}");
    assert!(error.contains("ended with exit code 7"), "{error}");
    site.scene.leaves_no_process();
}

#[test]
fn flags_for_warm_workers_reach_the_agents() {
    let site = Site::new();
    let flags = ["--hosts", "a,b", "--warm-workers", "1", "--warm-imports", "json"];
    let error = launcher_error(site.launch(&flags), 1);
    assert!(error.contains("--warm-workers is for a program that Python runs"), "{error}");
}

/// S001-42, S003-25: one rank has finished, and another fails in its last save: that is no success.
#[test]
fn a_job_whose_last_save_fails_has_not_succeeded() {
    let site = Site::new();
    site.script("job.sh", "[ $RANK = 0 ] || { echo >> succeeded; exit 0; }\nuntil [ -e succeeded ]; do sleep 0.1; done\nsleep 0.5; exit 7");
    let args = ["--hosts", "a,b", "--min-np", "2", "--max-restarts", "0", "--elastic-timeout", "2"];
    let error = launcher_error(site.launch(&args), 6);
    assert!(error.contains("no restart is left (--max-restarts) reason="), "{error}");
    assert!(error.contains("ended with exit code 7"), "{error}");
    assert!(error.contains("too few slots"), "{error}");
    site.scene.leaves_no_process();
}

/// S001-12: the reset limit.
#[test]
fn a_job_ends_when_its_hosts_change_too_often() {
    let site = Site::new();
    site.hosts("a\n");
    let launcher = site.launch_script(&["--reset-limit", "1"]);
    site.world(1);
    site.hosts("a\nb\n");
    site.world(2);
    site.hosts("a\n");
    let error = launcher_error(launcher, 7);
    assert!(error.contains("the agents changed more than 1 times, the reset limit"), "{error}");
    site.scene.leaves_no_process();
}

#[test]
fn an_interrupted_launcher_stops_all_agents_and_a_new_one_begins_again() {
    let site = Site::new();
    let rendezvous = site.rendezvous();
    let args = ["--hosts", "a,b", "--rdzv-endpoint", &rendezvous.endpoint];
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let mut launcher = site.launch(&args);
        site.world(2);
        launcher.signal(signal);
        let ended = launcher.end(END_MAX);
        assert_eq!(ended.code, Some(code), "{}", ended.stderr);
        assert_eq!(site.terminated(), 2, "the workers handle SIGTERM");
        assert!(site.scene.all_of("run").is_empty());
        site.forget();
    }
    let launcher = site.launch(&args);
    site.world(2);
    site.finish();
    succeeds(launcher);
}

/// A closed terminal ends no worker before it has saved, and warnings of a scheduler reach workers on all hosts.
#[test]
fn signals_of_a_launcher_reach_the_workers() {
    let site = Site::new();
    let script = "trap 'echo warned >> warned' USR1; trap 'echo >> terminated; exit 143' TERM\n\
                  echo \"$WORLD_SIZE $RANK ${TEST_HOST:-here}\" >> started\n\
                  until [ -e finish ]; do sleep 0.1; done";
    site.script("job.sh", script);
    let mut launcher = site.launch(&["--hosts", "a,b"]);
    site.world(2);
    launcher.signal(Signal::SIGUSR1);
    let warned = || fs::read_to_string(site.scene.path("warned")).unwrap_or_default();
    eventually("all workers are warned", || (warned().lines().count() == 2).then_some(()));
    launcher.signal(Signal::SIGHUP);
    let ended = launcher.end(END_MAX);
    assert_eq!(ended.code, Some(129), "{}", ended.stderr);
    assert_eq!(site.terminated(), 2, "the workers handle SIGTERM");
    site.scene.leaves_no_process();
}

/// Hosts behind a remote shell get the variables that are named, hosts that are this machine all of them.
#[test]
fn named_variables_are_passed_to_other_hosts() {
    let site = Site::new();
    // A remote shell passes none on.
    site.script(
        "rsh",
        "exec env -i PATH=\"$PATH\" SUITE_MARK=\"$SUITE_MARK\" TEST_HOST=\"$1\" sh -c \"$2\"",
    );
    let show = ["sh", "-c", "echo \"$ONE|$TWO\" >> shown; exec ./job.sh"];
    let hosts = ["--hosts", "a,b", "--env", "ONE=it's 1", "--env", "HOME"];
    let launcher = site.launch_words(&hosts, &show);
    site.world(2);
    let shown = fs::read_to_string(site.scene.path("shown")).unwrap();
    assert_eq!(shown, "it's 1|\nit's 1|\n");
    site.finish();
    succeeds(launcher);
    let error = launcher_error(site.launch(&["--hosts", "a,b", "--env", "NOT_SET_ANYWHERE"]), 2);
    assert!(error.contains("--env NOT_SET_ANYWHERE: the variable is not set"), "{error}");
}

/// A launcher that was killed finds its state, and goes on with the same launches.
#[test]
fn a_launcher_that_was_killed_goes_on_when_it_is_started_again() {
    let site = Site::new();
    let rendezvous = site.rendezvous();
    let args = ["--rdzv-endpoint", &rendezvous.endpoint];
    site.hosts("a\nb\n");
    let mut launcher = site.launch_script(&args);
    site.world(2);
    let before = rendezvous.host("b");
    assert_eq!(before["agent"]["phase"], "running", "{before}");
    launcher.signal(Signal::SIGKILL);
    launcher.end(END_MAX);
    eventually("the agents end with it", || site.scene.all_of("run").is_empty().then_some(()));
    site.forget();
    // The first poll of a launcher that goes on may fail.
    site.script("hosts.sh", "exit 3");
    let launcher = site.launch_script(&args);
    site.world(2);
    assert_eq!(rendezvous.host("b"), before);
    assert_eq!(rendezvous.state()["launches"], 2);
    site.script("hosts.sh", "echo b");
    assert_eq!(site.world(1), ["b"]);
    site.finish();
    succeeds(launcher);
    site.scene.leaves_no_process();
}

#[test]
fn a_job_has_one_launcher() {
    let site = Site::new();
    let rendezvous = site.rendezvous();
    let args = ["--hosts", "a,b", "--rdzv-endpoint", &rendezvous.endpoint];
    let launcher = site.launch(&args);
    site.world(2);
    let error = launcher_error(site.launch(&args), 4);
    assert!(error.contains("another launcher runs this job"), "{error}");
    site.finish();
    succeeds(launcher);
    assert_eq!((site.calls("a"), site.calls("b")), (1, 1));
}

/// A launcher that loses its lease acquires the lock again. Its agents go on.
#[test]
fn agents_go_on_while_etcd_does_not_answer() {
    let site = Site::new();
    let rendezvous = site.rendezvous();
    site.hosts("a\nb\n");
    let launcher = site.launch_script(&["--rdzv-endpoint", &rendezvous.endpoint]);
    site.world(2);
    rendezvous.process.signal(Signal::SIGSTOP);
    eventually("the lease is lost", || {
        launcher.stderr().contains("acquiring the lock again").then_some(())
    });
    rendezvous.process.signal(Signal::SIGCONT);
    site.hosts("a\n");
    eventually("the agent of b is stopped", || (site.scene.all_of("run").len() == 1).then_some(()));
    assert_eq!(site.world(1), ["a"]);
    site.finish();
    succeeds(launcher);
    assert_eq!((site.calls("a"), site.calls("b")), (1, 1));
}

/// The real remote shell: quoting, exit codes, an unknown host, and agents that end with the launcher's connection.
#[test]
fn hosts_are_reached_by_ssh() {
    let site = Site::new();
    let Some(sshd) = Sshd::start(&site.scene, &["127.0.0.2", "127.0.0.3"]) else { return };
    let rendezvous = site.rendezvous();
    let args = ["--remote-shell", &sshd.client, "--rdzv-endpoint", &rendezvous.endpoint];
    let args = [&args[..], &["--directory", site.scene.directory().to_str().unwrap()]].concat();
    let hosts = [&["--hosts", "127.0.0.2,127.0.0.3:2"], &args[..]].concat();
    let mut launcher =
        site.launch_words(&hosts, &["sh", "-c", "echo \"it's $RANK\"; exec ./job.sh"]);
    site.world(3);
    eventually("its output", || launcher.stdout().contains("[rank 0] it's 0").then_some(()));
    launcher.signal(Signal::SIGKILL);
    launcher.end(END_MAX);
    let launcher = site.launch(&hosts);
    within(END_MAX, "the workers are told to end", || (site.terminated() == 3).then_some(()));
    site.forget();
    site.world(3);
    assert_eq!(rendezvous.state()["launches"], 2);
    site.finish();
    succeeds(launcher);
    sshd.leaves_no_agent();
    let unknown = [
        "--hosts",
        "a.invalid,b.invalid",
        "--insecure-allow-plaintext",
        "--advertise",
        "127.0.0.1",
    ];
    let error =
        launcher_error(site.start("unknown", &[&unknown[..], &["--rdzv-id", "x"]].concat()), 1);
    assert!(error.contains("a.invalid: exit code 255: ssh: Could not resolve hostname"), "{error}");
}

/// Waits for the failure of a launcher; returns the lines with its error.
#[track_caller]
fn launcher_error(mut launcher: Process, code: i32) -> String {
    let ended = launcher.end(END_MAX);
    assert_eq!(ended.code, Some(code), "{}", ended.stderr);
    let lines = ended.stderr.lines().filter(|line| line.starts_with("steadfast: error: "));
    lines.collect::<Vec<_>>().join("\n")
}
