//! The format of a checkpoint's objects and of the model file that is exported from them, shared by all
//! code that writes, restores, verifies or exports a checkpoint.

mod applied;
mod decode;
mod encode;
mod error;
mod fixed_file;
mod model_file;
mod names;
mod optimizer_file;
mod range_reader;
mod reading;
pub mod row_file;
mod shard_file;
mod start_file;
mod table_file;
#[cfg(test)]
mod tests;
mod verify;

pub use applied::applied_by_slot;
pub use decode::{RowFileDecoder, ShardDecoder};
pub use encode::EncodeError;
pub use error::CheckpointError;
pub use fixed_file::{FixedError, describe_fixed, read_fixed};
pub use model_file::{ModelFile, encode_model};
pub use names::{BlockNames, tensor_name};
pub use optimizer_file::{OptimizerFile, OptimizerState, encode_optimizer};
pub use parquet::errors::ParquetError as TableFileError;
pub use reading::{Checkpoint, digest, is_in_place};
pub use shard_file::{
    BlockTensors, FileMeta, ReadBlock, ShardFile, ShardMeta, TensorFile, encode_shard,
};
pub use start_file::{
    StartError, check_fixed, describe_start, describe_start_optimizer, read_start,
    read_start_optimizer, start_shapes,
};
pub use table_file::{TableFile, table_file_name};
pub use verify::{
    AppliedToBlocks, Contents, Verified, Wanted, WriteTablesError, contents, verify, write_tables,
};
