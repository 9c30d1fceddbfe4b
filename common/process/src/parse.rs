//! Reads the settings of a process from flags, environment variables and a file, and reports all errors at
//! once.
//!
//! Every setting is checked on its own, including overridden ones. The valid settings are then parsed
//! together, so that clap reports missing and conflicting ones.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Write;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, ArgMatches, Command, Parser};

use crate::sources::{
    Found, Origin, Setting, from_command_line, from_environment, from_file, key_of, variable_of,
};

/// Why no settings are returned.
#[derive(Debug)]
pub enum Refusal {
    /// All errors, one message each.
    Errors(Vec<String>),
    /// The user requested help or the version.
    HelpOrVersion(Box<clap::Error>),
    /// The user requested a check of the settings, and they are valid; this lists them.
    Checked(String),
}

/// Parses the settings of this process. Flags override `STEADFAST_…` variables, which override the file,
/// which overrides the defaults. Exits if there are no settings to return.
pub fn parse<A: Parser>() -> A {
    let words: Vec<OsString> = std::env::args_os().collect();
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        })
        .collect();
    match try_parse(&words, &variables, &|path| std::fs::read_to_string(path)) {
        Ok(args) => args,
        Err(Refusal::HelpOrVersion(shown)) => shown.exit(),
        Err(Refusal::Checked(listing)) => {
            crate::print(listing);
            std::process::exit(0);
        }
        Err(Refusal::Errors(errors)) => {
            let command = A::command();
            for error in errors {
                // A failed write to stderr must not change the exit code.
                let _ = writeln!(std::io::stderr(), "{}: error: {error}", command.get_name());
            }
            std::process::exit(2);
        }
    }
}

/// Parses settings from given arguments (the program name first), variables and file reader.
///
/// # Errors
/// [`Refusal`]: all errors, or the user requested something other than a run.
pub fn try_parse<A: Parser>(
    words: &[OsString],
    variables: &BTreeMap<String, String>,
    read: &dyn Fn(&Path) -> std::io::Result<String>,
) -> Result<A, Refusal> {
    let mut command = A::command().mut_args(|arg| arg.env(None));
    command.build();
    let (program, words) = words.split_first().map_or((None, words), |(it, rest)| (Some(it), rest));
    if let Some(question) = words.iter().find(|word| is_question(word)) {
        return Err(answer(A::command(), question));
    }
    let flags = from_command_line(&command, words);
    let environment = from_environment(&command, variables);
    let file = match config_file(&flags, &environment) {
        None => Found::default(),
        Some(path) => match read(&path) {
            Ok(text) => from_file(&command, &path, &text),
            Err(error) => Found {
                settings: Vec::new(),
                errors: vec![format!("cannot read {}: {error}", path.display())],
            },
        },
    };
    let mut reader = Reader { command, program: program.cloned(), errors: Vec::new() };
    let mut settings = Vec::new();
    for found in [flags, environment, file] {
        reader.errors.extend(found.errors);
        settings.extend(found.settings);
    }
    reader.read(settings)
}

fn is_question(word: &OsString) -> bool {
    matches!(word.to_str(), Some("--help" | "-h" | "--version" | "-V"))
}

/// Renders clap's help, with the environment variable of each flag, or the version.
fn answer(command: Command, question: &OsString) -> Refusal {
    let command = command.mut_args(|arg| match arg.get_long().map(variable_of) {
        Some(name) => arg.env(name).hide_env_values(true),
        None => arg,
    });
    let name = OsString::from(command.get_name());
    match command.try_get_matches_from([name, question.clone()]) {
        Err(shown) if !shown.use_stderr() => Refusal::HelpOrVersion(Box::new(shown)),
        _ => Refusal::Errors(vec![format!("unexpected argument `{}`", question.to_string_lossy())]),
    }
}

fn config_file(flags: &Found, environment: &Found) -> Option<PathBuf> {
    let mut settings = flags.settings.iter().rev().chain(&environment.settings);
    let words = &settings.find(|setting| setting.id == "config")?.words;
    let last = words.last()?.to_str()?;
    Some(PathBuf::from(last.strip_prefix("--config=").unwrap_or(last)))
}

/// Checks settings and parses them into arguments.
struct Reader {
    command: Command,
    program: Option<OsString>,
    errors: Vec<String>,
}

impl Reader {
    fn read<A: Parser>(mut self, settings: Vec<Setting>) -> Result<A, Refusal> {
        let mut invalid = BTreeSet::new();
        let mut chosen: BTreeMap<String, Vec<Setting>> = BTreeMap::new();
        for setting in settings {
            if let Some(error) = self.error_of(&setting) {
                self.errors.push(error);
                invalid.insert(setting.id);
                continue;
            }
            self.choose(&mut chosen, setting);
        }
        let words = chosen.values().flatten().flat_map(|setting| setting.words.clone());
        let matches = match self.matches(words) {
            Ok(matches) => Some(matches),
            Err(error) => {
                self.record_whole(&error, &invalid);
                None
            }
        };
        let Some(matches) = matches.filter(|_| self.errors.is_empty()) else {
            return Err(Refusal::Errors(self.errors));
        };
        if self.asks_for_check(&matches) {
            return Err(Refusal::Checked(self.listing(&matches, &chosen)));
        }
        A::from_arg_matches(&matches).map_err(|error| Refusal::Errors(vec![first_line(&error)]))
    }

    /// Keeps a setting unless a source of higher precedence has it as well.
    fn choose(&mut self, chosen: &mut BTreeMap<String, Vec<Setting>>, setting: Setting) {
        let held = chosen.entry(setting.id.clone()).or_default();
        match held.first() {
            Some(first) if setting.origin.rank() < first.origin.rank() => {}
            Some(first) if setting.origin.rank() == first.origin.rank() => {
                let repeats = self.command.get_arguments().any(|arg| {
                    arg.get_id() == setting.id.as_str()
                        && matches!(arg.get_action(), ArgAction::Append | ArgAction::Count)
                });
                if !repeats {
                    self.errors.push(format!("`{}` is given twice", setting.origin));
                    held.clear();
                }
                held.push(setting);
            }
            Some(_) | None => *held = vec![setting],
        }
    }

    fn matches(&self, words: impl Iterator<Item = OsString>) -> Result<ArgMatches, clap::Error> {
        let program = self.program.clone().unwrap_or_else(|| self.command.get_name().into());
        self.command.clone().try_get_matches_from(std::iter::once(program).chain(words))
    }

    /// Returns the error of a setting on its own.
    fn error_of(&self, setting: &Setting) -> Option<String> {
        let error = self.matches(setting.words.iter().cloned()).err()?;
        let origin = &setting.origin;
        let value = match error.get(ContextKind::InvalidValue) {
            Some(ContextValue::String(value)) => value.as_str(),
            _ => "",
        };
        match error.kind() {
            // These concern the settings as a whole.
            ErrorKind::MissingRequiredArgument | ErrorKind::ArgumentConflict => None,
            ErrorKind::ValueValidation => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                let cause = cause.unwrap_or_else(|| "not a valid value".to_owned());
                Some(format!("{origin}: invalid value `{value}`: {cause}"))
            }
            ErrorKind::InvalidValue => match error.get(ContextKind::ValidValue) {
                Some(ContextValue::Strings(valid)) => {
                    Some(format!("{origin}: invalid value `{value}`: use {}", valid.join(" or ")))
                }
                _ => Some(format!("{origin}: {}", first_line(&error))),
            },
            _ => Some(format!("{origin}: {}", first_line(&error))),
        }
    }

    /// Records missing and conflicting settings. A setting with an invalid value is not missing.
    fn record_whole(&mut self, error: &clap::Error, invalid: &BTreeSet<String>) {
        let missing = match (error.kind(), error.get(ContextKind::InvalidArg)) {
            (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(missing))) => missing,
            _ => {
                self.errors.push(first_line(error));
                return;
            }
        };
        for usage in missing {
            let flag = usage.split([' ', '=']).next().unwrap_or(usage);
            let long = flag.trim_start_matches('-');
            let id = self.command.get_arguments().find(|arg| arg.get_long() == Some(long));
            if id.is_some_and(|arg| invalid.contains(arg.get_id().as_str())) {
                continue;
            }
            self.errors.push(format!(
                "{flag} is missing; set the flag, {} or `{}` in the settings file",
                variable_of(long),
                key_of(long)
            ));
        }
    }

    fn asks_for_check(&self, matches: &ArgMatches) -> bool {
        self.command.get_arguments().any(|arg| arg.get_id() == "check_config")
            && matches.get_flag("check_config")
    }

    /// Lists the effective settings in the format of a settings file, each with its origin.
    fn listing(&self, matches: &ArgMatches, chosen: &BTreeMap<String, Vec<Setting>>) -> String {
        let mut listing = String::new();
        for arg in self.command.get_arguments() {
            let id = arg.get_id().as_str();
            let (Some(long), true) = (arg.get_long(), arg.get_action().takes_values()) else {
                continue;
            };
            let Some(values) = matches.get_raw(id) else { continue };
            let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
            let origin = match chosen.get(id).and_then(|settings| settings.first()) {
                Some(Setting { origin: Origin::Flag(_), .. }) => "flag".to_owned(),
                Some(setting) => setting.origin.to_string(),
                None => "default".to_owned(),
            };
            let value = toml::Value::String(values.join(","));
            let _ = writeln!(listing, "{} = {value} # {origin}", key_of(long));
        }
        listing
    }
}

/// Returns clap's message without its prefix and the usage text.
fn first_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let line = text.lines().next().unwrap_or("wrong arguments");
    line.trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CommonArgs;

    #[derive(Debug, Parser)]
    #[command(name = "steadfast-test", version)]
    struct Args {
        #[command(flatten)]
        common: CommonArgs,
        /// Number of pserver slots.
        #[arg(long, default_value_t = 2)]
        pservers: u32,
    }

    fn read(words: &[&str], variables: &[(&str, &str)], file: &str) -> Result<Args, Refusal> {
        let words: Vec<OsString> =
            ["it"].iter().chain(words).map(|word| OsString::from(*word)).collect();
        let variables = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        try_parse(&words, &variables, &|_| Ok(file.to_owned()))
    }

    fn errors(words: &[&str], variables: &[(&str, &str)], file: &str) -> Vec<String> {
        match read(words, variables, file) {
            Err(Refusal::Errors(errors)) => errors,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flags_override_variables_which_override_the_file_which_overrides_defaults() {
        let file = "job = 'of-file'\npservers = 5\nlease_ttl = '9s'\n";
        let variables = [("STEADFAST_JOB", "of-variable"), ("STEADFAST_PSERVERS", "4")];
        let args = read(&["--config", "it.toml", "--pservers", "3"], &variables, file).unwrap();
        assert_eq!(args.pservers, 3);
        assert_eq!(args.common.job, "of-variable");
        assert_eq!(args.common.lease_ttl.as_secs(), 9);
        assert_eq!(args.common.log.filter, "info");
    }

    #[test]
    fn a_list_of_higher_precedence_replaces_one_of_lower() {
        let file = "job = 'a'\netcd_endpoints = ['http://a:1', 'http://b:1']";
        let args = read(&["--config=it.toml"], &[], file).unwrap();
        assert_eq!(args.common.etcd.etcd_endpoints, ["http://a:1", "http://b:1"]);
        let words = ["--config=it.toml", "--etcd-endpoints", "http://c:1"];
        let args = read(&words, &[], file).unwrap();
        assert_eq!(args.common.etcd.etcd_endpoints, ["http://c:1"]);
    }

    #[test]
    fn the_errors_of_all_sources_are_reported_together() {
        let words =
            ["--config=it.toml", "--listen", "here", "--log-format=xml", "--leas-ttl", "1s"];
        let variables = [("STEADFAST_LEASE_TTL", "soon"), ("STEADFAST_ROOT", "no-slash")];
        let file = "pservers = 'many'\nadmin_listn = 'x'\nlog = {}\n";
        let errors = errors(&words, &variables, file);
        let expected = [
            "unknown flag `--leas-ttl`; did you mean `--lease-ttl`?",
            "it.toml: unknown key `admin_listn`; did you mean `admin_listen`?",
            "it.toml: log: invalid type table",
            "--listen: invalid value `here`: use an IP address and a port",
            "--log-format: invalid value `xml`: use text or json",
            "STEADFAST_LEASE_TTL: invalid value `soon`: cannot parse `soon` as a duration",
            "STEADFAST_ROOT: invalid value `no-slash`",
            "it.toml: pservers: invalid value `many`: invalid digit",
            "--job is missing; set the flag, STEADFAST_JOB or `job` in the settings file",
        ];
        assert_eq!(errors.len(), expected.len(), "{errors:#?}");
        for start in expected {
            assert!(errors.iter().any(|error| error.starts_with(start)), "{start}: {errors:#?}");
        }
    }

    #[test]
    fn an_invalid_value_is_an_error_even_if_it_is_overridden() {
        let errors = errors(&["--job=a", "--pservers=1"], &[("STEADFAST_PSERVERS", "x")], "");
        assert_eq!(errors.len(), 1);
    }

    #[test]
    fn a_required_setting_with_an_invalid_value_is_not_reported_as_missing() {
        let errors = errors(&["--job", "a b"], &[], "");
        assert_eq!(errors.len(), 1);
        assert!(errors[0].starts_with("--job: invalid value `a b`: use 1 to 100"), "{errors:?}");
    }

    #[test]
    fn a_missing_companion_setting_is_named() {
        let errors = errors(&["--job=a", "--etcd-user=me"], &[], "");
        assert_eq!(errors.len(), 1);
        assert!(errors[0].starts_with("--etcd-password-file is missing"), "{errors:?}");
    }

    #[test]
    fn a_switch_can_be_set_and_unset_by_variable_and_file() {
        let on = [("STEADFAST_CHECK_CONFIG", "true"), ("STEADFAST_JOB", "a")];
        assert!(matches!(read(&[], &on, ""), Err(Refusal::Checked(_))));
        let off = [("STEADFAST_CHECK_CONFIG", "false"), ("STEADFAST_JOB", "a")];
        assert!(read(&["--config=it.toml"], &off, "check_config = true").is_ok());
    }

    #[test]
    fn a_check_lists_the_effective_settings_and_their_sources() {
        let words = ["--check-config", "--job=a", "--config=it.toml"];
        let Err(Refusal::Checked(listing)) = read(&words, &[], "pservers = 7") else {
            panic!("not checked");
        };
        assert!(listing.contains("job = \"a\" # flag\n"), "{listing}");
        assert!(listing.contains("pservers = \"7\" # it.toml: pservers\n"), "{listing}");
        assert!(listing.contains("lease_ttl = \"5s\" # default\n"), "{listing}");
    }

    #[test]
    fn a_repeated_flag_and_a_flag_without_value_are_errors() {
        assert_eq!(errors(&["--job=a", "--job=b"], &[], ""), ["`--job` is given twice"]);
        let errors = errors(&["--job=a", "--root", "--pservers=1"], &[], "");
        assert_eq!(errors, ["`--root` needs a value"]);
    }

    #[test]
    fn help_names_the_variables() {
        let Err(Refusal::HelpOrVersion(shown)) = read(&["--help", "--nonsense"], &[], "") else {
            panic!("not shown");
        };
        assert!(shown.render().to_string().contains("STEADFAST_ETCD_CA"));
    }
}
