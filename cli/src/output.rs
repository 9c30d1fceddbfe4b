//! The two forms in which a command answers.

use clap::{Args, ValueEnum};

/// Form of what goes to stdout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// The settings that choose the form.
#[derive(Debug, Args)]
pub struct FormArgs {
    /// Form of the answer on stdout.
    #[arg(long, short, value_name = "FORM", default_value = "text")]
    output: Output,
    /// Short for `--output json`.
    #[arg(long)]
    json: bool,
}

impl FormArgs {
    /// The form that was chosen.
    pub fn output(&self) -> Output {
        if self.json { Output::Json } else { self.output }
    }
}
