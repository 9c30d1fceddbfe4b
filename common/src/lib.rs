//! The vocabulary of Steadfast: ids, the job file, the dataset manifest, and all that follows from
//! them without asking anyone. Pure: no clock, no chance, no socket, no file.

pub mod dataset;
pub mod durations;
pub mod ids;
pub mod layout;
pub mod spec;
