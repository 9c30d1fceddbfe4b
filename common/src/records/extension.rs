//! More training for a job that has ended.

use serde::{Deserialize, Serialize};

use crate::ids::Version;
use crate::job::spec::JobSpec;
use crate::records::JobRecord;

/// An extension of a job: it goes on from its last checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extension {
    /// The step of the checkpoint.
    pub version: Version,
    /// What the job trained before: passes, or steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// When the job was extended, by the clock of the command.
    pub at_unix_ms: u64,
}

/// How much further a job trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum More {
    Passes(u32),
    Steps(u64),
}

impl JobRecord {
    /// Returns whether a job file with this digest of its spec is that of the job: with the passes or steps that it has
    /// now, or had before an extension, and the settings that it has now, or had before it was changed while it ran.
    pub fn is_of(&self, spec_digest: &str) -> bool {
        let before = self.extensions.iter().map(|it| (it.passes, it.steps));
        let lengths: Vec<_> = before.chain([(self.spec.passes, self.spec.steps)]).collect();
        self.valid_settings().any(|spec| {
            let of_length = |(passes, steps)| JobSpec { passes, steps, ..spec.clone() };
            lengths.iter().any(|it| of_length(*it).digest() == spec_digest)
        })
    }

    /// Returns the record of the job that trains further from the checkpoint of step `version`.
    ///
    /// # Errors
    /// A message, if the job does not count what `more` counts, or the sum is out of range.
    pub fn extended(&self, more: More, version: Version, at_unix_ms: u64) -> Result<Self, String> {
        let (passes, steps) = (self.spec.passes, self.spec.steps);
        let mut record = self.clone();
        let spec = &mut record.spec;
        match (more, passes, steps) {
            (More::Passes(more), Some(passes), _) => spec.passes = passes.checked_add(more),
            (More::Steps(more), _, Some(steps)) => spec.steps = steps.checked_add(more),
            (More::Passes(_), None, _) => {
                return Err("the job counts steps; extend it with --steps".to_owned());
            }
            (More::Steps(_), _, None) => {
                return Err("the job counts passes; extend it with --passes".to_owned());
            }
        }
        if spec.passes.is_none() && spec.steps.is_none() {
            return Err(
                "the job would have too many passes or steps; extend it by fewer".to_owned()
            );
        }
        record.extensions.push(Extension { version, passes, steps, at_unix_ms });
        Ok(record)
    }

    /// Returns whether `next` is this job, extended once.
    pub fn is_extended_to(&self, next: &Self) -> bool {
        let Some(extension) = next.extensions.last() else { return false };
        let (passes, steps) = (self.spec.passes, self.spec.steps);
        let has_more_passes = passes.is_some() && passes < next.spec.passes;
        let has_more_steps = steps.is_some() && steps < next.spec.steps;
        let is_longer = (has_more_passes && steps == next.spec.steps)
            || (has_more_steps && passes == next.spec.passes);
        let spec = JobSpec { passes, steps, ..next.spec.clone() };
        let mut extensions = self.extensions.clone();
        extensions.push(extension.clone());
        let before = Self { spec, extensions: self.extensions.clone(), ..next.clone() };
        is_longer
            && (extension.passes, extension.steps) == (passes, steps)
            && extensions == next.extensions
            && before == *self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::job_file;

    fn record(length: &str) -> JobRecord {
        let text = format!(
            "name = 'x'\n{length}\n[dataset]\nsource = ['x']\nformat = 'csv'\nfeatures = ['x']\nlabel = 'y'\n\
             [model]\nkind = 'linear'"
        );
        let spec = job_file::parse(&text).unwrap();
        JobRecord::new(spec, "/store".to_owned(), String::new())
    }

    #[test]
    fn a_job_is_extended_by_what_it_counts() {
        let passes = record("passes = 10");
        let longer = passes.extended(More::Passes(5), Version(100), 7).unwrap();
        assert_eq!((longer.spec.passes, longer.extensions.len()), (Some(15), 1));
        assert_eq!(longer.extensions[0].passes, Some(10));
        let steps = record("steps = 10");
        assert_eq!(steps.extended(More::Steps(1), Version(10), 7).unwrap().spec.steps, Some(11));
        assert!(steps.extended(More::Passes(1), Version(10), 7).unwrap_err().contains("--steps"));
        assert!(passes.extended(More::Steps(1), Version(9), 7).unwrap_err().contains("--passes"));
        let error = passes.extended(More::Passes(u32::MAX), Version(9), 7).unwrap_err();
        assert!(error.contains("by fewer"), "{error}");
    }

    #[test]
    fn a_job_file_may_have_the_old_or_the_new_length() {
        let (ten, fifteen) = (record("passes = 10"), record("passes = 15"));
        let longer = ten.extended(More::Passes(5), Version(100), 7).unwrap();
        assert!(longer.is_of(&ten.digest) && longer.is_of(&fifteen.digest));
        let longest = longer.extended(More::Passes(5), Version(150), 8).unwrap();
        assert!([&ten, &fifteen].iter().all(|it| longest.is_of(&it.digest)));
        assert!(!longest.is_of(&record("passes = 12").digest));
        assert!(!longer.is_of(&record("passes = 12").digest));
        assert!(!ten.is_of(&fifteen.digest));
    }

    /// I9: an extension changes nothing else, and is recorded.
    #[test]
    fn only_a_longer_job_with_its_record_is_an_extension() {
        let ten = record("passes = 10");
        let longer = ten.extended(More::Passes(5), Version(100), 7).unwrap();
        assert!(ten.is_extended_to(&longer) && !longer.is_extended_to(&ten));
        let again = longer.extended(More::Passes(5), Version(150), 8).unwrap();
        assert!(longer.is_extended_to(&again) && !ten.is_extended_to(&again));
        let unrecorded = JobRecord { extensions: Vec::new(), ..longer.clone() };
        let elsewhere = JobRecord { store: "/other".to_owned(), ..longer.clone() };
        let mut other = longer.clone();
        other.spec.seed = 3;
        for wrong in [ten.clone(), unrecorded, elsewhere, other] {
            assert!(!ten.is_extended_to(&wrong), "{wrong:?}");
        }
    }
}
