//! Settings from arguments and `STEADFAST_…` variables.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::Parser;
use pyo3::exceptions::PySystemExit;
use pyo3::prelude::*;
use steadfast_process::{Failure, Refusal, try_parse};

use crate::error::exception;

/// Parses the settings of `program` from these arguments, which override variables.
///
/// # Errors
/// `InvalidError` with all that is wrong. `SystemExit`, after an answer to `--help` or `--version`.
pub fn settings<A: Parser>(py: Python<'_>, program: &str, args: Vec<String>) -> PyResult<A> {
    let words: Vec<OsString> =
        [program.to_owned()].into_iter().chain(args).map(OsString::from).collect();
    let variables: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        })
        .collect();
    let refusal = match try_parse(&words, &variables, &|path| std::fs::read_to_string(path)) {
        Ok(args) => return Ok(args),
        Err(refusal) => refusal,
    };
    Err(match refusal {
        Refusal::Errors(errors) => exception(py, &Failure::invalid(errors.join("\n"))),
        Refusal::HelpOrVersion(shown) => {
            print!("{shown}");
            PySystemExit::new_err(0)
        }
        Refusal::Checked(listing) => {
            print!("{listing}");
            PySystemExit::new_err(0)
        }
    })
}
