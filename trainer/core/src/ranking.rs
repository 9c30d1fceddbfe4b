//! The area under the ROC curve of any number of records, from weights that can be added.

use std::collections::BTreeMap;

/// The weights of records by their scores and labels.
///
/// Scores are rounded down to bfloat16, the upper half of a float32: those of one class that agree in sign, exponent and
/// seven further bits are ties. The size does not grow with the number of records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ranking {
    /// The weights of negative and of positive records, by the place of their score.
    weights: BTreeMap<i32, [f64; 2]>,
}

impl Ranking {
    /// Adds a record. Of two records the one with the larger `score` is the more likely to be positive.
    pub fn add(&mut self, score: f32, is_positive: bool, weight: f64) {
        self.weights.entry(place(score)).or_default()[usize::from(is_positive)] += weight;
    }

    /// Adds the records of another ranking. Floating-point addition depends on its order: merge in a fixed one.
    pub fn merge(&mut self, other: &Self) {
        for (place, [negative, positive]) in &other.weights {
            let own = self.weights.entry(*place).or_default();
            *own = [own[0] + negative, own[1] + positive];
        }
    }

    /// Returns the probability that a positive record has a larger score than a negative one, where ties count half;
    /// `None` if either class is missing (Hanley and McNeil 1982).
    pub fn area(&self) -> Option<f64> {
        let (mut below, mut positives, mut wins) = (0.0, 0.0, 0.0);
        for [negative, positive] in self.weights.values() {
            wins += positive * (below + negative / 2.0);
            below += negative;
            positives += positive;
        }
        let pairs: f64 = below * positives;
        (pairs != 0.0).then(|| wins / pairs)
    }
}

/// Returns the place of a score: places are in the order of scores.
fn place(score: f32) -> i32 {
    // Zeros of both signs are equal.
    let bits = (score + 0.0).to_bits().cast_signed();
    // Of negative numbers, the larger bits are those of the smaller number.
    let ordered = if bits < 0 { !(bits & i32::MAX) } else { bits };
    ordered >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranking(records: &[(f32, bool, f64)]) -> Ranking {
        let mut ranking = Ranking::default();
        records.iter().for_each(|(score, label, weight)| ranking.add(*score, *label, *weight));
        ranking
    }

    /// Returns the area by its definition, pair by pair.
    fn by_pairs(records: &[(f32, bool, f64)]) -> f64 {
        let (mut wins, mut pairs) = (0.0, 0.0);
        for (of_positive, _, weight) in records.iter().filter(|it| it.1) {
            for (of_negative, _, other) in records.iter().filter(|it| !it.1) {
                let won = match of_positive.total_cmp(of_negative) {
                    std::cmp::Ordering::Greater => 1.0,
                    std::cmp::Ordering::Equal => 0.5,
                    std::cmp::Ordering::Less => 0.0,
                };
                wins += won * weight * other;
                pairs += weight * other;
            }
        }
        wins / pairs
    }

    #[test]
    fn the_area_is_that_of_all_pairs_for_scores_that_are_bfloat16() {
        let scores = [-2.5, -1.0, -0.125, 0.0, 0.5, 0.5, 3.0, 8.0];
        let records: Vec<(f32, bool, f64)> = (0..64_u32)
            .map(|it| (scores[it as usize % 8], (it * it) % 7 < 3, 1.0 + f64::from(it % 3)))
            .collect();
        let (whole, expected) = (ranking(&records), by_pairs(&records));
        assert!((whole.area().unwrap() - expected).abs() < 1e-12);
        let (first, second) = records.split_at(20);
        let mut merged = ranking(first);
        merged.merge(&ranking(second));
        assert_eq!(merged, whole);
    }

    #[test]
    fn scores_are_ordered_by_their_places() {
        let ordered =
            [f32::MIN, -100.0, -1.0, -0.01, -1e-30, 0.0, 1e-30, 0.01, 1.0, 1.01, 100.0, f32::MAX];
        assert!(ordered.windows(2).all(|it| place(it[0]) < place(it[1])));
        assert_eq!(place(-0.0), place(0.0));
    }

    #[test]
    fn records_of_one_class_have_no_area() {
        assert_eq!(Ranking::default().area(), None);
        assert_eq!(ranking(&[(1.0, true, 1.0), (2.0, true, 1.0)]).area(), None);
        assert_eq!(ranking(&[(1.0, true, 1.0), (2.0, false, 1.0)]).area(), Some(0.0));
        assert_eq!(ranking(&[(1.0, true, 0.0), (2.0, false, 1.0)]).area(), None);
    }
}
