//! The course of a job as its evaluations decide it: when training ends early, and which parameters are the best.

use crate::job::spec::{EvaluationSpec, Goal, Monitor};
use crate::records::position::Position;
use crate::records::{Best, Course, EvaluationRecord};

impl Course {
    /// Returns whether evaluations have ended training.
    pub fn has_ended(&self) -> bool {
        self.end.is_some() || self.end_version.is_some()
    }

    /// Returns whether training has ended at a position.
    pub fn is_over(&self, position: &Position) -> bool {
        let is_last_pass = self.end.is_some_and(|end| end <= position.pass);
        is_last_pass || self.end_version.is_some_and(|end| end <= position.version)
    }
}

impl EvaluationSpec {
    /// Returns whether an evaluation is due at a position of a synchronous job.
    pub fn is_due(&self, position: &Position) -> bool {
        match self.every_steps {
            Some(every) => 0 < position.version.0 && position.version.0.is_multiple_of(every),
            None => {
                let begins = position.version == position.pass_start && 0 < position.pass.0;
                begins && position.pass.0.is_multiple_of(self.every_passes.unwrap_or(1))
            }
        }
    }

    /// Returns the record with what follows from it, given the record of the evaluation before.
    #[must_use]
    pub fn decided(
        &self,
        before: Option<&EvaluationRecord>,
        record: EvaluationRecord,
    ) -> EvaluationRecord {
        if !self.decides() {
            return record;
        }
        let EvaluationRecord { pass, version, loss, metric, mut further_metrics, .. } = record;
        // JSON has no infinity. A number that is not finite must mean the same to those who read it from etcd.
        let finite = |value: f64| if value.is_finite() { value } else { f64::NAN };
        let (loss, metric) = (finite(loss), finite(metric));
        further_metrics.values_mut().for_each(|value| *value = finite(*value));
        let model = record.model.clone();
        let present = Best { pass, version, loss, metric, further_metrics, model };
        let further_metrics = present.further_metrics.clone();
        let record = EvaluationRecord { loss, metric, further_metrics, ..record };
        let value = self.monitored(&present);
        let course = match before.and_then(|before| before.course.as_ref()) {
            None => Course {
                best: present,
                improved: value,
                without_improvement: 0,
                end: None,
                end_version: None,
            },
            Some(course) => self.continued(course, present, value),
        };
        EvaluationRecord { course: Some(course), ..record }
    }

    fn continued(&self, course: &Course, present: Best, value: f64) -> Course {
        let by = |least: f64, than: f64| {
            // Nothing is compared with NaN, so a number that follows one is an improvement.
            than.is_nan() && !value.is_nan() || least < self.gain(than, value)
        };
        let has_improved = by(self.min_delta.unwrap_or(0.0), course.improved);
        let without_improvement = if has_improved { 0 } else { course.without_improvement + 1 };
        let is_over = self.patience.is_some_and(|most| most <= without_improvement);
        Course {
            improved: if has_improved { value } else { course.improved },
            without_improvement,
            end: (is_over && self.every_steps.is_none()).then_some(present.pass),
            end_version: (is_over && self.every_steps.is_some()).then_some(present.version),
            // Of several without a number the latest is the best.
            best: match self.monitored(&course.best) {
                than if than.is_nan() || by(0.0, than) => present,
                _ => course.best.clone(),
            },
        }
    }

    /// Returns by how much a number is better than another one.
    fn gain(&self, from: f64, to: f64) -> f64 {
        match (&self.monitor, self.goal) {
            (Monitor::Metric | Monitor::Named(_), Some(Goal::Max)) => to - from,
            (Monitor::Metric | Monitor::Named(_), Some(Goal::Min) | None) | (Monitor::Loss, _) => {
                from - to
            }
        }
    }

    fn monitored(&self, of: &Best) -> f64 {
        match &self.monitor {
            Monitor::Loss => of.loss,
            Monitor::Metric => of.metric,
            // A name that is none of the further metrics is that of the first one: others are refused at the start.
            Monitor::Named(name) => of.further_metrics.get(name).copied().unwrap_or(of.metric),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::ids::{Pass, Version};

    fn record(pass: u32, loss: f64, metric: f64) -> EvaluationRecord {
        EvaluationRecord {
            pass: Pass(pass),
            version: Version(10 * u64::from(pass)),
            records: 1,
            loss,
            metric,
            metric_name: "accuracy".to_owned(),
            further_metrics: BTreeMap::from([("top5".to_owned(), 1.0 - metric)]),
            course: None,
            model: None,
        }
    }

    /// Returns the courses after evaluations with these losses and metrics, one after each pass.
    fn courses(spec: &str, values: &[(f64, f64)]) -> Vec<Course> {
        let spec: EvaluationSpec = toml::from_str(spec).unwrap();
        let mut latest: Option<EvaluationRecord> = None;
        let course = |(pass, (loss, metric)): (u32, &(f64, f64))| {
            latest = Some(spec.decided(latest.as_ref(), record(pass, *loss, *metric)));
            latest.clone().and_then(|it| it.course)
        };
        (1..).zip(values).filter_map(course).collect()
    }

    fn ends(courses: &[Course]) -> Vec<Option<u32>> {
        courses.iter().map(|it| it.end.map(|end| end.0)).collect()
    }

    #[test]
    fn training_ends_after_as_many_evaluations_without_improvement() {
        let losses = [5.0, 4.0, 4.5, 3.9, 3.9, 4.1].map(|loss| (loss, 0.0));
        let found = courses("patience = 2", &losses);
        assert_eq!(ends(&found), [None, None, None, None, None, Some(6)]);
        assert_eq!(found[5].best.pass, Pass(4));
        assert_eq!(ends(&courses("patience = 1", &losses))[2], Some(3));
    }

    #[test]
    fn a_change_below_the_least_is_no_improvement_and_yet_may_be_the_best() {
        let losses = [1.0, 0.95, 0.91, 0.85].map(|loss| (loss, 0.0));
        let found = courses("patience = 9\nmin_delta = 0.1", &losses);
        let without: Vec<u32> = found.iter().map(|it| it.without_improvement).collect();
        assert_eq!(without, [0, 1, 2, 0]);
        assert_eq!(found[2].best.pass, Pass(3));
    }

    #[test]
    fn a_metric_improves_in_the_direction_of_its_goal() {
        let metrics = [0.5, 0.7, 0.6].map(|metric| (0.0, metric));
        let best = |goal: &str| {
            let spec = format!("keep = 'best'\nmonitor = 'metric'\ngoal = '{goal}'");
            courses(&spec, &metrics).last().map(|it| it.best.pass)
        };
        assert_eq!([best("max"), best("min")], [Some(Pass(2)), Some(Pass(1))]);
    }

    #[test]
    fn a_metric_is_monitored_by_its_name() {
        let metrics = [0.5, 0.7, 0.6].map(|metric| (0.0, metric));
        let best = |name: &str| {
            let spec = format!("keep = 'best'\nmonitor = '{name}'\ngoal = 'max'");
            courses(&spec, &metrics).last().map(|it| it.best.pass)
        };
        assert_eq!([best("accuracy"), best("top5")], [Some(Pass(2)), Some(Pass(1))]);
    }

    #[test]
    fn a_number_is_better_than_none_and_none_never_better() {
        let losses = [f64::NAN, 3.0, f64::NAN, 2.0].map(|loss| (loss, 0.0));
        let found = courses("patience = 3", &losses);
        let best: Vec<u32> = found.iter().map(|it| it.best.pass.0).collect();
        assert_eq!(best, [1, 2, 2, 4]);
    }

    /// A master that reads the record from etcd decides as the one that wrote it.
    #[test]
    fn a_number_that_is_not_finite_means_the_same_after_a_failover() {
        let infinite = f64::INFINITY;
        let losses = [infinite, infinite, 3.0, infinite, 2.0, 4.0].map(|loss| (loss, -loss));
        for spec in
            ["patience = 2\nkeep = 'best'", "patience = 2\nmonitor = 'metric'\ngoal = 'max'"]
        {
            let rules: EvaluationSpec = toml::from_str(spec).unwrap();
            let (mut kept, mut read) = (None, None);
            for (pass, (loss, metric)) in (1..).zip(losses) {
                let evaluation = record(pass, loss, metric);
                let next = rules.decided(kept.as_ref(), evaluation.clone());
                let other = rules.decided(read.as_ref(), evaluation);
                assert_eq!(format!("{next:?}"), format!("{other:?}"), "{spec}");
                let text = serde_json::to_string(&other).unwrap();
                read = Some(serde_json::from_str(&text).unwrap());
                kept = Some(next);
            }
        }
        let found = courses("patience = 9", &[(f64::NAN, 0.0), (f64::NAN, 0.0)]);
        assert_eq!(found[1].best.pass, Pass(2));
    }

    #[test]
    fn a_change_of_exactly_the_least_is_no_improvement() {
        let found = courses("patience = 9\nmin_delta = 0.25", &[(1.0, 0.0), (0.75, 0.0)]);
        assert_eq!(found[1].without_improvement, 1);
    }

    #[test]
    fn evaluations_between_passes_are_due_by_steps_and_end_training_after_one() {
        let spec: EvaluationSpec = toml::from_str("every_steps = 4\npatience = 1").unwrap();
        let at = |version, pass, pass_start| Position {
            version: Version(version),
            pass: Pass(pass),
            pass_start: Version(pass_start),
            ..Position::default()
        };
        let positions = [at(0, 0, 0), at(3, 0, 0), at(4, 0, 0), at(6, 1, 6), at(8, 1, 6)];
        assert_eq!(positions.map(|it| spec.is_due(&it)), [false, false, true, false, true]);

        let found = courses("every_steps = 4\npatience = 1", &[(0.5, 0.0), (0.6, 0.0)]);
        assert!(!found[0].has_ended());
        assert_eq!((found[1].end, found[1].end_version), (None, Some(Version(20))));
        let is_over = [at(19, 5, 15), at(20, 5, 15), at(21, 5, 15)].map(|it| found[1].is_over(&it));
        assert_eq!(is_over, [false, true, true]);
    }

    #[test]
    fn without_patience_nothing_follows_from_evaluations() {
        assert_eq!(courses("", &[(1.0, 1.0)]), []);
    }
}
