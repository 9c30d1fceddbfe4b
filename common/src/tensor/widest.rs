//! Runs loops with the widest vector instructions of the processor.
//!
//! Programs are built for the baseline of their architecture; on x86-64 its vectors are half as wide as
//! those of nearly every current processor. Each value is still computed by the same IEEE operations in
//! the same order, without fused operations, so the results have the same bits.

/// Runs `work`, compiled for the widest available vectors. Values in its loops must not depend on each
/// other.
#[inline(always)]
pub fn widest<T>(work: impl FnOnce() -> T) -> T {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn by_eights<T>(work: impl FnOnce() -> T) -> T {
            work()
        }

        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the feature.
            return unsafe { by_eights(work) };
        }
    }
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I7
    #[test]
    fn wide_loops_give_the_same_bits_as_narrow_ones() {
        let values: Vec<f32> = (0..1003).map(|it| (it as f32 * 0.37).sin() * 1e3).collect();
        let formula = |it: f32| (it * it + 0.1).sqrt() / (it * 0.7 - 1.1);
        let narrow: Vec<u32> = values.iter().map(|it| formula(*it).to_bits()).collect();
        let wide = widest(|| values.iter().map(|it| formula(*it).to_bits()).collect::<Vec<_>>());
        assert_eq!(wide, narrow);
    }
}
