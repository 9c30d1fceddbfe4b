//! Rules of the task queues, and exhaustive exploration of small models.

mod ledger;
mod small_worlds;
mod stream;
