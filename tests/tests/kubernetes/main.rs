//! Checks the manifests of `deploy/kubernetes`, rendered as by `kubectl apply -k`, without a cluster:
//! with the schemas of Kubernetes, a policy lint, the programs themselves, and the references between
//! objects.

mod disruption;
mod manifests;
mod network;
mod pods;
mod references;
mod settings;
mod spoiled;
mod tools;

use manifests::{Overlay, overlays};
use serde_json::json;
use tools::{LINT_EXCUSED, lint, validate};

/// A check; returns one line for each error in an overlay.
type Check = fn(&Overlay) -> Vec<String>;

/// The oldest supported version of Kubernetes, and the newest with schemas.
const VERSIONS: [&str; 2] = ["1.30.0", "1.37.0"];

fn find_nothing(checks: &[Check]) {
    let Some(overlays) = overlays() else { return };
    for overlay in overlays {
        let errors: Vec<String> = checks.iter().flat_map(|check| check(overlay)).collect();
        assert!(errors.is_empty(), "{}:\n{}", overlay.name, errors.join("\n"));
    }
}

/// S004-1, S004-87
#[test]
fn manifests_fit_the_strict_schemas_of_the_oldest_and_the_newest_kubernetes() {
    let Some(overlays) = overlays() else { return };
    for (overlay, version) in overlays.iter().flat_map(|it| VERSIONS.map(|version| (it, version))) {
        let Some(errors) = validate(overlay, version) else { return };
        assert!(errors.is_empty(), "{}, {version}:\n{}", overlay.name, errors.join("\n"));
    }
}

#[test]
fn the_policy_lint_finds_exactly_the_listed_exceptions() {
    let Some(overlays) = overlays() else { return };
    let Some(mut found) = lint(overlays) else { return };
    let mut unused = Vec::new();
    for (check, name, _) in LINT_EXCUSED {
        let before = found.len();
        found.retain(|it| it.check != *check || !it.is_about(name));
        if found.len() == before {
            unused.push(format!("{check} has an unused exception for {name}"));
        }
    }
    assert!(found.is_empty() && unused.is_empty(), "{found:#?}\n{}", unused.join("\n"));
}

#[test]
fn every_reference_in_a_manifest_resolves() {
    find_nothing(&[
        references::selectors,
        references::ports,
        references::volumes,
        references::keys,
    ]);
}

#[test]
fn every_program_accepts_the_settings_that_its_pod_gives_it() {
    find_nothing(&[settings::accepted, settings::ports_are_those_of_the_manifest, settings::job]);
}

#[test]
fn every_pod_is_restricted_and_its_liveness_probe_does_not_depend_on_etcd() {
    find_nothing(&[pods::restricted, pods::probes, pods::grace]);
}

/// F39, F40
#[test]
fn a_node_can_be_drained_and_a_rollout_ends_with_at_most_one_slot_down() {
    find_nothing(&[disruption::budgets, disruption::rollouts]);
}

#[test]
fn the_network_policy_allows_exactly_the_connections_that_processes_make() {
    find_nothing(&[network::ways]);
}

/// Each check must be able to fail.
#[test]
fn each_check_detects_its_violation() {
    let Some(overlays) = overlays() else { return };
    let silent = spoiled::silent(&overlays[0]);
    assert!(silent.is_empty(), "\n{}", silent.join("\n"));
}

#[test]
fn schemas_and_lint_detect_their_violations() {
    let Some(overlays) = overlays() else { return };
    let master = ("Deployment", "steadfast-master");
    let misspelt = overlays[0].with(master, "/spec/replica", json!(2));
    let mistyped = overlays[0].with(master, "/spec/replicas", json!("two"));
    let probe = "/spec/template/spec/containers/0/livenessProbe/httpGet/schema";
    let deep = overlays[0].with(master, probe, json!("HTTPS"));
    for (overlay, words) in [(misspelt, "replica"), (mistyped, "two"), (deep, "schema")] {
        let Some(errors) = validate(&overlay, VERSIONS[0]) else { return };
        assert!(errors.join("\n").contains(words), "{words}: {errors:?}");
    }
    let container = "/spec/template/spec/containers/0/securityContext/privileged";
    let Some(found) = lint(&[overlays[0].with(master, container, json!(true))]) else { return };
    assert!(found.iter().any(|it| it.check == "CKV_K8S_16"), "{found:#?}");
}
