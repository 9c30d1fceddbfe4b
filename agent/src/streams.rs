//! Where the output of each worker goes, with the flags of torchrun.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_supervise::Target;

use crate::args::RunArgs;

/// Streams of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Std {
    stdout: Choice,
    stderr: Choice,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Choice {
    #[default]
    No,
    Yes,
}

/// A choice of streams: the same for all workers, or by local rank, as torchrun writes it (`3`, `0:1,1:2`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Streams {
    All(Std),
    Of(BTreeMap<u32, Std>),
}

impl Streams {
    fn of(&self, local_rank: u32) -> Std {
        match self {
            Self::All(std) => *std,
            Self::Of(map) => map.get(&local_rank).copied().unwrap_or_default(),
        }
    }
}

/// Parses `--tee` and `--redirects`.
pub(crate) fn streams(text: &str) -> Result<Streams, String> {
    let usage =
        || "use 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or `LOCAL_RANK:N,…`".to_owned();
    let std = |text: &str| match text {
        "0" => Ok(Std::default()),
        "1" => Ok(Std { stdout: Choice::Yes, stderr: Choice::No }),
        "2" => Ok(Std { stdout: Choice::No, stderr: Choice::Yes }),
        "3" => Ok(Std { stdout: Choice::Yes, stderr: Choice::Yes }),
        _ => Err(usage()),
    };
    if !text.contains(':') {
        return std(text).map(Streams::All);
    }
    let entry = |entry: &str| {
        let (rank, number) = entry.split_once(':').ok_or_else(usage)?;
        Ok((rank.parse().map_err(|_| usage())?, std(number)?))
    };
    text.split(',').map(entry).collect::<Result<_, String>>().map(Streams::Of)
}

/// Returns where stdout and stderr of a worker go.
pub(crate) fn targets(args: &RunArgs, local_rank: u32) -> (Target, Target) {
    let of = |streams: &Option<Streams>| {
        streams.as_ref().map_or_else(Std::default, |streams| streams.of(local_rank))
    };
    let (tee, redirects) = (of(&args.tee), of(&args.redirects));
    let is_chosen = args.tee.is_some() || args.redirects.is_some();
    let filter: Option<BTreeSet<u32>> = (!args.local_ranks_filter.is_empty())
        .then(|| args.local_ranks_filter.iter().copied().collect());
    let is_shown = filter.is_none_or(|ranks| ranks.contains(&local_rank));
    let target = |tee: Choice, redirect: Choice| {
        let (file, print) = match (is_chosen, tee, redirect) {
            (true, Choice::Yes, _) => (true, true),
            (true, Choice::No, Choice::Yes) => (true, false),
            (true, Choice::No, Choice::No) => (false, true),
            (false, _, _) => (true, !args.quiet),
        };
        match (file && args.log_dir.is_some(), print && is_shown) {
            (true, true) => Target::Both,
            (true, false) => Target::File,
            (false, true) => Target::Print,
            (false, false) => Target::Nowhere,
        }
    };
    (target(tee.stdout, redirects.stdout), target(tee.stderr, redirects.stderr))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        args: RunArgs,
    }

    #[track_caller]
    fn check(flags: &[&str], expected: [(Target, Target); 2]) {
        let words = ["run", "--standalone"].iter().chain(flags).chain(&["true"]);
        let args = Only::parse_from(words).args;
        assert_eq!([targets(&args, 0), targets(&args, 1)], expected, "{flags:?}");
    }

    /// S003-20: the flags of torchrun say which streams go to files, and which are printed.
    #[test]
    fn streams_go_to_files_and_are_printed_as_torchrun_does_it() {
        use Target::{Both, File, Nowhere, Print};
        let log = "--log-dir=logs";
        check(&[], [(Print, Print); 2]);
        check(&[log], [(Both, Both); 2]);
        check(&[log, "--quiet"], [(File, File); 2]);
        check(&[log, "--redirects", "1"], [(File, Print); 2]);
        check(&[log, "-r", "0:3"], [(File, File), (Print, Print)]);
        check(&[log, "--tee", "0:1,1:2"], [(Both, Print), (Print, Both)]);
        check(&[log, "-r", "3", "-t", "2"], [(File, Both); 2]);
        check(&["-t", "3"], [(Print, Print); 2]);
        check(&["--local-ranks-filter", "1"], [(Nowhere, Nowhere), (Print, Print)]);
        check(&[log, "--local-ranks-filter", "0,7"], [(Both, Both), (File, File)]);
    }

    #[test]
    fn a_choice_of_streams_is_a_number_or_one_for_each_local_rank() {
        for text in ["", "4", "a", "0:", "0:4", "0:1,2", "a:1", "-1:1"] {
            assert!(streams(text).is_err(), "{text}");
        }
    }
}
