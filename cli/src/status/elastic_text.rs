//! Formats the status of an elastic job as text.

use steadfast_common::elastic_status::{ElasticStatus, LauncherStatus, NodePhase, NodeStatus};

use super::elastic::round;
use super::text::{LISTED_MAX, Page};
use crate::format::{plural, span};

/// Maximum number of failures of workers that are shown, latest first.
const EXITS_SHOWN: usize = 3;

/// Formats the status.
pub fn of(status: &ElasticStatus, now_unix_ms: u64) -> String {
    let state = match (&status.error, &status.result) {
        (Some(_), None) => "no master answers",
        (Some(_), Some(_)) | (None, _) => status.state.name(),
    };
    let mut page = Page::new(&status.job, state, " (elastic)");
    if let Some(reason) = status.result.as_ref().and_then(|result| result.reason.as_ref()) {
        page.row("reason", reason);
    }
    if let (Some(error), None) = (&status.error, &status.result) {
        page.row("why", error);
        page.row("below", "the state in etcd; the job continues once a master is acting");
    }
    for reason in &status.waiting {
        page.row("waiting", reason);
    }
    page.row("round", round(status));
    if status.result.is_none() {
        nodes(&mut page, status, now_unix_ms);
    }
    if status.master.is_some() {
        let changes = status.round.0.saturating_sub(1);
        let rounds = plural(usize::try_from(changes).unwrap_or(usize::MAX), "round");
        let restarts = status.restarts();
        page.row("restarts", format!("{restarts} after failures; {rounds} after the first"));
    }
    for exit in status.exits.iter().rev().take(EXITS_SHOWN) {
        let ago = span(now_unix_ms.saturating_sub(exit.unix_ms) as f64 / 1000.0);
        page.row("failure", format!("{} ({ago} ago)", exit.what));
    }
    if let Some(launcher) = &status.launcher {
        add_launcher(&mut page, launcher, now_unix_ms);
    }
    if let Some(master) = &status.master {
        page.row("master", format!("{} (epoch {})", master.address, master.epoch));
    }
    page.text
}

fn nodes(page: &mut Page, status: &ElasticStatus, now_unix_ms: u64) {
    let members = status.nodes.iter().filter(|it| it.state == NodePhase::Member).count();
    let (min, max) = (status.nodes_min, status.nodes_max);
    page.row("nodes", format!("{}; {min} to {max} are allowed", plural(members, "member")));
    for node in status.nodes.iter().take(LISTED_MAX) {
        page.row("", describe(node, now_unix_ms));
    }
    page.more(status.nodes.len());
}

fn describe(node: &NodeStatus, now_unix_ms: u64) -> String {
    let mut text = match node.rank {
        Some(rank) => format!("rank {rank}: {}", node.address),
        None => format!("no rank: {}", node.address),
    };
    if let Some(host) = &node.host {
        text.push_str(&format!(" on host {host}"));
    }
    let workers = plural(node.slots as usize, "worker");
    text.push_str(&match node.workers {
        Some(phase) => format!(", {}, {workers} {}", node.state.name(), phase.name()),
        None => format!(", {}, {workers}", node.state.name()),
    });
    if let Some(ranks) = ranks(node) {
        text.push_str(&format!(" ({ranks})"));
    }
    if let Some(since) = node.member_since_unix_ms.filter(|_| node.state == NodePhase::Member) {
        let seconds = now_unix_ms.saturating_sub(since) as f64 / 1000.0;
        text.push_str(&format!(", member for {}", span(seconds)));
    }
    if let Some(report) = &node.report {
        let (restarts, max) = (report.restarts, report.restarts_max);
        text.push_str(&format!(", {restarts} of {max} restarts, {} changes", report.changes));
    }
    format!("{text}, node {}", node.node)
}

/// Returns the ranks of a member's workers: `ranks 0 to 3`.
fn ranks(node: &NodeStatus) -> Option<String> {
    let first = node.first_rank?;
    Some(match node.slots {
        0 | 1 => format!("rank {first}"),
        slots => format!("ranks {first} to {}", first + slots - 1),
    })
}

fn add_launcher(page: &mut Page, launcher: &LauncherStatus, now_unix_ms: u64) {
    let launches = usize::try_from(launcher.launches).unwrap_or(usize::MAX);
    let resets = plural(launcher.resets as usize, "change");
    page.row("launcher", format!("{} started, {resets} of the set", plural(launches, "agent")));
    if let Some(outcome) = &launcher.outcome {
        page.row("", outcome.to_string());
    }
    let blacklist: Vec<_> = launcher.blacklist().collect();
    for host in blacklist.iter().take(LISTED_MAX) {
        let failures = plural(host.record.failures as usize, "failure");
        page.row(
            "blacklist",
            format!("{}: {failures}, {}", host.host, host.time_left(now_unix_ms)),
        );
    }
    page.more(blacklist.len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::sample;

    #[test]
    fn an_elastic_job_shows_its_nodes_by_rank_and_what_they_wait_for() {
        let text = of(&sample::elastic(), 20_000);
        let expected = "\
job ddp: gathering (elastic)
  waiting     10.0.0.1:4001 waits for 10.0.0.2:4002
  round       3, 4 workers
  nodes       1 member; 1 to 4 are allowed
              rank 0: 10.0.0.1:4001 on host a, waiting, 2 workers (ranks 0 to 1), 1 of 3 restarts, 2 changes, \
node 00000000-0000-0000-0000-000000000001
              rank 1: 10.0.0.2:4002, member, 2 workers running (ranks 2 to 3), member for 12s, \
node 00000000-0000-0000-0000-000000000002
              no rank: 10.0.0.3:4003, starting, 1 worker, node 00000000-0000-0000-0000-000000000003
  restarts    1 after failures; 2 rounds after the first
  failure     10.0.0.1:4001: round 3: the worker of rank 1 ended with exit code 7 (2s ago)
  launcher    5 agents started, 1 change of the set
  blacklist   c: 2 failures, 4 s left
  master      127.0.0.1:4000 (epoch 9)
";
        assert_eq!(text, expected);
    }

    #[test]
    fn without_a_master_an_elastic_job_shows_the_contents_of_etcd_and_a_notice() {
        let mut status = sample::elastic();
        status.master = None;
        status.error = Some("the job has no acting master".to_owned());
        for host in status.launcher.iter_mut().flat_map(|it| &mut it.hosts) {
            host.blacklisted_until_unix_ms = None;
        }
        let text = of(&status, 20_000);
        assert!(text.starts_with("job ddp: no master answers (elastic)\n"), "{text}");
        assert!(text.contains("why         the job has no acting master\n"), "{text}");
        assert!(text.contains("blacklist   c: 2 failures, at most 8 s left\n"), "{text}");
    }
}
