//! A pool of buffers for gradients in transit.
//!
//! Gradients arrive at network speed; allocating fresh memory for each of them would cost as much as
//! receiving it.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Returned buffers, by their length.
type Free = BTreeMap<usize, Vec<Vec<f32>>>;

/// Lends buffers. Clones share one pool.
#[derive(Clone, Debug, Default)]
pub struct BufferPool(Arc<Mutex<Free>>);

impl BufferPool {
    /// Returns a buffer of `len` values with unspecified content. Dropping it returns it to the pool.
    pub fn lend(&self, len: usize) -> PooledBuffer {
        let found = self.with(|free| free.get_mut(&len).and_then(Vec::pop));
        PooledBuffer { values: found.unwrap_or_else(|| vec![0.0; len]), home: self.clone() }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Free) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A buffer lent by a [`BufferPool`].
#[derive(Debug)]
pub struct PooledBuffer {
    values: Vec<f32>,
    home: BufferPool,
}

impl Deref for PooledBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values
    }
}

impl AsRef<[f32]> for PooledBuffer {
    fn as_ref(&self) -> &[f32] {
        &self.values
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let values = std::mem::take(&mut self.values);
        self.home.with(|free| free.entry(values.len()).or_default().push(values));
    }
}

impl Clone for PooledBuffer {
    fn clone(&self) -> Self {
        let mut clone = self.home.lend(self.values.len());
        clone.copy_from_slice(self);
        clone
    }
}

impl PartialEq for PooledBuffer {
    fn eq(&self, other: &Self) -> bool {
        self.values == other.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returned_buffer_is_lent_again() {
        let memory = BufferPool::default();
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
