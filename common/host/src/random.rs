//! Random values.

use uuid::Uuid;

use crate::simulated::present;

/// Returns a random (version 4) UUID.
pub fn uuid() -> Uuid {
    match present() {
        None => Uuid::new_v4(),
        Some(host) => {
            let bits = u128::from(host.random()) << 64 | u128::from(host.random());
            uuid::Builder::from_random_bytes(bits.to_be_bytes()).into_uuid()
        }
    }
}

/// Returns a random seed for a random number generator.
pub fn seed() -> u64 {
    uuid().as_u64_pair().1
}
