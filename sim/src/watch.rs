//! The checks after every turn.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_audit::history::{Checker, HistoryReport};
use steadfast_common::records::ResultRecord;
use steadfast_common::records::keys::Keys;

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
            let result = revision.changes.iter().find(|it| it.key == self.keys.result());
            if let Some(text) = result.and_then(|it| it.value.as_ref()) {
                self.result = serde_json::from_str(text).ok();
                self.ended = scene.world.now();
            }
        }
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
}
