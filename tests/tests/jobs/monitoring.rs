//! Metrics, alerts and the dashboard, checked with promtool and against the metrics of a live cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use steadfast_tests::promtool::{Promtool, in_older_text, names_served, names_used, with_times};
use steadfast_tests::{Cluster, Job, Member, Scene, Signal, eventually, get};

/// A label with the prefix of the metrics.
const LABEL: &str = "steadfast_job";

/// Metrics that are only served with TLS, which these clusters do not use.
const SERVED_ELSEWHERE: [&str; 5] = [
    "steadfast_certificate_not_after_seconds",
    // Of jobs that follow a stream.
    "steadfast_stream_lag_seconds",
    "steadfast_stream_left_out_files",
    "steadfast_stream_waiting_files",
    "steadfast_stream_waiting_records",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn monitoring() -> PathBuf {
    root().join("deploy/monitoring")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn dashboard() -> Value {
    let text = read(&monitoring().join("grafana/dashboards/steadfast.json"));
    serde_json::from_str(&text).expect("a dashboard is JSON")
}

fn metrics(member: &Member) -> Option<String> {
    Some(member.ask("/metrics").filter(|it| it.code == 200)?.body)
}

/// Returns the metrics of each role of a synchronous job after all events with a metric, of the master of
/// an asynchronous job, and of etcd.
fn served(scene: &Scene) -> BTreeMap<&'static str, String> {
    let cluster = Cluster::new(scene, &Job::endless(), 1, "2s");
    let (master, pserver) = (cluster.master("master"), cluster.pserver("pserver"));
    let mut first = cluster.trainer("trainer-0");
    let second = cluster.trainer("trainer-1");
    let has = |name: &str| {
        let text = metrics(&master)?;
        names_served(&text).contains(name).then_some(text)
    };
    eventually("two trainers are active and a checkpoint exists", || {
        let text = has("steadfast_checkpoint_age_seconds")?;
        text.contains("\nsteadfast_trainers 2\n").then_some(())
    });
    first.signal(Signal::SIGKILL);
    first.end();
    eventually("training continued after the loss of a trainer", || {
        has("steadfast_last_recovery_seconds")
    });
    let of_master =
        eventually("held-out records were evaluated", || has("steadfast_evaluation_metric"));
    let asynchronous = Cluster::new(scene, &Job::asynchronous(), 1, "2s");
    let other = asynchronous.master("other-master");
    let of_other = eventually("the other master has read its job", || {
        metrics(&other).filter(|it| names_served(it).contains("steadfast_staleness_bound"))
    });
    let url = cluster.etcd.url();
    let address = url.strip_prefix("http://").expect("it is plain HTTP");
    BTreeMap::from([
        ("master", of_master),
        ("master of an asynchronous job", of_other),
        ("pserver", metrics(&pserver).expect("it is alive")),
        ("trainer", metrics(&second).expect("it is alive")),
        ("etcd", get(address, "/metrics").expect("etcd serves its metrics").body),
    ])
}

/// Metrics follow the conventions of Prometheus, Prometheus can parse them, and every metric named in a
/// rule, the dashboard or an operations page is served.
#[test]
fn the_metrics_of_alerts_and_dashboard_exist_and_follow_the_conventions() {
    let Some(promtool) = Promtool::find() else { return };
    let scene = Scene::new();
    let served = served(&scene);
    for (role, text) in served.iter().filter(|(role, _)| **role != "etcd") {
        let directory = scene.directory();
        let checked = promtool.check(directory, &["check", "metrics"], &in_older_text(text));
        checked.unwrap_or_else(|why| panic!("{role}: {why}\n{text}"));
        let file = scene.write("openmetrics", with_times(text)).display().to_string();
        let blocks = scene.path("blocks").display().to_string();
        let read = ["tsdb", "create-blocks-from", "openmetrics", &file, &blocks];
        promtool.check(directory, &read, "").unwrap_or_else(|why| panic!("{role}: {why}\n{text}"));
    }
    let served: BTreeSet<String> = served.values().flat_map(|text| names_served(text)).collect();
    let pages = fs::read_dir(root().join("docs/operating")).expect("the operations pages exist");
    let mut files: Vec<PathBuf> = pages.map(|page| page.expect("it can be read").path()).collect();
    for name in ["alerts.yaml", "alerts.test.yaml", "grafana/dashboards/steadfast.json"] {
        files.push(monitoring().join(name));
    }
    for file in files {
        for name in names_used(&read(&file)) {
            let is_known = served.contains(&name)
                || name == LABEL
                || SERVED_ELSEWHERE.contains(&name.as_str());
            assert!(is_known, "{} names {name}, which is not served", file.display());
        }
    }
}

/// The checks above can fail: promtool runs and rejects invalid metrics.
#[test]
fn metrics_that_break_the_conventions_are_found() {
    let Some(promtool) = Promtool::find() else { return };
    let scene = Scene::new();
    let check = |metrics: &str| {
        promtool.check(scene.directory(), &["check", "metrics"], &in_older_text(metrics))
    };
    let sound = "# HELP x_seconds Time.\n# TYPE x_seconds counter\n# UNIT x_seconds seconds\n\
                 x_seconds_total 1\n# EOF\n";
    check(sound).unwrap();
    for (old, new) in [("# HELP x_seconds Time.\n", ""), ("x_seconds", "x_milliseconds")] {
        let broken = sound.replace(old, new);
        assert!(check(&broken).is_err(), "{broken}");
    }
    let take_in = |metrics: &str| {
        let file = scene.write("openmetrics", with_times(metrics)).display().to_string();
        let blocks = scene.path("blocks").display().to_string();
        let args = ["tsdb", "create-blocks-from", "openmetrics", &file, &blocks];
        promtool.check(scene.directory(), &args, "")
    };
    take_in(sound).unwrap();
    for (old, new) in [("# EOF\n", ""), ("UNIT x_seconds seconds", "UNIT x_seconds bytes")] {
        let broken = sound.replace(old, new);
        assert!(take_in(&broken).is_err(), "{broken}");
    }
}

/// F20, F33: each alert fires only when it should, including two missed checkpoints and an etcd without
/// space; a page describes what to do for each.
#[test]
fn each_alert_is_tested_and_has_a_page() {
    let Some(promtool) = Promtool::find() else { return };
    let directory = monitoring();
    promtool.check(&directory, &["check", "rules", "alerts.yaml"], "").unwrap();
    promtool.check(&directory, &["test", "rules", "alerts.test.yaml"], "").unwrap();
    let (rules, tests) =
        (read(&directory.join("alerts.yaml")), read(&directory.join("alerts.test.yaml")));
    let page = read(&root().join("docs/operating/alerts.md"));
    let headings: BTreeSet<String> =
        page.lines().filter_map(|it| Some(it.strip_prefix("## ")?.to_lowercase())).collect();
    let of = |key: &str| -> Vec<String> {
        let lines = rules.lines().map(|line| line.trim().trim_start_matches("- "));
        lines.filter_map(|line| Some(line.strip_prefix(key)?.trim().to_owned())).collect()
    };
    let (alerts, runbooks) = (of("alert:"), of("runbook:"));
    assert!(20 < alerts.len() && alerts.len() == runbooks.len());
    for alert in &alerts {
        assert!(tests.contains(&format!("alertname=\"{alert}\"")), "{alert} fires in no test");
        assert!(page.contains(alert), "{alert} is not described on the page");
    }
    for runbook in &runbooks {
        let heading = runbook.strip_prefix("docs/operating/alerts.md#").expect("it is our page");
        assert!(headings.contains(heading), "the page has no heading for {runbook}");
    }
}

#[test]
fn prometheus_accepts_its_configuration() {
    let Some(promtool) = Promtool::find() else { return };
    let scene = Scene::new();
    let secrets = scene.directory().display().to_string();
    scene.write("ca.crt", "");
    scene.write("admin-token", "");
    scene.write("alerts.yaml", read(&monitoring().join("alerts.yaml")));
    let settings = read(&monitoring().join("prometheus.yml")).replace("/viewers", &secrets);
    scene.write("prometheus.yml", settings);
    promtool.check(scene.directory(), &["check", "config", "prometheus.yml"], "").unwrap();
}

/// Collects all strings under the key `expr`.
fn queries(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value.as_str().filter(|_| key == "expr") {
                    Some(query) => found.push(query.to_owned()),
                    None => queries(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|it| queries(it, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Prometheus can parse every query of the dashboard, and Grafana has a data source for it.
#[test]
fn the_queries_of_the_dashboard_are_valid() {
    let Some(promtool) = Promtool::find() else { return };
    let scene = Scene::new();
    let dashboard = dashboard();
    let mut found = Vec::new();
    queries(&dashboard, &mut found);
    assert!(40 < found.len(), "{}", found.len());
    let mut rules = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    for (number, query) in found.iter().enumerate() {
        let query = query.replace("$__rate_interval", "1m").replace("$steadfast_job", ".*");
        assert!(!query.contains('$'), "{query} has an unknown variable");
        // A JSON string is a valid YAML string.
        let query = Value::from(query);
        rules.push_str(&format!("      - record: query:{number}\n        expr: {query}\n"));
    }
    scene.write("dashboard.yaml", rules);
    promtool.check(scene.directory(), &["check", "rules", "dashboard.yaml"], "").unwrap();
    let source = read(&monitoring().join("grafana/provisioning/datasources/prometheus.yaml"));
    assert!(source.contains("uid: prometheus"));
    let mut panels = dashboard["panels"].as_array().expect("it has panels").iter();
    assert!(panels.all(|it| it["type"] == "row" || it["datasource"]["uid"] == "prometheus"));
}
