//! The command line of trainers that compute in Python.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use steadfast_common::job::spec::ModelSpec;
use steadfast_process::{Failure, variable_of};

use super::args::LocalArgs;
use super::plan::absolute;

/// A Python program that is a trainer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Python {
    pub interpreter: PathBuf,
    pub args: Vec<OsString>,
    /// Directory of the job file: modules are looked up there first.
    directory: PathBuf,
}

/// Finds the interpreter: the one that is `named` (`--python`), the one beside this program (pip has installed both), that
/// of the active environment, or `python3`.
///
/// # Errors
/// If a path cannot be made absolute.
pub fn interpreter(named: Option<&Path>, programs: Option<&Path>) -> Result<PathBuf, Failure> {
    let in_directory =
        |directory: PathBuf| Some(directory.join("python")).filter(|it| it.is_file());
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .filter_map(env::var_os)
        .find_map(|directory| in_directory(PathBuf::from(directory).join("bin")));
    let beside = programs.and_then(|it| in_directory(it.to_owned()));
    Ok(match named {
        Some(python) if python.components().count() == 1 => python.to_owned(),
        Some(python) => absolute(python)?,
        None => beside.or(active).unwrap_or("python3".into()),
    })
}

impl Python {
    /// Finds the [`interpreter`], and what it runs.
    ///
    /// # Errors
    /// If a path cannot be made absolute, or the script does not exist.
    pub fn find(args: &LocalArgs, model: &ModelSpec, programs: &Path) -> Result<Self, Failure> {
        match &model.script {
            Some(script) => Self::of_script(args, script, programs, &TRAINER_OF_SCRIPT),
            None => {
                let interpreter = interpreter(args.python.as_deref(), Some(programs))?;
                let args_of_python = TRAINER.map(OsString::from).to_vec();
                Ok(Self { interpreter, args: args_of_python, directory: directory_of(args)? })
            }
        }
    }

    /// Finds the [`interpreter`], which runs a script after the arguments `before`.
    ///
    /// # Errors
    /// If a path cannot be made absolute, or the script does not exist.
    pub fn of_script(
        args: &LocalArgs,
        script: &str,
        programs: &Path,
        before: &[&str],
    ) -> Result<Self, Failure> {
        let interpreter = interpreter(args.python.as_deref(), Some(programs))?;
        let directory = directory_of(args)?;
        let path = directory.join(script);
        if !path.is_file() {
            return Err(Failure::invalid(format!(
                "{}: `model.script`: {} does not exist",
                args.job_file.display(),
                path.display()
            )));
        }
        let before = before.iter().copied().map(OsString::from);
        let args = before.chain([path.into_os_string()]).collect();
        Ok(Self { interpreter, args, directory })
    }

    /// Returns the environment that has the settings `flags` (names and values in turn).
    pub fn environment(&self, flags: &[OsString]) -> Vec<(String, OsString)> {
        let mut path = self.directory.clone().into_os_string();
        if let Some(inherited) = env::var_os("PYTHONPATH").filter(|it| !it.is_empty()) {
            path.push(":");
            path.push(inherited);
        }
        let settings = flags.chunks_exact(2).map(|pair| {
            let flag = pair[0].to_string_lossy();
            (variable_of(flag.trim_start_matches('-')), pair[1].clone())
        });
        // A log is useful only if it has the last lines before a crash.
        let own = [("PYTHONPATH", path), ("PYTHONUNBUFFERED", "1".into())];
        settings.chain(own.map(|(name, value)| (name.to_owned(), value))).collect()
    }
}

/// The arguments of Python for a trainer.
const TRAINER: [&str; 2] = ["-m", "steadfast.trainer"];
const TRAINER_OF_SCRIPT: [&str; 3] = ["-m", "steadfast.trainer", "--script"];

/// Returns the directory of the job file.
fn directory_of(args: &LocalArgs) -> Result<PathBuf, Failure> {
    let job_file = absolute(&args.job_file)?;
    Ok(job_file.parent().unwrap_or(Path::new("/")).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_passed_as_environment_variables() {
        let python = Python {
            interpreter: "python3".into(),
            args: vec!["-m".into(), "steadfast.trainer".into()],
            directory: "/jobs".into(),
        };
        let flags = ["--job", "digits", "--lease-ttl", "5000ms"].map(OsString::from);
        let environment = python.environment(&flags);
        assert_eq!(environment[0], ("STEADFAST_JOB".to_owned(), "digits".into()));
        assert_eq!(environment[1], ("STEADFAST_LEASE_TTL".to_owned(), "5000ms".into()));
        let (name, path) = &environment[2];
        assert_eq!(name, "PYTHONPATH");
        assert!(path.to_string_lossy().starts_with("/jobs"));
    }
}
