//! `steadfast checkpoint list`: lists the checkpoints of a job, newest first.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use serde::Serialize;
use steadfast_common::ids::{Generation, Pass, Version};
use steadfast_common::records::{CheckpointRecord, ShardRecord};
use steadfast_process::{Failure, print, print_line};

use super::manifests::{self, Manifest};
use crate::job_args::JobArgs;
use crate::output::{FormArgs, Output, notice};
use steadfast_common::status::format::{bytes, span};

/// List the checkpoints of a job, newest first.
#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// One checkpoint in the output.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    id: String,
    /// Whether the job would resume from it.
    latest: bool,
    #[serde(flatten)]
    about: Option<About>,
    /// Why it was invalidated.
    invalidated: Option<String>,
    /// Why the manifest is not valid.
    error: Option<String>,
}

/// Contents of a manifest.
#[derive(Debug, PartialEq, Serialize)]
struct About {
    version: Version,
    pass: Pass,
    examples: u64,
    generation: Generation,
    /// Absent if the manifest has no commit time.
    age_seconds: Option<u64>,
    created_unix_ms: u64,
    size_bytes: u64,
    shards: usize,
}

pub async fn run(args: ListArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_with_checkpoints().await?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    let passes = manifests::record(&job).await?.spec.passes;
    let manifests = manifests::read(&job).await?;
    let rows: Vec<Row> = manifests.into_iter().map(|manifest| row(manifest, now_ms)).collect();
    match args.form.output() {
        Output::Json => print_line(serde_json::json!(rows)),
        Output::Text if rows.is_empty() => {
            notice(format_args!("steadfast: job {} has no checkpoint", job.name));
        }
        Output::Text => print(table(&rows, passes)),
    }
    Ok(ExitCode::SUCCESS)
}

fn row(manifest: Manifest, now_ms: u64) -> Row {
    let Manifest { id, record, is_latest: latest, create_revision: _ } = manifest;
    match record {
        Ok(record) => Row {
            id,
            latest,
            about: Some(about(&record, now_ms)),
            error: record.invalid_reason(),
            invalidated: record.invalidated,
        },
        Err(error) => Row { id, latest, about: None, invalidated: None, error: Some(error) },
    }
}

fn about(record: &CheckpointRecord, now_ms: u64) -> About {
    let created = record.created_unix_ms;
    About {
        version: record.position.version,
        pass: record.position.pass,
        examples: record.position.examples,
        generation: record.generation,
        age_seconds: (created != 0).then(|| now_ms.saturating_sub(created) / 1000),
        created_unix_ms: created,
        size_bytes: record.shards.iter().map(ShardRecord::all_bytes).fold(0, u64::saturating_add),
        shards: record.shards.len(),
    }
}

/// Formats the rows as a table; `passes` is the number of passes of the job.
fn table(rows: &[Row], passes: Option<u32>) -> String {
    let width = rows.iter().map(|row| row.id.len()).max().unwrap_or_default().max(2);
    let mut text = format!(
        "{:width$}  {:>9}  {:>5}  {:>8}  {:>10}  {:>6}\n",
        "ID", "STEP", "PASS", "AGE", "SIZE", "SHARDS"
    );
    for row in rows {
        let cells = match &row.about {
            Some(about) => [
                about.version.to_string(),
                // At the end of the job, the position is one past the last pass.
                about.pass.0.saturating_add(1).min(passes.unwrap_or(u32::MAX)).to_string(),
                about.age_seconds.map_or_else(|| "?".to_owned(), |age| span(age as f64)),
                bytes(about.size_bytes),
                about.shards.to_string(),
            ],
            None => ["?"; 5].map(str::to_owned),
        };
        let [step, pass, age, size, shards] = cells;
        let line = format!(
            "{:width$}  {step:>9}  {pass:>5}  {age:>8}  {size:>10}  {shards:>6}{}",
            row.id,
            remarks(row)
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

fn remarks(row: &Row) -> String {
    let latest = row.latest.then(|| "latest".to_owned());
    let invalidated = row.invalidated.as_ref().map(|reason| format!("invalidated: {reason}"));
    let error = row.error.as_ref().map(|reason| format!("error: {reason}"));
    let all: Vec<String> = [latest, invalidated, error].into_iter().flatten().collect();
    match all.is_empty() {
        true => String::new(),
        false => format!("  {}", all.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use steadfast_common::records::position::Position;

    use super::*;

    fn manifest(id: &str, record: Result<CheckpointRecord, String>) -> Manifest {
        Manifest { id: id.to_owned(), create_revision: 1, record, is_latest: id == "new" }
    }

    fn rows() -> Vec<Row> {
        let position = Position { version: Version(400), pass: Pass(2), ..Position::default() };
        let sound = CheckpointRecord { position, created_unix_ms: 1_000, ..Default::default() };
        let invalidated = CheckpointRecord {
            invalidated: Some("shards/x is missing".to_owned()),
            created_unix_ms: 0,
            ..sound.clone()
        };
        let mut rows: Vec<Row> = [
            manifest("new", Ok(sound)),
            manifest("old", Ok(invalidated)),
            manifest("torn", Err("no JSON".to_owned())),
        ]
        .map(|manifest| row(manifest, 66_500))
        .into();
        // These manifests have no shards, which this test ignores.
        rows[..2].iter_mut().for_each(|row| row.error = None);
        rows
    }

    #[test]
    fn the_list_shows_version_age_and_validity_of_each_checkpoint() {
        let text = table(&rows(), Some(3));
        assert_eq!(text, table(&rows(), None));
        assert_ne!(text, table(&rows(), Some(2)));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "ID         STEP   PASS       AGE        SIZE  SHARDS");
        assert_eq!(lines[1], "new         400      3    1m 05s         0 B       0  latest");
        let expected = "old         400      3         ?         0 B       0  \
                        invalidated: shards/x is missing";
        assert_eq!(lines[2], expected);
        let expected = "torn          ?      ?         ?           ?       ?  error: no JSON";
        assert_eq!(lines[3], expected);
    }

    #[test]
    fn json_output_has_the_numbers_that_etcd_has() {
        let json = serde_json::json!(rows());
        assert_eq!(json[0]["version"], 400);
        assert_eq!(json[0]["pass"], 2);
        assert_eq!(json[0]["age_seconds"], 65);
        assert_eq!(json[0]["latest"], true);
        assert_eq!(json[1]["invalidated"], "shards/x is missing");
        assert_eq!(json[2]["error"], "no JSON");
    }
}
