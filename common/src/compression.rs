//! How gradients travel when a job gives up some of their digits for fewer bytes.
//!
//! A gradient is first *rounded* to what its form can hold, and then *encoded*, by which nothing more is
//! lost. Sums are rounded again, by whoever adds: so a sum of lanes has the same bits whether a trainer
//! or a pserver made it (see [`crate::lane_tree`]).

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::finite::bounded;
use crate::widest::widest;

/// Values that share a scale in [`Codec::Int8`].
const GROUP: usize = 1024;

/// Bytes of a scale, of an index, and of a value.
const WORD: usize = 4;

/// Bytes of a value in [`Codec::Bf16`] and [`Codec::F16`].
const HALF: usize = 2;

/// Largest step of [`Codec::Int8`] in either direction.
const STEPS: f32 = 127.0;

/// 2¹²⁷: a larger value could be rounded to one that is not finite.
const LARGEST_INT8: f32 = 1.701_411_8e38;

/// Added and taken away again it rounds a small number to the nearest integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;

/// The share of values that [`Compression::TopK`] keeps when the job does not say.
const KEEP: f64 = 0.01;

/// Forms of a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    #[default]
    None,
    /// 16 bits: the range of `f32`, 8 binary digits.
    Bf16,
    /// 16 bits: 11 binary digits, up to 65 504.
    F16,
    /// 8 bits, and a scale for each 1 024 values.
    Int8,
    /// The largest values alone, with their places.
    TopK,
}

/// How the gradients of a job travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GradientsSpec {
    #[serde(default)]
    pub compression: Compression,
    /// `top_k`: the share of a block's values that is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<f64>,
}

impl GradientsSpec {
    /// What rounds, encodes and decodes.
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
    /// Little-endian, one value after the other.
    Bf16,
    /// The same.
    F16,
    /// For each group of 1 024 values a scale, a power of two as little-endian `f32`, and a signed byte
    /// for each value: how many times the scale it is.
    Int8,
    /// For each value other than zero its place (little-endian `u32`, ascending) and itself (`f32`).
    Sparse {
        /// The share of values that rounding leaves.
        keep: f64,
    },
}

/// Bytes that are no block of that many values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("{found} bytes were sent; {wanted} are wanted")]
    Length { found: usize, wanted: usize },
    #[error("{0} is no scale; a positive power of two is wanted")]
    Scale(String),
    #[error("place {0} does not come after the one before it, or lies beyond the block")]
    Place(u32),
}

impl Codec {
    /// Adds finite values to those of a sum, and rounds it. Like a value, a sum that is too large
    /// becomes the largest there is: it stays finite, so it does not matter who looks whether it is.
    pub fn add(self, sum: &mut [f32], values: &[f32]) {
        widest(|| {
            for (sum, value) in sum.iter_mut().zip(values) {
                *sum = bounded(*sum + value, f32::MAX);
            }
        });
        self.round(sum);
    }

    /// Leaves of each value, which is finite, what can be encoded.
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
            Self::Sparse { keep } => leave_largest(values, keep),
        }
    }

    /// Writes values that were rounded.
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
                let pair = |(place, value): (usize, &f32)| {
                    [(place as u32).to_le_bytes(), value.to_le_bytes()].concat()
                };
                kept.flat_map(pair).collect()
            }
        }
    }

    /// Reads what was encoded into a block. The values need not be finite.
    ///
    /// # Errors
    /// If the bytes do not make as many values; some may have been written then.
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

/// Writes a group of [`Codec::Int8`].
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

/// Reads a group of [`Codec::Int8`], whose length was checked.
#[inline(always)]
fn decode_group(bytes: &[u8], group: &mut [f32]) -> Result<(), Malformed> {
    let (scale, steps) = bytes.split_first_chunk().expect("the length was checked");
    let scale = checked_scale(f32::from_le_bytes(*scale))?;
    for (value, step) in group.iter_mut().zip(steps) {
        *value = f32::from(*step as i8) * scale;
    }
    Ok(())
}

/// The smallest power of two of which no value is more than 127 times as large. Being a power of two it
/// loses no digit, and what was rounded by it gives the same one again.
#[inline(always)]
fn scale_of(group: &[f32]) -> f32 {
    // Without their sign, values are ordered as their bits are; integers are compared by eights.
    let largest = group.iter().map(|value| value.abs().to_bits()).max();
    let largest = f32::from_bits(largest.unwrap_or_default());
    let mut scale = f32::from_bits((largest / STEPS).to_bits() & f32::INFINITY.to_bits());
    if scale < f32::MIN_POSITIVE {
        // Below it there are no more digits to share.
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

/// The nearest integer of a value that is small against [`ROUNDER`].
fn nearest(value: f32) -> f32 {
    (value + ROUNDER) - ROUNDER
}

/// The lowest byte of that integer in two's complement, in which the digits of such a sum end. Faster
/// than a conversion, which has to mind values that are too large.
fn lowest_byte(value: f32) -> u8 {
    (value + ROUNDER).to_bits() as u8
}

/// Sets all values to zero but the largest; of equal ones the first is kept.
fn leave_largest(values: &mut [f32], keep: f64) {
    let kept = ((values.len() as f64 * keep).ceil() as usize).min(values.len());
    if kept < values.len() {
        let mut order: Vec<u32> = (0..values.len() as u32).collect();
        let by_size = |one: &u32, other: &u32| {
            let (of_one, of_other) = (values[*one as usize].abs(), values[*other as usize].abs());
            of_other.total_cmp(&of_one).then(one.cmp(other))
        };
        order.select_nth_unstable_by(kept, by_size);
        order[kept..].iter().for_each(|place| values[*place as usize] = 0.0);
    }
    // A zero has no sign on the way.
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
        let (place, value) = pair.split_first_chunk().expect("a pair has two words");
        let place = u32::from_le_bytes(*place);
        let target = values.get_mut(place as usize).filter(|_| next <= u64::from(place));
        let value = value.first_chunk().expect("a pair has two words");
        *target.ok_or(Malformed::Place(place))? = f32::from_le_bytes(*value);
        next = u64::from(place) + 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODECS: [Codec; 5] =
        [Codec::Plain, Codec::Bf16, Codec::F16, Codec::Int8, Codec::Sparse { keep: 0.1 }];

    /// Of many sizes and both signs.
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

    /// What was rounded comes back bit by bit, and is not changed by being rounded again. So it does
    /// not matter who rounds, and how often.
    #[test]
    fn what_was_rounded_stays_as_it_is() {
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

    /// I7: a sum that overflows is the same whoever makes it, since nobody ever sees it overflow.
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
    fn rounding_is_as_close_as_its_form() {
        let exact = values(5000);
        for (codec, relative) in [(Codec::Bf16, 1.0 / 256.0), (Codec::F16, 1.0 / 2048.0)] {
            let mut rounded = exact.clone();
            codec.round(&mut rounded);
            for (rounded, exact) in rounded.iter().zip(&exact) {
                // Below its range a form has a smallest step.
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

    /// Whatever the largest value is: it is representable, and so are the smallest there are.
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
    fn the_largest_values_are_kept_and_of_equal_ones_the_first() {
        let mut values = [1.0, -3.0, 2.0, -2.0, 2.0, 0.5, -0.0, 0.0, 1.5, -1.0];
        Codec::Sparse { keep: 0.3 }.round(&mut values);
        assert_eq!(values, [0.0, -3.0, 2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(Codec::Sparse { keep: 0.3 }.encode(&values).len(), 3 * 8);
    }

    /// F48: bytes that make no block are refused, not read.
    #[test]
    fn bytes_that_make_no_block_are_refused() {
        for codec in CODECS {
            let mut rounded = values(7);
            codec.round(&mut rounded);
            let good = codec.encode(&rounded);
            let mut place = [0.0; 7];
            let short = codec.decode(&good[..good.len() - 1], &mut place);
            assert!(matches!(short, Err(Malformed::Length { .. })), "{codec:?}");
            let long = codec.decode(&[&good[..], &[0]].concat(), &mut place);
            assert!(matches!(long, Err(Malformed::Length { .. })), "{codec:?}");
        }
        for scale in [0.0, -1.0, 3.0, f32::NAN, f32::INFINITY, 1e-40] {
            let bytes = [&scale.to_le_bytes()[..], &[1, 2]].concat();
            let read = Codec::Int8.decode(&bytes, &mut [0.0; 2]);
            assert!(matches!(read, Err(Malformed::Scale(_))), "{scale}");
        }
        let sparse = |places: &[u32]| {
            let pair = |place: &u32| [place.to_le_bytes(), 1_f32.to_le_bytes()].concat();
            let bytes: Vec<u8> = places.iter().flat_map(pair).collect();
            Codec::Sparse { keep: 1.0 }.decode(&bytes, &mut [0.0; 3])
        };
        assert_eq!(sparse(&[0, 2]), Ok(()));
        for places in [&[3][..], &[1, 1], &[2, 0], &[u32::MAX]] {
            assert!(matches!(sparse(places), Err(Malformed::Place(_))), "{places:?}");
        }
    }
}
