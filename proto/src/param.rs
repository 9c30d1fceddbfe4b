//! Parameters on the wire.

use steadfast_common::layout::{ParamSpec, UpdateRule};

use crate::v1::Param;
use crate::v1::param::Update;

impl From<&ParamSpec> for Param {
    fn from(spec: &ParamSpec) -> Self {
        let update = match spec.update {
            UpdateRule::Optimizer => Update::Optimizer,
            UpdateRule::AddMean => Update::AddMean,
        };
        let shape = spec.shape.iter().map(|side| *side as u64).collect();
        Self { name: spec.name.clone(), shape, update: update.into() }
    }
}

impl From<Param> for ParamSpec {
    fn from(param: Param) -> Self {
        let update = match param.update() {
            Update::Optimizer => UpdateRule::Optimizer,
            Update::AddMean => UpdateRule::AddMean,
        };
        // A side beyond the address space exceeds every limit on the size of a model.
        let side = |side: u64| usize::try_from(side).unwrap_or(usize::MAX);
        Self { name: param.name, shape: param.shape.into_iter().map(side).collect(), update }
    }
}
