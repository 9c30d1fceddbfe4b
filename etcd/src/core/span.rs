//! The set of keys that a request selects with its `key` and `range_end`.

use std::ops::Bound;

/// A range end of one zero byte means "no end".
const NO_END: &[u8] = &[0];

/// A range in the form that a sorted map takes.
pub type Bounds<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// One key, a half-open interval of keys, or every key from one on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span<'a> {
    One(&'a [u8]),
    Between(&'a [u8], &'a [u8]),
    From(&'a [u8]),
}

impl<'a> Span<'a> {
    pub fn new(key: &'a [u8], range_end: &'a [u8]) -> Self {
        match range_end {
            [] => Span::One(key),
            NO_END => Span::From(key),
            end => Span::Between(key, end),
        }
    }

    pub fn contains(&self, key: &[u8]) -> bool {
        match *self {
            Span::One(only) => key == only,
            Span::Between(start, end) => start <= key && key < end,
            Span::From(start) => start <= key,
        }
    }

    /// Returns the range for a sorted map, or `None` if no key can be in it. (A sorted map panics on a
    /// range that ends before it starts; a client may send one.)
    pub fn bounds(&self) -> Option<Bounds<'a>> {
        match *self {
            Span::One(only) => Some((Bound::Included(only), Bound::Included(only))),
            Span::Between(start, end) if start >= end => None,
            Span::Between(start, end) => Some((Bound::Included(start), Bound::Excluded(end))),
            Span::From(start) => Some((Bound::Included(start), Bound::Unbounded)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The three encodings of a range on the wire.
    #[test]
    fn the_range_end_selects_one_key_an_interval_or_an_open_interval() {
        assert_eq!(Span::new(b"a", b""), Span::One(b"a"));
        assert_eq!(Span::new(b"a", b"c"), Span::Between(b"a", b"c"));
        assert_eq!(Span::new(b"a", b"\0"), Span::From(b"a"));
        assert!(Span::new(b"a", b"c").contains(b"b") && !Span::new(b"a", b"c").contains(b"c"));
        assert!(Span::new(b"a", b"\0").contains(b"zzz"));
    }

    /// Hostile input must not trigger the map's assertion.
    #[test]
    fn an_inverted_interval_is_empty() {
        assert_eq!(Span::new(b"b", b"a").bounds(), None);
        assert!(!Span::new(b"b", b"a").contains(b"b"));
    }
}
