//! The vocabulary of Steadfast: ids, the job file, the dataset manifest, and all that follows from
//! them without asking anyone. Pure: no clock, no chance, no socket, no file.

pub mod compression;
pub mod dataset;
pub mod durations;
pub mod error;
pub mod faults_optimizer;
pub mod finite;
pub mod ids;
pub mod job_file;
pub mod keys;
pub mod lane_tree;
pub mod layout;
pub mod pieces;
pub mod records;
pub mod schedule;
pub mod spec;
pub mod status;
pub mod tally;
pub mod widest;
