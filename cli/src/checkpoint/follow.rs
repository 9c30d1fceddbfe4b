//! `steadfast checkpoint follow`: prints the objects of each checkpoint as it is committed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Pass, Slot, Version};
use steadfast_common::records::{CheckpointRecord, RowFilesRecord, ShardRecord};
use steadfast_coord::{Mirror, Range};
use steadfast_process::Failure;
use tokio::time::sleep;

use super::manifests::{self, Manifest};
use crate::job_args::JobArgs;
use crate::output::{FormArgs, Output};

/// Print the objects of each checkpoint as it is committed, until the job has ended.
///
/// An object that was printed with an earlier checkpoint is not printed again: of the rows of tables, only those that
/// changed since. After a rollback, all row files of a slot are printed anew.
#[derive(Debug, Args)]
pub struct FollowArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// How often etcd is asked whether it is there, and how often in a row it may not answer.
const ASK_EVERY: Duration = Duration::from_secs(10);
const FAILURES_MAX: u32 = 3;

/// The new objects of a checkpoint.
#[derive(Debug, PartialEq, Serialize)]
struct Committed {
    id: String,
    version: Version,
    pass: Pass,
    objects: Vec<Object>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Object {
    slot: Slot,
    content: Content,
    url: String,
}

/// What an object of a shard has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Content {
    /// Blocks of parameters, and where the rows are.
    Parameters,
    /// All rows of the slot's tables at one time. What a reader has of the slot is void.
    AllRows,
    /// Rows that changed since.
    ChangedRows,
}

pub async fn run(args: FollowArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_with_checkpoints().await?;
    let store = manifests::open_store(&manifests::record(&job).await?).await?;
    let checkpoints =
        Mirror::start(&job.etcd, Range::Prefix(job.keys.checkpoints_prefix())).await?;
    let result = Mirror::start(&job.etcd, Range::Key(job.keys.result())).await?;
    let (mut changes, mut ends) = (checkpoints.subscribe(), result.subscribe());
    let (mut printed, mut last) = (BTreeMap::new(), None);
    let mut failures = 0;
    loop {
        let is_over = !ends.borrow_and_update().entries.is_empty();
        let view = changes.borrow_and_update().clone();
        let all = match is_over {
            // The watch of the checkpoints may lag behind that of the result.
            true => manifests::read(&job).await?,
            false => manifests::of_view(&view, &job.keys),
        };
        let latest = all.into_iter().find(|it| it.is_latest);
        if let Some(manifest) = latest.filter(|it| last.as_ref() != Some(&it.id)) {
            let committed = committed(&manifest, store.url(), &mut printed)?;
            last = Some(manifest.id);
            print(&committed, args.form.output())?;
        }
        if is_over {
            return Ok(ExitCode::SUCCESS);
        }
        tokio::select! {
            biased;
            changed = changes.changed() => lost(changed)?,
            changed = ends.changed() => lost(changed)?,
            // A watch waits for ever for an etcd that has ended, such as the embedded one of a job.
            () = sleep(ASK_EVERY) => match job.etcd.get(&job.keys.result()).await {
                Ok(_) => failures = 0,
                Err(_) if failures < FAILURES_MAX => failures += 1,
                Err(error) => return Err(error.into()),
            },
        }
    }
}

fn lost<E>(changed: Result<(), E>) -> Result<(), Failure> {
    changed.map_err(|_| Failure::new(ErrorKind::Unavailable, "etcd is not reachable any more"))
}

/// Describes the objects of a checkpoint that are not `printed` yet.
fn committed(
    manifest: &Manifest,
    store: &str,
    printed: &mut BTreeMap<Slot, BTreeSet<String>>,
) -> Result<Committed, Failure> {
    let CheckpointRecord { position, shards, .. } = manifest.record()?;
    let mut new = Vec::new();
    for shard in shards {
        let rows: BTreeSet<String> = shard.rows.iter().flat_map(RowFilesRecord::objects).collect();
        // If rows were printed that the checkpoint lacks, the job was rolled back, or all are written anew.
        let known = printed.remove(&shard.slot).filter(|known| known.is_subset(&rows));
        let is_new = |object: &String| known.as_ref().is_none_or(|known| !known.contains(object));
        new.extend(objects(shard).filter(|(_, _, object)| is_new(object)));
        printed.insert(shard.slot, rows);
    }
    let described =
        |(slot, content, object)| Object { slot, content, url: format!("{store}/{object}") };
    let objects = new.into_iter().map(described).collect();
    let (id, version, pass) = (manifest.id.clone(), position.version, position.pass);
    Ok(Committed { id, version, pass, objects })
}

fn objects(shard: &ShardRecord) -> impl Iterator<Item = (Slot, Content, String)> + '_ {
    let parameters = [(Content::Parameters, shard.object.clone())];
    let rows = shard.rows.iter().enumerate().flat_map(|(layer, files)| {
        let content = if layer == 0 { Content::AllRows } else { Content::ChangedRows };
        files.objects().map(move |object| (content, object))
    });
    // Rows first: a reader of the objects in this order has all rows that the shard names.
    rows.chain(parameters).map(|(content, object)| (shard.slot, content, object))
}

fn print(committed: &Committed, output: Output) -> Result<(), Failure> {
    let text = match output {
        Output::Json => format!("{}\n", serde_json::json!(committed)),
        Output::Text => text(committed),
    };
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|error| {
        Failure::new(ErrorKind::Unavailable, format!("cannot write to the output: {error}"))
    })
}

fn text(committed: &Committed) -> String {
    let mut text = format!(
        "{} step {} pass {}\n",
        committed.id,
        committed.version,
        committed.pass.0.saturating_add(1)
    );
    for Object { slot, content, url } in &committed.objects {
        let content = match content {
            Content::Parameters => "parameters",
            Content::AllRows => "all rows",
            Content::ChangedRows => "changed rows",
        };
        let _ = writeln!(text, "  slot {slot}  {content:12}  {url}");
    }
    text
}

#[cfg(test)]
mod tests {
    use steadfast_common::records::RowFilesRecord;

    use super::*;

    fn manifest(id: &str, layers: &[&str]) -> Manifest {
        let shard = serde_json::json!({
            "slot": 0, "incarnation": 1, "object": format!("{id}.safetensors"), "sha256": "",
            "size_bytes": 1, "version": 3,
        });
        let mut shard: ShardRecord = serde_json::from_value(shard).unwrap();
        let layer =
            |name: &&str| RowFilesRecord { name: (*name).to_owned(), files: 2, size_bytes: 9 };
        shard.rows = layers.iter().map(layer).collect();
        let record = CheckpointRecord { shards: vec![shard], ..CheckpointRecord::default() };
        Manifest { id: id.to_owned(), create_revision: 1, record: Ok(record), is_latest: true }
    }

    #[test]
    fn an_object_is_printed_with_the_first_checkpoint_that_has_it() {
        let mut printed = BTreeMap::new();
        let mut next = |id, layers| {
            let committed =
                committed(&manifest(id, layers), "s3://bucket/job", &mut printed).unwrap();
            let objects = committed.objects.into_iter();
            objects
                .map(|it| (it.content, it.url.replace("s3://bucket/job/", "")))
                .collect::<Vec<_>>()
        };
        let file = |content, name: &str| (content, format!("{name}.safetensors"));
        let first = next("a", &["a"]);
        assert_eq!(
            first,
            [
                file(Content::AllRows, "a-rows-0"),
                file(Content::AllRows, "a-rows-1"),
                file(Content::Parameters, "a"),
            ]
        );
        // One in between was missed.
        let third = next("c", &["a", "b", "c"]);
        let changed = |name| file(Content::ChangedRows, name);
        assert_eq!(third[..2], [changed("b-rows-0"), changed("b-rows-1")]);
        assert_eq!(third[2..4], [changed("c-rows-0"), changed("c-rows-1")]);
        assert_eq!(third[4..], [file(Content::Parameters, "c")]);
        // The job was rolled back.
        let back = next("e", &["a", "b", "e"]);
        assert_eq!(back.len(), 7, "all layers are printed again: {back:?}");
        assert_eq!(next("d", &["d"])[0], file(Content::AllRows, "d-rows-0"));
    }
}
