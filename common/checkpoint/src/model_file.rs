//! A trained model as one plain safetensors file: each parameter with its name and shape, and the tensors that training
//! does not change, without the tables.

use std::collections::BTreeMap;

use bytes::Bytes;
use steadfast_common::tensor::layout::{Layout, ParamSpec};

use crate::encode::{Dtype, EncodeError, Tensor, check_finite, encode_any};
use crate::fixed_file::FixedFile;

/// The metadata of a model file.
#[derive(Clone, Copy, Debug)]
pub struct ModelFile<'a> {
    pub job: &'a str,
    /// The model's kind in the job file.
    pub model: &'a str,
    /// [`Layout::digest`] of the parameters.
    pub parameters_sha256: &'a str,
}

/// Encodes a model file; `fixed` is the file with the tensors that the model has beside its parameters. Equal parameters
/// of one job give equal bytes.
///
/// # Errors
/// If names clash, a parameter is not finite, or `fixed` is not such a file.
///
/// # Panics
/// If the number of values is not that of the layout.
pub fn encode_model(
    layout: &Layout,
    values: &[f32],
    about: ModelFile<'_>,
    fixed: Option<&[u8]>,
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
    let mut tensors: Vec<Tensor<&[u8]>> = params.map(tensor).collect();
    tensors.iter().try_for_each(check_finite)?;
    if let Some(fixed) = fixed {
        let fixed = FixedFile::decode(fixed).map_err(|reason| EncodeError::Fixed { reason })?;
        add_fixed(&mut tensors, &fixed)?;
    }
    let (mut file, data) = encode_any(tensors, &metadata)?;
    file.reserve_exact(data.iter().map(|bytes| bytes.len()).sum());
    data.iter().for_each(|bytes| file.extend_from_slice(bytes));
    Ok(file.into())
}

/// Adds the fixed tensors, whose values may be any, and then a copy of a tensor for each further name: other programs
/// find every name of a module in the file.
fn add_fixed<'a>(
    tensors: &mut Vec<Tensor<&'a [u8]>>,
    fixed: &FixedFile<'a>,
) -> Result<(), EncodeError> {
    for (name, view) in fixed.tensors() {
        let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data());
        tensors.push(Tensor { name, dtype, shape, bytes });
    }
    for (name, target) in &fixed.aliases {
        let named = tensors.iter().find(|tensor| tensor.name == *target).ok_or_else(|| {
            let reason = format!("`{name}` is another name of `{target}`, which does not exist");
            EncodeError::Fixed { reason }
        })?;
        let Tensor { dtype, bytes, .. } = *named;
        let copy = Tensor { name: name.clone(), dtype, shape: named.shape.clone(), bytes };
        tensors.push(copy);
    }
    Ok(())
}
