//! Checks that the tables of keys in docs/protocol.md, and the fuzz target of records, have a row for each key.

use steadfast_common::records::key_table::{Condition, KEYS, Key, Writer};

/// Types of values for which there is no record.
const PLAIN: &[&str] = &["String", "u32", "bytes"];

/// Returns what a page with tables of keys says otherwise than the code.
pub fn undocumented(page: &str) -> Vec<String> {
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .map(|row| row.split('|').map(str::trim).collect())
        .collect();
    let mut errors = Vec::new();
    for key in KEYS {
        let name = format!("{}`", key.path);
        let of_key = |row: &&Vec<&str>| row.len() == 6 && row[0] == name;
        let Some(row) = rows.iter().find(of_key) else {
            errors.push(format!("`{}` has no row", key.path));
            continue;
        };
        errors.extend(differences(key, row).map(|it| format!("`{}`: {it}", key.path)));
    }
    errors
}

fn differences(key: &Key, row: &[&str]) -> impl Iterator<Item = String> {
    let &[_, _, writers, condition, lease, _] = row else { panic!("a row has five columns") };
    let is_said = match key.condition {
        Condition::Compared => !condition.contains("fenced"),
        Condition::Absent => condition == "key does not exist; never changed",
        Condition::Fenced | Condition::FencedByLauncher | Condition::FencedByCoordinator => {
            condition.starts_with("fenced") && !condition.contains("never changed")
        }
        Condition::FencedOnce => condition == "fenced; never changed",
    };
    let unnamed = key.writers.iter().map(|it| name(*it)).filter(|it| !writers.contains(it));
    let unnamed = unnamed.map(|writer| format!("the writer `{writer}` is missing"));
    let condition = (!is_said).then(|| format!("the condition is {:?}", key.condition));
    let lease = (key.is_leased == (lease == "–")).then(|| "the lease is wrong".to_owned());
    let all: Vec<String> = unnamed.chain(condition).chain(lease).collect();
    all.into_iter()
}

fn name(writer: Writer) -> &'static str {
    match writer {
        Writer::Master => "master",
        Writer::Pserver => "pserver",
        Writer::Trainer => "trainer",
        Writer::Agent => "agent",
        Writer::Launcher => "launcher",
        Writer::Coordinator => "coordinator",
        Writer::Operator => "operator",
    }
}

/// Returns the records that a fuzz target does not decode.
pub fn not_fuzzed(target: &str) -> Vec<String> {
    let records = KEYS.iter().map(|key| key.record).filter(|record| !PLAIN.contains(record));
    let missing = records.filter(|record| !target.contains(&format!("check::<{record}>")));
    missing.map(|record| format!("no input is decoded as `{record}`")).collect()
}
