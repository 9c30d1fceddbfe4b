//! The values of a block: copy-on-write while readers hold references to them.

use std::ops::Range;
use std::sync::Arc;

/// The current values of one block, and the memory of earlier ones.
#[derive(Debug)]
pub(crate) struct Values {
    present: Arc<Vec<f32>>,
    /// Reused by the next update once its readers have released it.
    spare: Arc<Vec<f32>>,
}

impl Values {
    pub(crate) fn new(present: Arc<Vec<f32>>) -> Self {
        Self { present, spare: Arc::default() }
    }

    pub(crate) fn present(&self) -> &Arc<Vec<f32>> {
        &self.present
    }

    /// Begins an update of all values: in place without other holders, otherwise strip by strip into other
    /// memory.
    pub(crate) fn change(&mut self) -> Change<'_> {
        let is_held = Arc::get_mut(&mut self.present).is_none();
        let before = is_held.then(|| self.move_on());
        let values = Arc::get_mut(&mut self.present).expect("there are no other holders");
        Change { before, values }
    }

    /// Makes the spare memory the current one, or new memory if the spare has readers or another length; returns the
    /// previous one.
    fn move_on(&mut self) -> Arc<Vec<f32>> {
        let len = self.present.len();
        let is_of_use = Arc::get_mut(&mut self.spare).is_some_and(|it| it.len() == len);
        let next = if is_of_use { std::mem::take(&mut self.spare) } else { vec![0.0; len].into() };
        self.spare = std::mem::replace(&mut self.present, next);
        self.spare.clone()
    }
}

/// An update of all values of a block, strip by strip. The caller visits every strip.
pub(crate) struct Change<'a> {
    before: Option<Arc<Vec<f32>>>,
    values: &'a mut [f32],
}

impl Change<'_> {
    /// Returns a strip with its values before the update.
    pub(crate) fn strip(&mut self, range: Range<usize>) -> &mut [f32] {
        let strip = &mut self.values[range.clone()];
        if let Some(before) = &self.before {
            strip.copy_from_slice(&before[range]);
        }
        strip
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add_one(values: &mut Values) {
        let mut change = values.change();
        for range in [0..2, 2..3] {
            change.strip(range).iter_mut().for_each(|it| *it += 1.0);
        }
    }

    #[test]
    fn values_without_readers_change_in_place() {
        let mut values = Values::new(Arc::new(vec![1.0, 2.0, 3.0]));
        let place = values.present().as_ptr();
        add_one(&mut values);
        assert_eq!(**values.present(), [2.0, 3.0, 4.0]);
        assert_eq!(values.present().as_ptr(), place);
    }

    #[test]
    fn values_with_readers_are_copied() {
        let mut values = Values::new(Arc::new(vec![1.0, 2.0, 3.0]));
        let held = values.present().clone();
        add_one(&mut values);
        let held_too = values.present().clone();
        add_one(&mut values);
        assert_eq!(**values.present(), [3.0, 4.0, 5.0]);
        assert_eq!((&**held, &**held_too), (&[1.0, 2.0, 3.0][..], &[2.0, 3.0, 4.0][..]));
    }

    /// Successive readers need two vectors in total, not one each.
    #[test]
    fn memory_released_by_a_reader_is_reused() {
        let mut values = Values::new(Arc::new(vec![1.0, 2.0, 3.0]));
        let held = values.present().clone();
        let first = held.as_ptr();
        add_one(&mut values);
        drop(held);
        let _held = values.present().clone();
        add_one(&mut values);
        assert_eq!(values.present().as_ptr(), first);
        assert_eq!(**values.present(), [3.0, 4.0, 5.0]);
    }
}
