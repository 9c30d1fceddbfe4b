//! Access rules: which roles may make which call.

use steadfast_common::role::Role::{self, Admin, Master, Pserver, Trainer};

use crate::TensorMethod;

/// Returns the roles that may call a method, given its path; none if the method is unknown.
///
/// Pservers and administrators may request a checkpoint; only administrators may restore one.
pub fn access(path: &str) -> &'static [Role] {
    match TensorMethod::of_path(path) {
        Some(TensorMethod::FollowSlot | TensorMethod::FollowStep | TensorMethod::ReadHandover) => {
            return &[Pserver];
        }
        Some(
            TensorMethod::Push
            | TensorMethod::Pull
            | TensorMethod::PullRows
            | TensorMethod::ReadRange,
        ) => return &[Trainer],
        None => {}
    }
    let Some((service, method)) = path.strip_prefix('/').and_then(|it| it.split_once('/')) else {
        return &[];
    };
    match (service, method) {
        ("grpc.health.v1.Health", "Check" | "Watch") => &Role::ALL,
        (
            "steadfast.v1.Master",
            "BeginInit" | "FinishInit" | "Follow" | "NextTask" | "FailTask" | "Advance"
            | "ReportEvaluation" | "BeginSave" | "FinishSave" | "ReportDivergence"
            | "DiscardRecord",
        ) => &[Trainer],
        // Agents have the certificates of trainers.
        (
            "steadfast.v1.Elastic",
            "GetClusterSpec" | "GetWaitingNodes" | "Barrier" | "Synchronize" | "Announce" | "Join"
            | "Watch" | "Enter" | "Deal" | "GiveUp" | "ShareState",
        ) => &[Trainer],
        (
            "steadfast.v1.Worker",
            "Changes" | "NextRound" | "Suspect" | "BeginCommit" | "EndCommit" | "LastCommit"
            | "DecideCommit" | "FetchRecords" | "Progress",
        ) => &[Trainer],
        // Programs with a coordinator have the certificates of administrators.
        ("steadfast.v1.Closures", "Attend" | "Run" | "Cancel" | "Drop") => &[Admin],
        ("steadfast.v1.Elastic", "ShutDown" | "ElasticStatus") => &[Trainer, Admin],
        ("steadfast.v1.Elastic", "Scale") => &[Admin],
        ("steadfast.v1.Master", "ReportDamage") => &[Pserver],
        ("steadfast.v1.Master", "TakeCheckpoint") => &[Pserver, Admin],
        (
            "steadfast.v1.Master",
            "RestoreCheckpoint" | "AmendJob" | "Drain" | "ScaleTrainers" | "Status",
        ) => &[Admin],
        ("steadfast.v1.Pserver", "Init") => &[Trainer],
        // A program with a coordinator on the machine of a pserver comes over a Unix socket, as a trainer.
        ("steadfast.v1.Pserver", "Applied") => &[Trainer, Admin],
        ("steadfast.v1.Pserver", "Norms" | "ReportDigest") => &[Pserver],
        ("steadfast.v1.Pserver", "Snapshot" | "TableUsage") => &[Master],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// F50, S003-53: a role may call only its own methods; unknown methods are denied.
    #[test]
    fn each_role_may_call_only_the_methods_that_it_needs() {
        assert_eq!(access("/steadfast.v1.Master/NextTask"), [Trainer]);
        assert_eq!(access("/steadfast.v1.Master/RestoreCheckpoint"), [Admin]);
        assert_eq!(access("/steadfast.v1.Elastic/ElasticStatus"), [Trainer, Admin]);
        assert_eq!(access("/steadfast.v1.Pserver/Snapshot"), [Master]);
        for unknown in ["", "/", "/steadfast.v1.Master", "/steadfast.v1.Master/Other", "Push"] {
            assert_eq!(access(unknown), [], "{unknown}");
        }
    }

    /// A new method of a service needs an access rule, or every call to it is denied.
    #[test]
    fn every_method_of_our_services_has_a_permission() {
        let files = ["closures", "master", "pserver", "elastic", "worker"].map(|service| {
            let file = format!("{}/steadfast/v1/{service}.proto", env!("CARGO_MANIFEST_DIR"));
            (service, std::fs::read_to_string(file).unwrap())
        });
        let mut methods = 0;
        for (service, text) in &files {
            let (first, rest) = service.split_at(1);
            for line in text.lines().filter_map(|line| line.trim().strip_prefix("rpc ")) {
                let (method, _) = line.split_once('(').unwrap();
                let path = format!("/steadfast.v1.{}{rest}/{method}", first.to_uppercase());
                assert!(!access(&path).is_empty(), "{path}");
                methods += 1;
            }
        }
        assert!(25 < methods, "{methods}");
    }
}
