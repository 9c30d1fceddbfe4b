//! Parameters, rows of tables and gradients: how they are laid out, divided among slots, added and encoded.

pub mod byte_segments;
pub mod compression;
pub mod finite;
pub mod lane_tree;
pub mod layout;
pub mod placement;
pub mod row_ids;
pub mod table;
pub mod widest;
