//! The program that workers run: found, and known to be executable, before a round begins.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;

use crate::args::RunArgs;

/// torchrun reads the path of Python from it.
const PYTHON_VARIABLE: &str = "PYTHON_EXEC";

/// The options of Python without a value that have an effect on a program.
const PYTHON_FLAGS: &str = "bBdEIOPqsSuv";

/// The length of the first line of a script that the kernel reads.
const FIRST_LINE_BYTES: u64 = 256;

/// The first bytes of a program that is not a script.
const ELF: &[u8] = b"\x7fELF";

/// Position of the kind of processor in an ELF file.
const ELF_MACHINE: std::ops::Range<usize> = 18..20;

/// A program and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    pub path: PathBuf,
    pub args: Vec<OsString>,
}

impl Program {
    /// Finds the program of a command as torchrun does: Python runs modules, and files whose name ends in `.py` unless
    /// they name their own interpreter.
    ///
    /// # Errors
    /// If there is no such program, or it cannot be executed.
    pub fn find(args: &RunArgs) -> Result<Self, Failure> {
        let (first, rest) = args.command.split_first().expect("the command is required");
        if args.module {
            return Self::run_by_python(
                [OsString::from("-m")].into_iter().chain(args.command.clone()),
            );
        }
        let file = Path::new(first);
        let is_python = file.extension() == Some(OsStr::new("py")) && !args.no_python;
        if is_python && !is_own_interpreter_named(file) {
            return match file.is_file() {
                true => Self::run_by_python(args.command.iter().cloned()),
                false => Err(not_found(file)),
            };
        }
        let path = search(file).ok_or_else(|| not_found(file))?;
        check(&path)?;
        Ok(Self { path, args: rest.to_vec() })
    }

    fn run_by_python(args: impl Iterator<Item = OsString>) -> Result<Self, Failure> {
        let path = python();
        let found = search(&path).ok_or_else(|| not_found(&path))?;
        check(&found)?;
        Ok(Self { path: found, args: args.collect() })
    }

    /// Splits the arguments of Python into its options and what it runs: a file, or `-m` and a module, and their
    /// arguments. Returns `None` if this is another program, or Python runs something else.
    pub fn of_python(&self) -> Option<(&[OsString], &[OsString])> {
        let name = self.path.file_name()?.to_string_lossy();
        let mut options = 0;
        while name.starts_with("python") {
            let arg = self.args.get(options)?.to_string_lossy();
            let flags = arg.strip_prefix('-').filter(|flags| !flags.is_empty());
            options += match flags {
                Some("X" | "W") => 2,
                Some(text) if text.starts_with(['X', 'W']) => 1,
                Some(text) if text.chars().all(|flag| PYTHON_FLAGS.contains(flag)) => 1,
                Some("m") if options + 1 < self.args.len() => {
                    return Some(self.args.split_at(options));
                }
                Some(_) => return None,
                None if arg == "-" || arg.ends_with(".pyc") => return None,
                None => return Some(self.args.split_at(options)),
            };
        }
        None
    }
}

/// Returns the path or name of Python: that of the variable of torchrun, of the active environment, or `python3`.
fn python() -> PathBuf {
    let given = std::env::var_os(PYTHON_VARIABLE).filter(|it| !it.is_empty()).map(PathBuf::from);
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os);
    let mut active = active.map(|directory| Path::new(&directory).join("bin/python"));
    given.or_else(|| active.find(|it| it.is_file())).unwrap_or("python3".into())
}

/// Returns the path of a program, as a shell finds it.
fn search(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return name.exists().then(|| name.to_owned());
    }
    let directories = std::env::var_os("PATH").unwrap_or_default();
    let candidates = std::env::split_paths(&directories).map(|directory| directory.join(name));
    let files: Vec<PathBuf> = candidates.filter(|candidate| candidate.is_file()).collect();
    // A file that is not executable hides no other one.
    files.iter().find(|it| is_executable(it)).or(files.first()).cloned()
}

/// Checks what the kernel would refuse, and what a shell would try to read as a script.
fn check(path: &Path) -> Result<(), Failure> {
    let refuse = |reason: &str| {
        let message = format!("cannot execute {}: {reason}", path.display());
        Err(Failure::new(ErrorKind::NotFound, message))
    };
    if path.is_dir() {
        return refuse("it is a directory");
    }
    if !is_executable(path) {
        return refuse(&format!("no permission; use `chmod +x {}`", path.display()));
    }
    // What may be executed, but not read, is left to the kernel.
    let start = start_of(path);
    if let Some(interpreter) = interpreter(&start) {
        return match search(&interpreter) {
            Some(found) if is_executable(&found) => Ok(()),
            Some(_) | None => refuse(&format!(
                "there is no program `{}`, which its first line names",
                interpreter.display()
            )),
        };
    }
    if !start.starts_with(ELF) {
        let line = start.split(|byte| *byte == b'\n').next().unwrap_or_default();
        return match line.contains(&0) {
            true => refuse("it is neither a program nor a script"),
            false => Ok(()),
        };
    }
    match start.get(ELF_MACHINE) == start_of(Path::new("/proc/self/exe")).get(ELF_MACHINE) {
        true => Ok(()),
        false if has_emulators() => Ok(()),
        false => refuse("it is a program for another kind of processor"),
    }
}

/// Returns whether a Python file is executable, and says by which interpreter.
fn is_own_interpreter_named(file: &Path) -> bool {
    is_executable(file) && start_of(file).starts_with(b"#!")
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}

fn start_of(path: &Path) -> Vec<u8> {
    let mut start = Vec::new();
    if let Ok(file) = File::open(path) {
        // What was read before an error counts.
        let _ = file.take(FIRST_LINE_BYTES).read_to_end(&mut start);
    }
    start
}

/// Returns the program that the first line of a script names, also behind `env`.
fn interpreter(start: &[u8]) -> Option<PathBuf> {
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_whitespace();
    let first = Path::new(words.next()?);
    let is_env = first.file_name() == Some(OsStr::new("env")) && first.is_file();
    let name = words.next().filter(|it| is_env && !it.starts_with('-') && !it.contains('='));
    Some(name.map_or(first.to_owned(), PathBuf::from))
}

/// Returns whether the kernel may run programs of other processors.
fn has_emulators() -> bool {
    let entries = std::fs::read_dir("/proc/sys/fs/binfmt_misc").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name());
    names.into_iter().any(|name| name != "register" && name != "status")
}

fn not_found(path: &Path) -> Failure {
    Failure::new(
        ErrorKind::NotFound,
        format!("there is no program `{}` to run; check the command", path.display()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(command: &str, options: Option<usize>) {
        let mut words = command.split(' ').map(OsString::from);
        let program = Program { path: words.next().unwrap().into(), args: words.collect() };
        let found = program.of_python().map(|(options, _)| options.len());
        assert_eq!(found, options, "{command}");
    }

    #[test]
    fn what_python_runs_follows_its_options() {
        check("/usr/bin/python3 train.py -c 1", Some(0));
        check("python3.12 -m train", Some(0));
        check("python -u -OO -X dev -Wignore -W error -Bs dir", Some(8));
        for other in
            ["sh train.py", "./train.py", "python", "python -m", "python -", "python a.pyc"]
        {
            check(other, None);
        }
        for other in ["python -c pass", "python -i train.py", "python -um train", "python --help"] {
            check(other, None);
        }
    }
}
