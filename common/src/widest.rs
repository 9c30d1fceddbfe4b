//! Loops over values in the widest form that the processor has.
//!
//! Programs are built for any processor of their kind; on x86-64 that is half of what nearly every one
//! can do. Each value is still computed by the same IEEE operations in the same order, none of them
//! joined, so the results have the same bits.

/// Does `work`, in whose loops no value depends on another, compiled for the widest vectors at hand.
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
