//! Tensor bytes as they came: in pieces, which may be cut anywhere.

use std::sync::Arc;

use bytes::Bytes;

#[cfg(target_endian = "big")]
compile_error!("values travel as little-endian f32 straight from memory");

/// Bytes of one value.
const VALUE: usize = size_of::<f32>();

struct Shared(Arc<Vec<f32>>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// The bytes of `values`, which stay alive as long as the result does.
pub fn shared_bytes(values: Arc<Vec<f32>>) -> Bytes {
    Bytes::from_owner(Shared(values))
}

/// Little-endian `f32` values in one or more pieces of memory, which are shared and never copied
/// together. A value may lie across two pieces.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pieces {
    pieces: Vec<Bytes>,
    bytes: usize,
}

impl Pieces {
    /// Adds what came next.
    pub fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.bytes += piece.len();
            self.pieces.push(piece);
        }
    }

    /// Bytes in all pieces.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there is not a byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// All bytes in one piece: copied together, unless they are one already.
    pub fn joined(&self) -> Bytes {
        match &self.pieces[..] {
            [one] => one.clone(),
            several => Bytes::from(several.concat()),
        }
    }

    /// The pieces, in their order.
    pub fn iter(&self) -> impl Iterator<Item = &Bytes> {
        self.pieces.iter()
    }

    /// Shows all whole values in their order, in runs: where a run begins, counted in values, and the
    /// bytes of each value.
    pub fn for_each_run(&self, mut show: impl FnMut(usize, &[[u8; VALUE]])) {
        let (mut at, mut cut) = (0, Cut::default());
        for piece in &self.pieces {
            let mut rest = &piece[..];
            if let Some(whole) = cut.complete(&mut rest) {
                show(at, &[whole]);
                at += 1;
            }
            let (values, remainder) = rest.as_chunks();
            if !values.is_empty() {
                show(at, values);
                at += values.len();
            }
            cut.begin(remainder);
        }
    }

    /// Writes each value over that of `values` at its place; what is beyond its end is left out.
    pub fn copy_to(&self, values: &mut [f32]) {
        self.for_each_run(|at, run| {
            let place = values.get_mut(at..).unwrap_or_default();
            for (value, bytes) in place.iter_mut().zip(run) {
                *value = f32::from_le_bytes(*bytes);
            }
        });
    }
}

impl From<Bytes> for Pieces {
    fn from(bytes: Bytes) -> Self {
        let mut pieces = Self::default();
        pieces.push(bytes);
        pieces
    }
}

/// The beginning of a value whose end is in a later piece.
#[derive(Default)]
struct Cut {
    bytes: [u8; VALUE],
    len: usize,
}

impl Cut {
    /// Takes what is missing from the front of `rest`; the value, once it is whole.
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

    /// Keeps the beginning of a value. Nothing is kept over the end of one that is not whole yet.
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

    /// Cut at the given places.
    fn cut(bytes: &[u8], places: &[usize]) -> Pieces {
        let mut pieces = Pieces::default();
        let mut from = 0;
        for place in places.iter().copied().chain([bytes.len()]) {
            pieces.push(Bytes::copy_from_slice(&bytes[from..place]));
            from = place;
        }
        pieces
    }

    #[test]
    fn wherever_bytes_are_cut_the_values_are_the_same() {
        let bytes = bytes(&VALUES);
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                for third in second..=bytes.len() {
                    let pieces = cut(&bytes, &[first, second, third]);
                    assert_eq!(pieces.len(), bytes.len());
                    let mut copy = [0.0; VALUES.len()];
                    pieces.copy_to(&mut copy);
                    assert_eq!(copy, VALUES);
                }
            }
        }
    }

    #[test]
    fn bytes_that_make_no_whole_value_are_left_out() {
        let mut copy = [0.0; 2];
        let mut pieces = Pieces::from(Bytes::from(bytes(&[1.0])));
        pieces.push(Bytes::from_static(&[1, 2, 3]));
        pieces.copy_to(&mut copy);
        assert_eq!((copy, pieces.len()), ([1.0, 0.0], 7));
    }
}
