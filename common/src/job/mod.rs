//! The job file as types: how it is parsed and checked, and what follows from it alone.

pub mod average;
pub mod categories;
pub mod columns;
pub mod dataset;
pub mod durations;
pub mod elastic;
pub mod job_file;
pub mod learning_rate;
pub mod models;
pub mod optimizer_errors;
pub mod parameter_groups;
pub mod rule;
pub mod schedule;
mod shape;
pub mod spec;
pub mod spec_errors;
pub mod start;
pub mod wildcard;
