//! `steadfast members`, `slots` and `tasks`: what etcd holds of a job, line by line, for people and
//! scripts. A master need not answer.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use steadfast_common::ids::{Incarnation, Slot, TaskId};
use steadfast_common::records::{
    MasterRecord, PserverRecord, QueueRecord, TaskRecord, TrainerRecord,
};
use steadfast_process::Failure;
use uuid::Uuid;

use crate::format::plain;
use crate::job_args::{Job, JobArgs};
use crate::output::{FormArgs, Output};

/// List the processes of a job: the acting master, the holders of slots, the trainers.
#[derive(Debug, Args)]
pub struct MembersArgs {
    #[command(flatten)]
    of: Of,
}

/// List the slots of a job and who holds them.
#[derive(Debug, Args)]
pub struct SlotsArgs {
    #[command(flatten)]
    of: Of,
}

/// List the tasks of the pass that are neither simply waiting nor done: with whom they are, how often they
/// failed, and why they were given up.
#[derive(Debug, Args)]
pub struct TasksArgs {
    #[command(flatten)]
    of: Of,
}

/// Of which job, and in which form.
#[derive(Debug, Args)]
struct Of {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// A process that has a place in the job.
#[derive(Clone, Debug, Serialize)]
pub struct Member {
    pub role: &'static str,
    /// The slot of a pserver, the id of any other.
    pub name: String,
    /// The process's own.
    pub id: Uuid,
    pub address: Option<String>,
    pub admin: String,
    /// Revision of etcd at which it took its place: the smaller, the longer ago.
    pub since: i64,
}

impl Member {
    /// What people call it.
    pub fn title(&self) -> String {
        match self.role {
            "trainer" => format!("trainer {}", self.name),
            // There is one, and one for each slot.
            "master" => "master".to_owned(),
            _ => self.name.clone(),
        }
    }
}

/// All processes that have a place in the job, as etcd holds them.
///
/// # Errors
/// If etcd does not answer, or holds a value that is not ours.
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
    Ok(members)
}

/// Lists processes.
pub async fn members(args: MembersArgs) -> Result<ExitCode, Failure> {
    let members = all_members(&args.of.job.find().await?).await?;
    show(
        &args.of.form,
        &json!(members),
        "role     name                                  admin port",
    );
    if args.of.form.output() == Output::Text {
        for Member { role, name, admin, .. } in members {
            println!("{}", plain(&format!("{role:<9}{name:<38}{admin}")));
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct SlotRow {
    slot: Slot,
    /// Absent while nobody holds it.
    address: Option<String>,
    incarnation: Option<Incarnation>,
}

/// Lists slots.
pub async fn slots(args: SlotsArgs) -> Result<ExitCode, Failure> {
    let job = args.of.job.find().await?;
    let desired = job.etcd.get(&job.keys.ps_desired()).await?;
    let desired: u32 = desired.map_or(Ok(0), |entry| entry.json())?;
    let mut rows: Vec<SlotRow> = (0..desired)
        .map(|slot| SlotRow { slot: Slot(slot), address: None, incarnation: None })
        .collect();
    for (slot, record, created) in holders(&job).await? {
        let incarnation = Some(record.incarnation(created));
        let row = SlotRow { slot, address: Some(record.address), incarnation };
        match rows.get_mut(slot.0 as usize) {
            Some(place) => *place = row,
            // Given back soon: there are fewer slots now.
            None => rows.push(row),
        }
    }
    show(&args.of.form, &json!(rows), "slot  incarnation  pserver");
    if args.of.form.output() == Output::Text {
        for SlotRow { slot, address, incarnation } in rows {
            let incarnation = incarnation.map_or_else(|| "–".to_owned(), |it| it.to_string());
            let address = address.as_deref().unwrap_or("free");
            println!("{}", plain(&format!("{:<6}{incarnation:<13}{address}", slot.to_string())));
        }
    }
    Ok(ExitCode::SUCCESS)
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

/// Lists tasks.
pub async fn tasks(args: TasksArgs) -> Result<ExitCode, Failure> {
    let job = args.of.job.find().await?;
    let queue: Option<QueueRecord> = job.etcd.get_json(&job.keys.queue()).await?;
    let queue = queue.unwrap_or_default();
    let mut rows = Vec::new();
    for (key, entry) in job.etcd.list(&job.keys.round_prefix(queue.round)).await?.entries {
        if let Some(task) = job.keys.task_of(queue.round, &key) {
            rows.push(TaskRow { task, record: entry.json()? });
        }
    }
    let said = json!({ "pass": queue.pass, "dispatched": queue.cursor, "tasks": rows });
    show(&args.of.form, &said, "task      state      failures  with, or why");
    if args.of.form.output() == Output::Text {
        for TaskRow { task, record } in rows {
            let (state, failures, more) = match record {
                TaskRecord::Todo { failures, reason, .. } => ("todo", failures, reason),
                TaskRecord::Pending { failures, trainer, .. } => {
                    ("pending", failures, format!("trainer {trainer}"))
                }
                TaskRecord::Discarded { failures, reason } => ("discarded", failures, reason),
            };
            let line = format!("{:<10}{state:<11}{failures:<10}{more}", task.to_string());
            println!("{}", plain(&line));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the JSON, or the head of the table.
fn show(form: &FormArgs, said: &Value, head: &str) {
    match form.output() {
        Output::Json => println!("{said}"),
        Output::Text => println!("{head}"),
    }
}
