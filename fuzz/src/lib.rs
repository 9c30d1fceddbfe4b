//! Shared by the fuzz targets: splitting of input, memory limits, and seed inputs.

pub mod datasets;
mod memory;
mod seeds;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
pub use memory::within;
pub use seeds::seeds;

/// Splits bytes into segments like reads from a socket: not at all, after each byte, or at offsets derived
/// from `how`.
pub fn split(bytes: &[u8], how: u8) -> Vec<Bytes> {
    let mut state = u32::from(how);
    let mut segments = Vec::new();
    let mut rest = Bytes::copy_from_slice(bytes);
    while !rest.is_empty() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let len = match how {
            0 => rest.len(),
            1 => 1,
            _ => 1 + (state >> 24) as usize % 23,
        };
        segments.push(rest.split_to(len.min(rest.len())));
    }
    segments
}

/// Polls a future once and returns its result.
///
/// # Panics
/// If the future is pending.
pub fn at_once<T>(work: impl Future<Output = T>) -> T {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("the future is pending"),
    }
}
