//! Durations in human-readable form (`10m`, `30s`), for the job file and etcd.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de::Error};

/// Parses a duration such as `90s`, `10m` or `1h 30m`.
///
/// # Errors
/// A message that names the invalid text.
pub fn parse(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("cannot parse `{text}` as a duration (`30s`, `10m`): {error}"))
}

/// Parses `5s`, or a number of seconds longer than 0, as torchrun takes it.
///
/// # Errors
/// A message that names the invalid text.
pub fn parse_or_seconds(text: &str) -> Result<Duration, String> {
    match text.parse().map(Duration::try_from_secs_f64) {
        Ok(Ok(duration)) if !duration.is_zero() => Ok(duration),
        Ok(_) => Err("use a time longer than 0".to_owned()),
        Err(_) => parse(text),
    }
}

/// Writes a [`Duration`] as text.
///
/// # Errors
/// Errors of the serializer.
pub fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*value))
}

/// Reads a [`Duration`] from text.
///
/// # Errors
/// If the text is not a valid duration.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
}

/// Reads and writes a duration that may be absent.
pub mod optional {
    use super::{Deserialize, Deserializer, Duration, Error, Serializer, parse};

    /// Writes the duration, if there is one.
    ///
    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<S: Serializer>(
        value: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(duration) => super::serialize(duration, serializer),
            None => serializer.serialize_none(),
        }
    }

    /// Reads the duration, if there is one.
    ///
    /// # Errors
    /// If the text is not a valid duration.
    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| parse(&text)).transpose().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_may_be_a_number_of_seconds_as_for_torchrun() {
        assert_eq!(parse_or_seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_or_seconds("2s"), Ok(Duration::from_secs(2)));
        for text in ["0", "-1", "x"] {
            assert!(parse_or_seconds(text).is_err(), "{text}");
        }
    }
}
