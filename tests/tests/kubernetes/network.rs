//! Evaluates the network policies as Kubernetes does: checks which routes are open.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use serde_json::{Value, json};

use crate::manifests::{Overlay, Workload, list, selects, text};

/// All routes used inside the cluster: from, to, port. `monitoring` and `names` are in other namespaces.
const WAYS: [(&str, &str, u64); 24] = [
    ("pserver", "master", 7000),
    ("trainer", "master", 7000),
    ("tools", "master", 7000),
    ("master", "pserver", 7000),
    ("pserver", "pserver", 7000),
    ("trainer", "pserver", 7000),
    // Through the admin ports the acting master detects dead processes, and a standby detects a dead
    // master.
    ("master", "master", 9100),
    ("master", "pserver", 9100),
    ("master", "trainer", 9100),
    ("monitoring", "master", 9100),
    ("monitoring", "pserver", 9100),
    ("monitoring", "trainer", 9100),
    ("monitoring", "etcd", 2381),
    ("master", "etcd", 2379),
    ("pserver", "etcd", 2379),
    ("trainer", "etcd", 2379),
    ("tools", "etcd", 2379),
    ("etcd", "etcd", 2379),
    ("etcd", "etcd", 2380),
    ("master", "names", 53),
    ("pserver", "names", 53),
    ("trainer", "names", 53),
    ("tools", "names", 53),
    ("etcd", "names", 53),
];

const PORTS: [u64; 6] = [53, 2379, 2380, 2381, 7000, 9100];

/// An external store, an external etcd (of `own-etcd`), and the metadata server of cloud providers.
const STORE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
const OWN_ETCD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);
const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

/// One end of a connection.
enum End<'a> {
    Pod(&'a Value),
    Elsewhere { namespace: &'static str, labels: Value },
    Address(Ipv4Addr),
}

struct Route<'a> {
    from: End<'a>,
    to: End<'a>,
    port: u64,
    protocol: &'static str,
}

fn end<'a>(overlay: &'a Overlay, name: &str) -> Option<End<'a>> {
    let elsewhere = |namespace, labels| Some(End::Elsewhere { namespace, labels });
    match name {
        "monitoring" => elsewhere("monitoring", json!({"app": "prometheus"})),
        "names" => elsewhere("kube-system", json!({"k8s-app": "kube-dns"})),
        // A foreign pod with the labels of this deployment.
        "stranger" => elsewhere("default", json!({"app.kubernetes.io/part-of": "steadfast"})),
        "neighbor" => elsewhere("kube-system", json!({})),
        _ => overlay.component(name).map(|it| End::Pod(it.labels())),
    }
}

/// Exactly the used routes are open.
pub fn ways(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    let names: Vec<&str> = overlay.workloads().iter().map(Workload::component).collect();
    let used: BTreeSet<_> = WAYS.into_iter().collect();
    let others = ["monitoring", "names", "stranger", "neighbor"];
    let all: Vec<&str> = names.iter().copied().chain(others).collect();
    for (from, to) in all.iter().flat_map(|from| all.iter().map(move |to| (*from, *to))) {
        if others.contains(&from) && others.contains(&to) {
            continue;
        }
        for port in PORTS {
            let (Some(start), Some(goal)) = (end(overlay, from), end(overlay, to)) else {
                continue;
            };
            let protocol = if port == 53 { "UDP" } else { "TCP" };
            let is_open = is_open(overlay, &Route { from: start, to: goal, port, protocol });
            match (used.contains(&(from, to, port)), is_open) {
                (true, false) => errors.push(format!("{from} cannot reach {to} at {port}")),
                (false, true) => errors.push(format!("{from} can reach {to} at {port}")),
                (true, true) | (false, false) => {}
            }
        }
    }
    errors.extend(outwards(overlay, &names));
    errors
}

/// Routes out of the cluster: to the store, and to an external etcd.
fn outwards(overlay: &Overlay, names: &[&str]) -> Vec<String> {
    let mut errors = Vec::new();
    let has_etcd = names.contains(&"etcd");
    for name in names {
        let uses = [
            (STORE, 443, *name != "etcd"),
            (STORE, 80, false),
            (METADATA, 80, false),
            (OWN_ETCD, 2379, !has_etcd),
            (STORE, 2379, false),
        ];
        for (address, port, is_used) in uses {
            let Some(from) = end(overlay, name) else { continue };
            let way = Route { from, to: End::Address(address), port, protocol: "TCP" };
            if is_open(overlay, &way) != is_used {
                let word = if is_used { "cannot" } else { "can" };
                errors.push(format!("{name} {word} reach {address} at {port}"));
            }
        }
    }
    errors
}

fn is_open(overlay: &Overlay, way: &Route) -> bool {
    passes(overlay, "Egress", &way.from, &way.to, way)
        && passes(overlay, "Ingress", &way.to, &way.from, way)
}

/// Returns whether the policies of one end allow traffic with the other end.
fn passes(overlay: &Overlay, direction: &str, own: &End, other: &End, way: &Route) -> bool {
    let End::Pod(labels) = own else { return true };
    let applies = |policy: &&Value| {
        list(policy, "/spec/policyTypes").iter().any(|it| it == direction)
            && selects(&policy["spec"]["podSelector"], labels)
    };
    let policies: Vec<&Value> = overlay.of_kind("NetworkPolicy").filter(applies).collect();
    let (rules, peers) = match direction {
        "Egress" => ("/spec/egress", "/to"),
        _ => ("/spec/ingress", "/from"),
    };
    let mut all = policies.iter().flat_map(|it| list(it, rules));
    policies.is_empty()
        || all.any(|rule| {
            let is_meant = rule[&peers[1..]].is_null()
                || list(rule, peers).iter().any(|it| is_peer(it, other));
            is_meant && has_port(rule, way)
        })
}

fn has_port(rule: &Value, way: &Route) -> bool {
    let is_it = |it: &Value| {
        let protocol = it["protocol"].as_str().unwrap_or("TCP");
        protocol == way.protocol && it["port"].as_u64().is_none_or(|port| port == way.port)
    };
    rule["ports"].is_null() || list(rule, "/ports").iter().any(is_it)
}

/// Returns whether a peer of a rule matches this end. A pod in another namespace is matched by its
/// namespace only.
fn is_peer(peer: &Value, end: &End) -> bool {
    let pods =
        |labels: &Value| peer["podSelector"].is_null() || selects(&peer["podSelector"], labels);
    match end {
        End::Pod(labels) => {
            let is_own = peer["namespaceSelector"].is_null() && peer["ipBlock"].is_null();
            is_own && pods(labels)
        }
        End::Elsewhere { namespace, labels } => {
            let names = json!({ "kubernetes.io/metadata.name": namespace });
            let selector = &peer["namespaceSelector"];
            !selector.is_null() && selects(selector, &names) && pods(labels)
        }
        End::Address(address) => is_in(*address, text(peer, "/ipBlock/cidr")),
    }
}

fn is_in(address: Ipv4Addr, block: &str) -> bool {
    let Some((start, length)) = block.split_once('/') else { return false };
    let (Ok(start), Ok(length)) = (start.parse::<Ipv4Addr>(), length.parse::<u32>()) else {
        return false;
    };
    let mask = u32::MAX.checked_shl(32 - length).unwrap_or(0);
    address.to_bits() & mask == start.to_bits() & mask
}
