//! What the audit finds in simulated jobs: nothing in what a run leaves, and each change of it.

#![allow(clippy::unwrap_used)]

mod counts;
mod evidence;
mod findings;
mod history;
mod honest;
mod lanes;
mod recorded;
mod rounds;
