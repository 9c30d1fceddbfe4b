//! A trained model as one plain safetensors file: each parameter with its name and shape, without the tables.

use std::collections::BTreeMap;

use bytes::Bytes;
use steadfast_common::tensor::layout::{Layout, ParamSpec};

use crate::encode::{Dtype, EncodeError, Tensor, encode};

/// The metadata of a model file.
#[derive(Clone, Copy, Debug)]
pub struct ModelFile<'a> {
    pub job: &'a str,
    /// The model's kind in the job file.
    pub model: &'a str,
    /// [`Layout::digest`] of the parameters.
    pub parameters_sha256: &'a str,
}

/// Encodes a model file. Equal parameters of one job give equal bytes.
///
/// # Errors
/// If the parameters' names clash.
///
/// # Panics
/// If the number of values is not that of the layout.
pub fn encode_model(
    layout: &Layout,
    values: &[f32],
    about: ModelFile<'_>,
) -> Result<Bytes, EncodeError> {
    assert_eq!(values.len(), layout.len(), "as many values as the layout has places");
    let tensor = |(index, param): (usize, &ParamSpec)| Tensor {
        name: param.name.clone(),
        dtype: Dtype::F32,
        shape: param.shape.clone(),
        bytes: bytemuck::cast_slice::<f32, u8>(&values[layout.range_of(index)]),
    };
    let metadata = BTreeMap::from([
        ("job", about.job.to_owned()),
        ("model", about.model.to_owned()),
        ("parameters_sha256", about.parameters_sha256.to_owned()),
    ]);
    let params = layout.params().iter().enumerate().filter(|(_, param)| param.table.is_none());
    let tensors = params.map(tensor).collect();
    let (mut file, data) = encode(tensors, &metadata)?;
    file.reserve_exact(data.iter().map(|bytes| bytes.len()).sum());
    data.iter().for_each(|bytes| file.extend_from_slice(bytes));
    Ok(file.into())
}
