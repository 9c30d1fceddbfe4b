//! Writes safetensors files deterministically: equal content gives equal bytes. (The library writes
//! metadata entries in random order.)

use std::collections::BTreeMap;

pub(crate) use safetensors::tensor::Dtype;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use steadfast_common::tensor::finite::are_finite_bytes;

/// The longest header that readers accept.
pub(crate) const HEADER_BYTES_MAX: usize = 100_000_000;
/// Size of the header's length field; headers are padded to a multiple of it.
pub(crate) const WORD: usize = size_of::<u64>();
/// The name that the format reserves for metadata.
const METADATA: &str = "__metadata__";

/// Content that cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    #[error("two tensors have the name `{name}`; rename one of the parameters")]
    SameName { name: String },
    #[error("a tensor has the name `{METADATA}`, which the file format reserves; rename it")]
    Reserved,
    /// A value is not finite; training cannot recover from such values.
    #[error("a value of `{tensor}` is not finite; a lower learning rate or clipping may help")]
    NotFinite { tensor: String },
    /// The tensors that the model has beside its parameters are not those of a model.
    #[error("the tensors beside the parameters cannot be written: {reason}")]
    Fixed { reason: String },
    #[error("the header of {bytes} bytes is longer than readers accept; use fewer parameters")]
    HeaderTooLarge { bytes: usize },
}

/// One tensor.
pub(crate) struct Tensor<B> {
    pub name: String,
    pub dtype: Dtype,
    /// The shape, with as many values as `bytes` holds.
    pub shape: Vec<usize>,
    /// The values, little-endian.
    pub bytes: B,
}

#[derive(Serialize)]
struct Info<'a> {
    dtype: Dtype,
    shape: &'a [usize],
    data_offsets: (usize, usize),
}

struct Header<'a, B> {
    metadata: &'a BTreeMap<&'static str, String>,
    tensors: &'a [Tensor<B>],
}

impl<B: AsRef<[u8]>> Serialize for Header<'_, B> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(METADATA, self.metadata)?;
        let mut start = 0;
        for tensor in self.tensors {
            let end = start + tensor.bytes.as_ref().len();
            let Tensor { dtype, shape, .. } = tensor;
            let info = Info { dtype: *dtype, shape, data_offsets: (start, end) };
            map.serialize_entry(&tensor.name, &info)?;
            start = end;
        }
        map.end()
    }
}

/// Encodes `tensors`: returns the header, and the bytes of the tensors in the order of their names, which
/// follow it.
///
/// # Errors
/// See [`EncodeError`].
pub(crate) fn encode<B: AsRef<[u8]>>(
    tensors: Vec<Tensor<B>>,
    metadata: &BTreeMap<&'static str, String>,
) -> Result<(Vec<u8>, Vec<B>), EncodeError> {
    tensors.iter().try_for_each(check_finite)?;
    encode_any(tensors, metadata)
}

/// Returns an error if a value is not finite.
pub(crate) fn check_finite<B: AsRef<[u8]>>(tensor: &Tensor<B>) -> Result<(), EncodeError> {
    match tensor.dtype != Dtype::F32 || are_finite_bytes(tensor.bytes.as_ref()) {
        true => Ok(()),
        false => Err(EncodeError::NotFinite { tensor: tensor.name.clone() }),
    }
}

/// Encodes tensors with any values: see [`encode`].
///
/// # Errors
/// See [`EncodeError`].
pub(crate) fn encode_any<B: AsRef<[u8]>>(
    mut tensors: Vec<Tensor<B>>,
    metadata: &BTreeMap<&'static str, String>,
) -> Result<(Vec<u8>, Vec<B>), EncodeError> {
    tensors.sort_unstable_by(|left, right| left.name.cmp(&right.name));
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(EncodeError::SameName { name: pair[0].name.clone() });
    }
    if tensors.iter().any(|tensor| tensor.name == METADATA) {
        return Err(EncodeError::Reserved);
    }
    let header = Header { metadata, tensors: &tensors };
    let mut header = serde_json::to_vec(&header).expect("names and numbers can be serialized");
    header.resize(header.len().next_multiple_of(WORD), b' ');
    if HEADER_BYTES_MAX < header.len() {
        return Err(EncodeError::HeaderTooLarge { bytes: header.len() });
    }
    let first = [&(header.len() as u64).to_le_bytes()[..], &header].concat();
    Ok((first, tensors.into_iter().map(|tensor| tensor.bytes).collect()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use safetensors::tensor::TensorView;

    use super::*;

    fn tensor(name: &str, shape: &[usize], values: &[f32]) -> Tensor<Vec<u8>> {
        let bytes = bytemuck::cast_slice(values).to_vec();
        Tensor { name: name.to_owned(), dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    fn tensors() -> Vec<Tensor<Vec<u8>>> {
        vec![
            tensor("w@0", &[2, 2], &[1.0, 2.0, 3.0, 4.0]),
            tensor("a \"quoted\" näme", &[1], &[-0.0]),
            tensor("scalar", &[], &[7.5]),
            tensor("nothing", &[0], &[]),
        ]
    }

    /// I11
    #[test]
    fn a_value_that_is_not_finite_is_named_and_not_written() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let all = tensors().into_iter().chain([tensor("bad", &[2], &[1.0, value])]).collect();
            let refusal = encode(all, &BTreeMap::new()).unwrap_err();
            assert_eq!(refusal, EncodeError::NotFinite { tensor: "bad".to_owned() });
        }
    }

    #[test]
    fn a_file_has_the_same_bytes_as_one_written_by_the_library() {
        let one = BTreeMap::from([("one", "entry".to_owned())]);
        let (header, data) = encode(tensors(), &one).unwrap();
        let tensors = tensors();
        let views = tensors.iter().map(|it| {
            (&it.name, TensorView::new(Dtype::F32, it.shape.clone(), &it.bytes).unwrap())
        });
        let metadata = HashMap::from([("one".to_owned(), "entry".to_owned())]);
        let written = [header, data.concat()].concat();
        assert_eq!(written, safetensors::serialize(views, Some(metadata)).unwrap());
    }

    #[test]
    fn the_same_content_gives_the_same_bytes() {
        let metadata: BTreeMap<&'static str, String> =
            ["c", "a", "b", "d"].map(|key| (key, key.to_owned())).into();
        let mut other = tensors();
        other.reverse();
        assert_eq!(encode(tensors(), &metadata), encode(other, &metadata));
    }

    #[test]
    fn tensors_with_conflicting_names_are_rejected() {
        let named = |name: &str| tensor(name, &[0], &[]);
        let none = BTreeMap::new();
        let same = encode(vec![named("m/w@0"), named("m/w@0")], &none);
        assert_eq!(same, Err(EncodeError::SameName { name: "m/w@0".to_owned() }));
        assert_eq!(encode(vec![named(METADATA)], &none), Err(EncodeError::Reserved));
    }
}
