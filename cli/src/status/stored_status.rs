//! Reads the status of a job from etcd when its master does not answer.

use serde::Serialize;
use steadfast_common::code::CodeRecord;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Generation;
use steadfast_common::ids::Incarnation;
use steadfast_common::keys::Keys;
use steadfast_common::records::{
    EvaluationRecord, GenerationRecord, JobRecord, PserverRecord, ResultRecord, TrainerRecord,
    WaitsRecord,
};
use steadfast_common::spec::Mode;
use steadfast_common::status::SlotStatus;
use steadfast_coord::Etcd;
use steadfast_process::Failure;

use crate::checkpoint::pointer;

/// Status of a job, as stored in etcd.
#[derive(Debug, PartialEq, Serialize)]
pub struct StoredStatus {
    pub job: String,
    /// Absent if no master has accepted the job yet.
    pub mode: Option<Mode>,
    /// Always absent: distinguishes this from a status of the master.
    pub master: Option<()>,
    /// Why no master answers.
    pub error: String,
    /// What the master of a new job waits for before it accepts calls.
    pub waits_for: Option<String>,
    pub generation: Option<Generation>,
    pub ps_desired: Option<u32>,
    /// The slots that have a pserver.
    pub slots: Vec<SlotStatus>,
    pub trainers: Vec<StoredTrainer>,
    pub checkpoint: Option<String>,
    pub evaluation: Option<EvaluationRecord>,
    /// Warnings about the code of the model; only a master knows the others.
    pub warnings: Vec<String>,
    pub result: Option<ResultRecord>,
}

/// A registered trainer.
#[derive(Debug, PartialEq, Serialize)]
pub struct StoredTrainer {
    pub id: String,
    pub admin: String,
}

impl StoredStatus {
    /// Reads the job's keys.
    pub async fn read(
        etcd: &Etcd,
        keys: &Keys,
        name: &str,
        error: String,
    ) -> Result<Self, Failure> {
        let record: Option<JobRecord> = etcd.get_json(&keys.job()).await?;
        let mut slots = Vec::new();
        for entry in etcd.list(&keys.ps_prefix()).await?.entries.values() {
            let Some(slot) = keys.slot_of(&entry.key) else { continue };
            let pserver: PserverRecord = entry.json()?;
            let incarnation = Some(Incarnation(entry.create_revision));
            slots.push(SlotStatus { slot, address: Some(pserver.address), incarnation });
        }
        slots.sort_by_key(|slot| slot.slot);
        let mut trainers = Vec::new();
        for entry in etcd.list(&keys.trainers_prefix()).await?.entries.values() {
            let Some(id) = keys.trainer_of(&entry.key) else { continue };
            let trainer: TrainerRecord = entry.json()?;
            trainers.push(StoredTrainer { id: id.to_string(), admin: trainer.admin });
        }
        let result = etcd.get_json(&keys.result()).await?;
        let waits: Option<WaitsRecord> = etcd.get_json(&keys.master_waits()).await?;
        let has_job = record.is_some() || result.is_some() || waits.is_some();
        if !has_job && slots.is_empty() && trainers.is_empty() {
            let root = keys.root();
            let message =
                format!("etcd has no job {name} (no key below `{root}/`): a master creates it");
            return Err(Failure::new(ErrorKind::NotFound, message));
        }
        let code: Option<CodeRecord> = etcd.get_json(&keys.code()).await?;
        let generation: Option<GenerationRecord> = etcd.get_json(&keys.generation()).await?;
        Ok(Self {
            job: name.to_owned(),
            mode: record.map(|record| record.spec.mode),
            master: None,
            error,
            waits_for: waits.map(|it| it.waits_for),
            generation: generation.map(|it| it.generation),
            ps_desired: etcd.get_json(&keys.ps_desired()).await?,
            slots,
            trainers,
            checkpoint: etcd.get(&keys.checkpoint_latest()).await?.map(|it| pointer(&it.value)),
            evaluation: etcd.get_json(&keys.evaluation()).await?,
            warnings: code.unwrap_or_default().changes.iter().map(ToString::to_string).collect(),
            result,
        })
    }
}
