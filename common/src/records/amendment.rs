//! An amendment lets a job train further, or with other settings.

use crate::job::spec::{EvaluationSpec, JobSpec, Keep};
use crate::records::extension::More;
use crate::records::{CheckpointRecord, Course, EvaluationRecord, JobRecord};

/// A user amends a job, which then goes on from a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub enum Amendment {
    /// It trains further.
    Extend(More),
    /// It has the settings of this spec.
    Change(Box<JobSpec>),
}

/// A job that goes on from a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Amended {
    pub record: JobRecord,
    /// The evaluation that counts as its latest one.
    pub evaluation: Option<EvaluationRecord>,
}

impl JobRecord {
    /// Returns the job that goes on from `checkpoint` with an amendment; `evaluation` is its latest one so far.
    ///
    /// # Errors
    /// A message, if the job cannot be amended like this.
    pub fn amended(
        &self,
        amendment: &Amendment,
        checkpoint: &CheckpointRecord,
        evaluation: Option<&EvaluationRecord>,
        at_unix_ms: u64,
    ) -> Result<Amended, String> {
        let position = &checkpoint.position;
        match amendment {
            Amendment::Extend(_) if self.spec.dataset.follow => {
                Err("it is a stream, which has no length".to_owned())
            }
            Amendment::Extend(more) => {
                let course = evaluation.and_then(|it| it.course.as_ref());
                if course.is_some_and(Course::has_ended) {
                    return Err("its evaluations ended it (`evaluation.patience`); `steadfast change` gives it \
                                another patience, and a new job with `[start]` begins from its model"
                        .to_owned());
                }
                let record = self.extended(*more, position.version, at_unix_ms)?;
                Ok(Amended { record, evaluation: evaluation.cloned() })
            }
            Amendment::Change(spec) => {
                let record = self.changed(spec, position.version, at_unix_ms)?;
                let has_tables = checkpoint.params.iter().any(|param| param.table.is_some());
                if record.spec.evaluation.keep == Keep::Best && has_tables {
                    return Err("`evaluation.keep` = \"best\" does not apply to a model with embedding tables; \
                                remove it"
                        .to_owned());
                }
                let evaluation = evaluation.and_then(|it| EvaluationSpec::forgotten(it, position));
                Ok(Amended { record, evaluation })
            }
        }
    }
}
