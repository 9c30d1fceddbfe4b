//! Hosts and their slots, as `--hosts` and the output of a discovery script list them.
//!
//! | text | host | slots |
//! |---|---|---|
//! | `name`, `10.0.0.1` | as written | the default |
//! | `name:4`, `10.0.0.1:4` | as written | 4 |
//! | `[fd00::1]`, `[fd00::1]:4` | `fd00::1` | the default, 4 |
//! | `fd00::1` | `fd00::1` | the default |
//! | `fd00::1:4` | refused: an address, or an address with slots | |
//!
//! A script prints one host per line; `#` begins a comment. `--hosts` has commas between its hosts. Blank lines
//! and entries are skipped, so an empty output is a list without hosts. A host that is listed twice with the same slots counts once; with
//! different slots it is refused.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

// Only the type of an address, which does no I/O.
use core::net::Ipv6Addr;

use serde::{Deserialize, Serialize};
use steadfast_common::error::ErrorKind;
use steadfast_common::records::rendezvous::{NODES_MAX, SLOTS_MAX};

/// Maximum number of hosts in a list: as many as a round has nodes.
pub const HOSTS_MAX: usize = NODES_MAX as usize;

/// Maximum length of an entry, or of a line without its comment.
pub const LINE_BYTES_MAX: usize = 1024;

/// Maximum length of a script's output. The caller reads no more than one byte beyond it.
pub const OUTPUT_BYTES_MAX: usize = 1024 * 1024;

/// Maximum length of a host's name in DNS.
const NAME_BYTES_MAX: usize = 253;

/// How much of a refused text a message quotes.
const QUOTED_CHARS_MAX: usize = 64;

/// The name or the address of a host: ASCII letters, digits, `.`, `-` and `_`, or an IPv6 address in its
/// canonical form, without brackets. It has no `/`, so it is the last part of an etcd key as it is; it does
/// not begin with `-`, so no program takes it for an option.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostName(String);

impl HostName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HostName {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        if let Ok(address) = text.parse::<Ipv6Addr>() {
            return Ok(Self(address.to_string()));
        }
        let is_name = |it: u8| it.is_ascii_alphanumeric() || matches!(it, b'.' | b'-' | b'_');
        let is_valid = text.bytes().all(is_name) && !text.starts_with(['-', '.']);
        match is_valid && !text.is_empty() && text.len() <= NAME_BYTES_MAX {
            true => Ok(Self(text.to_owned())),
            false => Err(HostError::Name(quoted(text))),
        }
    }
}

impl TryFrom<String> for HostName {
    type Error = HostError;

    fn try_from(text: String) -> Result<Self, HostError> {
        text.parse()
    }
}

impl From<HostName> for String {
    fn from(name: HostName) -> Self {
        name.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A host that can run workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub name: HostName,
    /// How many workers it can run.
    pub slots: u32,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.0.contains(':') {
            true => write!(f, "[{}]:{}", self.name, self.slots),
            false => write!(f, "{}:{}", self.name, self.slots),
        }
    }
}

/// Why one host was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    #[error("`{0}` is not a host; write `host` or `host:slots`")]
    Name(String),
    #[error("`{0}` is not an IPv6 address; write `[address]` or `[address]:slots`")]
    Address(String),
    #[error("`{0}` may end in slots or not; write the address in brackets")]
    Ambiguous(String),
    #[error("`{0}` is not a number of slots; 1 to {SLOTS_MAX} are allowed")]
    Slots(String),
    #[error("host {host} has {slots} slots here and {before} before")]
    Conflict { host: HostName, slots: u32, before: u32 },
    #[error("the text is longer than {LINE_BYTES_MAX} bytes")]
    TooLong,
    #[error("the text is not UTF-8")]
    NotUtf8,
    #[error("there are more than {HOSTS_MAX} hosts")]
    TooMany,
}

/// Why a list of hosts was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostsError {
    #[error("line {number} of the hosts: {error}")]
    Line { number: usize, error: HostError },
    #[error("entry {number} of the hosts: {error}")]
    Entry { number: usize, error: HostError },
    #[error("the list of hosts is longer than {OUTPUT_BYTES_MAX} bytes")]
    TooLong,
}

impl HostsError {
    /// Returns what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}

/// Parses the value of `--hosts`: entries between commas.
///
/// # Errors
/// If an entry is invalid, or there are too many.
pub fn parse_list(text: &str, default_slots: u32) -> Result<Vec<Host>, HostsError> {
    let entries = text.split(',').map(str::as_bytes);
    parse(entries, default_slots).map_err(|(number, error)| HostsError::Entry { number, error })
}

/// Parses the output of a discovery script.
///
/// # Errors
/// If a line is invalid, or there are too many.
pub fn parse_output(output: &[u8], default_slots: u32) -> Result<Vec<Host>, HostsError> {
    if OUTPUT_BYTES_MAX < output.len() {
        return Err(HostsError::TooLong);
    }
    let lines = output.split(|it| *it == b'\n');
    let texts = lines.map(|line| line.split(|it| *it == b'#').next().unwrap_or_default());
    parse(texts, default_slots).map_err(|(number, error)| HostsError::Line { number, error })
}

fn parse<'a>(
    lines: impl Iterator<Item = &'a [u8]>,
    default_slots: u32,
) -> Result<Vec<Host>, (usize, HostError)> {
    let mut hosts = Vec::new();
    let mut known = BTreeMap::new();
    for (index, line) in lines.enumerate() {
        let refused = |error| (index + 1, error);
        let text = text_of(line).map_err(refused)?;
        if text.is_empty() {
            continue;
        }
        let host = parse_host(text, default_slots).map_err(refused)?;
        match known.get(&host.name) {
            Some(before) if *before == host.slots => continue,
            Some(before) => {
                let Host { name: host, slots } = host;
                return Err(refused(HostError::Conflict { host, slots, before: *before }));
            }
            None if hosts.len() == HOSTS_MAX => return Err(refused(HostError::TooMany)),
            None => known.insert(host.name.clone(), host.slots),
        };
        hosts.push(host);
    }
    Ok(hosts)
}

/// Returns a line without spaces and the carriage return around it.
fn text_of(line: &[u8]) -> Result<&str, HostError> {
    if LINE_BYTES_MAX < line.len() {
        return Err(HostError::TooLong);
    }
    Ok(std::str::from_utf8(line).map_err(|_| HostError::NotUtf8)?.trim())
}

fn parse_host(text: &str, default_slots: u32) -> Result<Host, HostError> {
    let (name, slots) = split(text)?;
    let name = name.parse()?;
    let slots = slots.map_or(Ok(default_slots), parse_slots)?;
    match (1..=SLOTS_MAX).contains(&slots) {
        true => Ok(Host { name, slots }),
        false => Err(HostError::Slots(slots.to_string())),
    }
}

/// Returns the host and the text of its slots.
fn split(text: &str) -> Result<(&str, Option<&str>), HostError> {
    let is_address = |it: &str| it.parse::<Ipv6Addr>().is_ok();
    if let Some((address, rest)) = text.strip_prefix('[').and_then(|it| it.split_once(']')) {
        let slots = rest.strip_prefix(':');
        let is_valid = is_address(address) && (rest.is_empty() || slots.is_some());
        return is_valid.then_some((address, slots)).ok_or(HostError::Address(quoted(text)));
    }
    match text.rsplit_once(':') {
        Some((host, slots)) if !host.contains(':') => Ok((host, Some(slots))),
        Some((_, _)) if !is_address(text) => Err(HostError::Address(quoted(text))),
        Some((host, slots)) if is_address(host) && parse_slots(slots).is_ok() => {
            Err(HostError::Ambiguous(quoted(text)))
        }
        Some((_, _)) | None => Ok((text, None)),
    }
}

fn parse_slots(text: &str) -> Result<u32, HostError> {
    // A sign is a number for `parse`.
    let digits = Some(text).filter(|it| it.bytes().all(|it| it.is_ascii_digit()));
    digits.and_then(|it| it.parse().ok()).ok_or_else(|| HostError::Slots(quoted(text)))
}

/// Returns the beginning of a text, with control characters escaped.
fn quoted(text: &str) -> String {
    text.escape_debug().take(QUOTED_CHARS_MAX).collect()
}
