//! Settings of a job that change while it goes on.

use serde::{Deserialize, Serialize};

use crate::ids::Version;
use crate::job::spec::{CheckpointSpec, EvaluationSpec, JobSpec, LearningRateSpec};
use crate::records::JobRecord;

/// The settings that may change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    pub learning_rate: LearningRateSpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_value: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f32>,
    /// Its records are those that the job holds out, which do not change.
    pub evaluation: EvaluationSpec,
    pub checkpoint: CheckpointSpec,
}

/// A change of a job's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// The step of the checkpoint from which the job goes on with other settings.
    pub version: Version,
    /// The settings before.
    pub before: Settings,
    /// When the job was changed, by the clock of the command or, while the job ran, of the master.
    pub at_unix_ms: u64,
    /// Whether the job ran. Then job files with the settings before stay valid, since its processes were started with
    /// them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub while_running: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !*value
}

impl Settings {
    /// Returns whether other settings mean the same learning rate.
    fn has_rate_of(&self, other: &Self) -> bool {
        let of = |it: &Self| (it.learning_rate.clone(), it.evaluation.reduce_on_plateau);
        of(self) == of(other)
    }
}

impl JobSpec {
    pub fn settings(&self) -> Settings {
        Settings {
            learning_rate: self.learning_rate.clone(),
            clip_value: self.optimizer.clip_value,
            clip_norm: self.optimizer.clip_norm,
            evaluation: self.evaluation.clone(),
            checkpoint: self.checkpoint.clone(),
        }
    }

    /// Returns the spec with other settings.
    #[must_use]
    pub fn with_settings(&self, settings: &Settings) -> Self {
        let mut spec = self.clone();
        spec.learning_rate = settings.learning_rate.clone();
        (spec.optimizer.clip_value, spec.optimizer.clip_norm) =
            (settings.clip_value, settings.clip_norm);
        spec.evaluation = EvaluationSpec {
            fraction: self.evaluation.fraction,
            source: self.evaluation.source.clone(),
            ..settings.evaluation.clone()
        };
        spec.checkpoint = settings.checkpoint.clone();
        spec
    }
}

/// Returns the settings that held at a step, if changes have replaced them since.
///
/// A job may be changed again at an earlier step, after it has gone back to an older checkpoint: the later change
/// replaces the settings from its step on, whatever changes were to come.
pub fn settings_before(changes: &[Change], version: Version) -> Option<&Settings> {
    let mut before = None;
    for change in changes.iter().rev() {
        if change.version <= version {
            break;
        }
        before = Some(&change.before);
    }
    before
}

impl JobRecord {
    /// Returns the settings with which the step that begins at `version` is trained.
    pub fn settings_at(&self, version: Version) -> Settings {
        let before = settings_before(&self.changes, version);
        before.cloned().unwrap_or_else(|| self.spec.settings())
    }

    /// Returns the rules of the evaluation of parameters: those of the step that led to them.
    pub fn evaluation_of(&self, version: Version) -> EvaluationSpec {
        self.settings_at(Version(version.0.saturating_sub(1))).evaluation
    }

    /// Returns whether the course of the job depends on evaluations, at any step.
    pub fn has_decisive_evaluations(&self) -> bool {
        let before = self.changes.iter().map(|it| &it.before.evaluation);
        before.chain([&self.spec.evaluation]).any(EvaluationSpec::decides)
    }

    /// Returns whether evaluations may reduce the learning rate, at any step.
    pub fn may_reduce_rate(&self) -> bool {
        let before = self.changes.iter().map(|it| &it.before.evaluation);
        before.chain([&self.spec.evaluation]).any(|it| it.reduce_on_plateau.is_some())
    }

    /// Returns how often evaluations have reduced the learning rate of the step that begins at `version`. `reductions` are
    /// the versions from which on it is reduced once more; those before it was changed do not count.
    pub fn reductions_at(&self, reductions: &[Version], version: Version) -> u32 {
        if reductions.is_empty() {
            return 0;
        }
        let since = self.rate_changed(version);
        let counts = |it: &&Version| since.is_none_or(|since| since < **it) && **it <= version;
        reductions.iter().filter(counts).count() as u32
    }

    /// Returns from which version on the learning rate is another one, if it was changed before the step at `version`.
    fn rate_changed(&self, version: Version) -> Option<Version> {
        let (mut from, mut after) = (Version(u64::MAX), self.spec.settings());
        for change in self.changes.iter().rev() {
            // A later change at an earlier step replaced this one there.
            from = from.min(change.version);
            if from <= version && !change.before.has_rate_of(&after) {
                return Some(from);
            }
            after = change.before.clone();
        }
        None
    }

    /// Returns the record of the job that goes on with the settings of `spec` from the checkpoint of step `version`.
    ///
    /// # Errors
    /// A message, if nothing that may change differs, or anything else does.
    pub fn changed(
        &self,
        spec: &JobSpec,
        version: Version,
        at_unix_ms: u64,
    ) -> Result<Self, String> {
        let mut lengths = self.extensions.iter().map(|it| (it.passes, it.steps));
        let length = (self.spec.passes, self.spec.steps);
        if (spec.passes, spec.steps) != length && !lengths.any(|it| it == (spec.passes, spec.steps))
        {
            return Err(
                "its length is another one; `steadfast extend` trains it further".to_owned()
            );
        }
        let wanted = JobSpec { passes: length.0, steps: length.1, ..spec.clone() };
        let changed = self.spec.with_settings(&wanted.settings());
        if changed != wanted {
            return Err(format!(
                "it would be another job: {}; only the learning rate, `optimizer.clip_value` and `clip_norm`, \
                 the checkpoints, and of the evaluation all but its records may change. A new job with `[start]` \
                 begins from the model of this one",
                wanted.difference(&changed)
            ));
        }
        if changed == self.spec {
            return Err("the job file has the settings that it has".to_owned());
        }
        let mut record = Self { spec: changed, ..self.clone() };
        let before = self.spec.settings();
        record.changes.push(Change { version, before, at_unix_ms, while_running: false });
        Ok(record)
    }

    /// Notes that the job ran when it was changed last.
    #[must_use]
    pub fn changed_while_running(mut self) -> Self {
        if let Some(change) = self.changes.last_mut() {
            change.while_running = true;
        }
        self
    }

    /// Returns the specs of the job file that are valid: with the settings of now, or of those changes back that were made
    /// while the job ran.
    pub(super) fn valid_settings(&self) -> impl Iterator<Item = JobSpec> {
        let running = self.changes.iter().rev().take_while(|it| it.while_running);
        let before = running.map(|it| self.spec.with_settings(&it.before));
        [self.spec.clone()].into_iter().chain(before)
    }

    /// Returns whether `next` is this job, changed once.
    pub fn is_changed_to(&self, next: &Self) -> bool {
        let Some(change) = next.changes.last() else { return false };
        let changed = self.changed(&next.spec, change.version, change.at_unix_ms);
        changed.is_ok_and(|it| it == *next || it.changed_while_running() == *next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::job_file;
    use crate::records::extension::More;

    fn spec(rate: &str, more: &str) -> JobSpec {
        let text = format!(
            "name = 'x'\npasses = 9\n[dataset]\nsource = ['x']\nformat = 'csv'\nfeatures = ['x']\nlabel = 'y'\n\
             [model]\nkind = 'linear'\n[learning_rate]\nbase = {rate}\n[evaluation]\nfraction = 0.5\n{more}"
        );
        job_file::parse(&text).unwrap()
    }

    fn record() -> JobRecord {
        JobRecord::new(spec("0.5", ""), "/store".to_owned(), String::new())
    }

    fn base_at(record: &JobRecord, version: u64) -> f32 {
        record.settings_at(Version(version)).learning_rate.base
    }

    /// I10: a job that goes back to a checkpoint before a change trains again with the settings of that time.
    #[test]
    fn each_step_has_the_settings_that_held_for_it() {
        let once = record().changed(&spec("0.25", ""), Version(100), 7).unwrap();
        let twice = once.changed(&spec("0.125", ""), Version(200), 8).unwrap();
        let steps = [0, 99, 100, 199, 200, 900];
        assert_eq!(steps.map(|at| base_at(&twice, at)), [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]);
        assert_eq!(base_at(&once, 900), 0.25);
        // It went back before the last change, and was changed again.
        let back = twice.changed(&spec("1.0", ""), Version(150), 9).unwrap();
        assert_eq!(steps.map(|at| base_at(&back, at)), [0.5, 0.5, 0.25, 1.0, 1.0, 1.0]);
        let far = twice.changed(&spec("1.0", ""), Version(50), 9).unwrap();
        assert_eq!(steps.map(|at| base_at(&far, at)), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn parameters_are_evaluated_by_the_rules_of_the_step_before() {
        let next = record().changed(&spec("0.5", "patience = 3"), Version(100), 7).unwrap();
        assert!(!next.evaluation_of(Version(100)).decides());
        assert!(next.evaluation_of(Version(101)).decides());
        assert!(next.has_decisive_evaluations() && !record().has_decisive_evaluations());
        let back = next.changed(&spec("0.5", ""), Version(300), 8).unwrap();
        assert!(back.has_decisive_evaluations() && !back.spec.evaluation.decides());
    }

    #[test]
    fn a_changed_learning_rate_is_not_reduced_by_evaluations_before() {
        let reductions = [50, 100, 150, 250].map(Version);
        let count = |record: &JobRecord, at| record.reductions_at(&reductions, Version(at));
        let once = record().changed(&spec("0.25", ""), Version(100), 7).unwrap();
        assert_eq!(
            [49, 50, 99, 100, 149, 150, 300].map(|at| count(&once, at)),
            [0, 1, 1, 0, 0, 1, 2]
        );
        // Other settings do not begin a learning rate anew.
        let kept = once.changed(&spec("0.25", "patience = 3"), Version(200), 8).unwrap();
        assert_eq!([99, 199, 200, 300].map(|at| count(&kept, at)), [1, 1, 1, 2]);
        let far = kept.changed(&spec("0.25", ""), Version(40), 8).unwrap();
        assert_eq!([39, 60, 300].map(|at| count(&far, at)), [0, 1, 4]);
        assert_eq!(count(&record(), 300), 4);
    }

    #[test]
    fn what_makes_another_job_is_refused_with_the_way() {
        let refused = |change: &dyn Fn(&mut JobSpec)| {
            let mut spec = spec("0.25", "");
            change(&mut spec);
            record().changed(&spec, Version(100), 7).unwrap_err()
        };
        type Case<'a> = (&'a str, &'a dyn Fn(&mut JobSpec));
        let cases: [Case<'_>; 6] = [
            ("`seed` differs", &|it| it.seed = 3),
            ("`model` differs", &|it| it.model.hidden = vec![3]),
            ("`sync` differs", &|it| it.sync.lanes = 3),
            ("`optimizer` differs", &|it| it.optimizer.weight_decay = 0.5),
            ("`evaluation` differs", &|it| it.evaluation.fraction = 0.25),
            ("steadfast extend", &|it| it.passes = Some(10)),
        ];
        for (expected, change) in cases {
            let error = refused(change);
            assert!(error.contains(expected), "{error}");
        }
        let same = record().changed(&spec("0.5", ""), Version(100), 7).unwrap_err();
        assert!(same.contains("the settings that it has"), "{same}");
    }

    /// I9: a change changes nothing else, and is recorded.
    #[test]
    fn only_other_settings_with_their_record_are_a_change() {
        let changed = record().changed(&spec("0.25", "patience = 3"), Version(100), 7).unwrap();
        assert!(record().is_changed_to(&changed) && !changed.is_changed_to(&record()));
        assert!(!record().is_extended_to(&changed));
        let longer = changed.extended(More::Passes(5), Version(200), 8).unwrap();
        assert!(changed.is_extended_to(&longer) && !changed.is_changed_to(&longer));
        // The file of the job may have the length before or after.
        let again = longer.changed(&spec("0.5", ""), Version(300), 9).unwrap();
        assert!(longer.is_changed_to(&again));
        assert_eq!(again.spec.passes, Some(14));
        assert!(again.is_of(&spec("0.5", "").digest()) && !again.is_of(&spec("0.25", "").digest()));
        let unrecorded = JobRecord { changes: Vec::new(), ..changed.clone() };
        let elsewhere = JobRecord { store: "/other".to_owned(), ..changed.clone() };
        let mut other = changed.clone();
        other.changes[0].before.learning_rate.base = 3.0;
        for wrong in [record(), unrecorded, elsewhere, other] {
            assert!(!record().is_changed_to(&wrong), "{wrong:?}");
        }
    }

    /// The processes of a job that ran were started with the settings before, and others take their place.
    #[test]
    fn job_files_from_before_a_change_stay_valid_if_the_job_ran() {
        let [first, second, third] = ["0.5", "0.25", "0.125"].map(|rate| spec(rate, ""));
        let valid =
            |record: &JobRecord| [&first, &second, &third].map(|spec| record.is_of(&spec.digest()));
        let running = record().changed(&second, Version(100), 7).unwrap().changed_while_running();
        assert!(record().is_changed_to(&running));
        assert_eq!(valid(&running), [true, true, false]);
        let again = running.changed(&third, Version(200), 8).unwrap().changed_while_running();
        assert_eq!(valid(&again), [true; 3]);
        let longer = again.extended(More::Passes(5), Version(250), 9).unwrap();
        assert_eq!(valid(&longer), [true; 3]);
        let stopped = running.changed(&third, Version(200), 8).unwrap();
        assert_eq!(valid(&stopped), [false, false, true]);
    }

    /// Records of jobs that were never changed stay as they are.
    #[test]
    fn a_change_survives_etcd_and_none_takes_no_space() {
        assert!(!serde_json::to_string(&record()).unwrap().contains("changes"));
        let changed = record().changed(&spec("0.25", "patience = 3"), Version(100), 7).unwrap();
        let text = serde_json::to_string(&changed).unwrap();
        assert_eq!(serde_json::from_str::<JobRecord>(&text).unwrap(), changed);
    }
}
