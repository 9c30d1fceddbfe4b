//! Checks the commands on a page, in code blocks and in backticks.

use crate::pages::{Page, split_code};
use crate::programs::{Help, Known, Takes, is_flag};

/// Flags that pages mention alone and that belong to other programs: etcd, etcdctl and curl, Docker,
/// TensorBoard, and the simulator, which this test does not build.
const OF_OTHERS: &[&str] = &[
    "--auto-compaction-mode",
    "--auto-compaction-retention",
    "--cacert",
    "--local-addr",
    "--rdzv-conf",
    "--cert",
    "--client-cert-auth",
    "--endpoints",
    "--initial-cluster",
    "--key",
    "--peer-cert-allowed-cn",
    "--quota-backend-bytes",
    "--user",
    "--build-arg",
    "--logdir",
    "--delete-emptydir-data",
    "--ignore-daemonsets",
    "--explore",
    "--pairs",
    "--moves",
    "--trace",
    // Of `python -m steadfast.worker`.
    "--threads",
];

/// Returns a message for each flag, subcommand, target or variable on a page that is not `known`.
pub fn unknown(page: &Page, known: &Known) -> Vec<String> {
    let mut errors = Vec::new();
    let mut check = |line: usize, text: &str| {
        for (before, words) in simple_commands(text) {
            let place = format!("{}:{}", page.path, line + before);
            errors.extend(command_errors(&words, known).iter().map(|it| format!("{place}: {it}")));
        }
    };
    for block in &page.blocks {
        match block.language.as_str() {
            "sh" => check(block.line, &block.text),
            "console" => check(block.line, &prompted(&block.text)),
            _ => {}
        }
    }
    for (line, text) in &page.prose {
        for code in split_code(text).0 {
            // Brackets mark optional parts.
            match code.contains(" [") {
                true => check(*line, &code.replace(['[', ']'], " ").replace(" | ", " ")),
                false => check(*line, &code),
            }
        }
    }
    errors
}

/// Returns the input of a session: lines after a prompt, and their continuation lines.
fn prompted(session: &str) -> String {
    let (mut typed, mut goes_on) = (String::new(), false);
    for line in session.lines() {
        let command = line.trim_start().strip_prefix("$ ").or(goes_on.then_some(line));
        goes_on = command.is_some_and(|it| it.ends_with('\\'));
        // Output lines become empty lines, which keeps the line numbers.
        typed += command.unwrap_or_default();
        typed.push('\n');
    }
    typed
}

/// Returns the words of each simple command in a shell text, and the number of lines before it. Handles
/// quotes, comments, pipes and lists; the content of `$(…)` starts a command.
fn simple_commands(text: &str) -> Vec<(usize, Vec<String>)> {
    let mut commands = vec![(0, Vec::new())];
    let (mut word, mut line, mut quote) = (String::new(), 0, None);
    let mut letters = text.chars().chain(['\n']).peekable();
    while let Some(letter) = letters.next() {
        line += usize::from(letter == '\n');
        let next = letters.peek().copied().unwrap_or('\n');
        let ends_command = match letter {
            '\n' | ';' => true,
            '$' => next == '(',
            ')' => !word.contains('('),
            // A bar within a word separates alternatives in a synopsis.
            '|' | '&' => word.is_empty() || next.is_whitespace(),
            _ => false,
        };
        match quote {
            Some(open) if letter == open => quote = None,
            Some(_) => word.push(letter),
            None if letter == '"' || letter == '\'' => quote = Some(letter),
            None if letter == '\\' && next == '\n' => {
                line += usize::from(letters.next().is_some());
            }
            None if letter == '#' && word.is_empty() => {
                while letters.next_if(|it| *it != '\n').is_some() {}
            }
            None if ends_command || letter.is_whitespace() => {
                let (_, words) = commands.last_mut().expect("there is one");
                words.extend((!word.is_empty()).then(|| std::mem::take(&mut word)));
                if ends_command {
                    letters.next_if(|it| letter == '$' && *it == '(');
                    commands.push((line, Vec::new()));
                }
            }
            None => word.push(letter),
        }
    }
    commands.retain(|(_, words)| !words.is_empty());
    commands
}

/// Returns the errors in one command.
fn command_errors(words: &[String], known: &Known) -> Vec<String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let start = words.iter().take_while(|it| is_assignment(it)).count();
    let words = &words[start..];
    let Some((first, rest)) = words.split_first() else {
        return Vec::new();
    };
    if first.starts_with("--") {
        return lone_flags(words, known);
    }
    if *first == "make" {
        return targets(rest, known);
    }
    let name = first.rsplit('/').next().unwrap_or(first);
    if let Some(help) = known.programs.get(name) {
        return arguments(name, help, rest);
    }
    // In a container: `docker compose run admin steadfast status`.
    let inner = rest.iter().position(|it| *it == "steadfast");
    let help = known.programs.get("steadfast");
    inner.zip(help).map_or(Vec::new(), |(at, help)| arguments("steadfast", help, &rest[at + 1..]))
}

fn is_assignment(word: &str) -> bool {
    let name = word.split_once('=').map_or("", |(name, _)| name);
    !name.is_empty()
        && name.bytes().all(|it| it.is_ascii_uppercase() || b"_0123456789".contains(&it))
}

fn lone_flags(words: &[&str], known: &Known) -> Vec<String> {
    let mut errors = Vec::new();
    for flag in words.iter().filter(|it| it.starts_with("--")).map(|it| flag_name(it)) {
        let is_ours = known.programs.values().any(|it| it.knows(flag));
        if !is_ours && !OF_OTHERS.contains(&flag) {
            errors.push(format!("no program of ours has the flag {flag} (see OF_OTHERS)"));
        }
    }
    errors
}

fn targets(words: &[&str], known: &Known) -> Vec<String> {
    let mut errors = Vec::new();
    for word in words.iter().filter(|it| !is_flag(it)) {
        match word.split_once('=') {
            Some((name, _)) if !known.makefile.reads(name) => {
                errors.push(format!("the Makefile reads no variable {name}"));
            }
            None if !known.makefile.targets.contains(*word) => {
                errors.push(format!("the Makefile has no target {word}"));
            }
            Some(_) | None => {}
        }
    }
    errors
}

/// Returns the errors in the arguments of one of the programs.
fn arguments(name: &str, help: &Help, words: &[&str]) -> Vec<String> {
    let mut errors = Vec::new();
    let mut path = name.to_owned();
    // All alternatives of a choice such as `now|list` must exist.
    let mut helps = vec![help];
    let mut words = words.iter();
    while let Some(word) = words.next() {
        // Another program's command follows.
        if *word == "--" {
            break;
        }
        if is_flag(word) {
            let flag = flag_name(word);
            match helps.iter().find_map(|it| it.flags.get(flag)) {
                None => errors.push(format!("{path} has no flag {flag}")),
                Some(Takes::Value) if !word.contains('=') => drop(words.next()),
                Some(Takes::Value | Takes::Nothing) => {}
            }
            continue;
        }
        if helps.iter().all(|it| it.commands.is_empty()) {
            continue;
        }
        if is_placeholder(word) {
            break;
        }
        let mut inner = Vec::new();
        for choice in word.split('|') {
            match helps.iter().find_map(|it| it.commands.get(choice)) {
                Some(help) => inner.push(help),
                None => errors.push(format!("{path} has no subcommand {choice}")),
            }
        }
        if inner.is_empty() {
            break;
        }
        path = format!("{path} {word}");
        helps = inner;
    }
    errors
}

/// Returns `--flag` for `--flag=value`, and for `--flag…` in prose.
fn flag_name(word: &str) -> &str {
    let end = word.find(|it: char| !it.is_ascii_alphanumeric() && it != '-');
    &word[..end.unwrap_or(word.len())]
}

/// Returns whether a word is a placeholder: `…`, `COMMAND`, `<command>`.
fn is_placeholder(word: &str) -> bool {
    let is_name = word.bytes().all(|it| it.is_ascii_uppercase() || it == b'_');
    is_name || word.starts_with('…') || word.starts_with('<')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::Makefile;

    fn known() -> Known {
        let mut steadfast = Help::parse("Commands:\n  status  Look\n  certs  Make\n");
        let status = Help::parse("Options:\n  -o, --output <FORM>  Form\n      --watch  Again\n");
        let certs = Help::parse("Commands:\n  init  Begin\n  renew  Again\n");
        steadfast.commands.extend([("status".to_owned(), status), ("certs".to_owned(), certs)]);
        let master = Help::parse("Options:\n      --job <NAME>  Name\n");
        let programs = [("steadfast", steadfast), ("steadfast-master", master)];
        let makefile = Makefile::parse("sim: build ## Run\n\t./sim $(or $(SEED),1)\n".to_owned());
        Known { programs: programs.map(|(name, help)| (name.to_owned(), help)).into(), makefile }
    }

    fn found(text: &str) -> Vec<String> {
        unknown(&Page::new("a.md", text), &known())
    }

    #[test]
    fn commands_that_help_lists_are_accepted() {
        let page = "Run `steadfast certs init|renew`, `steadfast status [--watch | -o json]`, `--job`,\n\
                    `--cacert FILE`, `steadfast-master: error: …`, `make sim SEED=7`, `--unknown` is not\n\
                    `steadfast …`, `steadfast` and `kubectl scale statefulset/steadfast-master --replicas=4`.\n\
                    ```sh\nA=$(steadfast status) target/release/steadfast status --output json \\\n  --watch | jq --raw-output . # --unknown\n\
                    docker compose run --rm admin steadfast status -o \"a b\" && make sim &\n```\n\
                    ```console\n$ steadfast status \\\n    --watch\nsteadfast status --unknown\n```\n\
                    ```text\nsteadfast unknown\n```\n";
        assert_eq!(
            found(page),
            ["a.md:2: no program of ours has the flag --unknown (see OF_OTHERS)"]
        );
    }

    #[test]
    fn commands_that_help_does_not_list_are_found() {
        let cases = [
            ("`steadfast unknown`", "steadfast has no subcommand unknown"),
            ("`steadfast certs init|unknown`", "steadfast certs has no subcommand unknown"),
            ("`steadfast certs --unknown`", "steadfast certs has no flag --unknown"),
            ("| `steadfast status [ID \\| --unknown]` |", "steadfast status has no flag --unknown"),
            ("`steadfast status -x`", "steadfast status has no flag -x"),
            ("`--watch --unknown=1`", "no program of ours has the flag --unknown (see OF_OTHERS)"),
            (
                "```sh\nls\nsteadfast-master --unknown &\n```",
                "steadfast-master has no flag --unknown",
            ),
            ("```sh\nx; run admin steadfast unknown\n```", "steadfast has no subcommand unknown"),
            (
                "```console\n$ ls | steadfast status --unknown\n```",
                "steadfast status has no flag --unknown",
            ),
            ("`make unknown`", "the Makefile has no target unknown"),
            ("```sh\nmake sim UNKNOWN=1\n```", "the Makefile reads no variable UNKNOWN"),
        ];
        for (page, expected) in cases {
            let errors = found(page);
            assert_eq!(errors.len(), 1, "{page}: {errors:?}");
            assert!(errors[0].ends_with(&format!(": {expected}")), "{page}: {errors:?}");
        }
    }

    #[test]
    fn an_unknown_command_is_reported_with_its_line() {
        let page = "```sh\nls \\\n  -l\nA=$(ls)\nsteadfast unknown\n```\n\n\
                    ```console\n$ ls\na file\n$ steadfast status \\\n    --unknown\n```\n`make unknown`\n";
        let expected = [
            "a.md:5: steadfast has no subcommand unknown",
            "a.md:11: steadfast status has no flag --unknown",
            "a.md:14: the Makefile has no target unknown",
        ];
        assert_eq!(found(page), expected);
    }
}
