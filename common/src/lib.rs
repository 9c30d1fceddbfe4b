//! Common types of Steadfast: ids, the job spec, the dataset manifest, and pure functions of them. Uses no
//! clock, random number generator, socket or file.

pub mod error;
pub mod ids;
pub mod job;
pub mod machine;
pub mod random;
pub mod records;
pub mod role;
pub mod status;
pub mod tensor;
