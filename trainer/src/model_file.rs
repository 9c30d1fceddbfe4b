//! The trained model as one safetensors file.

use std::collections::HashMap;

use bytes::Bytes;
use safetensors::tensor::{Dtype, TensorView};
use steadfast_common::records::JobRecord;
use steadfast_trainer_core::Parameters;

/// Writes every parameter under its own name and shape.
///
/// # Panics
/// If two parameters have the same name, which [`crate::run`] refuses at start.
pub fn encode(parameters: &Parameters, job: &JobRecord, sha256: &str) -> Bytes {
    let layout = parameters.layout();
    let views = layout.params().iter().enumerate().map(|(index, param)| {
        let bytes = bytemuck::cast_slice(&parameters.values()[layout.range_of(index)]);
        let view = TensorView::new(Dtype::F32, param.shape.clone(), bytes);
        (&param.name, view.expect("a parameter has as many values as its shape"))
    });
    let metadata = HashMap::from([
        ("job".to_owned(), job.spec.name.clone()),
        ("model".to_owned(), job.spec.model.kind.clone()),
        ("parameters_sha256".to_owned(), sha256.to_owned()),
    ]);
    safetensors::serialize(views, Some(metadata)).expect("names are unique").into()
}
