//! The checks after every turn.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_audit::history::{Checker, HistoryReport};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::RoundRecord;
use steadfast_common::records::{JobOutcome, ResultRecord};

use crate::audit::Auditor;
use crate::checks::Observed;
use crate::fault::Scene;
use crate::generation_check::GenerationCheck;
use crate::pointer::Pointer;

/// Checks the changes of the last turn.
pub struct Watch<'a> {
    keys: &'a Keys,
    checker: Checker<'a>,
    pub auditor: Auditor<'a>,
    pointer: Pointer,
    generation_check: GenerationCheck,
    /// Number of deletions in the store that were checked.
    deleted: u64,
    observed: Arc<Mutex<Observed>>,
    /// The last round of an elastic job.
    round: Option<RoundRecord>,
    /// The result of the job, once it has ended.
    pub result: Option<ResultRecord>,
    /// The simulated time of the result.
    pub ended: Duration,
}

impl<'a> Watch<'a> {
    /// Starts with an empty etcd. The observer of replies fills `observed`.
    pub fn new(
        keys: &'a Keys,
        checker: Checker<'a>,
        auditor: Auditor<'a>,
        observed: Arc<Mutex<Observed>>,
    ) -> Self {
        Self {
            keys,
            checker,
            auditor,
            pointer: Pointer::default(),
            generation_check: GenerationCheck::default(),
            deleted: 0,
            observed,
            round: None,
            result: None,
            ended: Duration::ZERO,
        }
    }

    /// Returns the report on the etcd history so far.
    pub fn report(&self) -> &HistoryReport {
        &self.checker.report
    }

    /// Returns the violated invariants.
    pub fn check(&mut self, scene: &Scene) -> Vec<String> {
        let mut broken = Vec::new();
        for revision in scene.etcd.news() {
            self.checker.check(&revision);
            self.auditor.follow(&revision);
            self.pointer.follow(self.keys, &revision);
            broken.extend(self.generation_check.follow(self.keys, &revision));
            let value = |key: String| {
                let mut of_key = revision.changes.iter().filter(|it| it.key == key);
                of_key.find_map(|it| it.value.as_deref())
            };
            if let Some(text) = value(self.keys.formed_round()) {
                self.round = serde_json::from_str(text).ok();
            }
            if let Some(text) = value(self.keys.result()) {
                self.result = serde_json::from_str(text).ok();
                self.ended = scene.world.now();
                broken.extend(self.unfounded_end());
            }
        }
        broken.extend(self.unknown_success());
        broken.extend(self.checker.report.broken.iter().map(ToString::to_string));
        broken.append(&mut self.observed.lock().expect("one thread").broken);
        broken.extend(scene.cluster.strange());
        let has_moved = self.pointer.has_moved();
        if has_moved {
            broken.extend(self.pointer.has_diverged(&scene.store));
        }
        if has_moved || self.deleted < scene.store.deleted() {
            self.deleted = scene.store.deleted();
            broken.extend(self.pointer.is_dangling(&scene.store));
        }
        broken.extend(self.auditor.check());
        broken
    }

    fn has_succeeded(&self) -> bool {
        self.result.as_ref().is_some_and(|result| result.state == JobOutcome::Finished)
    }

    /// Returns the rule that the success of an elastic job violates.
    fn unfounded_end(&self) -> Option<String> {
        let last = self.round.as_ref().filter(|_| self.has_succeeded())?;
        self.observed.lock().expect("one thread").workers.unfounded_end(last)
    }

    /// Returns that an agent has taken the job for a success, unless it is one.
    fn unknown_success(&self) -> Option<String> {
        let is_known = self.observed.lock().expect("one thread").workers.has_agent_succeeded;
        let result = &self.result;
        (is_known && !self.has_succeeded())
            .then(|| format!("an agent has ended as if the job had succeeded: {result:?}"))
    }
}
