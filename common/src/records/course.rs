//! The course of a job as its evaluations decide it: when training ends early, which parameters are the best, and how far
//! the learning rate is reduced.

use std::collections::BTreeMap;

use crate::ids::Version;
use crate::job::spec::{DeltaMode, EvaluationSpec, Goal, Monitor, PlateauSpec};
use crate::records::position::Position;
use crate::records::{Best, Course, EvaluationRecord, Plateau};

/// The most reductions of a learning rate; further evaluations do not reduce it.
pub const REDUCTIONS_MAX: usize = 1000;

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
        let before = before.and_then(|before| before.course.as_ref());
        if !self.decides() {
            // Steps before may be repeated with the rates that they had.
            let has_reductions = |it: &&Course| it.plateau.is_some();
            let course = before.filter(has_reductions).map(|it| Course {
                end: None,
                end_version: None,
                ..it.clone()
            });
            return EvaluationRecord { course, ..record };
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
        let reduced = before.and_then(|it| it.plateau.as_ref());
        let plateau = match &self.reduce_on_plateau {
            Some(rules) => Some(self.plateau(rules, reduced, version, value)),
            None => reduced.cloned(),
        };
        let course = match before {
            None => Course {
                best: present,
                improved: value,
                without_improvement: 0,
                end: None,
                end_version: None,
                plateau: None,
            },
            Some(course) => self.continued(course, present, value),
        };
        EvaluationRecord { course: Some(Course { plateau, ..course }), ..record }
    }

    /// Returns what is left of the latest evaluation when a user abandons what was trained after `position`, or changes
    /// the settings from there on: the reductions of the learning rate before, as an evaluation without records. `None`
    /// if there are none. Nothing else is kept, because what is known of the evaluations up to `position` depends on
    /// whether there are later ones.
    #[must_use]
    pub fn forgotten(latest: &EvaluationRecord, position: &Position) -> Option<EvaluationRecord> {
        let mut reductions = latest.course.as_ref()?.plateau.as_ref()?.reductions.clone();
        reductions.retain(|it| *it <= position.version);
        if reductions.is_empty() {
            return None;
        }
        let (pass, version, none) = (position.pass, position.version, f64::NAN);
        let further_metrics = BTreeMap::new();
        let best = Best { pass, version, loss: none, metric: none, further_metrics, model: None };
        let plateau = Plateau { improved: none, without_improvement: 0, cooldown: 0, reductions };
        let course = Course {
            best,
            without_improvement: 0,
            improved: none,
            end: None,
            end_version: None,
            plateau: Some(plateau),
        };
        Some(EvaluationRecord {
            pass,
            version,
            records: 0,
            loss: none,
            metric: none,
            metric_name: latest.metric_name.clone(),
            further_metrics: BTreeMap::new(),
            course: Some(course),
            model: None,
        })
    }

    /// Returns whether a number is better than another one by more than a change.
    fn is_better(&self, value: f64, than: f64, by: f64) -> bool {
        // Nothing is compared with NaN, so a number that follows one is an improvement.
        than.is_nan() && !value.is_nan() || by < self.gain(than, value)
    }

    /// Returns the state of the plateau after an evaluation of `version` with this number.
    fn plateau(
        &self,
        rules: &PlateauSpec,
        before: Option<&Plateau>,
        version: Version,
        value: f64,
    ) -> Plateau {
        let first = Plateau {
            improved: value,
            without_improvement: 0,
            cooldown: 0,
            reductions: Vec::new(),
        };
        let Some(before) = before else { return first };
        let mut plateau = before.clone();
        let least = rules.min_delta.unwrap_or(0.0);
        let least = match rules.min_delta_mode {
            DeltaMode::Absolute => least,
            DeltaMode::Relative => least * before.improved.abs(),
        };
        plateau.without_improvement = plateau.without_improvement.saturating_add(1);
        if self.is_better(value, before.improved, least) {
            (plateau.improved, plateau.without_improvement) = (value, 0);
        }
        if 0 < plateau.cooldown {
            (plateau.cooldown, plateau.without_improvement) = (plateau.cooldown - 1, 0);
        }
        let is_due = rules.patience <= plateau.without_improvement;
        if is_due && plateau.reductions.len() < REDUCTIONS_MAX {
            plateau.reductions.push(version);
            (plateau.cooldown, plateau.without_improvement) = (rules.cooldown, 0);
        }
        plateau
    }

    fn continued(&self, course: &Course, present: Best, value: f64) -> Course {
        let by = |least: f64, than: f64| self.is_better(value, than, least);
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
            plateau: None,
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
    use crate::ids::Pass;
    use crate::job::learning_rate::reduced;

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

    /// Returns the learning rates after evaluations with these losses, from a rate of 1.
    fn rates(plateau: &str, losses: &[f64]) -> Vec<f32> {
        let values: Vec<(f64, f64)> = losses.iter().map(|loss| (*loss, *loss)).collect();
        let text = format!("reduce_on_plateau = {{ {plateau} }}");
        let rules: EvaluationSpec = toml::from_str(&text).unwrap();
        let found = courses(&text, &values);
        let plateaus = found.iter().filter_map(|it| it.plateau.as_ref());
        let counts = plateaus.map(|it| it.reductions.len() as u32);
        counts.map(|count| reduced(1.0, rules.reduce_on_plateau.as_ref(), count)).collect()
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

    /// The expected rates are those of `torch.optim.lr_scheduler.ReduceLROnPlateau` with a patience that is lower by 1,
    /// which reduces after one evaluation more than its patience.
    #[test]
    fn a_plateau_reduces_the_learning_rate_as_pytorch_does() {
        let none = f64::NAN;
        let losses = [
            5.0, 4.0, 4.5, 4.2, 4.1, 3.99, 3.98, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0, none, 3.1, 3.2,
            2.995,
        ];
        // The evaluations that reduce the rate, and by which factor.
        for (plateau, factor, reducing, least) in [
            ("factor = 0.5, patience = 2", 0.5, &[4, 9, 11, 13, 16][..], 0.0),
            ("factor = 0.5, patience = 2, min_delta = 0.1", 0.5, &[4, 6, 8, 10, 12, 16, 18], 0.0),
            (
                "factor = 0.5, patience = 1, min_delta = 0.1, min_delta_mode = 'relative', \
                 cooldown = 2, min_rate = 0.1",
                0.5,
                &[3, 6, 9, 12],
                0.1,
            ),
            ("factor = 0.125, patience = 3, cooldown = 1, min_rate = 0.05", 0.125, &[5, 10], 0.05),
        ] {
            let mut rate = 1.0_f32;
            let expected = (1..=losses.len()).map(|evaluation| {
                if reducing.contains(&evaluation) {
                    rate = (rate * factor).max(least);
                }
                rate
            });
            let expected: Vec<f32> = expected.collect();
            assert_eq!(rates(plateau, &losses), expected, "{plateau}");
        }
    }

    #[test]
    fn a_reduction_holds_from_the_version_of_its_evaluation_on() {
        let plateau = "patience = 2\nmonitor = 'metric'\ngoal = 'max'\n\
                       reduce_on_plateau = { patience = 1 }";
        let found = courses(plateau, &[0.5, 0.6, 0.6, 0.7].map(|metric| (0.0, metric)));
        let latest = found.last().unwrap().plateau.as_ref().unwrap();
        assert_eq!(latest.reductions, [Version(30)]);
        let text = serde_json::to_string(&found[1]).unwrap();
        assert!(!text.contains("reductions") && !text.contains("cooldown"), "{text}");
    }

    #[test]
    fn a_schedule_below_the_least_rate_is_not_raised() {
        let plateau = PlateauSpec { min_rate: Some(0.1), ..toml::from_str("").unwrap() };
        assert_eq!(reduced(0.5, Some(&plateau), 0), 0.5);
        assert_eq!(reduced(0.5, Some(&plateau), 1), 0.1);
        assert_eq!(reduced(0.01, Some(&plateau), 3), 0.01);
        assert_eq!(reduced(0.5, None, 3), 0.5);
    }

    /// The parameters of the checkpoint were trained with the reductions before it.
    #[test]
    fn a_rollback_that_is_requested_forgets_all_but_reductions_before_it() {
        let rules: EvaluationSpec = toml::from_str("reduce_on_plateau = { patience = 1 }").unwrap();
        let mut latest = None;
        for pass in 1..=5 {
            latest = Some(rules.decided(latest.as_ref(), record(pass, 1.0, 0.0)));
        }
        let latest = latest.unwrap();
        let position =
            |version| Position { version: Version(version), pass: Pass(3), ..Position::default() };
        let left = EvaluationSpec::forgotten(&latest, &position(35)).unwrap();
        assert_eq!((left.pass, left.version), (Pass(3), Version(35)));
        let reductions = |it: &EvaluationRecord| {
            it.course.as_ref().and_then(|it| it.plateau.clone()).unwrap().reductions
        };
        assert_eq!(reductions(&left), [Version(20), Version(30)]);
        assert_eq!(EvaluationSpec::forgotten(&latest, &position(15)), None);
        // What comes next is compared with nothing before.
        let next = rules.decided(Some(&left), record(4, 9.0, 0.0));
        let course = next.course.clone().unwrap();
        assert_eq!((course.best.pass, reductions(&next).len()), (Pass(4), 2));
    }

    /// Rules without a plateau keep the reductions, since steps before may be repeated.
    #[test]
    fn reductions_outlive_the_rules_that_made_them() {
        let of = |rules: &str| toml::from_str::<EvaluationSpec>(rules).unwrap();
        let plateau = of("reduce_on_plateau = { factor = 0.5, patience = 1 }");
        let first = plateau.decided(None, record(1, 1.0, 0.0));
        let second = plateau.decided(Some(&first), record(2, 2.0, 0.0));
        let reductions = |it: &EvaluationRecord| {
            it.course.as_ref().and_then(|it| it.plateau.clone()).map(|it| it.reductions)
        };
        assert_eq!(reductions(&second), Some(vec![Version(20)]));
        for rules in ["", "patience = 5"] {
            let next = of(rules).decided(Some(&second), record(3, 3.0, 0.0));
            assert_eq!(reductions(&next), Some(vec![Version(20)]), "{rules}");
            assert_eq!(next.course.and_then(|it| it.end), None);
        }
        assert_eq!(of("").decided(Some(&record(1, 1.0, 0.0)), record(2, 1.0, 0.0)).course, None);
    }

    #[test]
    fn without_patience_nothing_follows_from_evaluations() {
        assert_eq!(courses("", &[(1.0, 1.0)]), []);
    }
}
