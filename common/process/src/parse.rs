//! Reads a process's settings from flags, variables and a file, and reports every fault at once.
//!
//! Each setting found anywhere is checked by itself, also one that a stronger place overrides; what
//! is right is then parsed as a whole, so that clap judges what is missing or contradictory.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, ArgMatches, Command, Parser};

use crate::sources::{
    Found, Origin, Setting, from_command_line, from_environment, from_file, key_of, variable_of,
};

/// Why there are no settings to go on with.
#[derive(Debug)]
pub enum Refusal {
    /// Everything that is wrong, one sentence each.
    Faults(Vec<String>),
    /// The user asked for help or the version.
    Shown(Box<clap::Error>),
    /// The user asked to check the settings, and they are right; they are listed here.
    Checked(String),
}

/// Parses the settings of this process: flag before `STEADFAST_…` variable before file before
/// default. Ends the process when there is nothing to go on with.
pub fn parse<A: Parser>() -> A {
    let words: Vec<OsString> = std::env::args_os().collect();
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        })
        .collect();
    match try_parse(&words, &variables, &|path| std::fs::read_to_string(path)) {
        Ok(args) => args,
        Err(Refusal::Shown(shown)) => shown.exit(),
        Err(Refusal::Checked(listing)) => {
            print!("{listing}");
            std::process::exit(0);
        }
        Err(Refusal::Faults(faults)) => {
            let command = A::command();
            for fault in faults {
                eprintln!("{}: error: {fault}", command.get_name());
            }
            std::process::exit(2);
        }
    }
}

/// The same from given words (the program's name first), variables and file reader.
///
/// # Errors
/// [`Refusal`]: all faults, or that the user asked for something else than a run.
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
                faults: vec![format!("cannot read {}: {error}", path.display())],
            },
        },
    };
    let mut reader = Reader { command, program: program.cloned(), faults: Vec::new() };
    let mut settings = Vec::new();
    for found in [flags, environment, file] {
        reader.faults.extend(found.faults);
        settings.extend(found.settings);
    }
    reader.read(settings)
}

fn is_question(word: &OsString) -> bool {
    matches!(word.to_str(), Some("--help" | "-h" | "--version" | "-V"))
}

/// Has clap write the help, with each flag's variable in it.
fn answer(command: Command, question: &OsString) -> Refusal {
    let command = command.mut_args(|arg| match arg.get_long().map(variable_of) {
        Some(name) => arg.env(name).hide_env_values(true),
        None => arg,
    });
    let name = OsString::from(command.get_name());
    match command.try_get_matches_from([name, question.clone()]) {
        Err(shown) if !shown.use_stderr() => Refusal::Shown(Box::new(shown)),
        _ => Refusal::Faults(vec![format!("unexpected word `{}`", question.to_string_lossy())]),
    }
}

fn config_file(flags: &Found, environment: &Found) -> Option<PathBuf> {
    let mut settings = flags.settings.iter().rev().chain(&environment.settings);
    let words = &settings.find(|setting| setting.id == "config")?.words;
    let last = words.last()?.to_str()?;
    Some(PathBuf::from(last.strip_prefix("--config=").unwrap_or(last)))
}

/// Checks settings and makes arguments of them.
struct Reader {
    command: Command,
    program: Option<OsString>,
    faults: Vec<String>,
}

impl Reader {
    fn read<A: Parser>(mut self, settings: Vec<Setting>) -> Result<A, Refusal> {
        let mut faulty = BTreeSet::new();
        let mut chosen: BTreeMap<String, Vec<Setting>> = BTreeMap::new();
        for setting in settings {
            if let Some(fault) = self.fault_of(&setting) {
                self.faults.push(fault);
                faulty.insert(setting.id);
                continue;
            }
            self.choose(&mut chosen, setting);
        }
        let words = chosen.values().flatten().flat_map(|setting| setting.words.clone());
        let matches = match self.matches(words) {
            Ok(matches) => Some(matches),
            Err(error) => {
                self.judge_whole(&error, &faulty);
                None
            }
        };
        let Some(matches) = matches.filter(|_| self.faults.is_empty()) else {
            return Err(Refusal::Faults(self.faults));
        };
        if self.asks_for_check(&matches) {
            return Err(Refusal::Checked(self.listing(&matches, &chosen)));
        }
        A::from_arg_matches(&matches).map_err(|error| Refusal::Faults(vec![first_line(&error)]))
    }

    /// Keeps a setting unless a stronger place has it as well.
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
                    self.faults.push(format!("`{}` is given twice", setting.origin));
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

    /// What is wrong with a setting, whatever the others are.
    fn fault_of(&self, setting: &Setting) -> Option<String> {
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
                let cause = cause.unwrap_or_else(|| "not a value of this setting".to_owned());
                Some(format!("{origin}: `{value}` does not fit: {cause}"))
            }
            ErrorKind::InvalidValue => match error.get(ContextKind::ValidValue) {
                Some(ContextValue::Strings(valid)) => {
                    Some(format!("{origin}: `{value}` does not fit: use {}", valid.join(" or ")))
                }
                _ => Some(format!("{origin}: {}", first_line(&error))),
            },
            _ => Some(format!("{origin}: {}", first_line(&error))),
        }
    }

    /// Notes what is missing or contradictory; a setting that is there but faulty is not missing.
    fn judge_whole(&mut self, error: &clap::Error, faulty: &BTreeSet<String>) {
        let missing = match (error.kind(), error.get(ContextKind::InvalidArg)) {
            (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(missing))) => missing,
            _ => {
                self.faults.push(first_line(error));
                return;
            }
        };
        for usage in missing {
            let flag = usage.split([' ', '=']).next().unwrap_or(usage);
            let long = flag.trim_start_matches('-');
            let id = self.command.get_arguments().find(|arg| arg.get_long() == Some(long));
            if id.is_some_and(|arg| faulty.contains(arg.get_id().as_str())) {
                continue;
            }
            self.faults.push(format!(
                "{flag} is missing; give the flag, {} or `{}` in the settings file",
                variable_of(long),
                key_of(long)
            ));
        }
    }

    fn asks_for_check(&self, matches: &ArgMatches) -> bool {
        self.command.get_arguments().any(|arg| arg.get_id() == "check_config")
            && matches.get_flag("check_config")
    }

    /// The settings in force, as a settings file, each with its origin.
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

/// clap's sentence, without its prefix and the usage below it.
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

    fn faults(words: &[&str], variables: &[(&str, &str)], file: &str) -> Vec<String> {
        match read(words, variables, file) {
            Err(Refusal::Faults(faults)) => faults,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_flag_goes_before_a_variable_before_the_file_before_the_default() {
        let file = "job = 'of-file'\npservers = 5\nlease_ttl = '9s'\n";
        let variables = [("STEADFAST_JOB", "of-variable"), ("STEADFAST_PSERVERS", "4")];
        let args = read(&["--config", "it.toml", "--pservers", "3"], &variables, file).unwrap();
        assert_eq!(args.pservers, 3);
        assert_eq!(args.common.job, "of-variable");
        assert_eq!(args.common.lease_ttl.as_secs(), 9);
        assert_eq!(args.common.log.filter, "info");
    }

    #[test]
    fn a_list_of_a_stronger_place_replaces_that_of_a_weaker_one() {
        let file = "job = 'a'\netcd_endpoints = ['http://a:1', 'http://b:1']";
        let args = read(&["--config=it.toml"], &[], file).unwrap();
        assert_eq!(args.common.etcd.etcd_endpoints, ["http://a:1", "http://b:1"]);
        let words = ["--config=it.toml", "--etcd-endpoints", "http://c:1"];
        let args = read(&words, &[], file).unwrap();
        assert_eq!(args.common.etcd.etcd_endpoints, ["http://c:1"]);
    }

    #[test]
    fn every_fault_of_every_place_is_reported_at_once() {
        let words =
            ["--config=it.toml", "--listen", "here", "--log-format=xml", "--leas-ttl", "1s"];
        let variables = [("STEADFAST_LEASE_TTL", "soon"), ("STEADFAST_ROOT", "no-slash")];
        let file = "pservers = 'many'\nadmin_listn = 'x'\nlog = {}\n";
        let faults = faults(&words, &variables, file);
        let expected = [
            "unknown flag `--leas-ttl`; did you mean `--lease-ttl`?",
            "it.toml: unknown key `admin_listn`; did you mean `admin_listen`?",
            "it.toml: log: a table does not fit",
            "--listen: `here` does not fit: use an IP address and a port",
            "--log-format: `xml` does not fit: use text or json",
            "STEADFAST_LEASE_TTL: `soon` does not fit: `soon` is no duration",
            "STEADFAST_ROOT: `no-slash` does not fit",
            "it.toml: pservers: `many` does not fit: invalid digit",
            "--job is missing; give the flag, STEADFAST_JOB or `job` in the settings file",
        ];
        assert_eq!(faults.len(), expected.len(), "{faults:#?}");
        for start in expected {
            assert!(faults.iter().any(|fault| fault.starts_with(start)), "{start}: {faults:#?}");
        }
    }

    #[test]
    fn a_faulty_value_that_is_overridden_is_a_fault_all_the_same() {
        let faults = faults(&["--job=a", "--pservers=1"], &[("STEADFAST_PSERVERS", "x")], "");
        assert_eq!(faults.len(), 1);
    }

    #[test]
    fn a_required_setting_with_a_faulty_value_is_not_called_missing() {
        let faults = faults(&["--job", "a b"], &[], "");
        assert_eq!(faults.len(), 1);
        assert!(faults[0].starts_with("--job: `a b` does not fit: use 1 to 100"), "{faults:?}");
    }

    #[test]
    fn settings_that_need_each_other_are_asked_for_by_name() {
        let faults = faults(&["--job=a", "--etcd-user=me"], &[], "");
        assert_eq!(faults.len(), 1);
        assert!(faults[0].starts_with("--etcd-password-file is missing"), "{faults:?}");
    }

    #[test]
    fn a_switch_can_be_set_and_unset_by_variable_and_file() {
        let on = [("STEADFAST_CHECK_CONFIG", "true"), ("STEADFAST_JOB", "a")];
        assert!(matches!(read(&[], &on, ""), Err(Refusal::Checked(_))));
        let off = [("STEADFAST_CHECK_CONFIG", "false"), ("STEADFAST_JOB", "a")];
        assert!(read(&["--config=it.toml"], &off, "check_config = true").is_ok());
    }

    #[test]
    fn a_check_lists_the_settings_in_force_and_where_they_come_from() {
        let words = ["--check-config", "--job=a", "--config=it.toml"];
        let Err(Refusal::Checked(listing)) = read(&words, &[], "pservers = 7") else {
            panic!("not checked");
        };
        assert!(listing.contains("job = \"a\" # flag\n"), "{listing}");
        assert!(listing.contains("pservers = \"7\" # it.toml: pservers\n"), "{listing}");
        assert!(listing.contains("lease_ttl = \"5s\" # default\n"), "{listing}");
    }

    #[test]
    fn twice_the_same_flag_and_a_flag_without_value_are_faults() {
        assert_eq!(faults(&["--job=a", "--job=b"], &[], ""), ["`--job` is given twice"]);
        let faults = faults(&["--job=a", "--root", "--pservers=1"], &[], "");
        assert_eq!(faults, ["`--root` needs a value"]);
    }

    #[test]
    fn help_is_shown_and_names_the_variables() {
        let Err(Refusal::Shown(shown)) = read(&["--help", "--nonsense"], &[], "") else {
            panic!("not shown");
        };
        assert!(shown.render().to_string().contains("STEADFAST_ETCD_CA"));
    }
}
