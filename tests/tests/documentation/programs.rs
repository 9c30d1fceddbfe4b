//! The commands, flags and targets of the programs and the Makefile, from their own output.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use steadfast_tests::program;

use crate::pages::read;

const PROGRAMS: &[&str] =
    &["steadfast", "steadfast-master", "steadfast-pserver", "steadfast-trainer"];

/// Commands, flags and targets that a page may mention.
pub struct Known {
    pub programs: BTreeMap<String, Help>,
    pub makefile: Makefile,
}

/// The parsed `--help` of a program or a subcommand.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Help {
    /// Long and short flags, and whether they take a value.
    pub flags: BTreeMap<String, Takes>,
    pub commands: BTreeMap<String, Help>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    Nothing,
    Value,
}

/// Returns the help of all built programs.
pub fn ours() -> BTreeMap<String, Help> {
    let help = |name: &&str| ((*name).to_owned(), ask(&program(name), &[]));
    PROGRAMS.iter().map(help).collect()
}

fn ask(program: &Path, words: &[&str]) -> Help {
    let output =
        Command::new(program).args(words).arg("--help").output().expect("the program starts");
    assert!(output.status.success(), "{} {words:?} --help fails", program.display());
    let text = String::from_utf8(output.stdout).expect("help is UTF-8");
    let mut help = Help::parse(&text);
    for (name, inner) in &mut help.commands {
        if name != "help" {
            *inner = ask(program, &[words, &[name.as_str()]].concat());
        }
    }
    help
}

impl Help {
    /// Parses the output of clap, without the help of the subcommands.
    pub fn parse(text: &str) -> Self {
        let mut help = Self::default();
        let mut heading = "";
        for line in text.lines() {
            if !line.starts_with(' ') {
                heading = line;
                continue;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            match (heading, words.as_slice()) {
                ("Commands:", [name, ..]) if line.starts_with("  ") && !line.starts_with("   ") => {
                    help.commands.insert((*name).to_owned(), Self::default());
                }
                (_, [first, ..]) if is_flag(first) => help.add_flags(&words),
                _ => {}
            }
        }
        help
    }

    /// Adds the flags of a line such as `-o, --output <FORM>  Form of the output`.
    fn add_flags(&mut self, words: &[&str]) {
        let names = words.iter().take_while(|it| is_flag(it)).count();
        let takes = match words.get(names) {
            Some(next) if next.starts_with('<') || next.starts_with("[<") => Takes::Value,
            _ => Takes::Nothing,
        };
        for name in &words[..names] {
            self.flags.insert(name.trim_end_matches(',').to_owned(), takes);
        }
    }

    /// Returns whether the program or one of its subcommands has a flag.
    pub fn knows(&self, flag: &str) -> bool {
        self.flags.contains_key(flag) || self.commands.values().any(|it| it.knows(flag))
    }
}

/// Returns whether a word looks like a flag, long or short.
pub fn is_flag(word: &str) -> bool {
    word.strip_prefix('-').is_some_and(|it| {
        it.trim_start_matches('-').starts_with(|first: char| first.is_ascii_alphabetic())
    })
}

/// The targets of a Makefile, and its variables.
pub struct Makefile {
    pub targets: BTreeSet<String>,
    text: String,
}

impl Makefile {
    pub fn ours() -> Self {
        Self::parse(read("Makefile").expect("the Makefile is text"))
    }

    pub fn parse(text: String) -> Self {
        let is_name = |it: &str| it.bytes().all(|it| it.is_ascii_lowercase() || it == b'-');
        let targets = text.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name);
        let targets = targets.filter(|it| is_name(it)).map(str::to_owned).collect();
        Self { targets, text }
    }

    pub fn reads(&self, variable: &str) -> bool {
        self.text.contains(&format!("$({variable})"))
    }
}

#[test]
fn help_is_parsed_as_clap_prints_it() {
    let help = Help::parse(
        "Does it\n\nUsage: x [OPTIONS] <COMMAND>\n\nCommands:\n  run   Run it, --fast or not\n  \
         stop  Stop it\n\nOptions:\n  -o, --output <FORM>  Form [default: text]\n          Possible \
         values:\n          - text: For people\n      --dry        Change nothing\n",
    );
    assert_eq!(help.commands.keys().collect::<Vec<_>>(), ["run", "stop"]);
    let flags: Vec<_> = help.flags.iter().map(|(name, takes)| (name.as_str(), *takes)).collect();
    let expected = [("--dry", Takes::Nothing), ("--output", Takes::Value), ("-o", Takes::Value)];
    assert_eq!(flags, expected);
}
