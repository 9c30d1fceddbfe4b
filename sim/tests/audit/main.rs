//! Checks that the audit finds nothing in what a simulated job leaves, and finds each change of it.

#![allow(clippy::unwrap_used)]

mod commits;
mod counts;
mod dealt;
mod evidence;
mod findings;
mod history;
mod honest;
mod lanes;
mod recorded;
mod rounds;
