//! Parameters on the wire.

use steadfast_common::tensor::layout::{ParamSpec, UpdateRule};
use steadfast_common::tensor::table::Initial;

use crate::v1::param::Update;
use crate::v1::{self, Param, table};

impl From<&ParamSpec> for Param {
    fn from(spec: &ParamSpec) -> Self {
        let update = match spec.update {
            UpdateRule::Optimizer => Update::Optimizer,
            UpdateRule::AddMean => Update::AddMean,
            UpdateRule::Frozen => Update::Frozen,
        };
        let initial = |initial| match initial {
            Initial::Zeros => None,
            Initial::Uniform(bound) => Some(table::Initial::Uniform(bound)),
            Initial::Normal(deviation) => Some(table::Initial::Normal(deviation)),
        };
        Self {
            name: spec.name.clone(),
            shape: spec.shape.iter().map(|side| *side as u64).collect(),
            update: update.into(),
            weight_decay: spec.weight_decay,
            learning_rate: spec.learning_rate,
            table: spec.table.map(|it| v1::Table { initial: initial(it) }),
        }
    }
}

impl From<Param> for ParamSpec {
    fn from(param: Param) -> Self {
        let update = match param.update() {
            Update::Optimizer => UpdateRule::Optimizer,
            Update::AddMean => UpdateRule::AddMean,
            Update::Frozen => UpdateRule::Frozen,
        };
        let initial = |table: v1::Table| match table.initial {
            None => Initial::Zeros,
            Some(table::Initial::Uniform(bound)) => Initial::Uniform(bound),
            Some(table::Initial::Normal(deviation)) => Initial::Normal(deviation),
        };
        // A side beyond the address space exceeds every limit on the size of a model.
        let side = |side: u64| usize::try_from(side).unwrap_or(usize::MAX);
        Self {
            name: param.name,
            shape: param.shape.into_iter().map(side).collect(),
            update,
            weight_decay: param.weight_decay,
            learning_rate: param.learning_rate,
            table: param.table.map(initial),
        }
    }
}
