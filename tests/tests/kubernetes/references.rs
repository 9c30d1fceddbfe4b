//! Checks references between objects: selectors, ports, volumes.

use serde_json::Value;

use crate::manifests::{Overlay, Workload, list, selects, text};

/// Selectors match existing pods, and those of workloads match only their own pods.
pub fn selectors(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    let workloads = overlay.workloads();
    for it in &workloads {
        let selector = &it.object["spec"]["selector"];
        let selected: Vec<&str> = workloads
            .iter()
            .filter(|it| selects(selector, it.labels()))
            .map(Workload::name)
            .collect();
        if selected != [it.name()] {
            errors.push(format!("{} selects {selected:?}, not only its own pods", it.name()));
        }
        let service = text(it.object, "/spec/serviceName");
        if it.kind() == "StatefulSet" && !is_headless(overlay, service, it.labels()) {
            errors.push(format!("{}: serviceName {service} is not a headless Service", it.name()));
        }
    }
    let matched = |selector: &Value| workloads.iter().any(|it| selects(selector, it.labels()));
    for service in overlay.of_kind("Service") {
        let selector = serde_json::json!({ "matchLabels": service["spec"]["selector"] });
        if !matched(&selector) {
            errors.push(format!("Service {} selects no pod", text(service, "/metadata/name")));
        }
    }
    let budgets = overlay.of_kind("PodDisruptionBudget").map(|it| (it, &it["spec"]["selector"]));
    let policies = overlay.of_kind("NetworkPolicy").map(|it| (it, &it["spec"]["podSelector"]));
    for (object, selector) in budgets.chain(policies) {
        if !matched(selector) {
            let name = text(object, "/metadata/name");
            errors.push(format!("{} {name} selects no pod", object["kind"]));
        }
    }
    for scaler in overlay.of_kind("HorizontalPodAutoscaler") {
        let (kind, name) =
            (text(scaler, "/spec/scaleTargetRef/kind"), text(scaler, "/spec/scaleTargetRef/name"));
        if !workloads.iter().any(|it| it.kind() == kind && it.name() == name) {
            errors.push(format!("{} has no scale target", text(scaler, "/metadata/name")));
        }
    }
    errors
}

fn is_headless(overlay: &Overlay, name: &str, labels: &Value) -> bool {
    overlay.exactly("Service", name).is_some_and(|service| {
        let selector = serde_json::json!({ "matchLabels": service["spec"]["selector"] });
        service["spec"]["clusterIP"] == "None" && selects(&selector, labels)
    })
}

/// Ports of Services, probes and hooks are ports of their containers.
pub fn ports(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    for service in overlay.of_kind("Service") {
        let selector = serde_json::json!({ "matchLabels": service["spec"]["selector"] });
        let workloads = overlay.workloads();
        for workload in workloads.iter().filter(|it| selects(&selector, it.labels())) {
            for port in list(service, "/spec/ports") {
                let number = workload.port(&port["targetPort"]);
                // Headless Services do not map ports.
                let is_mapped = service["spec"]["clusterIP"] != "None";
                if number.is_none() || !is_mapped && port["port"].as_u64() != number {
                    let target = port["targetPort"].to_string();
                    let (name, own) = (text(service, "/metadata/name"), workload.name());
                    errors.push(format!("{name}: {own} has no port {}", target.trim_matches('"')));
                }
            }
        }
    }
    for workload in overlay.workloads() {
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            let port = &workload.container()[probe]["httpGet"]["port"];
            if !port.is_null() && workload.port(port).is_none() {
                errors.push(format!("{}: {probe}: unknown port {port}", workload.name()));
            }
        }
    }
    errors
}

/// Every mount has a volume, every volume has its Secret, ConfigMap or claim, and every path has its
/// file.
pub fn volumes(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    for workload in overlay.workloads() {
        let mut error = |what: String| errors.push(format!("{}: {what}", workload.name()));
        let (pod, container) = (workload.pod(), workload.container());
        let mounts = list(container, "/volumeMounts");
        for volume in list(pod, "/volumes") {
            if !mounts.iter().any(|it| it["name"] == volume["name"]) {
                error(format!("no container mounts {}", text(volume, "/name")));
            }
            for (kind, name) in sources(volume) {
                if overlay.exactly(kind, name).is_none() {
                    error(format!("{kind} {name} is missing"));
                }
            }
        }
        for mount in mounts {
            let name = text(mount, "/name");
            let claims = list(workload.object, "/spec/volumeClaimTemplates");
            let has_claim = claims.iter().any(|it| text(it, "/metadata/name") == name);
            let has_volume = list(pod, "/volumes").iter().any(|it| text(it, "/name") == name);
            if !has_claim && !has_volume {
                error(format!("volume {name} is missing"));
            }
        }
        for from in list(container, "/envFrom") {
            let name = text(from, "/configMapRef/name");
            if overlay.exactly("ConfigMap", name).is_none() {
                error(format!("ConfigMap {name} is missing"));
            }
        }
        let account = text(pod, "/serviceAccountName");
        if overlay.exactly("ServiceAccount", account).is_none() {
            error(format!("ServiceAccount {account} is missing"));
        }
        for path in paths(overlay, workload) {
            if let Some(what) = missing(overlay, workload, &path) {
                error(what);
            }
        }
    }
    errors
}

/// If the store requires keys, all processes that access it have them.
pub fn keys(overlay: &Overlay) -> Vec<String> {
    let Some(secret) = overlay.found("Secret", "steadfast-store-keys") else { return Vec::new() };
    let name = text(secret, "/metadata/name");
    let has_keys = |workload: &Workload| {
        let mut volumes = list(workload.pod(), "/volumes").iter();
        let is_named = |key: &str| {
            let value = format!("/run/steadfast/store/{key}");
            list(workload.container(), "/env").iter().any(|it| it["value"] == value)
        };
        volumes.any(|it| text(it, "/secret/secretName") == name)
            && is_named("access-key-id")
            && is_named("secret-access-key")
    };
    let users = overlay.workloads().into_iter().filter(|it| it.component() != "etcd");
    let without = users.filter(|it| !has_keys(it));
    without.map(|it| format!("{} has no keys of the store", it.name())).collect()
}

fn sources(volume: &Value) -> impl Iterator<Item = (&'static str, &str)> {
    let secret = ("Secret", text(volume, "/secret/secretName"));
    let map = ("ConfigMap", text(volume, "/configMap/name"));
    [secret, map].into_iter().filter(|(_, name)| !name.is_empty())
}

/// Returns all absolute paths in the arguments and the environment variables of a program.
fn paths(overlay: &Overlay, workload: Workload) -> Vec<String> {
    let container = workload.container();
    let mut texts: Vec<&str> = workload.command();
    texts.extend(list(container, "/env").iter().map(|it| text(it, "/value")));
    for from in list(container, "/envFrom") {
        let map = overlay.exactly("ConfigMap", text(from, "/configMapRef/name"));
        let data = map.and_then(|it| it["data"].as_object());
        texts.extend(data.into_iter().flatten().filter_map(|(_, value)| value.as_str()));
    }
    let values = texts.into_iter().map(|it| match it.split_once('=') {
        Some((flag, value)) if flag.starts_with("--") => value,
        Some(_) | None => it,
    });
    values.filter(|it| it.starts_with('/')).map(str::to_owned).collect()
}

/// Returns why a path does not exist, if it does not.
fn missing(overlay: &Overlay, workload: Workload, path: &str) -> Option<String> {
    let mounts = list(workload.container(), "/volumeMounts");
    let below = |it: &&Value| {
        let rest = path.strip_prefix(text(it, "/mountPath"));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let Some(mount) = mounts.iter().find(below) else {
        return Some(format!("{path} is in no volume"));
    };
    let volumes = list(workload.pod(), "/volumes");
    // Claims are empty at first; missing volumes are reported elsewhere.
    let volume = volumes.iter().find(|it| it["name"] == mount["name"])?;
    let (kind, name) = sources(volume).next()?;
    let files = overlay.files(kind, name)?;
    let file = path[text(mount, "/mountPath").len()..].trim_start_matches('/');
    // The directory of certificates is mounted as a whole.
    let wanted = if file.is_empty() { vec!["ca.crt", "tls.crt", "tls.key"] } else { vec![file] };
    let absent = wanted.into_iter().find(|it| files.iter().all(|(key, _)| key != it))?;
    Some(format!("{kind} {name} has no file {absent}"))
}
