//! Tests of object stores: conformance, and access over a network.

mod conformance;
#[cfg(feature = "cloud")]
mod network;
