//! Tensor bytes as received: in byte segments with arbitrary boundaries.

use std::sync::Arc;

use bytes::Bytes;

#[cfg(target_endian = "big")]
compile_error!("values are sent from memory as little-endian f32");

/// Bytes of one value.
const VALUE: usize = size_of::<f32>();

struct Shared<T>(Arc<T>);

impl<T: AsRef<[f32]>> AsRef<[u8]> for Shared<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(T::as_ref(&self.0))
    }
}

/// Returns the bytes of `values` without a copy; the result keeps them alive.
pub fn shared_bytes<T: AsRef<[f32]> + Send + Sync + 'static>(values: Arc<T>) -> Bytes {
    Bytes::from_owner(Shared(values))
}

/// Little-endian `f32` values in one or more segments of memory, which are shared and not concatenated. A
/// value may span segments.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ByteSegments {
    segments: Vec<Bytes>,
    bytes: usize,
}

impl ByteSegments {
    /// Appends a segment; ignores an empty one.
    pub fn push(&mut self, segment: Bytes) {
        if !segment.is_empty() {
            self.bytes += segment.len();
            self.segments.push(segment);
        }
    }

    /// Returns the number of bytes in all segments.
    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns all bytes in one segment; copies unless there is only one.
    pub fn joined(&self) -> Bytes {
        match &self.segments[..] {
            [one] => one.clone(),
            several => Bytes::from(several.concat()),
        }
    }

    /// Returns the segments, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Bytes> {
        self.segments.iter()
    }

    /// Calls `show` for runs of complete values, in order, with the index of the first value of the run and
    /// the bytes of each value.
    pub fn for_each_run(&self, mut show: impl FnMut(usize, &[[u8; VALUE]])) {
        let (mut at, mut split) = (0, SplitValue::default());
        for segment in &self.segments {
            let mut rest = &segment[..];
            if let Some(whole) = split.complete(&mut rest) {
                show(at, &[whole]);
                at += 1;
            }
            let (values, remainder) = rest.as_chunks();
            if !values.is_empty() {
                show(at, values);
                at += values.len();
            }
            split.begin(remainder);
        }
    }

    /// Copies the values into `values`; ignores values beyond its end.
    pub fn copy_to(&self, values: &mut [f32]) {
        self.for_each_run(|at, run| {
            let targets = values.get_mut(at..).unwrap_or_default();
            for (value, bytes) in targets.iter_mut().zip(run) {
                *value = f32::from_le_bytes(*bytes);
            }
        });
    }
}

impl From<Bytes> for ByteSegments {
    fn from(bytes: Bytes) -> Self {
        let mut segments = Self::default();
        segments.push(bytes);
        segments
    }
}

/// The first bytes of a value whose last bytes are in a later segment.
#[derive(Default)]
struct SplitValue {
    bytes: [u8; VALUE],
    len: usize,
}

impl SplitValue {
    /// Takes missing bytes from the front of `rest`; returns the value once it is complete.
    fn complete(&mut self, rest: &mut &[u8]) -> Option<[u8; VALUE]> {
        if self.len == 0 {
            return None;
        }
        let taken = rest.len().min(VALUE - self.len);
        self.bytes[self.len..self.len + taken].copy_from_slice(&rest[..taken]);
        *rest = &rest[taken..];
        self.len += taken;
        (self.len == VALUE).then(|| {
            self.len = 0;
            self.bytes
        })
    }

    /// Stores the first bytes of a value, unless the previous value is still incomplete.
    fn begin(&mut self, remainder: &[u8]) {
        if self.len == 0 {
            self.bytes[..remainder.len()].copy_from_slice(remainder);
            self.len = remainder.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: [f32; 5] = [1.0, -2.5, 3.25, 1e-30, 7.0];

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|it| it.to_le_bytes()).collect()
    }

    /// Splits bytes at the given positions.
    fn split(bytes: &[u8], places: &[usize]) -> ByteSegments {
        let mut segments = ByteSegments::default();
        let mut from = 0;
        for place in places.iter().copied().chain([bytes.len()]) {
            segments.push(Bytes::copy_from_slice(&bytes[from..place]));
            from = place;
        }
        segments
    }

    #[test]
    fn the_values_are_the_same_however_the_bytes_are_split() {
        let bytes = bytes(&VALUES);
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                for third in second..=bytes.len() {
                    let segments = split(&bytes, &[first, second, third]);
                    assert_eq!(segments.len(), bytes.len());
                    let mut copy = [0.0; VALUES.len()];
                    segments.copy_to(&mut copy);
                    assert_eq!(copy, VALUES);
                }
            }
        }
    }

    #[test]
    fn an_incomplete_value_is_left_out() {
        let mut copy = [0.0; 2];
        let mut segments = ByteSegments::from(Bytes::from(bytes(&[1.0])));
        segments.push(Bytes::from_static(&[1, 2, 3]));
        segments.copy_to(&mut copy);
        assert_eq!((copy, segments.len()), ([1.0, 0.0], 7));
    }
}
