//! The wait chain of an elastic job.

use futures::future::join_all;
use serde_json::Value;
use steadfast_common::status::format::plural;
use steadfast_common::status::{ElasticStatus, NodePhase, NodeStatus, Wait};

use crate::admin_client;
use crate::job_args::Job;

/// Returns what the job waits for. The agents of the nodes that are waited for are asked what they do.
pub(super) async fn waits(job: &Job, status: &ElasticStatus, now_unix_ms: u64) -> Vec<Wait> {
    let awaited = status.nodes.iter().filter(|node| status.awaited.contains(&node.node));
    let answers = awaited.map(|node| async move { (node, asked(job, node).await) });
    let answers = join_all(answers).await;
    all_waits(status, &answers, now_unix_ms)
}

/// Asks the agent of a node what it does; `None` if it has no admin port.
async fn asked(job: &Job, node: &NodeStatus) -> Option<Result<Value, String>> {
    let admin = node.admin.as_ref()?;
    Some(admin_client::status(admin, &job.tls).await.map_err(|failure| failure.message))
}

fn all_waits(
    status: &ElasticStatus,
    awaited: &[(&NodeStatus, Option<Result<Value, String>>)],
    now_unix_ms: u64,
) -> Vec<Wait> {
    let mut found = Vec::new();
    if status.waiting.is_empty() && status.error.is_none() {
        let workers = plural(status.world_size as usize, "worker");
        let running = format!("not blocked: round {} runs with {workers}", status.round);
        found.push(Wait::of_job("", running));
    }
    found.extend(status.error.iter().flat_map(|error| super::without_master(error)));
    found.extend(status.waits.iter().cloned());
    found.extend(awaited.iter().map(|it| Wait::of_job("", describe(it))));
    let hosts = status.launcher.iter().flat_map(|launcher| launcher.blacklist());
    found.extend(hosts.map(|host| {
        let failures = plural(host.record.failures as usize, "failure");
        let left = host.time_left().text(now_unix_ms);
        let why = format!("host {} is on the blacklist after {failures}, {left}", host.host);
        Wait::of_job("", why)
    }));
    if let Some(outcome) = status.launcher.as_ref().and_then(|it| it.outcome.as_ref()) {
        found.push(Wait::of_job("", format!("the launcher has ended: {outcome}")));
    }
    found
}

/// Describes a node that is waited for.
fn describe((node, answer): &(&NodeStatus, Option<Result<Value, String>>)) -> String {
    let on = node.host.as_deref().map_or_else(String::new, |host| format!(" on host {host}"));
    let who = format!("node {} ({}{on})", node.node, node.address);
    let stands = match (node.state, node.rank) {
        (NodePhase::Starting, _) => "is starting".to_owned(),
        (NodePhase::Waiting, _) => "waits".to_owned(),
        (NodePhase::Member, Some(rank)) => format!("is a member with rank {rank}"),
        (NodePhase::Member, None) => "is a member".to_owned(),
        (NodePhase::Late, _) => "is late".to_owned(),
        (NodePhase::Gone, _) => "is gone".to_owned(),
    };
    let does = match answer {
        None => String::new(),
        Some(Err(error)) => format!("; {error}"),
        Some(Ok(reply)) => {
            let workers = reply["workers"].as_u64().unwrap_or(0) as usize;
            let round = &reply["round"];
            format!("; its agent answers: {} of round {round}", plural(workers, "worker"))
        }
    };
    format!("{who} {stands}{does}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use steadfast_common::status::chains;

    use super::super::text;
    use super::*;
    use crate::status::sample;

    #[test]
    fn a_wait_chain_leads_from_a_round_to_the_node_that_blocks_it() {
        let status = sample::elastic();
        let answer = Some(Ok(json!({ "round": 3, "workers": 2 })));
        let found = all_waits(&status, &[(&status.nodes[1], answer)], 20_000);
        let expected = "\
10.0.0.1:4001 waits for 10.0.0.2:4002
node 00000000-0000-0000-0000-000000000002 (10.0.0.2:4002) is a member with rank 1; its agent answers: \
2 workers of round 3
host c is on the blacklist after 2 failures, 4s left
";
        assert_eq!(text(&chains(&found)), expected);
    }

    #[test]
    fn without_a_master_the_chain_begins_with_it() {
        let mut status = sample::elastic();
        status.error = Some("the job has no acting master".to_owned());
        let waits = all_waits(&status, &[(&status.nodes[1], None)], 20_000);
        let found = text(&chains(&waits));
        assert!(
            found.starts_with(
                "the job waits for\n  an acting master: the job has no acting master\n"
            ),
            "{found}"
        );
        assert!(found.contains("10.0.0.2:4002) is a member with rank 1\n"), "{found}");
    }

    #[test]
    fn a_round_that_runs_is_not_blocked() {
        let mut status = sample::elastic();
        (status.waiting, status.waits, status.launcher) = (Vec::new(), Vec::new(), None);
        let found = text(&chains(&all_waits(&status, &[], 20_000)));
        assert_eq!(found, "not blocked: round 3 runs with 4 workers\n");
    }
}
