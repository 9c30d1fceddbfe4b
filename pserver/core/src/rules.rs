//! The settings of a job that determine its updates.

use std::collections::BTreeMap;
use std::sync::Arc;

use steadfast_common::ids::Version;
use steadfast_common::job::average::AverageSpec;
use steadfast_common::job::spec::{
    GroupSpec, JobSpec, LearningRateSpec, Mode, OptimizerSpec, PlateauSpec, TableSpec,
};
use steadfast_common::records::change::{Change, settings_before};
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::{Block, Layout, ParamSpec};
use steadfast_pserver_storage::{MemoryStores, RowStores};

use crate::optimizer::Optimizer;

/// The settings of a job that determine its updates.
#[derive(Clone, Debug)]
pub struct Rules {
    pub mode: Mode,
    pub lanes: u32,
    pub optimizer: OptimizerSpec,
    pub learning_rate: LearningRateSpec,
    /// The average of the parameters, which a model with tables does not have.
    pub average: Option<AverageSpec>,
    /// Updates that the state of the optimizer reflects before the first one of the job.
    pub updates_before: u64,
    /// How evaluations reduce the learning rate.
    pub plateau: Option<PlateauSpec>,
    /// Changes of the settings; those above hold after the last one.
    pub changes: Vec<Change>,
    /// Encoding of gradients, and the arithmetic that adds them.
    pub codec: Codec,
    /// Seed of the initial values of rows.
    pub seed: u64,
    /// Settings of embedding tables, by name.
    pub tables: BTreeMap<String, TableSpec>,
    /// Where rows are kept.
    pub stores: Arc<dyn RowStores>,
}

impl Default for Rules {
    /// Returns the rules of a synchronous job of one lane that sets nothing.
    fn default() -> Self {
        Self {
            mode: Mode::Sync,
            lanes: 1,
            optimizer: OptimizerSpec::default(),
            learning_rate: LearningRateSpec::default(),
            average: None,
            updates_before: 0,
            plateau: None,
            changes: Vec::new(),
            codec: Codec::Plain,
            seed: 0,
            tables: BTreeMap::new(),
            stores: Arc::new(MemoryStores),
        }
    }
}

impl Rules {
    /// Returns the rules of a job; rows are kept in memory.
    pub fn new(spec: &JobSpec) -> Self {
        Self {
            mode: spec.mode,
            lanes: spec.sync.lanes,
            optimizer: spec.optimizer.clone(),
            learning_rate: spec.learning_rate.clone(),
            average: spec.average,
            updates_before: 0,
            plateau: spec.evaluation.reduce_on_plateau,
            changes: Vec::new(),
            codec: spec.gradients.codec(),
            seed: spec.seed,
            tables: spec.tables.clone(),
            stores: Arc::new(MemoryStores),
        }
    }

    /// Returns the learning rate of the step that begins at `version`, and how evaluations reduce it.
    pub fn learning_rate_at(&self, version: Version) -> (&LearningRateSpec, Option<&PlateauSpec>) {
        match settings_before(&self.changes, version) {
            Some(before) => (&before.learning_rate, before.evaluation.reduce_on_plateau.as_ref()),
            None => (&self.learning_rate, self.plateau.as_ref()),
        }
    }

    /// Returns the bounds of the gradient of the step that begins at `version`: of each value, and of the global norm.
    pub fn clip_at(&self, version: Version) -> (Option<f32>, Option<f32>) {
        match settings_before(&self.changes, version) {
            Some(before) => (before.clip_value, before.clip_norm),
            None => (self.optimizer.clip_value, self.optimizer.clip_norm),
        }
    }

    /// Returns the update rule of each block: that of the job, or of the group of its parameter.
    pub fn optimizers<'a>(
        &self,
        layout: &Layout,
        blocks: impl Iterator<Item = &'a Block>,
    ) -> Vec<Optimizer> {
        let whole = self.optimizer();
        let of_parameter = |param: &ParamSpec| {
            let ParamSpec { weight_decay, learning_rate, .. } = *param;
            // That of the model, if it sets anything: a parameter is not in two groups.
            let own = GroupSpec { weight_decay, learning_rate, ..GroupSpec::default() };
            let group = self.optimizer.group_of(&param.name).unwrap_or(&own);
            if *group == GroupSpec::default() {
                return whole.clone();
            }
            Optimizer::of_group(&self.optimizer, Some(group)).with_average(self.own_average())
        };
        let all: Vec<Optimizer> = layout.params().iter().map(of_parameter).collect();
        blocks.map(|block| all[block.param as usize].clone()).collect()
    }

    /// Returns the update rule of parameters that are in no group.
    pub fn optimizer(&self) -> Optimizer {
        Optimizer::new(&self.optimizer).with_average(self.own_average())
    }

    /// Returns the average of the parameters, which counts the updates of this job alone.
    fn own_average(&self) -> Option<AverageSpec> {
        let start_step = |it: AverageSpec| it.start_step.saturating_add(self.updates_before);
        self.average.map(|it| AverageSpec { start_step: start_step(it), ..it })
    }

    /// Returns the names of the state vectors of a block, which are the same for all groups.
    pub fn state_names(&self) -> Vec<String> {
        self.optimizer().state_names()
    }

    /// Returns the update rule of a table.
    pub fn optimizer_of(&self, table: &str) -> Optimizer {
        let own = self.tables.get(table).and_then(|table| table.optimizer.as_ref());
        Optimizer::new(own.unwrap_or(&self.optimizer))
    }
}
