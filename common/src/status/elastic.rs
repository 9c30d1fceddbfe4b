//! The status of an elastic job: its values, and the document of them.

use serde::{Deserialize, Serialize};

use super::document::{Body, Cell, Document, Level, Metric, Row, Section, Summary, Table, Value};
use super::format::plural;
use super::training::{MasterStatus, TimelineEvent, summary};
use super::waits::{JOB, Wait};
use crate::ids::{Incarnation, NodeId, Round};
use crate::job::elastic::ElasticKind;
use crate::records::ResultRecord;
use crate::records::commits::CommitRecord;
use crate::records::launch::{HostRecord, Outcome};
use crate::records::scale::{ScaleMode, ScaleRecord};

/// An elastic job at one point in time, as seen by its acting master or else read from etcd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ElasticStatus {
    pub kind: ElasticKind,
    pub job: String,
    pub state: ElasticPhase,
    /// What is blocked, by what, and why; empty if nothing is blocked.
    pub waiting: Vec<String>,
    /// Which node waits for which, with the same reasons.
    #[serde(default)]
    pub waits: Vec<Wait>,
    /// The nodes that are waited for; only the first few.
    #[serde(default)]
    pub awaited: Vec<NodeId>,
    pub nodes_min: u32,
    pub nodes_max: u32,
    /// The round that was formed last; 0 before the first.
    pub round: Round,
    /// Number of workers of the round that was formed last.
    pub world_size: u32,
    /// The position in the data that the workers have reached; absent unless the job counts records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataStatus>,
    /// Says how many workers the rounds are to have, if a person or the master has chosen a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<ScaleStatus>,
    /// All known nodes: the members of the last round by rank, then the others.
    pub nodes: Vec<NodeStatus>,
    /// The launcher, if the job has or had one.
    #[serde(default)]
    pub launcher: Option<LauncherStatus>,
    /// The acting master; absent if it does not answer: the rest is then what etcd holds.
    pub master: Option<MasterStatus>,
    /// Why no master answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Restarts after failures of nodes that are gone, as far as they have reported them to this master.
    #[serde(default)]
    pub restarts_of_gone: u64,
    /// The last failures of workers that agents reported to this master, the latest last.
    #[serde(default)]
    pub exits: Vec<TimelineEvent>,
    /// Timeline of this master's term, the latest event last.
    pub events: Vec<TimelineEvent>,
    pub result: Option<ResultRecord>,
}

/// The position in the data that the workers have reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataStatus {
    /// The number of records of a pass.
    pub records: u64,
    /// The last commit that was decided; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<CommitRecord>,
    /// Tells how fast the workers used records lately, by their number, as this master has measured it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub speeds: Vec<SpeedStatus>,
}

/// Says how many workers the rounds are to have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScaleStatus {
    #[serde(flatten)]
    pub record: ScaleRecord,
    /// Says what the master would do, in mode `advise`, or will do next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Before this time the master tries no other number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_try_unix_ms: Option<u64>,
}

/// The speed of a number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpeedStatus {
    pub workers: u32,
    /// Records that all of them together use in a second.
    pub records_per_second: f64,
}

/// Phases of an elastic job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElasticPhase {
    /// No round is intact: nodes gather.
    Gathering,
    /// The members of a round run their workers.
    Running,
    Finished,
    Failed,
}

impl ElasticPhase {
    /// Returns the name, for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gathering => "gathering",
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Failed => "failed",
        }
    }
}

/// A node, as the master knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub address: String,
    /// The host on which a launcher started its agent, under the launcher's name for that host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The admin port of its agent; absent for a node without one, or that is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<String>,
    pub slots: u32,
    pub state: NodePhase,
    /// What its workers do, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<WorkersPhase>,
    /// Since when it has been a member of each round, or since when the master acts, if that is later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_since_unix_ms: Option<u64>,
    /// Records that its workers used in a second of late, in a job whose order is dynamic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records_per_second: Option<f64>,
    /// Rank of the node in the last round, and rank of its first worker.
    pub rank: Option<u32>,
    pub first_rank: Option<u32>,
    /// What its agent reported last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<NodeReport>,
}

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodePhase {
    Starting,
    Waiting,
    Member,
    Late,
    /// A member of the last round that was lost, or left.
    Gone,
}

impl NodePhase {
    /// Returns the name, for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Waiting => "waiting",
            Self::Member => "member",
            Self::Late => "late",
            Self::Gone => "gone",
        }
    }
}

/// What the workers of a member do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkersPhase {
    /// The agent has not reported that they run in this round.
    Starting,
    Running,
    /// All have exited with 0; the node waits for the others.
    Succeeded,
}

impl WorkersPhase {
    /// Returns the name, for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
        }
    }
}

/// The state of a node's workers, as its agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// The round in which the agent reported.
    pub round: Round,
    /// Restarts after failures.
    pub restarts: u32,
    pub restarts_max: u32,
    /// Rounds that ended for the node because others came or went.
    pub changes: u64,
    pub state: String,
    /// Which worker failed last, in which round, and how; empty if none has.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub last_exit: String,
    /// The time that the slowest worker of the node computes for an update, without waits for others, in µs. It is 0 if
    /// unknown.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub busy_us: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl ElasticStatus {
    /// Returns the number of restarts after failures that agents have reported, including those of nodes that are gone.
    pub fn restarts(&self) -> u64 {
        let reports = self.nodes.iter().filter_map(|node| node.report.as_ref());
        self.restarts_of_gone + reports.map(|report| u64::from(report.restarts)).sum::<u64>()
    }
}

/// What a launcher has recorded in etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LauncherStatus {
    /// Agents that were started.
    pub launches: u64,
    /// How often the set of agents changed after it had settled.
    pub resets: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// The hosts that run an agent or have failed.
    pub hosts: Vec<HostStatus>,
}

impl LauncherStatus {
    pub fn blacklist(&self) -> impl Iterator<Item = &HostStatus> {
        self.hosts.iter().filter(|host| host.record.cooldown_ms.is_some())
    }
}

/// A host of a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    pub host: String,
    #[serde(flatten)]
    pub record: HostRecord,
    /// When the host leaves the blacklist, as the master computes; absent if the host is not on it, or no master
    /// answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blacklisted_until_unix_ms: Option<u64>,
}

impl HostStatus {
    /// Returns how long the host stays on the blacklist.
    pub fn time_left(&self) -> Value {
        match self.blacklisted_until_unix_ms {
            Some(until) => Value::Until(until),
            // Records hold no points in time.
            None => {
                let seconds = self.record.cooldown_ms.unwrap_or(0).div_ceil(1000);
                Value::Text(format!("at most {seconds}s left"))
            }
        }
    }
}

/// A node is slow if its workers are slower than this part of the speed of the median node.
const SLOW: f64 = 0.5;

/// Maximum number of failures of workers that are shown, latest first.
const EXITS_SHOWN: usize = 3;

impl ElasticStatus {
    /// Describes the status.
    pub fn document(&self) -> Document {
        let (state, level) = match (&self.error, &self.result) {
            (Some(_), None) => ("no master answers", Level::Bad),
            (Some(_), Some(_)) | (None, _) => (self.state.name(), self.state.level()),
        };
        let rows = Body::Rows(self.rows());
        let mut sections = vec![Section { id: "job", title: "Job", body: rows }];
        if self.result.is_none() {
            sections.push(self.nodes());
        }
        sections.extend(self.launcher.iter().flat_map(blacklist));
        let events = Body::Events(self.events.clone());
        sections.push(Section { id: "events", title: "Events", body: events });
        let names = ElasticPhase::ALL.map(ElasticPhase::name);
        let help = "1 for the current state of the elastic job";
        Document {
            job: self.job.clone(),
            state: state.to_owned(),
            level,
            kind: "elastic",
            done: None,
            waits: self.waits.clone(),
            sections,
            metrics: Metric::states("steadfast_elastic_state", help, &names, self.state.name()),
        }
    }

    fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        let reason = self.result.as_ref().and_then(|result| result.reason.as_ref());
        rows.extend(reason.map(|it| Row::error("reason", it)));
        if let (Some(error), None) = (&self.error, &self.result) {
            rows.push(Row::error("why", error));
            let below = "the state in etcd; the job continues once a master is acting";
            rows.push(Row::text("below", below));
        }
        let round = match self.round.0 {
            0 => "none yet".to_owned(),
            number => format!("{number}, {}", plural(self.world_size as usize, "worker")),
        };
        let help = "Rounds that were formed";
        let row = Row::text("round", round).counter("steadfast_elastic_rounds", help, self.round.0);
        let help = "Workers of the round that was formed last";
        rows.push(row.gauge("steadfast_elastic_workers", help, self.world_size));
        rows.extend(self.data.iter().flat_map(|data| data.rows(self.world_size)));
        let (name, help) =
            ("steadfast_elastic_workers_desired", "Workers that the rounds are to have at most");
        rows.extend(self.scale.iter().flat_map(|it| it.rows("workers", name, help)));
        if self.master.is_some() {
            let changes = usize::try_from(self.round.0.saturating_sub(1)).unwrap_or(usize::MAX);
            let help = "Restarts after failures, as agents have reported them to this master";
            let note = format!(" after failures; {} after the first", plural(changes, "round"));
            let row = Row::new("restarts", Value::Count(self.restarts()));
            let row = row.note(note);
            rows.push(row.counter("steadfast_elastic_restarts", help, self.restarts()));
        }
        rows.extend(self.slow_nodes().into_iter().map(|it| Row::warning("slow", it)));
        for exit in self.exits.iter().rev().take(EXITS_SHOWN) {
            rows.push(Row::error("failure", &exit.what).since(exit.unix_ms));
        }
        rows.extend(self.launcher.iter().map(launcher));
        let master = self.master.iter();
        rows.extend(
            master.map(|it| Row::text("master", format!("{} (epoch {})", it.address, it.epoch))),
        );
        rows
    }

    /// Describes the nodes whose workers are slower than [`SLOW`] of the median node.
    fn slow_nodes(&self) -> Vec<String> {
        let used =
            self.slower(NodeStatus::speed_of_worker).into_iter().map(|(node, speed, median)| {
                let address = &node.address;
                format!(
                    "a worker of {address} uses {speed:.1}/s, one of the median node {median:.1}/s"
                )
            });
        let busy =
            self.slower(NodeStatus::updates_per_second).into_iter().map(|(node, speed, median)| {
                let (own, others) = (1000.0 / speed, 1000.0 / median);
                let address = &node.address;
                format!(
                    "{address} computes {own:.1} ms for an update, the median node {others:.1} ms"
                )
            });
        used.chain(busy).collect()
    }

    /// Returns the nodes that are slower than [`SLOW`] of the median, with their speed and the median.
    fn slower(
        &self,
        speed_of: impl Fn(&NodeStatus) -> Option<f64>,
    ) -> Vec<(&NodeStatus, f64, f64)> {
        let mut all: Vec<f64> = self.nodes.iter().filter_map(&speed_of).collect();
        all.sort_by(f64::total_cmp);
        let Some(median) = all.get(all.len() / 2).copied() else { return Vec::new() };
        let slow = |node| Some((node, speed_of(node).filter(|it| *it < SLOW * median)?, median));
        self.nodes.iter().filter_map(slow).collect()
    }

    fn nodes(&self) -> Section {
        let members = self.nodes.iter().filter(|it| it.state == NodePhase::Member).count();
        let (min, max) = (self.nodes_min, self.nodes_max);
        let text = format!("{}; {min} to {max} are allowed", plural(members, "member"));
        let has_hosts = self.nodes.iter().any(|it| it.host.is_some());
        let mut columns = vec!["rank", "address", "state", "workers", "ranks", "member for"];
        columns.extend(["restarts", "changes"]);
        let has_speeds = self.nodes.iter().any(|it| it.records_per_second.is_some());
        if has_speeds {
            columns.push("records/s");
        }
        let computes = self.nodes.iter().any(|it| it.updates_per_second().is_some());
        if computes {
            columns.push("computes");
        }
        if has_hosts {
            columns.push("host");
        }
        columns.push("node");
        let row = |it: &NodeStatus| {
            let mut cells = it.cells();
            if has_speeds {
                cells.push(it.records_per_second.map_or(Value::None, Value::Rate).into());
            }
            if computes {
                let time = it.updates_per_second().map(|it| format!("{:.1} ms", 1000.0 / it));
                cells.push(Value::maybe_text(time).into());
            }
            if has_hosts {
                cells.push(Value::maybe_text(it.host.as_ref()).into());
            }
            cells.push(Value::Id(it.node.to_string()).into());
            cells
        };
        let help = "Members of the round that was formed last, without those that are gone";
        let metrics = vec![Metric::gauge("steadfast_elastic_members", help, members)];
        let table = Table {
            summary: Summary { metrics, ..summary("nodes", text) },
            columns,
            rows: self.nodes.iter().map(row).collect(),
            processes: self.nodes.iter().map(|it| process(it.node)).collect(),
            count: self.nodes.len(),
        };
        Section { id: "nodes", title: "Nodes", body: Body::Table(table) }
    }

    /// Returns the waits with these reasons for the nodes that are waited for.
    pub fn waits_of(reasons: &[String], awaited: &[NodeId]) -> Vec<Wait> {
        let wait = |reason: &String, on: String| Wait::new(JOB, on, reason);
        let mut waits = Vec::new();
        for (index, reason) in reasons.iter().enumerate() {
            match index {
                // The first reason names the nodes.
                0 if !awaited.is_empty() => {
                    waits.extend(awaited.iter().map(|node| wait(reason, process(*node))));
                }
                _ => waits.push(wait(reason, String::new())),
            }
        }
        waits
    }
}

/// Returns the name of a node in [`Wait`].
fn process(node: NodeId) -> String {
    format!("node {node}")
}

impl SpeedStatus {
    /// Returns the speed for users, such as `2 workers 1830/s`.
    pub(super) fn shown(&self, worker: &str) -> String {
        let digits = usize::from(self.records_per_second < 10.0);
        let workers = plural(self.workers as usize, worker);
        format!("{workers} {:.digits$}/s", self.records_per_second)
    }
}

impl ScaleStatus {
    /// Returns a row with this label, with a metric, and those about what the master would do.
    pub(super) fn rows(
        &self,
        label: &'static str,
        name: &'static str,
        help: &'static str,
    ) -> Vec<Row> {
        let row = Row::text(label, self.record.to_string());
        let row = match self.record.workers {
            Some(workers) => row.gauge(name, help, workers),
            None => row,
        };
        let label = if self.record.mode == ScaleMode::Auto { "next try" } else { "advice" };
        let advice = self.advice.iter().map(|advice| Row::text(label, advice));
        let pause = self.next_try_unix_ms.map(|next| Row::new("pause", Value::Until(next)));
        std::iter::once(row).chain(advice).chain(pause).collect()
    }
}

impl DataStatus {
    /// Returns the rows of a job that has so many workers.
    fn rows(&self, workers: u32) -> Vec<Row> {
        let position = self.commit.as_ref().map(|commit| commit.position).unwrap_or_default();
        let ahead = self.commit.as_ref().map_or(0, |commit| commit.ahead.count());
        let text = match &self.commit {
            Some(commit) => commit.id.to_string(),
            None => "none yet".to_owned(),
        };
        let help = "Records of this pass that the last commit has seen";
        let used = Value::Of(position.used, Some(self.records));
        let used = Row::new("records", used).note(match ahead {
            0 => format!(" of pass {}", position.pass),
            ahead => format!(" of pass {}, and {ahead} behind them", position.pass),
        });
        let used = used.gauge("steadfast_elastic_pass_records", help, position.used);
        let help = "Records of all passes that the last commit has seen";
        let seen = Row::new("records in all", Value::Count(position.seen));
        let seen = seen.gauge("steadfast_elastic_records", help, position.seen);
        let mut rows = vec![Row::text("commit", text), used, seen];
        if !self.speeds.is_empty() {
            let shown: Vec<String> = self.speeds.iter().map(|it| it.shown("worker")).collect();
            let help =
                "Records that the workers use in a second, as measured lately with so many workers";
            let row = Row::text("speed", shown.join(", "));
            rows.push(match self.speeds.iter().find(|it| it.workers == workers) {
                Some(now) => {
                    row.gauge("steadfast_elastic_records_per_second", help, now.records_per_second)
                }
                None => row,
            });
        }
        rows
    }
}

impl NodeStatus {
    /// Returns the records that one of its workers uses in a second, if that was measured.
    fn speed_of_worker(&self) -> Option<f64> {
        self.records_per_second.map(|all| all / f64::from(self.slots.max(1)))
    }

    /// Returns how many updates its slowest worker could compute in a second if it never waited for others, if that was
    /// measured.
    fn updates_per_second(&self) -> Option<f64> {
        let busy = self.report.as_ref().map(|it| it.busy_us).filter(|it| 0 < *it)?;
        Some(1e6 / busy as f64)
    }

    fn cells(&self) -> Vec<Cell> {
        let state = Value::Text(self.state.name().to_owned());
        let workers = match self.workers {
            Some(phase) => format!("{} {}", self.slots, phase.name()),
            None => self.slots.to_string(),
        };
        let ranks = self.first_rank.map(|first| match self.slots {
            0 | 1 => first.to_string(),
            slots => format!("{first} to {}", first + slots - 1),
        });
        let since = self.member_since_unix_ms.filter(|_| self.state == NodePhase::Member);
        let report = self.report.as_ref();
        vec![
            Value::maybe_count(self.rank).into(),
            Value::Text(self.address.clone()).into(),
            if self.state == NodePhase::Gone { Cell::bad(state) } else { state.into() },
            Value::Text(workers).into(),
            Value::maybe_text(ranks).into(),
            since.map_or(Value::None, Value::Since).into(),
            report.map_or(Value::None, |it| it.restarts_of_max()).into(),
            Value::maybe_count(report.map(|it| it.changes)).into(),
        ]
    }
}

impl NodeReport {
    fn restarts_of_max(&self) -> Value {
        Value::Of(self.restarts.into(), Some(self.restarts_max.into()))
    }
}

impl ElasticPhase {
    /// All phases, in the order of a job.
    const ALL: [Self; 4] = [Self::Gathering, Self::Running, Self::Finished, Self::Failed];

    fn level(self) -> Level {
        match self {
            Self::Gathering => Level::Warning,
            Self::Running | Self::Finished => Level::Good,
            Self::Failed => Level::Bad,
        }
    }
}

/// What the launcher did.
fn launcher(launcher: &LauncherStatus) -> Row {
    let launches = usize::try_from(launcher.launches).unwrap_or(usize::MAX);
    let resets = plural(launcher.resets as usize, "change");
    let text = format!("{} started, {resets} of the set", plural(launches, "agent"));
    let outcome = launcher.outcome.as_ref().map_or_else(String::new, |it| format!("; {it}"));
    Row::text("launcher", text).note(outcome)
}

/// The hosts on the blacklist, if there are any.
fn blacklist(launcher: &LauncherStatus) -> Option<Section> {
    let hosts: Vec<&HostStatus> = launcher.blacklist().collect();
    let row = |it: &&HostStatus| {
        vec![
            Cell::bad(Value::Text(it.host.clone())),
            Value::Count(it.record.failures.into()).into(),
            it.time_left().into(),
        ]
    };
    let table = Table {
        summary: summary("blacklist", plural(hosts.len(), "host")),
        columns: vec!["host", "failures", "time"],
        rows: hosts.iter().map(row).collect(),
        processes: Vec::new(),
        count: hosts.len(),
    };
    let section = Section { id: "blacklist", title: "Blacklist", body: Body::Table(table) };
    (!hosts.is_empty()).then_some(section)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S002-10, S003-54: the measured speeds are shown together, and that of the present workers is a metric.
    #[test]
    fn speeds_are_shown_by_the_number_of_workers() {
        let speed = |workers, records_per_second| SpeedStatus { workers, records_per_second };
        let speeds = vec![speed(1, 7.25), speed(2, 1830.4)];
        let data = DataStatus { records: 9, commit: None, speeds };
        let row_of = |workers| data.rows(workers).pop().expect("there are rows");
        let shown = row_of(2);
        assert_eq!(shown.value, Value::Text("1 worker 7.2/s, 2 workers 1830/s".to_owned()));
        let metric =
            Metric::gauge("steadfast_elastic_records_per_second", shown.metrics[0].help, 1830.4);
        assert_eq!(shown.metrics, [metric]);
        assert_eq!(row_of(3).metrics, []);
    }
}
