//! What etcd holds of a launcher: one that is started again decides, and its own records restore it.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use serde_json::json;
use steadfast_common::ids::Millis;
use steadfast_common::records::launch::{HostRecord, LauncherRecord, Outcome};
use steadfast_fuzz::{seeds, within};
use steadfast_launcher_core::Exit;
use steadfast_launcher_core::discovery::Discovery;
use steadfast_launcher_core::hosts::{Host, HostName, parse_list};
use steadfast_launcher_core::launcher::{Change, FACTS_MAX, Fact, Launcher};
use steadfast_launcher_core::settings::{Context, Settings, WorkerRange};
use steadfast_launcher_core::timers::Timers;

/// A host has a record, and waits, in several maps.
const TIMES_MAX: usize = 1024;
/// Decisions after one event, besides some for each host.
const DECISIONS_MAX: usize = 16;

fuzz_target!(init: seeds("launcher", well_formed()), |data: &[u8]| {
    let Some((sizes, text)) = data.split_first() else { return };
    let min_np = 1 + u32::from(sizes % 4);
    let max_np = if *sizes < 128 { min_np + u32::from(sizes / 4 % 8) } else { u32::MAX };
    let mut settings = Settings::new(WorkerRange::new(min_np, max_np).expect("a valid range"));
    settings.reset_limit = (sizes & 64 != 0).then_some(3);
    within(TIMES_MAX * text.len() + (64 << 10), || play(text, settings));
});

/// Recovers from the records on the first lines, and polls the hosts on each other line.
fn play(text: &[u8], settings: Settings) {
    let mut records = Records::default();
    let mut lines = text.split(|it| *it == b'\n');
    for line in lines.by_ref().take_while(|line| !line.is_empty()) {
        if records.read(line).is_none() {
            return;
        }
    }
    let launcher = records.restored();
    drop(launcher.actions());
    let (timers, now) = (Timers::default(), Millis(0));
    let discovery = Discovery::resumed(settings.elastic_timeout_ms, now);
    let mut driver = Driver { records, launcher, discovery, timers, settings, now };
    driver.commit(&[]);
    for (line, number) in lines.zip(0..) {
        driver.poll(line);
        driver.exit(if number % 3 == 2 { Exit::Succeeded } else { Exit::Failed });
        driver.now = driver.launcher.deadline(driver.context()).unwrap_or(driver.now);
        driver.settle();
    }
    let end = driver.launcher.end(Outcome::Interrupted);
    driver.commit(&end);
    driver.settle();
    assert!(driver.launcher.record().outcome.is_some());
}

/// The keys in etcd.
#[derive(Default)]
struct Records {
    launcher: Option<LauncherRecord>,
    hosts: BTreeMap<HostName, HostRecord>,
}

impl Records {
    /// Reads a line: the record of the job, or a host and its record. Returns `None` if it is invalid.
    fn read(&mut self, line: &[u8]) -> Option<()> {
        if line.starts_with(b"{") {
            self.launcher = Some(serde_json::from_slice(line).ok()?);
            return Some(());
        }
        let mut parts = line.splitn(2, |it| *it == b' ');
        let host = std::str::from_utf8(parts.next()?).ok()?.parse().ok()?;
        self.hosts.insert(host, serde_json::from_slice(parts.next()?).ok()?);
        Some(())
    }

    fn restored(&self) -> Launcher {
        Launcher::from_records(self.launcher.clone(), self.hosts.clone())
    }

    fn write(&mut self, change: Change) {
        match change {
            Change::Launcher(record) => self.launcher = Some(record),
            Change::Host { host, record: Some(record) } => {
                self.hosts.insert(host, record);
            }
            Change::Host { host, record: None } => {
                self.hosts.remove(&host);
            }
        }
    }
}

struct Driver {
    records: Records,
    launcher: Launcher,
    discovery: Discovery,
    timers: Timers,
    settings: Settings,
    now: Millis,
}

impl Driver {
    fn context(&self) -> Context<'_> {
        let discovered = self.discovery.hosts();
        Context { settings: &self.settings, discovered, timers: &self.timers, now: self.now }
    }

    fn commit(&mut self, facts: &[Fact]) {
        assert!(facts.len() <= FACTS_MAX + 1);
        for change in self.launcher.changes(facts) {
            self.records.write(change);
        }
        facts.iter().for_each(|fact| self.launcher.evolve(fact));
        assert_eq!(self.records.restored(), self.launcher, "the records are the state");
        let discovered = self.discovery.hosts();
        self.timers.follow(self.now, &self.launcher, &self.settings, discovered);
        drop(self.launcher.blacklist(&self.timers, self.now));
    }

    /// Commits what is due, until nothing is.
    fn settle(&mut self) {
        let hosts = self.launcher.hosts().count() + self.discovery.hosts().map_or(0, <[Host]>::len);
        for _ in 0..DECISIONS_MAX + 4 * hosts {
            let facts = self.launcher.due(self.context());
            if facts.is_empty() {
                return;
            }
            self.commit(&facts);
        }
        panic!("there is always something due: {:?}", self.launcher);
    }

    fn poll(&mut self, list: &[u8]) {
        let text = String::from_utf8_lossy(list);
        match parse_list(&text, 2) {
            Ok(hosts) => drop(self.discovery.succeeded(self.now, &hosts)),
            Err(error) => drop(self.discovery.failed(self.now, &error.to_string())),
        }
        self.commit(&[]);
        self.settle();
    }

    /// The agents exit, up to two of them.
    fn exit(&mut self, exit: Exit) {
        let agents = self.launcher.agents().map(|(host, agent)| (host.clone(), agent.launch));
        for (host, launch) in agents.take(2).collect::<Vec<_>>() {
            let facts = self.launcher.exited(&host, launch, exit, u64::MAX, self.context());
            self.commit(&facts);
            self.settle();
        }
    }
}

fn well_formed() -> Vec<Vec<u8>> {
    let job = json!({ "launches": 3, "resets": 1, "settled": true });
    let over = json!({ "launches": 3, "resets": 1, "settled": true, "outcome": { "result": "succeeded" } });
    let agent = |launch: u64, phase| json!({ "agent": { "launch": launch, "place": launch, "slots": 2, "phase": phase } });
    let stopping = json!({ "agent": {
        "launch": 2, "place": 1, "slots": 1, "phase": "stopping", "reason": "slots_changed",
    } });
    let cooling = json!({ "failures": 2, "cooldown_ms": 4000 });
    [
        (5, "\na:2,b\na\na,b,c".to_owned()),
        (
            200,
            format!(
                "{job}\na {}\nb {stopping}\nc {cooling}\n\na,b,c\nb,c\na:1,c",
                agent(3, "running")
            ),
        ),
        (70, format!("{job}\na {}\nb {cooling}\n\nb,a,d\n\nx,,y:9", agent(3, "restarting"))),
        (9, format!("{over}\na {}\n\na,b", agent(3, "running"))),
    ]
    .map(|(sizes, text): (u8, _)| [&[sizes], text.as_bytes()].concat())
    .to_vec()
}
