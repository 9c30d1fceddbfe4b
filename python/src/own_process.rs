//! Values that belong to the process that has made them.

use std::mem::ManuallyDrop;
use std::ops::Deref;

/// Drops its content only in the process that has made it: a forked one has none of its threads, for which the end of a
/// runtime waits, and may have its locks held for ever.
pub struct OwnProcess<T> {
    process: u32,
    content: ManuallyDrop<T>,
}

impl<T> OwnProcess<T> {
    pub fn new(content: T) -> Self {
        Self { process: std::process::id(), content: ManuallyDrop::new(content) }
    }

    /// Returns whether this is another process, forked from that one.
    pub fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// Returns the process that has made the content.
    pub fn process(&self) -> u32 {
        self.process
    }
}

impl<T> Deref for OwnProcess<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.content
    }
}

impl<T> Drop for OwnProcess<T> {
    fn drop(&mut self) {
        if !self.is_forked() {
            // SAFETY: it is dropped once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.content) }
        }
    }
}
