//! Whether nodes can be drained and rollouts end, where not every pod is ever ready.

use serde_json::Value;

use crate::manifests::{Overlay, Workload, list, selects, text};
use crate::pods::before_leaving;

/// How many pods of a workload there are, and how many of them are ready when all is well: one master
/// acts; a pserver is ready with a slot.
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

/// A number of pods, or a share of all of them.
fn share(value: &Value, all: u64) -> Option<u64> {
    let percent = || value.as_str()?.strip_suffix('%')?.parse::<u64>().ok();
    // Kubernetes rounds budgets up.
    value.as_u64().or_else(|| percent().map(|it| (it * all).div_ceil(100)))
}

/// Budgets let one pod go at a time where it matters, and always one.
pub fn budgets(overlay: &Overlay) -> Vec<String> {
    let mut faults = Vec::new();
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
                    faults.push(format!("{name}: the acting master could never be evicted"))
                }
                "pserver" | "etcd" if 1 < may_go => {
                    faults.push(format!("{name}: {may_go} slots or members may go at a time"));
                }
                _ if may_go == 0 => faults.push(format!("{name}: no node can be drained")),
                _ => {}
            }
            let is_kept = spec["unhealthyPodEvictionPolicy"] != "AlwaysAllow";
            if is_kept && workload.component() != "etcd" {
                faults.push(format!("{name}: who is not ready must go: AlwaysAllow"));
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
        faults.push(format!("{component} has no budget"));
    }
    faults
}

/// No rollout waits for a pod that is never ready.
pub fn rollouts(overlay: &Overlay) -> Vec<String> {
    let mut faults = Vec::new();
    for workload in overlay.workloads() {
        let (all, ready) = pods(overlay, workload);
        let spec = &workload.object["spec"];
        let name = workload.name();
        let has_reserve = ready < all;
        if workload.kind() == "StatefulSet" {
            if has_reserve && spec["updateStrategy"]["type"] != "OnDelete" {
                faults.push(format!("{name}: a rollout waits for the spare and will never end"));
            }
            if spec["podManagementPolicy"] != "Parallel" {
                faults.push(format!("{name}: not Parallel, so a pod waits for those before it"));
            }
            continue;
        }
        let rolling = &spec["strategy"]["rollingUpdate"];
        if has_reserve && share(&rolling["maxUnavailable"], all) != Some(all) {
            faults.push(format!("{name}: a rollout never stops the acting one and will never end"));
        }
        let starts_first = share(&rolling["maxSurge"], all) == Some(all);
        if has_reserve && !(starts_first && 5 < before_leaving(workload)) {
            faults.push(format!("{name}: the acting one leaves before its successor stands by"));
        }
        if has_reserve && spec["progressDeadlineSeconds"] != i32::MAX {
            faults
                .push(format!("{name}: one pod is never ready, and that would count as a failure"));
        }
    }
    faults.extend(autoscaler(overlay));
    faults
}

/// The autoscaler alone says how many trainers there are, and can measure them.
fn autoscaler(overlay: &Overlay) -> Vec<String> {
    let mut faults = Vec::new();
    let Some(scaler) = overlay.of_kind("HorizontalPodAutoscaler").next() else {
        return vec!["there is no autoscaler".to_owned()];
    };
    let name = text(scaler, "/spec/scaleTargetRef/name");
    let Some(workload) = overlay.workloads().into_iter().find(|it| it.name() == name) else {
        return vec![format!("there is no {name}")];
    };
    if !workload.object["spec"]["replicas"].is_null() {
        faults.push(format!("{name}: replicas are the autoscaler's business"));
    }
    for metric in list(scaler, "/spec/metrics") {
        let resource = text(metric, "/resource/name");
        if text(workload.container(), &format!("/resources/requests/{resource}")).is_empty() {
            faults.push(format!("{name}: a share of {resource} needs a request of it"));
        }
    }
    faults
}
