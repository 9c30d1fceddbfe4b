//! The learning rate as a function of the step.
//!
//! Computed in `f64` with IEEE operations and the `libm` crate: every machine gets the same bits.

use std::f64::consts::PI;

use steadfast_common::spec::{LearningRateSpec, Schedule};

/// Returns the rate of update number `step`, counted from 0.
///
/// A warm-up of `w` steps rises linearly to the base rate, which its last step reaches: step `s` has
/// `(s + 1) / w` of it, which avoids a first step with a rate of zero. The schedule begins after the
/// warm-up. `spec` has passed [validation](steadfast_common::optimizer_errors::learning_rate).
pub fn learning_rate(spec: &LearningRateSpec, step: u64) -> f32 {
    let base = f64::from(spec.base);
    let rate = match step.checked_sub(spec.warmup_steps) {
        None => base * ((step + 1) as f64 / spec.warmup_steps as f64),
        Some(elapsed) => scheduled(spec, base, elapsed),
    };
    rate as f32
}

/// Returns the rate after `elapsed` steps of the schedule.
fn scheduled(spec: &LearningRateSpec, base: f64, elapsed: u64) -> f64 {
    let gamma = f64::from(spec.gamma.unwrap_or(1.0));
    let every = spec.every_steps.unwrap_or(1).max(1);
    let decay_steps = spec.decay_steps.unwrap_or(1).max(1);
    let done = elapsed.min(decay_steps) as f64 / decay_steps as f64;
    let end = f64::from(spec.end.unwrap_or(0.0));
    match spec.schedule {
        Schedule::Constant => base,
        Schedule::Step => base * libm::pow(gamma, (elapsed / every) as f64),
        Schedule::Exponential => base * libm::pow(gamma, elapsed as f64 / every as f64),
        Schedule::Polynomial => {
            end + (base - end) * libm::pow(1.0 - done, f64::from(spec.power.unwrap_or(1.0)))
        }
        Schedule::Cosine => end + (base - end) * 0.5 * (1.0 + libm::cos(PI * done)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(schedule: Schedule) -> LearningRateSpec {
        LearningRateSpec { schedule, base: 0.5, ..LearningRateSpec::default() }
    }

    fn decaying() -> Vec<LearningRateSpec> {
        let every = |schedule, gamma| LearningRateSpec {
            every_steps: Some(10),
            gamma: Some(gamma),
            ..spec(schedule)
        };
        let until = |schedule, end, power| LearningRateSpec {
            decay_steps: Some(100),
            end,
            power,
            ..spec(schedule)
        };
        vec![
            every(Schedule::Step, 0.5),
            every(Schedule::Exponential, 0.5),
            until(Schedule::Polynomial, None, None),
            until(Schedule::Polynomial, Some(0.1), Some(2.0)),
            until(Schedule::Cosine, Some(0.1), None),
        ]
    }

    #[track_caller]
    fn assert_rates(spec: &LearningRateSpec, expected: &[(u64, f32)]) {
        for (step, rate) in expected {
            let found = learning_rate(spec, *step);
            assert!((found - rate).abs() <= 1e-7, "step {step}: {found}, not {rate}");
        }
    }

    #[test]
    fn each_schedule_passes_through_its_points() {
        assert_rates(&spec(Schedule::Constant), &[(0, 0.5), (1_000_000, 0.5)]);
        let specs = decaying();
        assert_rates(&specs[0], &[(0, 0.5), (9, 0.5), (10, 0.25), (19, 0.25), (30, 0.0625)]);
        assert_rates(&specs[1], &[(0, 0.5), (5, 0.353_553_4), (10, 0.25), (30, 0.0625)]);
        assert_rates(&specs[2], &[(0, 0.5), (25, 0.375), (99, 0.005), (100, 0.0), (500, 0.0)]);
        assert_rates(&specs[3], &[(0, 0.5), (50, 0.2), (90, 0.104), (100, 0.1), (500, 0.1)]);
        let quarter = 0.1 + 0.4 * 0.853_553_4;
        assert_rates(&specs[4], &[(0, 0.5), (25, quarter), (50, 0.3), (100, 0.1), (500, 0.1)]);
    }

    #[test]
    fn a_warm_up_rises_evenly_to_the_base_and_delays_the_schedule() {
        for after in decaying() {
            let warm = LearningRateSpec { warmup_steps: 4, ..after.clone() };
            assert_rates(&warm, &[(0, 0.125), (1, 0.25), (2, 0.375), (3, 0.5)]);
            for step in 0..200 {
                let rate = learning_rate(&warm, step + 4);
                assert_eq!(rate.to_bits(), learning_rate(&after, step).to_bits());
            }
        }
    }

    #[test]
    fn a_decaying_rate_never_rises_nor_leaves_its_bounds() {
        for spec in decaying() {
            for step in 0..300 {
                let (now, next) = (learning_rate(&spec, step), learning_rate(&spec, step + 1));
                assert!(next <= now && now <= 0.5, "{spec:?}, step {step}");
                assert!(spec.end.unwrap_or(0.0) <= next, "{spec:?}, step {step}");
            }
        }
    }

    #[test]
    fn the_last_step_of_all_has_a_rate() {
        for spec in decaying() {
            let rate = learning_rate(&LearningRateSpec { warmup_steps: 4, ..spec }, u64::MAX);
            assert!(rate.is_finite() && 0.0 <= rate);
            let warm =
                LearningRateSpec { warmup_steps: u64::MAX, ..self::spec(Schedule::Constant) };
            assert_eq!(learning_rate(&warm, u64::MAX - 1), 0.5);
        }
    }
}
