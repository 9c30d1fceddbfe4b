//! The state of the optimizer as one plain safetensors file: each vector of each parameter, with the shape of the
//! parameter.

use std::collections::BTreeMap;

use bytes::Bytes;
use steadfast_common::tensor::layout::{Layout, UpdateRule};

use crate::encode::{Dtype, EncodeError, Tensor, encode};
use crate::names::state_name;

/// The state of the optimizer in a checkpoint, without that of rows of tables.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerState {
    /// Number of updates so far; in asynchronous mode that of the slot that has most.
    pub updates: u64,
    /// The vectors by name, each with a value for each value of the parameters.
    pub states: BTreeMap<String, Vec<f32>>,
}

/// The metadata of a file with the state of an optimizer.
#[derive(Clone, Copy, Debug)]
pub struct OptimizerFile<'a> {
    pub job: &'a str,
    /// The optimizer's kind in the job file.
    pub optimizer: &'a str,
    /// [`Layout::digest`] of the parameters that the state belongs to.
    pub parameters_sha256: &'a str,
}

/// Encodes the state of the optimizer, of the parameters that it updates: vector `m` of parameter `w` is the tensor `m/w`.
///
/// # Errors
/// If names clash, or a value is not finite.
///
/// # Panics
/// If a vector has another number of values than the layout.
pub fn encode_optimizer(
    layout: &Layout,
    state: &OptimizerState,
    about: OptimizerFile<'_>,
) -> Result<Bytes, EncodeError> {
    let mut tensors = Vec::new();
    for (index, param) in layout.params().iter().enumerate() {
        if param.table.is_some() || param.update != UpdateRule::Optimizer {
            continue;
        }
        for (name, values) in &state.states {
            assert_eq!(values.len(), layout.len(), "as many values as the layout has places");
            tensors.push(Tensor {
                name: state_name(name, &param.name),
                dtype: Dtype::F32,
                shape: param.shape.clone(),
                bytes: bytemuck::cast_slice::<f32, u8>(&values[layout.range_of(index)]),
            });
        }
    }
    let metadata = BTreeMap::from([
        ("job", about.job.to_owned()),
        ("optimizer", about.optimizer.to_owned()),
        ("parameters_sha256", about.parameters_sha256.to_owned()),
        ("updates", state.updates.to_string()),
    ]);
    let (mut file, data) = encode(tensors, &metadata)?;
    data.iter().for_each(|bytes| file.extend_from_slice(bytes));
    Ok(file.into())
}
