//! Rules of the task queues, and exhaustive exploration of small models.

#![allow(clippy::unwrap_used)]

mod ledger;
mod small_worlds;
mod stream;
