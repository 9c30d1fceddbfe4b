//! Numbers as people read them.

/// Writes a count of events per second: `5.2k`.
pub fn rate(per_second: f64) -> String {
    match per_second {
        it if !it.is_finite() || it <= 0.0 => "0".to_owned(),
        it if it < 10.0 => format!("{it:.1}"),
        it if it < 1_000.0 => format!("{it:.0}"),
        it if it < 1_000_000.0 => format!("{:.1}k", it / 1_000.0),
        it => format!("{:.1}M", it / 1_000_000.0),
    }
}

/// Writes a span of time: `1h 02m`, `3m 05s`, `12s`.
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

/// Text of others for a terminal: what would move its cursor or colour it is left out.
pub fn plain(text: &str) -> String {
    text.chars().filter(|it| *it == '\n' || !it.is_control()).collect()
}

/// Writes a number of bytes: `812 B`, `1.2 MiB`.
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

/// Writes `1 trainer`, `2 trainers`.
pub fn plural(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    }
}

/// Writes a loss or a metric with four digits that mean something.
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
    fn numbers_read_well_at_every_size() {
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
