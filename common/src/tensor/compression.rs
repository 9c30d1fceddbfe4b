//! Lossy compression of gradients for transport.
//!
//! A gradient is first *rounded* to values that its codec can represent, and then *encoded* without
//! further loss. Each addition rounds the sum again, so that a sum of lanes has the same bits whether a
//! trainer or a pserver computed it (see [`crate::tensor::lane_tree`]).

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::tensor::finite::bounded;
use crate::tensor::widest::widest;

/// Values that share a scale in [`Codec::Int8`].
const GROUP: usize = 1024;

/// Bytes of a scale, of an index, and of a value.
const WORD: usize = 4;

/// Bytes of a value in [`Codec::Bf16`] and [`Codec::F16`].
const HALF: usize = 2;

/// Largest magnitude of a quantized value of [`Codec::Int8`].
const STEPS: f32 = 127.0;

/// 2¹²⁷: rounding a larger value could give infinity.
const LARGEST_INT8: f32 = 1.701_411_8e38;

/// Adding and subtracting this rounds a small number to the nearest integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;

/// Default share of values that [`Compression::TopK`] keeps.
const KEEP: f64 = 0.01;

/// Compression methods of gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    #[default]
    None,
    /// 16 bits: the range of `f32`, 8 significant bits.
    Bf16,
    /// 16 bits: 11 significant bits, up to 65 504.
    F16,
    /// 8 bits, and a scale for every 1 024 values.
    Int8,
    /// Only the largest values, with their indices.
    TopK,
}

/// How the gradients of a job are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GradientsSpec {
    #[serde(default)]
    pub compression: Compression,
    /// `top_k`: the share of a block's values that is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<f64>,
}

impl GradientsSpec {
    pub fn codec(self) -> Codec {
        match self.compression {
            Compression::None => Codec::Plain,
            Compression::Bf16 => Codec::Bf16,
            Compression::F16 => Codec::F16,
            Compression::Int8 => Codec::Int8,
            Compression::TopK => Codec::Sparse { keep: self.keep.unwrap_or(KEEP) },
        }
    }
}

/// Rounds, encodes and decodes the values of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Codec {
    /// Little-endian `f32`.
    #[default]
    Plain,
    /// Little-endian `bf16`.
    Bf16,
    /// Little-endian `f16`.
    F16,
    /// For each group of 1 024 values a scale, a power of two as little-endian `f32`, and a signed byte
    /// for each value: the value divided by the scale.
    Int8,
    /// For each nonzero value its index (little-endian `u32`, ascending) and the value (`f32`).
    Sparse {
        /// The share of values that rounding keeps.
        keep: f64,
    },
}

/// The bytes are not an encoded block of the expected length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("received {found} bytes; expected {wanted}")]
    Length { found: usize, wanted: usize },
    #[error("invalid scale {0}; expected a positive power of two")]
    Scale(String),
    #[error("invalid index {0}; expected one above the previous and within the block")]
    Place(u32),
}

impl Codec {
    /// Adds finite values to a sum and rounds it. A sum that is too large saturates at the largest finite
    /// value, so that the result does not depend on where values are checked to be finite.
    pub fn add(self, sum: &mut [f32], values: &[f32]) {
        widest(|| {
            for (sum, value) in sum.iter_mut().zip(values) {
                *sum = bounded(*sum + value, f32::MAX);
            }
        });
        self.round(sum);
    }

    /// Rounds finite values to values that can be encoded.
    pub fn round(self, values: &mut [f32]) {
        match self {
            Self::Plain => {}
            Self::Bf16 => round_each(values, bf16::MAX.to_f32(), |it| bf16::from_f32(it).to_f32()),
            Self::F16 => round_each(values, f16::MAX.to_f32(), |it| f16::from_f32(it).to_f32()),
            Self::Int8 => {
                widest(|| {
                    for group in values.chunks_mut(GROUP) {
                        group.iter_mut().for_each(|value| *value = bounded(*value, LARGEST_INT8));
                        let scale = scale_of(group);
                        let steps = 1.0 / scale;
                        for value in group {
                            *value = nearest(*value * steps) * scale;
                        }
                    }
                });
            }
            Self::Sparse { keep } => keep_largest(values, keep),
        }
    }

    /// Encodes values that [`Codec::round`] has rounded.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::Plain => bytemuck::cast_slice(values).to_vec(),
            Self::Bf16 => encode_halves(bf16::ZERO, values),
            Self::F16 => encode_halves(f16::ZERO, values),
            Self::Int8 => {
                let mut bytes = vec![0; Self::int8_len(values.len())];
                let groups = values.chunks(GROUP).zip(bytes.chunks_mut(WORD + GROUP));
                widest(|| groups.for_each(|(group, bytes)| encode_group(group, bytes)));
                bytes
            }
            Self::Sparse { .. } => {
                let kept = values.iter().enumerate().filter(|(_, value)| **value != 0.0);
                let pair = |(index, value): (usize, &f32)| {
                    [(index as u32).to_le_bytes(), value.to_le_bytes()].concat()
                };
                kept.flat_map(pair).collect()
            }
        }
    }

    /// Decodes a block into `values`. The decoded values need not be finite.
    ///
    /// # Errors
    /// If the bytes are not an encoding of that many values; some may already be written.
    pub fn decode(self, bytes: &[u8], values: &mut [f32]) -> Result<(), Malformed> {
        let of_length = |wanted: usize| match bytes.len() {
            found if found == wanted => Ok(()),
            found => Err(Malformed::Length { found, wanted }),
        };
        match self {
            Self::Plain => {
                of_length(size_of_val(values))?;
                decode_each(bytes, values, f32::from_le_bytes);
            }
            Self::Bf16 => {
                of_length(values.len() * HALF)?;
                decode_each(bytes, values, |it| bf16::from_le_bytes(it).to_f32());
            }
            Self::F16 => {
                of_length(values.len() * HALF)?;
                decode_each(bytes, values, |it| f16::from_le_bytes(it).to_f32());
            }
            Self::Int8 => {
                of_length(Self::int8_len(values.len()))?;
                let mut groups = values.chunks_mut(GROUP).zip(bytes.chunks(WORD + GROUP));
                widest(|| groups.try_for_each(|(group, bytes)| decode_group(bytes, group)))?;
            }
            Self::Sparse { .. } => decode_sparse(bytes, values)?,
        }
        Ok(())
    }

    fn int8_len(len: usize) -> usize {
        len + len.div_ceil(GROUP) * WORD
    }
}

fn round_each(values: &mut [f32], largest: f32, round: impl Fn(f32) -> f32) {
    widest(|| values.iter_mut().for_each(|value| *value = round(bounded(*value, largest))));
}

fn encode_halves<H: Copy>(zero: H, values: &[f32]) -> Vec<u8>
where
    [H]: HalfFloatSliceExt,
{
    let mut halves = vec![zero; values.len()];
    halves.convert_from_f32_slice(values);
    bytemuck::cast_slice(halves.reinterpret_cast()).to_vec()
}

fn decode_each<const N: usize>(bytes: &[u8], values: &mut [f32], read: impl Fn([u8; N]) -> f32) {
    let pairs = values.iter_mut().zip(bytes.as_chunks().0);
    widest(|| pairs.for_each(|(value, bytes)| *value = read(*bytes)));
}

/// Encodes a group of [`Codec::Int8`].
#[inline(always)]
fn encode_group(group: &[f32], bytes: &mut [u8]) {
    let scale = scale_of(group);
    let steps = 1.0 / scale;
    let (first, rest) = bytes.split_at_mut(WORD);
    first.copy_from_slice(&scale.to_le_bytes());
    for (byte, value) in rest.iter_mut().zip(group) {
        *byte = lowest_byte(*value * steps);
    }
}

/// Decodes a group of [`Codec::Int8`] of the right length.
#[inline(always)]
fn decode_group(bytes: &[u8], group: &mut [f32]) -> Result<(), Malformed> {
    let (scale, steps) = bytes.split_first_chunk().expect("the length was checked");
    let scale = checked_scale(f32::from_le_bytes(*scale))?;
    for (value, step) in group.iter_mut().zip(steps) {
        *value = f32::from(*step as i8) * scale;
    }
    Ok(())
}

/// Returns the smallest power of two such that no value exceeds 127 times it. Scaling by a power of two is
/// exact, and rounded values give the same scale again.
#[inline(always)]
fn scale_of(group: &[f32]) -> f32 {
    // The bits of nonnegative floats are ordered as the floats, and integer comparison vectorizes.
    let largest = group.iter().map(|value| value.abs().to_bits()).max();
    let largest = f32::from_bits(largest.unwrap_or_default());
    let mut scale = f32::from_bits((largest / STEPS).to_bits() & f32::INFINITY.to_bits());
    if scale < f32::MIN_POSITIVE {
        // Subnormal scales would lose precision.
        return f32::MIN_POSITIVE;
    }
    if scale * STEPS < largest {
        scale *= 2.0;
    }
    scale
}

fn checked_scale(scale: f32) -> Result<f32, Malformed> {
    let is_power = scale.is_normal() && 0.0 < scale && scale.to_bits().trailing_zeros() >= 23;
    if is_power { Ok(scale) } else { Err(Malformed::Scale(scale.to_string())) }
}

/// Returns the nearest integer to a value that is small relative to [`ROUNDER`].
fn nearest(value: f32) -> f32 {
    (value + ROUNDER) - ROUNDER
}

/// Returns the lowest byte, in two's complement, of the nearest integer to a value that is small relative to
/// [`ROUNDER`]. This is the lowest byte of the sum's mantissa, and faster than a conversion, which has to saturate.
fn lowest_byte(value: f32) -> u8 {
    (value + ROUNDER).to_bits() as u8
}

/// Sets all values to zero except the share `keep` with the largest magnitudes, rounded up; keeps the first of equal
/// ones.
fn keep_largest(values: &mut [f32], keep: f64) {
    let kept = ((values.len() as f64 * keep).ceil() as usize).min(values.len());
    if kept < values.len() {
        let mut order: Vec<u32> = (0..values.len() as u32).collect();
        let by_size = |one: &u32, other: &u32| {
            let (of_one, of_other) = (values[*one as usize].abs(), values[*other as usize].abs());
            of_other.total_cmp(&of_one).then(one.cmp(other))
        };
        order.select_nth_unstable_by(kept, by_size);
        order[kept..].iter().for_each(|index| values[*index as usize] = 0.0);
    }
    // The encoding does not keep the sign of a zero.
    values.iter_mut().for_each(|value| *value += 0.0);
}

fn decode_sparse(bytes: &[u8], values: &mut [f32]) -> Result<(), Malformed> {
    let (pairs, rest) = bytes.as_chunks::<{ 2 * WORD }>();
    if !rest.is_empty() {
        let wanted = pairs.len() * 2 * WORD;
        return Err(Malformed::Length { found: bytes.len(), wanted });
    }
    values.fill(0.0);
    let mut next = 0;
    for pair in pairs {
        let (index, value) = pair.split_first_chunk().expect("a pair has two words");
        let index = u32::from_le_bytes(*index);
        let target = values.get_mut(index as usize).filter(|_| next <= u64::from(index));
        let value = value.first_chunk().expect("a pair has two words");
        *target.ok_or(Malformed::Place(index))? = f32::from_le_bytes(*value);
        next = u64::from(index) + 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODECS: [Codec; 5] =
        [Codec::Plain, Codec::Bf16, Codec::F16, Codec::Int8, Codec::Sparse { keep: 0.1 }];

    /// Returns values of many magnitudes and both signs.
    fn values(len: usize) -> Vec<f32> {
        let value = |index: usize| {
            let mixed = (index as u64 * 2_654_435_761 + 12_345) % 100_003;
            let size = 10_f32.powi((mixed % 9) as i32 - 6);
            (mixed as f32 / 50_000.0 - 1.0) * size
        };
        (0..len).map(value).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    /// Rounding is idempotent, and encoding rounded values is lossless, so that it does not matter which
    /// process rounds and how often.
    #[test]
    fn a_rounded_value_rounds_to_itself() {
        for codec in CODECS {
            for len in [0, 1, 5, GROUP, GROUP + 1, 5000] {
                let mut rounded = values(len);
                codec.round(&mut rounded);
                let encoded = codec.encode(&rounded);
                let mut decoded = vec![f32::NAN; len];
                codec.decode(&encoded, &mut decoded).unwrap();
                assert_eq!(bits(&decoded), bits(&rounded), "{codec:?} {len}");
                let mut again = rounded.clone();
                codec.round(&mut again);
                assert_eq!(bits(&again), bits(&rounded), "{codec:?} {len}");
            }
        }
    }

    /// I7: sums saturate instead of overflowing, so that they do not depend on which process adds.
    #[test]
    fn a_sum_stays_finite() {
        for codec in CODECS {
            for value in [f32::MAX, f32::MIN, 65_504.0, 40_000.0] {
                let mut rounded = [value, 1.0];
                codec.round(&mut rounded);
                let mut sum = rounded;
                codec.add(&mut sum, &rounded);
                codec.add(&mut sum, &rounded);
                assert!(sum.iter().all(|it| it.is_finite()), "{codec:?}: {sum:?}");
                assert!(rounded[0].abs() <= sum[0].abs(), "{codec:?}: {sum:?}");
                let mut again = sum;
                codec.round(&mut again);
                assert_eq!(bits(&again), bits(&sum), "{codec:?}");
            }
        }
    }

    #[test]
    fn rounding_is_as_precise_as_its_format() {
        let exact = values(5000);
        for (codec, relative) in [(Codec::Bf16, 1.0 / 256.0), (Codec::F16, 1.0 / 2048.0)] {
            let mut rounded = exact.clone();
            codec.round(&mut rounded);
            for (rounded, exact) in rounded.iter().zip(&exact) {
                // Subnormal values have a fixed step.
                let bound = (exact.abs() * relative).max(1e-7);
                assert!((rounded - exact).abs() <= bound, "{codec:?}: {exact} is {rounded}");
            }
        }
        let mut rounded = exact.clone();
        Codec::Int8.round(&mut rounded);
        for (rounded, exact) in rounded.chunks(GROUP).zip(exact.chunks(GROUP)) {
            let largest = exact.iter().fold(0.0_f32, |most, it| most.max(it.abs()));
            for (rounded, exact) in rounded.iter().zip(exact) {
                assert!((rounded - exact).abs() <= largest / 127.0, "{exact} is {rounded}");
            }
        }
    }

    /// For every magnitude of the largest value, that value can be represented.
    #[test]
    fn a_scale_fits_the_largest_value() {
        for exponent in -149..128 {
            for part in [1.0_f32, 1.01, 1.5, 1.984_375, 1.99, 1.999_999_9] {
                let largest = (f64::from(part) * 2_f64.powi(exponent)) as f32;
                let scale = scale_of(&[largest, -largest, 0.0]);
                assert_eq!(checked_scale(scale), Ok(scale), "{largest}");
                assert!(f64::from(largest) <= f64::from(scale) * 127.0, "{largest}");
                let mut values = [largest, 0.0];
                Codec::Int8.round(&mut values);
                assert!(values[0].is_finite() && (scale <= f32::MIN_POSITIVE || 0.0 < values[0]));
            }
        }
    }

    #[test]
    fn the_largest_values_are_kept_and_among_equals_the_first() {
        let mut values = [1.0, -3.0, 2.0, -2.0, 2.0, 0.5, -0.0, 0.0, 1.5, -1.0];
        Codec::Sparse { keep: 0.3 }.round(&mut values);
        assert_eq!(values, [0.0, -3.0, 2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(Codec::Sparse { keep: 0.3 }.encode(&values).len(), 3 * 8);
    }

    /// F48: bytes that do not encode a block are refused.
    #[test]
    fn bytes_that_are_not_a_block_are_rejected() {
        for codec in CODECS {
            let mut rounded = values(7);
            codec.round(&mut rounded);
            let good = codec.encode(&rounded);
            let mut decoded = [0.0; 7];
            let short = codec.decode(&good[..good.len() - 1], &mut decoded);
            assert!(matches!(short, Err(Malformed::Length { .. })), "{codec:?}");
            let long = codec.decode(&[&good[..], &[0]].concat(), &mut decoded);
            assert!(matches!(long, Err(Malformed::Length { .. })), "{codec:?}");
        }
        for scale in [0.0, -1.0, 3.0, f32::NAN, f32::INFINITY, 1e-40] {
            let bytes = [&scale.to_le_bytes()[..], &[1, 2]].concat();
            let read = Codec::Int8.decode(&bytes, &mut [0.0; 2]);
            assert!(matches!(read, Err(Malformed::Scale(_))), "{scale}");
        }
        let sparse = |indices: &[u32]| {
            let pair = |index: &u32| [index.to_le_bytes(), 1_f32.to_le_bytes()].concat();
            let bytes: Vec<u8> = indices.iter().flat_map(pair).collect();
            Codec::Sparse { keep: 1.0 }.decode(&bytes, &mut [0.0; 3])
        };
        assert_eq!(sparse(&[0, 2]), Ok(()));
        for indices in [&[3][..], &[1, 1], &[2, 0], &[u32::MAX]] {
            assert!(matches!(sparse(indices), Err(Malformed::Place(_))), "{indices:?}");
        }
    }
}
