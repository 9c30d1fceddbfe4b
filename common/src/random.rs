//! Random numbers that depend only on their key.
//!
//! A stream is identified by a seed, a purpose and three numbers, which form the key and the nonce of
//! ChaCha8. Streams share no state: the order in which they are drawn, how often and by which trainer does
//! not matter.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Separates streams with different uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The initial values of parameters.
    Initialize,
    /// Random numbers within a gradient, such as for dropout.
    Gradient,
    /// The inputs of the numerics fingerprint.
    Fingerprint,
    /// The seed of a framework that has random numbers of its own.
    Framework,
    /// The initial values of a row of a table.
    Row,
}

impl Purpose {
    fn number(self) -> u64 {
        match self {
            Self::Initialize => 1,
            Self::Gradient => 2,
            Self::Fingerprint => 3,
            Self::Framework => 4,
            Self::Row => 5,
        }
    }
}

/// One stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    words: ChaCha8Rng,
}

impl Random {
    /// Opens the stream with this key, at its beginning.
    pub fn keyed(seed: u64, purpose: Purpose, a: u64, b: u64, c: u64) -> Self {
        let mut key = [0; 32];
        for (bytes, number) in key.chunks_exact_mut(8).zip([seed, purpose.number(), a, b]) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        let mut words = ChaCha8Rng::from_seed(key);
        words.set_stream(c);
        Self { words }
    }

    /// Opens the stream for the initial values of parameter `index`.
    pub fn of_parameter(seed: u64, index: usize) -> Self {
        Self::keyed(seed, Purpose::Initialize, index as u64, 0, 0)
    }

    /// Draws 64 random bits.
    pub fn integer(&mut self) -> u64 {
        self.words.next_u64()
    }

    /// Draws a number from 0 (included) to 1 (excluded), a multiple of 2⁻²⁴.
    pub fn uniform(&mut self) -> f32 {
        (self.words.next_u32() >> 8) as f32 * (1.0 / (1 << 24) as f32)
    }

    /// Draws a number from the normal distribution of mean 0 and variance 1 (Box and Muller 1958).
    pub fn normal(&mut self) -> f32 {
        let radius = libm::sqrtf(-2.0 * libm::logf(1.0 - self.uniform()));
        radius * libm::cosf(2.0 * std::f32::consts::PI * self.uniform())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(mut draw: impl FnMut() -> f32) -> (f64, f64) {
        let drawn: Vec<f64> = (0..100_000).map(|_| f64::from(draw())).collect();
        let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
        let variance = drawn.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / drawn.len() as f64;
        (mean, variance)
    }

    #[test]
    fn a_name_gives_the_same_numbers_on_every_machine() {
        let mut random = Random::keyed(1, Purpose::Gradient, 2, 3, 4);
        let drawn: Vec<u32> = (0..3).map(|_| random.words.next_u32()).collect();
        assert_eq!(drawn, [3_124_249_744, 1_056_022_805, 691_070_653]);
    }

    #[test]
    fn draws_have_the_moments_of_their_distribution() {
        let mut random = Random::of_parameter(5, 0);
        let (mean, variance) = moments(|| random.uniform());
        assert!((mean - 0.5).abs() < 0.005 && (variance - 1.0 / 12.0).abs() < 0.002);
        let (mean, variance) = moments(|| random.normal());
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02);
    }
}
