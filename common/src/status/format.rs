//! Formats numbers, durations and sizes for text output.

use crate::records::given_up::DiscardedTask;

/// Formats a rate per second: `5.2k`.
pub fn rate(per_second: f64) -> String {
    match per_second {
        it if !it.is_finite() || it <= 0.0 => "0".to_owned(),
        it if it < 10.0 => format!("{it:.1}"),
        it if it < 1_000.0 => format!("{it:.0}"),
        it if it < 1_000_000.0 => format!("{:.1}k", it / 1_000.0),
        it => format!("{:.1}M", it / 1_000_000.0),
    }
}

/// Formats a duration: `1h 02m`, `3m 05s`, `12s`.
pub fn span(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "?".to_owned();
    }
    let whole = seconds.ceil() as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m {seconds:02}s"),
        (hours, minutes, _) => format!("{hours}h {minutes:02}m"),
    }
}

/// Removes control characters except newlines from text that this process did not write.
pub fn plain(text: &str) -> String {
    text.chars().filter(|it| *it == '\n' || !it.is_control()).collect()
}

/// Formats a size in bytes: `812 B`, `1.2 MiB`.
pub fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return match unit {
                "B" => format!("{count} B"),
                unit => format!("{value:.1} {unit}"),
            };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// Formats a count with its noun: `1 trainer`, `2 trainers`.
pub fn plural(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    }
}

/// Formats the passes in which a task was given up: `in pass 3`, `in passes 1 to 4, 6 (9 in all)`.
pub fn passes(task: &DiscardedTask) -> String {
    if task.held_out {
        return "held out for evaluation".to_owned();
    }
    let ranges = task.passes.ranges().iter().map(|(first, last)| match first == last {
        true => (u64::from(first.0) + 1).to_string(),
        false => format!("{} to {}", u64::from(first.0) + 1, u64::from(last.0) + 1),
    });
    let listed = ranges.collect::<Vec<_>>().join(", ");
    match (task.times, task.passes.count()) {
        (1, _) => format!("in pass {listed}"),
        (times, all) if times == all => format!("in passes {listed}"),
        (times, _) => format!("in passes {listed} ({times} in all)"),
    }
}

/// Formats a loss or a metric with four decimals, or in scientific notation if it is very small or large.
pub fn figure(value: f64) -> String {
    match value.abs() {
        it if it != 0.0 && !(0.001..10_000.0).contains(&it) => format!("{value:.3e}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable_at_every_magnitude() {
        assert_eq!(
            [0.0, 3.25, 812.4, 5_210.0, 2.5e6].map(rate),
            ["0", "3.2", "812", "5.2k", "2.5M"]
        );
        assert_eq!([0.2, 59.5, 185.0, 3720.0].map(span), ["1s", "1m 00s", "3m 05s", "1h 02m"]);
        assert_eq!([0.0, 0.12345, 1e-7].map(figure), ["0.0000", "0.1235", "1.000e-7"]);
        assert_eq!(plural(1, "trainer"), "1 trainer");
        assert_eq!(plural(0, "trainer"), "0 trainers");
        let sizes = [0, 1023, 1024, 1_300_000, 5 << 40].map(bytes);
        assert_eq!(sizes, ["0 B", "1023 B", "1.0 KiB", "1.2 MiB", "5.0 TiB"]);
        assert_eq!(rate(f64::NAN), "0");
        assert_eq!(span(f64::INFINITY), "?");
    }
}
