//! `steadfast members`, `slots` and `tasks`: list the state of a job in etcd. No master is needed.

use std::collections::BTreeSet;
use std::process::ExitCode;

use clap::Args;
use futures::future::join_all;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use steadfast_common::ids::{Incarnation, Pass, Slot, TaskId};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::given_up::GivenUpRecord;
use steadfast_common::records::rendezvous::AgentRecord;
use steadfast_common::records::{
    CheckpointRecord, FollowerRecord, JobRecord, MasterRecord, PserverRecord, QueueRecord,
    TaskRecord, TrainerRecord,
};
use steadfast_coord::Entry;
use steadfast_process::{Failure, print_line};
use uuid::Uuid;

use crate::admin_client;
use crate::job_args::{Job, JobArgs};
use crate::output::{FormArgs, Output, notice};
use steadfast_common::status::format::{plain, plural};

/// List the processes of a job: the acting master, the holders of slots, the trainers; of an elastic job the
/// agents.
#[derive(Debug, Args)]
pub struct MembersArgs {
    #[command(flatten)]
    of: Of,
}

/// List the slots of a job and their pservers.
#[derive(Debug, Args)]
pub struct SlotsArgs {
    #[command(flatten)]
    of: Of,
}

/// List the tasks of the current pass that are pending, have failed or were given up, with trainer, failures
/// and reason.
#[derive(Debug, Args)]
pub struct TasksArgs {
    #[command(flatten)]
    of: Of,
}

/// Flags of the list commands.
#[derive(Debug, Args)]
struct Of {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// A process that is registered in the job.
#[derive(Clone, Debug, Serialize)]
pub struct Member {
    pub role: &'static str,
    /// The slot of a pserver, the id of any other process.
    pub name: String,
    /// Id of the process.
    pub id: Uuid,
    pub address: Option<String>,
    pub admin: String,
    /// Create-revision of its key in etcd.
    pub since: i64,
}

impl Member {
    /// Returns the name used in text output and by `steadfast drain`.
    pub fn title(&self) -> String {
        match self.role {
            role @ ("trainer" | "agent") => format!("{role} {}", self.name),
            // There is one acting master, and the name of a pserver is its slot.
            "master" => "master".to_owned(),
            _ => self.name.clone(),
        }
    }
}

/// Reads all processes that are registered in the job from etcd.
///
/// # Errors
/// If etcd does not answer, or holds a value that cannot be parsed.
pub async fn all_members(job: &Job) -> Result<Vec<Member>, Failure> {
    let mut members = Vec::new();
    if let Some(entry) = job.etcd.get(&job.keys.master_addr()).await? {
        let record: MasterRecord = entry.json()?;
        members.push(Member {
            role: "master",
            name: record.id.to_string(),
            id: record.id,
            address: Some(record.address),
            admin: record.admin,
            since: entry.create_revision,
        });
    }
    for (slot, record, since) in holders(job).await? {
        members.push(Member {
            role: "pserver",
            name: format!("slot {slot}"),
            id: record.id,
            address: Some(record.address),
            admin: record.admin,
            since,
        });
    }
    for (key, entry) in job.etcd.list(&job.keys.followers_prefix()).await?.entries {
        let Some(slot) = job.keys.followed_slot_of(&key) else { continue };
        let record: FollowerRecord = entry.json()?;
        members.push(Member {
            role: "pserver",
            name: format!("follower of slot {slot}"),
            id: record.id,
            address: Some(record.address),
            admin: record.admin,
            since: entry.create_revision,
        });
    }
    for (key, entry) in job.etcd.list(&job.keys.trainers_prefix()).await?.entries {
        let Some(id) = job.keys.trainer_of(&key) else { continue };
        let record: TrainerRecord = entry.json()?;
        members.push(Member {
            role: "trainer",
            name: id.to_string(),
            id: id.0,
            address: None,
            admin: record.admin,
            since: entry.create_revision,
        });
    }
    for (key, entry) in job.etcd.list(&job.keys.agents_prefix()).await?.entries {
        let Some(id) = job.keys.agent_of(&key) else { continue };
        let record: AgentRecord = entry.json()?;
        members.push(Member {
            role: "agent",
            name: id.to_string(),
            id: id.0,
            address: Some(record.address),
            admin: record.admin,
            since: entry.create_revision,
        });
    }
    Ok(members)
}

pub async fn members(args: MembersArgs) -> Result<ExitCode, Failure> {
    let members = all_members(&args.of.job.find().await?).await?;
    show(
        &args.of.form,
        &json!(members),
        "role     name                                  admin port",
    );
    if args.of.form.output() == Output::Text {
        for Member { role, name, admin, .. } in members {
            print_line(plain(&format!("{role:<9}{name:<38}{admin}")));
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct SlotRow {
    slot: Slot,
    /// Absent while the slot is free.
    address: Option<String>,
    incarnation: Option<Incarnation>,
    /// The spare that can take the slot over.
    follower: Option<String>,
    /// Names the spare that has, or is making, a copy of its shard, as the holder knows it.
    copy: Option<Copy>,
}

/// A spare as the holder of a slot sees it.
#[derive(Debug, Serialize, Deserialize)]
struct Copy {
    address: String,
    /// Number of complete steps that it lacks.
    steps_behind: u64,
}

impl SlotRow {
    /// Returns the text of the column of followers.
    fn follower(&self) -> String {
        match (&self.follower, &self.copy) {
            (Some(address), None | Some(Copy { steps_behind: 0, .. })) => address.clone(),
            (Some(address), Some(copy)) => format!("{address} ({} behind)", copy.steps()),
            (None, Some(copy)) => {
                format!("none; {} copies it, {} behind", copy.address, copy.steps())
            }
            (None, None) => "none".to_owned(),
        }
    }
}

impl Copy {
    fn steps(&self) -> String {
        plural(self.steps_behind as usize, "step")
    }
}

pub async fn slots(args: SlotsArgs) -> Result<ExitCode, Failure> {
    let job = args.of.job.find().await?;
    job.must_train("it has no slots; `steadfast status` shows its nodes").await?;
    let desired = job.etcd.get(&job.keys.ps_desired()).await?;
    let desired: u32 = desired.map_or(Ok(0), |entry| entry.json())?;
    let mut rows: Vec<SlotRow> = (0..desired)
        .map(|slot| SlotRow {
            slot: Slot(slot),
            address: None,
            incarnation: None,
            follower: None,
            copy: None,
        })
        .collect();
    let record: Option<JobRecord> = job.etcd.get_json(&job.keys.job()).await?;
    let are_followed = record.is_some_and(|record| 0 < record.spec.warm_spares);
    let holders = holders(&job).await?;
    let copies = match are_followed {
        true => join_all(holders.iter().map(|(_, record, _)| copy(&job, record))).await,
        false => holders.iter().map(|_| None).collect(),
    };
    let followers = job.etcd.list(&job.keys.followers_prefix()).await?;
    for ((slot, record, created), copy) in holders.into_iter().zip(copies) {
        let incarnation = Some(record.incarnation(created));
        let follower = followers.entries.get(&job.keys.follower(slot));
        let follower: Option<FollowerRecord> = follower.map(Entry::json).transpose()?;
        let follower = follower.map(|it| it.address);
        let address = Some(record.address);
        let row = SlotRow { slot, address, incarnation, follower, copy };
        match rows.get_mut(slot.0 as usize) {
            Some(place) => *place = row,
            // The number of slots was reduced; this one is released soon.
            None => rows.push(row),
        }
    }
    let title = match are_followed {
        true => "slot  incarnation  pserver               follower",
        false => "slot  incarnation  pserver",
    };
    show(&args.of.form, &json!(rows), title);
    if args.of.form.output() == Output::Text {
        for it in rows {
            let incarnation = it.incarnation.map_or_else(|| "–".to_owned(), |it| it.to_string());
            let address = it.address.as_deref().unwrap_or("free");
            let row = format!("{:<6}{incarnation:<13}{address}", it.slot.to_string());
            print_line(plain(&match are_followed {
                true => format!("{row:<40} {}", it.follower()),
                false => row,
            }));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks the holder of a slot for the spare that copies it; `None` if it does not answer.
async fn copy(job: &Job, holder: &PserverRecord) -> Option<Copy> {
    let reply = admin_client::status(&holder.admin, &job.tls).await.ok()?;
    serde_json::from_value(reply["follower"].clone()).ok()
}

async fn holders(job: &Job) -> Result<Vec<(Slot, PserverRecord, i64)>, Failure> {
    let mut found = Vec::new();
    for (key, entry) in job.etcd.list(&job.keys.ps_prefix()).await?.entries {
        if let Some(slot) = job.keys.slot_of(&key) {
            found.push((slot, entry.json()?, entry.create_revision));
        }
    }
    found.sort_by_key(|(slot, ..)| *slot);
    Ok(found)
}

#[derive(Debug, Serialize)]
struct TaskRow {
    task: TaskId,
    #[serde(flatten)]
    record: TaskRecord,
}

pub async fn tasks(args: TasksArgs) -> Result<ExitCode, Failure> {
    let job = args.of.job.find().await?;
    job.must_train("it has no tasks; `steadfast status` shows its rounds").await?;
    let queue = queue(&job).await?;
    let mut rows = Vec::new();
    for (key, entry) in job.etcd.list(&job.keys.round_prefix(queue.round)).await?.entries {
        if let Some(task) = job.keys.task_of(queue.round, &key) {
            rows.push(TaskRow { task, record: entry.json()? });
        }
    }
    let listed: BTreeSet<TaskId> = rows.iter().map(|row| row.task).collect();
    for (key, entry) in job.etcd.list(&job.keys.given_up_prefix()).await?.entries {
        let Some(task) = job.keys.given_up_of(&key).filter(|task| !listed.contains(task)) else {
            continue;
        };
        let record: GivenUpRecord = entry.json()?;
        if record.passes.contains(queue.pass) {
            let record = TaskRecord::Discarded { failures: 0, reason: record.reason };
            rows.push(TaskRow { task, record });
        }
    }
    rows.sort_by_key(|row| row.task);
    let output = json!({ "pass": queue.pass, "dispatched": queue.cursor, "tasks": rows });
    show(&args.of.form, &output, "task      state      failures  trainer or reason");
    if args.of.form.output() == Output::Text {
        notice(format_args!("pass {}", u64::from(queue.pass.0) + 1));
        for TaskRow { task, record } in rows {
            let (state, failures, more) = match record {
                TaskRecord::Todo { failures, reason, .. } => ("todo", failures, reason),
                TaskRecord::Pending { failures, trainer, .. } => {
                    ("pending", failures, format!("trainer {trainer}"))
                }
                TaskRecord::Discarded { failures, reason } => ("discarded", failures, reason),
            };
            let line = format!("{:<10}{state:<11}{failures:<10}{more}", task.to_string());
            print_line(plain(&line));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the head of the queues. A synchronous job has none in etcd: its pass comes from the acting master or
/// else from the latest checkpoint, and its rounds are its passes.
async fn queue(job: &Job) -> Result<QueueRecord, Failure> {
    let record: Option<JobRecord> = job.etcd.get_json(&job.keys.job()).await?;
    if record.is_none_or(|record| record.spec.mode == Mode::Async) {
        return Ok(job.etcd.get_json(&job.keys.queue()).await?.unwrap_or_default());
    }
    let pass = match job.master().status().await {
        Ok(status) => status.pass,
        Err(_) => pass_of_latest(job).await?,
    };
    Ok(QueueRecord { round: u64::from(pass.0), pass, ..QueueRecord::default() })
}

async fn pass_of_latest(job: &Job) -> Result<Pass, Failure> {
    let latest: Option<String> = job.etcd.get_json(&job.keys.checkpoint_latest()).await?;
    let Some(id) = latest else { return Ok(Pass(0)) };
    let record: Option<CheckpointRecord> = job.etcd.get_json(&job.keys.checkpoint(&id)).await?;
    Ok(record.map_or(Pass(0), |record| record.position.pass))
}

/// Prints the JSON output or the header of the table.
fn show(form: &FormArgs, output: &Value, head: &str) {
    match form.output() {
        Output::Json => print_line(output),
        Output::Text => print_line(head),
    }
}
