//! Authorization: which peer may make which call. Refusals are counted, and logged at a limited rate.

mod gate;
mod refusals;

pub use gate::{Access, Gate, GateLayer, Peer};
pub use refusals::{Refusal, Refusals, refusals, refused};
