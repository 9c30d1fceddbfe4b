//! Checks that nodes can be drained and rollouts end, although some pods are never ready.

use serde_json::Value;

use crate::manifests::{Overlay, Workload, list, selects, text};
use crate::pods::before_leaving;

/// Returns the number of pods of a workload, and how many of them are ready in a healthy job: one master
/// acts; a pserver with a slot is ready.
fn pods(overlay: &Overlay, workload: Workload) -> (u64, u64) {
    let number = workload.object["spec"]["replicas"].as_u64();
    match workload.component() {
        "master" => (number.unwrap_or(1), 1),
        "pserver" => (number.unwrap_or(1), number.unwrap_or(1).min(overlay.slots())),
        "trainer" => {
            let scaler = overlay.of_kind("HorizontalPodAutoscaler").next().unwrap_or(&Value::Null);
            let least = scaler["spec"]["minReplicas"].as_u64().unwrap_or(1);
            (least, least)
        }
        _ => (number.unwrap_or(1), number.unwrap_or(1)),
    }
}

/// Returns a number of pods, given as a number or a percentage.
fn share(value: &Value, all: u64) -> Option<u64> {
    let percent = || value.as_str()?.strip_suffix('%')?.parse::<u64>().ok();
    // Kubernetes rounds percentages up.
    value.as_u64().or_else(|| percent().map(|it| (it * all).div_ceil(100)))
}

/// Disruption budgets allow at least one eviction at a time, and no more where it matters.
pub fn budgets(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    for budget in overlay.of_kind("PodDisruptionBudget") {
        let (name, spec) = (text(budget, "/metadata/name"), &budget["spec"]);
        let workloads = overlay.workloads();
        for workload in workloads.iter().filter(|it| selects(&spec["selector"], it.labels())) {
            let (all, ready) = pods(overlay, *workload);
            let keeps = match share(&spec["maxUnavailable"], all) {
                Some(may_go) => all.saturating_sub(may_go),
                None => share(&spec["minAvailable"], all).unwrap_or(0),
            };
            let may_go = ready.saturating_sub(keeps);
            match workload.component() {
                "master" => {
                    errors.push(format!("{name}: the acting master could never be evicted"))
                }
                "pserver" | "etcd" if 1 < may_go => {
                    errors.push(format!(
                        "{name}: {may_go} slots or members may be evicted at a time"
                    ));
                }
                _ if may_go == 0 => errors.push(format!("{name}: no node can be drained")),
                _ => {}
            }
            let is_kept = spec["unhealthyPodEvictionPolicy"] != "AlwaysAllow";
            if is_kept && workload.component() != "etcd" {
                errors.push(format!(
                    "{name}: pods that are not ready must be evictable: AlwaysAllow"
                ));
            }
        }
    }
    let has_budget = |component: &str| {
        let budgets = overlay.of_kind("PodDisruptionBudget");
        let workload = overlay.component(component);
        let mut selectors = budgets.map(|it| &it["spec"]["selector"]);
        workload.is_none_or(|it| selectors.any(|selector| selects(selector, it.labels())))
    };
    for component in ["pserver", "trainer", "etcd"].iter().filter(|it| !has_budget(it)) {
        errors.push(format!("{component} has no budget"));
    }
    errors
}

/// Rollouts do not wait for pods that are never ready.
pub fn rollouts(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    for workload in overlay.workloads() {
        let (all, ready) = pods(overlay, workload);
        let spec = &workload.object["spec"];
        let name = workload.name();
        let has_reserve = ready < all;
        if workload.kind() == "StatefulSet" {
            if has_reserve && spec["updateStrategy"]["type"] != "OnDelete" {
                errors.push(format!("{name}: a rollout waits for the spare and will never end"));
            }
            if spec["podManagementPolicy"] != "Parallel" {
                errors.push(format!("{name}: not Parallel, so a pod waits for those before it"));
            }
            continue;
        }
        let rolling = &spec["strategy"]["rollingUpdate"];
        if has_reserve && share(&rolling["maxUnavailable"], all) != Some(all) {
            errors.push(format!(
                "{name}: a rollout never stops the acting master and will never end"
            ));
        }
        let starts_first = share(&rolling["maxSurge"], all) == Some(all);
        if has_reserve && !(starts_first && 5 < before_leaving(workload)) {
            errors.push(format!("{name}: the acting master exits before its successor stands by"));
        }
        if has_reserve && spec["progressDeadlineSeconds"] != i32::MAX {
            errors
                .push(format!("{name}: one pod is never ready, and that would count as a failure"));
        }
    }
    errors.extend(autoscaler(overlay));
    errors
}

/// Only the autoscaler sets the number of trainers, and the metrics that it needs are available.
fn autoscaler(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    let Some(scaler) = overlay.of_kind("HorizontalPodAutoscaler").next() else {
        return vec!["the autoscaler is missing".to_owned()];
    };
    let name = text(scaler, "/spec/scaleTargetRef/name");
    let Some(workload) = overlay.workloads().into_iter().find(|it| it.name() == name) else {
        return vec![format!("{name} is missing")];
    };
    if !workload.object["spec"]["replicas"].is_null() {
        errors.push(format!("{name}: replicas must be left to the autoscaler"));
    }
    for metric in list(scaler, "/spec/metrics") {
        let resource = text(metric, "/resource/name");
        if text(workload.container(), &format!("/resources/requests/{resource}")).is_empty() {
            errors.push(format!("{name}: utilization of {resource} requires a resource request"));
        }
    }
    errors
}
