//! Checks for finite values.

/// Returns whether no value is infinite or NaN. Checks all values without an early exit, so that the loop vectorizes.
pub fn are_finite(values: &[f32]) -> bool {
    are_all_finite(values.iter().copied())
}

/// Returns whether no little-endian value is infinite or NaN. Ignores bytes at the end that are not a whole value.
pub fn are_finite_bytes(values: &[u8]) -> bool {
    are_all_finite(values.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it)))
}

fn are_all_finite(values: impl Iterator<Item = f32>) -> bool {
    values.fold(true, |are_finite, value| are_finite & value.is_finite())
}

/// Clamps a value to ±`bound`; NaN stays NaN. Unlike [`f32::clamp`] this cannot panic, so loops vectorize.
pub fn bounded(value: f32, bound: f32) -> f32 {
    if bound < value {
        bound
    } else if value < -bound {
        -bound
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_not_finite_is_found_at_any_position() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in 0..67 {
                let mut values = [1.0; 67];
                assert!(are_finite(&values));
                values[place] = bad;
                assert!(!are_finite(&values), "{bad} at {place}");
                let bytes: Vec<u8> = values.iter().flat_map(|it| it.to_le_bytes()).collect();
                assert!(!are_finite_bytes(&bytes), "{bad} at {place}");
            }
        }
    }
}
