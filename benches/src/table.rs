//! The table of results.

use crate::catalog::{Bench, Unit};
use crate::sample::{Pairs, Sample, median};

/// Returns the two header lines.
pub fn head(is_compared: bool) -> String {
    let other = if is_compared { "base" } else { "limit" };
    let ratio = if is_compared { "ratio" } else { "ratio (target)" };
    format!(
        "| bench | ours | {other} | {ratio} | CPU, ours | CPU, {other} | ratio of CPU | memory, ours \
         | memory, {other} | p99, ours |\n|---|---|---|---|---|---|---|---|---|---|"
    )
}

/// Returns the description of a benchmark.
pub fn legend(bench: &Bench) -> String {
    format!("{}: {}; reference: {}", bench.name, bench.what, bench.reference)
}

/// Returns the row of one benchmark.
pub fn row(bench: &Bench, pairs: &Pairs, is_compared: bool) -> String {
    let rate = |samples: &[Sample]| median(samples.iter().map(Sample::rate).collect());
    let cpu = |samples: &[Sample]| median(samples.iter().map(Sample::cpu_per_giga).collect());
    let peak = |samples: &[Sample]| samples.iter().map(|it| it.peak_bytes).max().unwrap_or(0) >> 20;
    let ratio = match is_compared {
        true => format!("{:.2}", pairs.ratio()),
        false => format!("{:.2} ({})", pairs.ratio(), bench.target),
    };
    let rate_text = |it: f64| match bench.unit {
        Unit::Bytes => format!("{:.2} GB/s", it / 1e9),
        Unit::Steps => format!("{it:.0}/s"),
        Unit::Seconds => format!("{:.3} s", 1.0 / it),
    };
    let cpu_text = |it: f64| match bench.unit {
        Unit::Bytes => format!("{it:.2} s/GB"),
        Unit::Steps if it < 1e4 => format!("{:.2} µs", it / 1e3),
        Unit::Steps => format!("{:.0} µs", it / 1e3),
        Unit::Seconds => format!("{:.2} s", it / 1e9),
    };
    let waits: Vec<f64> = pairs.ours.iter().filter_map(|it| it.p99_seconds).collect();
    let p99 = match waits.is_empty() {
        true => "–".to_owned(),
        false => format!("{:.1} ms", median(waits) * 1e3),
    };
    // An upper bound has no CPU time.
    let cpu_ratio = match pairs.cpu_ratio() {
        ratio if ratio.is_finite() => format!("{ratio:.2}"),
        _ => "–".to_owned(),
    };
    format!(
        "| {} | {} | {} | {ratio} | {} | {} | {cpu_ratio} | {} MiB | {} MiB | {p99} |",
        bench.name,
        rate_text(rate(&pairs.ours)),
        rate_text(rate(&pairs.limit)),
        cpu_text(cpu(&pairs.ours)),
        cpu_text(cpu(&pairs.limit)),
        peak(&pairs.ours),
        peak(&pairs.limit)
    )
}
