//! What the views of members say, computed once for each change: the event loop asks in every turn, and a
//! turn must not take longer with the number of members.

use std::sync::{Arc, Mutex};

use steadfast_coord::View;

/// A value computed from a view.
#[derive(Debug, Default)]
pub(crate) struct Derived<T> {
    /// The mutex guards short reads and writes.
    known: Mutex<Option<(Arc<View>, Arc<T>)>>,
}

impl<T> Derived<T> {
    /// Returns the value for `view`.
    pub fn of(&self, view: Arc<View>, compute: impl FnOnce(&View) -> T) -> Arc<T> {
        let mut known = self.known.lock().expect("no holder panics");
        if let Some((of, value)) = &*known
            && Arc::ptr_eq(of, &view)
        {
            return value.clone();
        }
        let value = Arc::new(compute(&view));
        *known = Some((view, value.clone()));
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_computed_once_for_each_view() {
        let (derived, first) = (Derived::<usize>::default(), Arc::<View>::default());
        assert_eq!(*derived.of(first.clone(), |_| 1), 1);
        assert_eq!(*derived.of(first.clone(), |_| panic!("it is known")), 1);
        // An equal view is another one: only the same one is known to be equal without a comparison.
        assert_eq!(*derived.of(Arc::default(), |_| 2), 2);
        assert_eq!(*derived.of(first, |_| 3), 3);
    }
}
