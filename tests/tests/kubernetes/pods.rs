//! What each pod says of itself: what it may do, how it is probed, how long it may take to leave.

use serde_json::Value;

use crate::manifests::{Overlay, Workload, list, text};

/// Longest time that a process takes to leave in good order, in seconds, by component.
const DRAIN_SECONDS: [(&str, u64); 3] = [("master", 30), ("pserver", 90), ("trainer", 45)];

/// Pods fit the restricted standard, and have neither a token nor a place to write to.
pub fn restricted(overlay: &Overlay) -> Vec<String> {
    let mut faults = Vec::new();
    for workload in overlay.workloads() {
        let (pod, container) = (workload.pod(), workload.container());
        let mut wrong: Vec<String> = wanted(pod, container)
            .into_iter()
            .filter(|(_, is_so)| !is_so)
            .map(|(what, _)| what.to_owned())
            .collect();
        for (kind, unit) in
            ["requests", "limits"].iter().flat_map(|it| [(it, "cpu"), (it, "memory")])
        {
            if text(container, &format!("/resources/{kind}/{unit}")).is_empty() {
                wrong.push(format!("no {unit} in {kind}"));
            }
        }
        for volume in list(pod, "/volumes") {
            let is_private = volume["secret"]["defaultMode"] == 0o440;
            if volume["secret"].is_object() && !is_private {
                wrong.push(format!("{} is readable for everybody", text(volume, "/name")));
            }
        }
        faults.extend(wrong.iter().map(|it| format!("{}: {it}", workload.name())));
    }
    for account in overlay.of_kind("ServiceAccount") {
        if account["automountServiceAccountToken"] != false {
            faults.push("the account hands out a token".to_owned());
        }
    }
    faults
}

fn wanted(pod: &Value, container: &Value) -> Vec<(&'static str, bool)> {
    let (of_pod, own) = (&pod["securityContext"], &container["securityContext"]);
    let is_off = |key: &str| pod[key].is_null() || pod[key] == false;
    vec![
        ("a token", pod["automountServiceAccountToken"] == false),
        ("enableServiceLinks", pod["enableServiceLinks"] == false),
        ("hostNetwork", is_off("hostNetwork")),
        ("hostPID", is_off("hostPID")),
        ("hostIPC", is_off("hostIPC")),
        ("initContainers", list(pod, "/initContainers").is_empty()),
        ("runAsNonRoot", of_pod["runAsNonRoot"] == true),
        ("runAsUser", of_pod["runAsUser"] == 10001 && of_pod["runAsGroup"] == 10001),
        ("fsGroup", of_pod["fsGroup"] == 10001),
        ("seccomp", of_pod["seccompProfile"]["type"] == "RuntimeDefault"),
        ("allowPrivilegeEscalation", own["allowPrivilegeEscalation"] == false),
        ("readOnlyRootFilesystem", own["readOnlyRootFilesystem"] == true),
        ("capabilities", own["capabilities"] == serde_json::json!({ "drop": ["ALL"] })),
        ("securityContext", own["privileged"].is_null() && own["runAsUser"].is_null()),
    ]
}

/// Loaded and alive are asked of the process alone; ready is what it says of its part in the job.
pub fn probes(overlay: &Overlay) -> Vec<String> {
    let mut faults = Vec::new();
    for workload in overlay.workloads() {
        let (live, scheme) = match workload.component() {
            "tools" => continue,
            "etcd" => ("/livez", Value::Null),
            _ => ("/healthz", Value::from("HTTPS")),
        };
        let paths =
            [("startupProbe", live), ("livenessProbe", live), ("readinessProbe", "/readyz")];
        for (probe, path) in paths {
            let get = &workload.container()[probe]["httpGet"];
            if get["path"] != path || get["scheme"] != scheme {
                faults.push(format!("{}: {probe} does not ask for {path}", workload.name()));
            }
        }
        let alone = &workload.container()["startupProbe"];
        let (every, times) = (alone["periodSeconds"].as_u64(), alone["failureThreshold"].as_u64());
        if every.unwrap_or(10) * times.unwrap_or(3) < 60 {
            faults.push(format!("{}: less than a minute to be loaded", workload.name()));
        }
    }
    faults
}

/// A pod gets more time to leave than it takes.
pub fn grace(overlay: &Overlay) -> Vec<String> {
    let mut faults = Vec::new();
    for (component, drain) in DRAIN_SECONDS {
        let workload = overlay.component(component);
        let takes = drain + workload.map_or(0, before_leaving);
        let given = workload.and_then(|it| it.pod()["terminationGracePeriodSeconds"].as_u64());
        if given.is_none_or(|it| it < takes) {
            faults.push(format!("{component}: given {given:?} s for a drain of {takes} s"));
        }
    }
    faults
}

/// The seconds that a pod sleeps before it is told to leave.
pub fn before_leaving(workload: Workload) -> u64 {
    let seconds = workload.container().pointer("/lifecycle/preStop/sleep/seconds");
    seconds.and_then(Value::as_u64).unwrap_or(0)
}
