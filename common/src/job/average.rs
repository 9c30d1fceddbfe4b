//! The moving average of the parameters.

use serde::{Deserialize, Serialize};

/// Name of the state vector with the average of a parameter, in checkpoints.
pub const AVERAGE: &str = "average";

/// A moving average of the parameters, kept beside them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AverageSpec {
    /// Share of the average that is kept; without it, all parameters since the first have the same weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay: Option<f32>,
    /// Updates before the first whose parameters count. Until then the average is the parameters.
    #[serde(default)]
    pub start_step: u64,
    /// Updates from one whose parameters count to the next.
    #[serde(default = "one")]
    pub every_steps: u64,
}

fn one() -> u64 {
    1
}

impl AverageSpec {
    /// Returns the weight of the parameters after update number `update`, counted from 1, in the new average, as
    /// PyTorch's `AveragedModel` computes it. Returns `None` if they do not count.
    pub fn weight(&self, update: u64) -> Option<f32> {
        let Some(elapsed) = update.checked_sub(self.start_step.saturating_add(1)) else {
            return Some(1.0);
        };
        let every = self.every_steps.max(1);
        let before = elapsed / every;
        match (elapsed.is_multiple_of(every), before, self.decay) {
            (false, ..) => None,
            (true, 0, _) => Some(1.0),
            (true, _, Some(decay)) => Some((1.0 - f64::from(decay)) as f32),
            (true, before, None) => Some((1.0 / (before as f64 + 1.0)) as f32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(spec: &str) -> Vec<Option<f32>> {
        let spec: AverageSpec = toml::from_str(spec).unwrap();
        (1..=5).map(|update| spec.weight(update)).collect()
    }

    #[test]
    fn parameters_count_from_the_first_step_and_at_intervals() {
        let quarter = Some(0.25);
        assert_eq!(weights("decay = 0.75"), [Some(1.0), quarter, quarter, quarter, quarter]);
        assert_eq!(
            weights("decay = 0.75\nstart_step = 2"),
            [Some(1.0), Some(1.0), Some(1.0), quarter, quarter]
        );
        let third = Some(1.0 / 3.0);
        assert_eq!(weights("every_steps = 2"), [Some(1.0), None, Some(0.5), None, third]);
    }
}
