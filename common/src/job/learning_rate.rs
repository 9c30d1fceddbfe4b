//! The learning rate as a function of the step.
//!
//! Computed in `f64` with IEEE operations and the `libm` crate: every machine gets the same bits.

use std::f64::consts::PI;

use crate::job::spec::{Interpolation, LearningRateSpec, PlateauSpec, Schedule};

/// Returns the rate of update number `step`, counted from 0, with all its factors.
///
/// A warm-up of `w` steps rises linearly to the rate with which the schedule begins, which its last step reaches: step
/// `s` has `(s + 1) / w` of it, which avoids a first step with a rate of zero. The schedule begins after the
/// warm-up. `spec` has passed [validation](crate::job::optimizer_errors::learning_rate).
pub fn learning_rate(spec: &LearningRateSpec, step: u64) -> f32 {
    let rate = warmed_up(spec, f64::from(spec.base), step);
    let factors = spec.factors.iter().map(|factor| warmed_up(factor, 1.0, step));
    factors.fold(rate, |rate, factor| rate * factor) as f32
}

/// Returns a rate that evaluations have reduced `count` times.
pub fn reduced(rate: f32, plateau: Option<&PlateauSpec>, count: u32) -> f32 {
    let Some(PlateauSpec { factor, min_rate, .. }) = plateau.filter(|_| 0 < count) else {
        return rate;
    };
    let lower = f64::from(rate) * libm::pow(f64::from(*factor), f64::from(count));
    // The schedule itself may be below the least rate of reductions.
    (lower as f32).max(min_rate.unwrap_or(0.0).min(rate))
}

fn warmed_up(spec: &LearningRateSpec, base: f64, step: u64) -> f64 {
    match step.checked_sub(spec.warmup_steps) {
        None => scheduled(spec, base, 0) * ((step + 1) as f64 / spec.warmup_steps as f64),
        Some(elapsed) => scheduled(spec, base, elapsed),
    }
}

/// Returns the rate after `elapsed` steps of the schedule.
fn scheduled(spec: &LearningRateSpec, base: f64, elapsed: u64) -> f64 {
    let gamma = f64::from(spec.gamma.unwrap_or(1.0));
    let every = spec.every_steps.unwrap_or(spec.warmup_steps).max(1);
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
        Schedule::Linear => end + (base - end) * (1.0 - done),
        Schedule::Cosine => annealed(base, end, done),
        Schedule::CosineRestarts => {
            annealed(base, end, done_of_period(elapsed, decay_steps, spec.period_factor))
        }
        Schedule::InverseSqrt => base / libm::sqrt(1.0 + elapsed as f64 / every as f64),
        Schedule::OneCycle => one_cycle(spec, base, elapsed.min(decay_steps - 1), decay_steps),
        Schedule::Table => looked_up(spec, elapsed),
    }
}

/// Returns the rate at the share `done` of half a cosine from `start` to `end`.
fn annealed(start: f64, end: f64, done: f64) -> f64 {
    end + (start - end) * 0.5 * (1.0 + libm::cos(PI * done))
}

/// Returns the share of the present period that is done (Loshchilov and Hutter 2017). Each period is `factor` times as
/// long as the one before.
fn done_of_period(elapsed: u64, first: u64, factor: Option<u64>) -> f64 {
    let factor = factor.unwrap_or(1).max(1);
    if factor == 1 {
        return (elapsed % first) as f64 / first as f64;
    }
    let (mut left, mut period) = (elapsed, first);
    while period <= left {
        left -= period;
        period = period.saturating_mul(factor);
    }
    left as f64 / period as f64
}

/// Returns the rate of the one-cycle policy (Smith and Topin 2018), as PyTorch computes it: half a cosine up, and half a
/// cosine down. Its last step has the final rate.
fn one_cycle(spec: &LearningRateSpec, base: f64, elapsed: u64, steps: u64) -> f64 {
    let start = base / f64::from(spec.div_factor.unwrap_or(25.0));
    let end = start / f64::from(spec.final_div_factor.unwrap_or(1e4));
    // Below 0 for a short rise: then the first step is on the way down.
    let top = f64::from(spec.pct_start.unwrap_or(0.3)) * steps as f64 - 1.0;
    let (elapsed, last) = (elapsed as f64, steps as f64 - 1.0);
    match elapsed < top {
        true => annealed(start, base, elapsed / top),
        false => annealed(base, end, (elapsed - top) / (last - top)),
    }
}

/// Returns the rate of a table. Before its first point it is that of the point.
fn looked_up(spec: &LearningRateSpec, elapsed: u64) -> f64 {
    let next = spec.points.partition_point(|(step, _)| *step <= elapsed);
    let before = spec.points.get(next.saturating_sub(1)).copied().unwrap_or((0, 0.0));
    let rate = f64::from(before.1);
    match (spec.interpolation.unwrap_or_default(), spec.points.get(next)) {
        (Interpolation::Linear, Some((step, after))) if before.0 < elapsed => {
            let share = (elapsed - before.0) as f64 / (step - before.0) as f64;
            rate + (f64::from(*after) - rate) * share
        }
        (Interpolation::Hold | Interpolation::Linear, _) => rate,
    }
}

#[cfg(test)]
mod tests {
    use crate::job::optimizer_errors;

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
            until(Schedule::Linear, Some(0.1), None),
            LearningRateSpec { every_steps: Some(10), ..spec(Schedule::InverseSqrt) },
        ]
    }

    fn of_toml(text: &str) -> LearningRateSpec {
        let spec = toml::from_str(text).expect("a valid learning rate");
        assert_eq!(optimizer_errors::learning_rate(&spec), [], "{text}");
        spec
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

    /// The expected rates are those of `torch.optim.lr_scheduler.OneCycleLR` and `CosineAnnealingWarmRestarts`.
    #[test]
    fn one_cycle_and_restarts_have_the_rates_of_pytorch() {
        let cycle = of_toml("schedule = 'one-cycle'\nbase = 0.5\ndecay_steps = 10");
        let rates = [
            (0, 0.02),
            (1, 0.26),
            (2, 0.5),
            (3, 0.475_242_3),
            (6, 0.194_371),
            (9, 2e-6),
            (100, 2e-6),
        ];
        assert_rates(&cycle, &rates);
        let fall = of_toml("schedule = 'one-cycle'\nbase = 0.5\npct_start = 0\ndecay_steps = 4");
        assert_rates(&fall, &[(0, 0.426_777), (1, 0.250_001), (3, 2e-6)]);
        let keys = "schedule = 'cosine-restarts'\nbase = 0.5\nend = 0.1\ndecay_steps = 4";
        let even = of_toml(keys);
        let quarter = 0.1 + 0.4 * 0.853_553_4;
        assert_rates(&even, &[(0, 0.5), (1, quarter), (2, 0.3), (4, 0.5), (4001, quarter)]);
        let longer = of_toml(&format!("{keys}\nperiod_factor = 2"));
        assert_rates(&longer, &[(4, 0.5), (6, quarter), (8, 0.3), (12, 0.5), (20, 0.3), (28, 0.5)]);
    }

    #[test]
    fn a_table_holds_or_interpolates_its_rates() {
        let points = "schedule = 'table'\npoints = [[2, 0.5], [4, 0.1], [8, 0.3]]";
        let held = [(0, 0.5), (2, 0.5), (3, 0.5), (4, 0.1), (7, 0.1), (8, 0.3), (99, 0.3)];
        assert_rates(&of_toml(points), &held);
        let lines = of_toml(&format!("{points}\ninterpolation = 'linear'"));
        assert_rates(
            &lines,
            &[(0, 0.5), (2, 0.5), (3, 0.3), (4, 0.1), (6, 0.2), (8, 0.3), (9, 0.3)],
        );
    }

    /// With a warm-up of `w` steps, the rate falls with the square root of the step (Vaswani et al. 2017).
    #[test]
    fn the_inverse_square_root_goes_on_from_the_warm_up() {
        let spec = of_toml("schedule = 'inverse-sqrt'\nbase = 0.5\nwarmup_steps = 100");
        assert_rates(&spec, &[(49, 0.25), (99, 0.5), (100, 0.5), (400, 0.25), (1600, 0.125)]);
        let cold = of_toml("schedule = 'inverse-sqrt'\nbase = 0.5");
        assert_rates(&cold, &[(0, 0.5), (3, 0.25), (15, 0.125)]);
    }

    #[test]
    fn factors_multiply_the_rate() {
        let spec = of_toml(
            "base = 0.5\nwarmup_steps = 4\n\
             factors = [{ schedule = 'step', every_steps = 10, gamma = 0.5 }, \
                        { schedule = 'table', points = [[0, 1], [15, 0.5]] }]",
        );
        assert_rates(&spec, &[(0, 0.125), (9, 0.5), (10, 0.25), (15, 0.125), (20, 0.0625)]);
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
