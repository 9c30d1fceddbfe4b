//! The status of a training job without a master: what etcd holds.

use serde::Serialize;

use super::document::{Body, Document, Level, Row, Section, Table, Value};
use super::training::{self, SlotStatus};
use crate::ids::Generation;
use crate::job::spec::Mode;
use crate::records::{EvaluationRecord, JobOutcome, ResultRecord};

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
    /// Number of spares that are to follow a slot.
    pub warm_spares: u32,
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
    /// Describes the status.
    pub fn document(&self) -> Document {
        let (state, level) = match (&self.result, &self.waits_for) {
            (Some(result), _) => match result.state {
                JobOutcome::Finished => ("finished", Level::Good),
                JobOutcome::Failed => ("failed", Level::Bad),
            },
            (None, Some(_)) => ("waiting", Level::Bad),
            (None, None) => ("no master answers", Level::Bad),
        };
        let mut rows = Vec::new();
        let mut sections = Vec::new();
        let checkpoint = Row::text("checkpoint", self.checkpoint.as_deref().unwrap_or("none"));
        let warnings = self.warnings.iter().map(|it| Row::warning("warning", it));
        match &self.result {
            Some(result) => {
                rows.extend(training::result_rows(result));
                rows.push(checkpoint);
                rows.extend(training::left_out_rows(&result.left_out));
                rows.extend(warnings);
                sections.extend(training::discarded(&result.discarded));
            }
            None => {
                rows.push(Row::error("why", &self.error));
                if self.waits_for.is_none() {
                    let below = "the state in etcd; the job continues once a master is acting";
                    rows.push(Row::text("below", below));
                }
                let generation = self.generation.iter();
                rows.extend(generation.map(|it| Row::new("generation", Value::Count(it.0))));
                rows.push(checkpoint);
                rows.extend(self.evaluation.iter().flat_map(training::evaluation_rows));
                rows.extend(warnings);
                sections.push(training::slots(&self.slots, self.ps_desired, self.warm_spares));
                sections.push(self.trainers());
            }
        }
        sections.insert(0, Section { id: "job", title: "Job", body: Body::Rows(rows) });
        Document {
            job: self.job.clone(),
            state: state.to_owned(),
            level,
            kind: training::kind(self.mode),
            sections,
            ..Document::default()
        }
    }

    fn trainers(&self) -> Section {
        let row = |it: &StoredTrainer| {
            vec![Value::Id(it.id.clone()).into(), Value::Text(it.admin.clone()).into()]
        };
        let table = Table {
            summary: training::summary("trainers", self.trainers.len().to_string()),
            columns: vec!["trainer", "admin port"],
            rows: self.trainers.iter().map(row).collect(),
            processes: self.trainers.iter().map(|it| format!("trainer {}", it.id)).collect(),
            count: self.trainers.len(),
        };
        Section { id: "trainers", title: "Trainers", body: Body::Table(table) }
    }
}
