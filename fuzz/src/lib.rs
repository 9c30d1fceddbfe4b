//! What the fuzz targets share: cuts, bounds of memory, and inputs to begin with.

pub mod datasets;
mod memory;
mod seeds;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
pub use memory::within;
pub use seeds::seeds;

/// Cuts bytes into pieces as they could come from a socket: not at all, or after each byte, or at
/// places that follow from `how`.
pub fn cut(bytes: &[u8], how: u8) -> Vec<Bytes> {
    let mut state = u32::from(how);
    let mut pieces = Vec::new();
    let mut rest = Bytes::copy_from_slice(bytes);
    while !rest.is_empty() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let len = match how {
            0 => rest.len(),
            1 => 1,
            _ => 1 + (state >> 24) as usize % 23,
        };
        pieces.push(rest.split_to(len.min(rest.len())));
    }
    pieces
}

/// The result of work that waits for nobody.
pub fn at_once<T>(work: impl Future<Output = T>) -> T {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("it waits for somebody"),
    }
}
