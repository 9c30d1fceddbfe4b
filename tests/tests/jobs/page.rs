//! The status page of an acting master, in a browser.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use steadfast_tests::{Cluster, Job, Scene, python};

const BROWSER: &str = "/usr/bin/chromium";

/// The page shows a running job and, within two seconds, that a pserver was killed and which one took over, and then
/// who waits for whom when there is no spare; it loads nothing from other hosts, fits a phone and a screen of 1300
/// pixels, has a dark mode, and needs no mouse.
#[test]
fn a_browser_shows_a_job_and_a_kill_as_it_happens() {
    if !Path::new(BROWSER).is_file() {
        assert!(
            std::env::var_os("CI").is_none(),
            "{BROWSER} is not there; run scripts/setup --tests"
        );
        eprintln!("skipped: {BROWSER} is not there; run scripts/setup --tests");
        return;
    }
    let Some(python) = python("browser", &["playwright==1.55.0"]) else { return };
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, "2s");
    let (master, pserver) = (cluster.master("master"), cluster.pserver("pserver"));
    let _trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    cluster.until_step(50);
    let spare = cluster.pserver("spare");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/jobs/page.py");
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let mut browser = Command::new(python);
    browser.arg(script).arg(format!("http://{}/", master.admin)).arg(target);
    browser.args([&pserver, &spare].map(|it| it.process.pid().to_string()));
    let output = browser.output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seen: Value = serde_json::from_slice(&output.stdout).expect("it prints JSON");
    let headings = json!(["Processes", "Job", "Curves", "Pservers", "Trainers", "Events"]);
    assert_eq!(seen["headings"], headings);
    assert_eq!((&seen["complaints"], &seen["elsewhere"]), (&json!([]), &json!([])));
    assert_eq!((&seen["focused"], &seen["too_wide"]), (&json!("#picture"), &json!(0)));
    assert_eq!(seen["dark"], "rgb(22, 22, 22)");
    // The master, a slot and two trainers.
    assert_eq!((&seen["scrolled"], &seen["drawn"]), (&json!([]), &json!(4)));
    assert_eq!(seen["waits"], "slot 0 has no pserver");
    assert!(seen["seconds"].as_f64().is_some_and(|it| it < 2.0), "{seen}");
}
