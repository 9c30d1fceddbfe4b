//! Common types of Steadfast: ids, the job spec, the dataset manifest, and pure functions of them. Uses no
//! clock, random number generator, socket or file.

pub mod applied_records;
pub mod byte_segments;
pub mod categories;
pub mod code;
pub mod columns;
pub mod compression;
pub mod contribution;
pub mod dataset;
pub mod durations;
pub mod elastic;
pub mod error;
pub mod finite;
pub mod given_up;
pub mod ids;
pub mod job_file;
pub mod key_table;
pub mod keys;
pub mod lane_tree;
pub mod launch;
pub mod layout;
pub mod models;
pub mod optimizer_errors;
pub mod placement;
pub mod position;
pub mod random;
pub mod records;
pub mod rendezvous;
pub mod role;
pub mod schedule;
mod shape;
pub mod spec;
pub mod spec_errors;
pub mod status;
pub mod stream;
pub mod table;
pub mod widest;
