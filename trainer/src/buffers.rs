//! Memory of gradients and parameters, which is used again from step to step: the operating system takes longer
//! to provide fresh memory than a gradient takes to be added to it.

use std::sync::Arc;

/// The most vectors that wait to be used again.
const FREE_MAX: usize = 4;

/// Vectors of one length that were handed out.
pub struct Buffers {
    len: usize,
    used: Vec<Arc<Vec<f32>>>,
}

impl Buffers {
    /// Creates an empty pool of vectors of `len` values.
    pub fn new(len: usize) -> Self {
        Self { len, used: Vec::new() }
    }

    /// Returns a vector of any content: one that is not in use any more, or zeros.
    pub fn take(&mut self) -> Vec<f32> {
        let free = self.used.iter().position(is_free);
        let free = free.and_then(|place| Arc::into_inner(self.used.swap_remove(place)));
        free.unwrap_or_else(|| vec![0.0; self.len])
    }

    /// Keeps a vector for later, when all its other owners have dropped it.
    pub fn keep(&mut self, values: &Arc<Vec<f32>>) {
        if values.len() != self.len {
            return;
        }
        // Not all vectors that are kept were taken here, so there may be more than are ever needed.
        let mut free = 0;
        self.used.retain(|values| {
            free += usize::from(is_free(values));
            !is_free(values) || free < FREE_MAX
        });
        self.used.push(values.clone());
    }
}

fn is_free(values: &Arc<Vec<f32>>) -> bool {
    Arc::strong_count(values) == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_is_used_again_once_nothing_else_holds_it() {
        let mut buffers = Buffers::new(3);
        let held = Arc::new(buffers.take());
        buffers.keep(&held);
        let other = Arc::new(vec![1.0, 2.0, 3.0]);
        let taken = buffers.take();
        assert_ne!(taken.as_ptr(), held.as_ptr());
        buffers.keep(&other);
        let place = other.as_ptr();
        drop(other);
        let again = buffers.take();
        assert_eq!(again.as_ptr(), place);
        buffers.keep(&Arc::new(vec![0.0; 4]));
        assert_eq!(buffers.take().len(), 3);
    }

    #[test]
    fn only_a_few_vectors_wait_to_be_used_again() {
        let mut buffers = Buffers::new(1);
        for _ in 0..100 {
            buffers.keep(&Arc::new(vec![0.0]));
        }
        assert_eq!(buffers.used.len(), FREE_MAX);
        let held: Vec<_> = (0..9).map(|_| Arc::new(vec![0.0])).collect();
        held.iter().for_each(|values| buffers.keep(values));
        assert!(held.iter().all(|values| Arc::strong_count(values) == 2));
    }
}
