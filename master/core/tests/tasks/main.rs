//! The queues of tasks: their rules, and every order of events in small worlds.

mod ledger;
mod small_worlds;
