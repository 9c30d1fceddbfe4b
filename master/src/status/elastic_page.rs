//! The acting master's web page for an elastic job.

use maud::{Markup, html};
use steadfast_common::elastic_status::{
    ElasticStatus, HostStatus, LauncherStatus, NodePhase, NodeStatus, WorkersPhase,
};
use steadfast_process::Section;

use crate::status::page::{ROWS_MAX, ago, events, more};

/// Renders the sections of a job's page.
pub(crate) fn sections(status: &ElasticStatus, now_unix_ms: u64) -> Vec<Section> {
    let section = |id, title, body| Section { id, title, body };
    let mut sections = vec![
        section("job", "Job", job(status)),
        section("why", "Waiting for", why(status)),
        section("nodes", "Nodes", nodes(&status.nodes, now_unix_ms)),
    ];
    if let Some(it) = &status.launcher {
        sections.push(section("launcher", "Launcher", launcher(it, now_unix_ms)));
    }
    if !status.exits.is_empty() {
        sections.push(section("exits", "Failures of workers", events(&status.exits, now_unix_ms)));
    }
    sections.push(section("events", "Events", events(&status.events, now_unix_ms)));
    sections
}

fn job(status: &ElasticStatus) -> Markup {
    html! {
        table { tbody {
            tr { th scope="row" { "job" } td { (status.job) " (elastic)" } }
            tr { th scope="row" { "state" } td { (status.state.name()) } }
            @if let Some(reason) = status.result.as_ref().and_then(|it| it.reason.as_ref()) {
                tr { th scope="row" { "reason" } td { (reason) } }
            }
            tr { th scope="row" { "round" } td { (status.round) " with " (status.world_size) " workers" } }
            tr { th scope="row" { "nodes" } td { (status.nodes_min) " to " (status.nodes_max) } }
            tr { th scope="row" { "restarts" } td { (status.restarts()) " after failures" } }
            @if let Some(it) = &status.master {
                tr { th scope="row" { "master" } td { (it.address) ", epoch " (it.epoch) } }
            }
        } }
    }
}

fn why(status: &ElasticStatus) -> Markup {
    html! {
        @if status.waiting.is_empty() { p { "Nothing is blocked." } }
        @else { ul { @for reason in &status.waiting { li { (reason) } } } }
    }
}

fn nodes(nodes: &[NodeStatus], now_unix_ms: u64) -> Markup {
    html! {
        @if nodes.is_empty() { p.bad { "None." } }
        @else {
            table {
                thead { tr {
                    th scope="col" { "rank" } th scope="col" { "address" } th scope="col" { "workers" }
                    th scope="col" { "state" } th scope="col" { "member for" } th scope="col" { "restarts" }
                    th scope="col" { "changes" } th scope="col" { "host" } th scope="col" { "node" }
                } }
                tbody { @for it in nodes.iter().take(ROWS_MAX) { (node(it, now_unix_ms)) } }
            }
            (more(nodes.len()))
        }
    }
}

fn node(it: &NodeStatus, now_unix_ms: u64) -> Markup {
    let state = it.workers.map_or(it.state.name(), WorkersPhase::name);
    html! {
        tr {
            td.number { @match it.rank { Some(rank) => (rank), None => "–" } }
            td { (it.address) }
            td.number { (it.slots) }
            @if it.state == NodePhase::Gone { td.bad { (state) } } @else { td { (state) } }
            td.number { @match it.member_since_unix_ms {
                Some(since) => (ago(now_unix_ms.saturating_sub(since))),
                None => "–",
            } }
            td.number { @match &it.report {
                Some(report) => { (report.restarts) " of " (report.restarts_max) },
                None => "–",
            } }
            td.number { @match &it.report { Some(report) => (report.changes), None => "–" } }
            td { (it.host.as_deref().unwrap_or("–")) }
            td { code { (it.node) } }
        }
    }
}

fn launcher(it: &LauncherStatus, now_unix_ms: u64) -> Markup {
    let blacklist: Vec<&HostStatus> = it.blacklist().collect();
    html! {
        p {
            (it.launches) " agents started; the set of agents has changed " (it.resets) " times. "
            @if let Some(outcome) = &it.outcome { (outcome.to_string()) "." }
        }
        @if blacklist.is_empty() { p { "No host is on the blacklist." } }
        @else {
            table {
                thead { tr {
                    th scope="col" { "host on the blacklist" } th scope="col" { "failures" } th scope="col" { "time" }
                } }
                tbody { @for host in blacklist.iter().take(ROWS_MAX) { tr {
                    td.bad { (host.host) }
                    td.number { (host.record.failures) }
                    td.number { (host.time_left(now_unix_ms)) }
                } } }
            }
            (more(blacklist.len()))
        }
    }
}

#[cfg(test)]
mod tests {
    use steadfast_common::elastic_status::NodeReport;
    use steadfast_common::ids::{Incarnation, NodeId, Round};
    use steadfast_common::launch::HostRecord;

    use super::*;

    #[test]
    fn members_are_shown_with_their_workers_and_hosts_on_the_blacklist_with_the_time_left() {
        let member = NodeStatus {
            node: NodeId::of_address("a:1"),
            incarnation: Incarnation(7),
            address: "<a>:1".to_owned(),
            host: Some("a".to_owned()),
            admin: None,
            slots: 2,
            state: NodePhase::Member,
            workers: Some(WorkersPhase::Running),
            member_since_unix_ms: Some(8_000),
            rank: Some(0),
            first_rank: Some(0),
            report: Some(NodeReport {
                round: Round(1),
                restarts: 1,
                restarts_max: 3,
                ..NodeReport::default()
            }),
        };
        let shown = nodes(&[member], 20_000).into_string();
        assert!(shown.contains("&lt;a&gt;:1") && shown.contains("running"), "{shown}");
        assert!(shown.contains("12 s") && shown.contains("1 of 3"), "{shown}");
        let record = HostRecord { failures: 2, cooldown_ms: Some(8_000), agent: None };
        let until = Some(24_000);
        let host = HostStatus { host: "b".to_owned(), record, blacklisted_until_unix_ms: until };
        let status = LauncherStatus { launches: 3, resets: 0, outcome: None, hosts: vec![host] };
        let shown = launcher(&status, 20_000).into_string();
        assert!(shown.contains(">b<") && shown.contains("4 s left"), "{shown}");
    }
}
