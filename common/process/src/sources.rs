//! Collects the settings on the command line, in the environment and in a file, before they are parsed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::Path;

use clap::{Arg, Command};
use steadfast_common::job::job_file::nearest;

/// Prefix of all environment variables.
const VARIABLE_PREFIX: &str = "STEADFAST_";

/// One setting from one source.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// Id of clap's argument.
    pub id: String,
    pub origin: Origin,
    /// The setting as command-line arguments; none for a switch that is off.
    pub words: Vec<OsString>,
}

/// The source of a setting; a later variant overrides an earlier one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    File(String),
    Variable(String),
    Flag(String),
}

impl Origin {
    /// Returns the precedence of the source, independent of its name.
    pub fn rank(&self) -> u8 {
        match self {
            Self::File(_) => 0,
            Self::Variable(_) => 1,
            Self::Flag(_) => 2,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(name) | Self::Variable(name) | Self::Flag(name) => f.write_str(name),
        }
    }
}

/// The settings and errors of one source.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub settings: Vec<Setting>,
    pub errors: Vec<String>,
}

/// Returns the environment variable of a flag: `STEADFAST_ETCD_CA` for `etcd-ca`.
pub fn variable_of(long: &str) -> String {
    format!("{VARIABLE_PREFIX}{}", long.replace('-', "_").to_uppercase())
}

/// Returns the file key of a flag: `etcd_ca` for `etcd-ca`.
pub(crate) fn key_of(long: &str) -> String {
    long.replace('-', "_")
}

fn by_long<'a>(command: &'a Command, long: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_long() == Some(long))
}

/// Splits the arguments after the program name into settings.
pub(crate) fn from_command_line(command: &Command, words: &[OsString]) -> Found {
    let mut found = Found::default();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        let Some(flag) = text.strip_prefix("--") else {
            found
                .errors
                .push(format!("unexpected argument `{text}`; use flags such as `--job NAME`"));
            continue;
        };
        let (long, value) = flag.split_once('=').map_or((flag, None), |(it, v)| (it, Some(v)));
        let follower = words.next_if(|next| !next.to_string_lossy().starts_with("--"));
        let Some(arg) = by_long(command, long) else {
            found.errors.push(unknown_flag(command, long));
            continue;
        };
        let takes_value = arg.get_action().takes_values();
        let mut setting = Setting {
            id: arg.get_id().to_string(),
            origin: Origin::Flag(format!("--{long}")),
            words: vec![word.clone()],
        };
        match (takes_value, value, follower) {
            (true, None, Some(follower)) => setting.words.push(follower.clone()),
            (true, None, None) => {
                found.errors.push(format!("`--{long}` needs a value"));
                continue;
            }
            (_, _, Some(extra)) => {
                let extra = extra.to_string_lossy();
                found.errors.push(format!("unexpected argument `{extra}` after `{text}`"));
            }
            (_, _, None) => {}
        }
        found.settings.push(setting);
    }
    found
}

fn unknown_flag(command: &Command, long: &str) -> String {
    let known = command.get_arguments().filter_map(Arg::get_long);
    match nearest(long, known) {
        Some(known) => format!("unknown flag `--{long}`; did you mean `--{known}`?"),
        None => format!("unknown flag `--{long}`; `--help` lists all flags"),
    }
}

/// Reads the environment variable of every setting. Empty variables count as not set. Unknown variables
/// with the prefix are ignored, because other Steadfast programs may use them.
pub(crate) fn from_environment(command: &Command, variables: &BTreeMap<String, String>) -> Found {
    let mut found = Found::default();
    for arg in command.get_arguments().filter(|arg| is_setting(arg)) {
        let Some(long) = arg.get_long() else { continue };
        let name = variable_of(long);
        let Some(value) = variables.get(&name).filter(|value| !value.is_empty()) else { continue };
        found.add(arg, long, Origin::Variable(name), value);
    }
    found
}

/// Parses the text of a file of settings; `path` names the file in errors.
pub(crate) fn from_file(command: &Command, path: &Path, text: &str) -> Found {
    let mut found = Found::default();
    let shown = path.display();
    let table: toml::Table = match text.parse() {
        Ok(table) => table,
        Err(error) => {
            found.errors.push(format!("{shown}: {}", describe(text, &error)));
            return found;
        }
    };
    let known = |arg: &&Arg| is_setting(arg) && arg.get_id() != "config";
    let keys: BTreeMap<String, (&Arg, &str)> = command
        .get_arguments()
        .filter(known)
        .filter_map(|arg| arg.get_long().map(|long| (key_of(long), (arg, long))))
        .collect();
    for (key, value) in &table {
        let Some((arg, long)) = keys.get(key) else {
            found.errors.push(match nearest(key, keys.keys().map(String::as_str)) {
                Some(near) => format!("{shown}: unknown key `{key}`; did you mean `{near}`?"),
                None => format!("{shown}: unknown key `{key}`"),
            });
            continue;
        };
        match plain(value) {
            Some(value) => found.add(arg, long, Origin::File(format!("{shown}: {key}")), &value),
            None => found.errors.push(format!(
                "{shown}: {key}: invalid type {}; use a string, a number, a list of them, or \
                 true or false",
                value.type_str()
            )),
        }
    }
    found
}

impl Found {
    fn add(&mut self, arg: &Arg, long: &str, origin: Origin, value: &str) {
        let words = if arg.get_action().takes_values() {
            vec![OsString::from(format!("--{long}={value}"))]
        } else {
            match value {
                "true" | "1" | "yes" => vec![OsString::from(format!("--{long}"))],
                "false" | "0" | "no" => Vec::new(),
                _ => {
                    self.errors.push(format!("{origin}: `{value}` is neither `true` nor `false`"));
                    return;
                }
            }
        };
        self.settings.push(Setting { id: arg.get_id().to_string(), origin, words });
    }
}

/// Returns whether an argument is a setting, unlike `--help` and `--version`.
fn is_setting(arg: &Arg) -> bool {
    !matches!(arg.get_id().as_str(), "help" | "version")
}

/// Converts a value of a file to the value of a flag.
fn plain(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(switch) => Some(switch.to_string()),
        toml::Value::Array(items) => {
            let items: Option<Vec<String>> = items.iter().map(plain).collect();
            items.map(|items| items.join(","))
        }
        toml::Value::Datetime(_) | toml::Value::Table(_) => None,
    }
}

fn describe(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().trim_end_matches('.');
    match error.span() {
        Some(span) => {
            let line = text[..span.start.min(text.len())].matches('\n').count() + 1;
            format!("line {line}: {message}")
        }
        None => message.to_owned(),
    }
}
