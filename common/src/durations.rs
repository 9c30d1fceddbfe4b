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
