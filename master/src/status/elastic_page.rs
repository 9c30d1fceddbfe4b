//! The acting master's web page for an elastic job.

use maud::{Markup, html};
use steadfast_common::elastic_status::{ElasticPhase, ElasticStatus, NodePhase, NodeStatus};
use steadfast_process::Section;

use crate::status::page::{ROWS_MAX, events, more};

/// Renders the sections of a job's page.
pub(crate) fn sections(status: &ElasticStatus, now_unix_ms: u64) -> Vec<Section> {
    let section = |id, title, body| Section { id, title, body };
    vec![
        section("job", "Job", job(status)),
        section("why", "Waiting for", why(status)),
        section("nodes", "Nodes", nodes(&status.nodes)),
        section("events", "Events", events(&status.events, now_unix_ms)),
    ]
}

fn job(status: &ElasticStatus) -> Markup {
    let state = match status.state {
        ElasticPhase::Gathering => "gathering",
        ElasticPhase::Running => "running",
        ElasticPhase::Finished => "finished",
        ElasticPhase::Failed => "failed",
    };
    html! {
        table { tbody {
            tr { th scope="row" { "job" } td { (status.job) " (elastic)" } }
            tr { th scope="row" { "state" } td { (state) } }
            tr { th scope="row" { "round" } td { (status.round) " with " (status.world_size) " workers" } }
            tr { th scope="row" { "nodes" } td { (status.nodes_min) " to " (status.nodes_max) } }
            tr { th scope="row" { "master" } td { (status.master.address) ", epoch " (status.master.epoch) } }
        } }
    }
}

fn why(status: &ElasticStatus) -> Markup {
    html! {
        @if status.waiting.is_empty() { p { "Nothing is blocked." } }
        @else { ul { @for reason in &status.waiting { li { (reason) } } } }
    }
}

fn nodes(nodes: &[NodeStatus]) -> Markup {
    html! {
        @if nodes.is_empty() { p.bad { "None." } }
        @else {
            table {
                thead { tr {
                    th scope="col" { "rank" } th scope="col" { "address" } th scope="col" { "workers" }
                    th scope="col" { "state" } th scope="col" { "restarts" } th scope="col" { "node" }
                } }
                tbody { @for it in nodes.iter().take(ROWS_MAX) { (node(it)) } }
            }
            (more(nodes.len()))
        }
    }
}

fn node(it: &NodeStatus) -> Markup {
    let state = match it.state {
        NodePhase::Starting => "starting",
        NodePhase::Waiting => "waiting",
        NodePhase::Member => "member",
        NodePhase::Late => "late",
        NodePhase::Gone => "gone",
    };
    html! {
        tr {
            td.number { @match it.rank { Some(rank) => (rank), None => "–" } }
            td { (it.address) }
            td.number { (it.slots) }
            @if it.state == NodePhase::Gone { td.bad { (state) } } @else { td { (state) } }
            td.number { @match &it.report {
                Some(report) => { (report.restarts) " of " (report.restarts_max) },
                None => "–",
            } }
            td { code { (it.node) } }
        }
    }
}
