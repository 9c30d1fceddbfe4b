//! Checks each pod: security context, probes, grace period.

use serde_json::Value;

use crate::manifests::{Overlay, Workload, list, text};

/// Longest duration of a drain in seconds, by component.
const DRAIN_SECONDS: [(&str, u64); 3] = [("master", 30), ("pserver", 90), ("trainer", 45)];

/// Pods conform to the restricted standard, and have neither an API token nor a writable file system.
pub fn restricted(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
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
                wrong.push(format!("{} is readable for all users", text(volume, "/name")));
            }
        }
        errors.extend(wrong.iter().map(|it| format!("{}: {it}", workload.name())));
    }
    for account in overlay.of_kind("ServiceAccount") {
        if account["automountServiceAccountToken"] != false {
            errors.push("the service account mounts a token".to_owned());
        }
    }
    errors
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

/// Startup and liveness probes depend on the process alone; readiness depends on its role in the job.
pub fn probes(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
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
                errors.push(format!("{}: {probe} does not request {path}", workload.name()));
            }
        }
        let alone = &workload.container()["startupProbe"];
        let (every, times) = (alone["periodSeconds"].as_u64(), alone["failureThreshold"].as_u64());
        if every.unwrap_or(10) * times.unwrap_or(3) < 60 {
            errors
                .push(format!("{}: the startup probe allows less than a minute", workload.name()));
        }
    }
    errors
}

/// The grace period of a pod exceeds the duration of its drain.
pub fn grace(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    for (component, drain) in DRAIN_SECONDS {
        let workload = overlay.component(component);
        let takes = drain + workload.map_or(0, before_leaving);
        let given = workload.and_then(|it| it.pod()["terminationGracePeriodSeconds"].as_u64());
        if given.is_none_or(|it| it < takes) {
            errors.push(format!("{component}: given {given:?} s for a drain of {takes} s"));
        }
    }
    errors
}

/// Returns the seconds that a pod sleeps before it receives SIGTERM.
pub fn before_leaving(workload: Workload) -> u64 {
    let seconds = workload.container().pointer("/lifecycle/preStop/sleep/seconds");
    seconds.and_then(Value::as_u64).unwrap_or(0)
}
