//! Memory of gradients on their way: lent, given back, and lent again.
//!
//! Gradients come as fast as the network carries them. To ask the system for fresh memory for each would
//! cost as much as to receive them.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Memory that was given back, by its length.
type Free = BTreeMap<usize, Vec<Vec<f32>>>;

/// Lends memory. A clone lends the same.
#[derive(Clone, Debug, Default)]
pub struct Memory(Arc<Mutex<Free>>);

impl Memory {
    /// Memory for `len` values, which are whatever was there before. It is given back when it is
    /// dropped.
    pub fn lend(&self, len: usize) -> Lent {
        let found = self.with(|free| free.get_mut(&len).and_then(Vec::pop));
        Lent { values: found.unwrap_or_else(|| vec![0.0; len]), home: self.clone() }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Free) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Memory that is lent.
#[derive(Debug)]
pub struct Lent {
    values: Vec<f32>,
    home: Memory,
}

impl Deref for Lent {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let values = std::mem::take(&mut self.values);
        self.home.with(|free| free.entry(values.len()).or_default().push(values));
    }
}

impl Clone for Lent {
    fn clone(&self) -> Self {
        let mut clone = self.home.lend(self.values.len());
        clone.copy_from_slice(self);
        clone
    }
}

impl PartialEq for Lent {
    fn eq(&self, other: &Self) -> bool {
        self.values == other.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_given_back_is_lent_again() {
        let memory = Memory::default();
        let first = memory.lend(3);
        let second = memory.lend(3);
        let places = [first.as_ptr(), second.as_ptr()];
        assert_ne!(places[0], places[1]);
        drop(first);
        assert_eq!(memory.lend(3).as_ptr(), places[0]);
        assert_eq!(memory.lend(5).len(), 5);
        assert_eq!(memory.lend(3).as_ptr(), places[0]);
        drop(second);
    }
}
