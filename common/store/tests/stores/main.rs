//! Object stores by what they promise: the local one, and those that are reached over a network.

mod conformance;
#[cfg(feature = "cloud")]
mod network;
