//! Values that are numbers.

/// Whether no value is infinite or NaN. Looks at all of them, so that it runs at memory's speed.
pub fn are_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |are_finite, value| are_finite & value.is_finite())
}

/// The same of little-endian values.
pub fn are_finite_bytes(values: &[u8]) -> bool {
    let values = values.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it));
    values.fold(true, |are_finite, value| are_finite & value.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_that_is_not_finite_is_found_wherever_it_is() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in 0..67 {
                let mut values = [1.0; 67];
                assert!(are_finite(&values));
                values[place] = bad;
                assert!(!are_finite(&values), "{bad} at {place}");
            }
        }
    }
}
