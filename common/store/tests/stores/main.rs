//! Tests of object stores: conformance, and access over a network.

#![allow(clippy::unwrap_used)]

mod conformance;
#[cfg(feature = "cloud")]
mod network;
