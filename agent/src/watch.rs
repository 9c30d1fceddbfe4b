//! Watches the round that this node is a member of.

use std::time::Duration;

use steadfast_client::{Change, NodeError, NodeSession};
use steadfast_common::ids::Round;
use steadfast_host::time::sleep;
use steadfast_process::Failure;
use steadfast_proto::v1::NodeReport;

use crate::membership::failure;

/// Pause after an error that is not expected to last.
const RETRY: Duration = Duration::from_millis(500);

/// Why a round is over for this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RoundOver {
    /// Nodes wait to be added, or were lost.
    Changed(Change),
    /// This node's registration was lost: it registers again.
    Unregistered,
    JobEnded,
    /// The job refuses this node.
    Failed(Failure),
}

/// Completes when the round is over for this node.
pub(crate) async fn until_over(
    session: &NodeSession,
    round: Round,
    report: impl Fn() -> NodeReport,
    interval: Duration,
) -> RoundOver {
    loop {
        match session.watch(round, 0, Some(report()), interval).await {
            Ok(Change { nodes: 0, .. }) => {}
            Ok(change) => return RoundOver::Changed(change),
            Err(NodeError::Unregistered) => return RoundOver::Unregistered,
            Err(NodeError::JobEnded) => return RoundOver::JobEnded,
            Err(error @ NodeError::Rejected { .. }) => return RoundOver::Failed(failure(&error)),
            Err(NodeError::BadReply(_) | NodeError::Coord(_)) => sleep(RETRY).await,
        }
    }
}

/// Describes a change, for users.
pub(crate) fn describe(change: &Change) -> String {
    match change.nodes {
        1.. => format!("{} more nodes are ready to join", change.nodes),
        _ if change.lost.is_empty() => format!("{} nodes were lost", -change.nodes),
        _ => format!("lost {}", change.lost),
    }
}
