//! A local run, from the job file to the summary.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steadfast_agent::pass_on;
use steadfast_common::error::ErrorKind;
use steadfast_common::job::job_file::{self, nearest};
use steadfast_common::job::models::{self, BUILT_IN, BuiltIn, PYTHON};
use steadfast_common::job::spec::{JobSpec, Keep};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{JobRecord, ResultRecord};
use steadfast_common::status::JobStatus;
use steadfast_coord::{Etcd, Mirror, Op, Range, Unchanged};
use steadfast_host::time::unix_ms;
use steadfast_net::TlsIdentity;
use steadfast_process::{Failure, Shutdown, TlsArgs};
use steadfast_supervise::{GuardProgram, Supervisor as Starter};
use tokio::sync::mpsc;

use super::args::LocalArgs;
use super::directory::Directory;
use super::observer::Observer;
use super::outages::Outages;
use super::plan::{Plan, Programs, absolute};
use super::progress::{Progress, Stderr};
use super::summary::{State, Summary};
use super::supervisor::{Notice, Supervisor};
use super::{etcd_child, log_tail};
use crate::job_master::{CheckpointOutcome, JobMaster};
use crate::output::notice;

/// Default and maximum number of slots.
const SLOTS_DEFAULT: u32 = 2;
const SLOTS_MAX: u32 = 1000;

/// Capacity of the channel of notices.
const NOTICES_MAX: usize = 256;

/// Time for the processes to see the result of the job and exit.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Status requests after the last checkpoint, and the pause between them.
const STATUS_LOOKS: u32 = 10;
const STATUS_PAUSE: Duration = Duration::from_millis(30);

/// Time for the master to take a last checkpoint.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs a job to its end, or until it is interrupted.
pub async fn run(args: LocalArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let shutdown = Shutdown::install()?;
    if args.stop_with_stdin {
        stop_with_stdin(shutdown.clone())?;
    }
    let (job_file, spec) = read_job(&args.job_file)?;
    let own = std::env::current_exe()
        .map_err(|error| Failure::io("cannot find the path of this program", &error))?;
    check_model(&args, &spec)?;
    let programs = Programs::find(&args, &spec.model, &own)?;
    let default_directory = || Path::new("steadfast-data").join(&spec.name);
    let path = args.data_dir.clone().unwrap_or_else(default_directory);
    let directory = Directory::open(&path)?;
    log_tail::rotate(&directory.logs());

    let starter = Starter::new(GuardProgram::this_program());
    let starter = starter.map_err(|error| Failure::new(error.kind(), error.to_string()))?;
    let starter = Arc::new(starter);
    let (notices_tx, mut notices) = mpsc::channel(NOTICES_MAX);
    let opening = open_etcd(&args, &directory, &own, &notices_tx, &mut notices, &starter);
    let cluster = tokio::select! {
        opened = opening => opened?,
        () = shutdown.drain() => {
            print_resume_command();
            let summary = Summary::of_drained(&spec, None, started.elapsed().as_secs_f64());
            summary.print(args.output)?;
            return Ok(summary.exit_code());
        }
    };
    check_same_job(&cluster, &spec, &directory).await?;
    let pservers = settle_slots(&cluster.etcd, &spec, args.pservers).await?;
    let plan = Plan {
        args: &args,
        programs,
        job: &spec.name,
        pservers,
        warm_spares: spec.warm_spares,
        job_file,
        store: directory.store(),
        endpoints: cluster.endpoints.clone(),
        logs: directory.logs(),
    };
    let passing_on = pass_on(starter.signaller(), &shutdown);
    let run = Run {
        spec: &spec,
        plan,
        directory: &directory,
        etcd: &cluster.etcd,
        shutdown: shutdown.clone(),
        started,
    };
    let outcome = tokio::select! {
        outcome = run.drive(&notices_tx, &mut notices, &starter) => outcome,
        never = passing_on => match never {},
    };
    if let Some(supervisor) = cluster.supervisor {
        supervisor.stop(Duration::ZERO).await;
    }
    if let Some(starter) = Arc::into_inner(starter) {
        // What cannot be ended was logged.
        let _ = starter.close().await;
    }
    let summary = outcome?;
    summary.print(args.output)?;
    Ok(summary.exit_code())
}

fn read_job(path: &Path) -> Result<(PathBuf, JobSpec), Failure> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::io(format!("cannot read the job file {shown}"), &error))
        .map_err(|failure| Failure::invalid(failure.message))?;
    let spec = job_file::parse(&text).map_err(|error| {
        let errors: Vec<String> =
            error.errors.iter().map(|error| format!("{shown}: {error}")).collect();
        Failure::invalid(errors.join("\n"))
    })?;
    Ok((absolute(path)?, spec))
}

/// Rejects an unknown model: without a custom trainer only the built-in models exist.
fn check_model(args: &LocalArgs, spec: &JobSpec) -> Result<(), Failure> {
    let kind = spec.model.kind.as_str();
    let is_elsewhere = kind == PYTHON || spec.model.has_closures();
    if args.trainer_bin.is_some() || BuiltIn::of(kind).is_some() || is_elsewhere {
        return Ok(());
    }
    let hint = match nearest(kind, BUILT_IN.iter().map(|model| model.name)) {
        Some(known) => format!("did you mean `{known}`?"),
        None => format!(
            "built-in models are {}; pass a trainer with your own model with --trainer-bin",
            models::names(|_| true)
        ),
    };
    Err(Failure::invalid(format!("{}: `model.kind` is `{kind}`; {hint}", args.job_file.display())))
}

/// Rejects a data directory or etcd that holds the job with another spec, before any process is started. In a data
/// directory, a job that left nothing to continue is deleted instead, so that its corrected file can be used.
async fn check_same_job(
    cluster: &Cluster,
    spec: &JobSpec,
    directory: &Directory,
) -> Result<(), Failure> {
    let keys = Keys::of_job(&spec.name);
    let Some(entry) = cluster.etcd.get(&keys.job()).await? else { return Ok(()) };
    let held: JobRecord = entry.json()?;
    let is_ours = cluster.supervisor.is_some();
    let may_begin_anew = is_ours && !has_progress(&cluster.etcd, &keys).await?;
    let difference = match held.is_of(&spec.digest()) {
        false => spec.difference(&held.spec),
        true if may_begin_anew && has_other_start(&held).await => {
            "the file of `start` has changed".to_owned()
        }
        true => return Ok(()),
    };
    if may_begin_anew {
        let of = |key: String, mod_revision: i64| Unchanged { key, mod_revision };
        let unchanged = [
            of(keys.job(), entry.mod_revision),
            of(keys.checkpoint_latest(), 0),
            of(keys.result(), 0),
        ];
        let all = Op::delete_prefix(&format!("{}/", keys.root()));
        if cluster.etcd.put_if(&all, &unchanged).await?.is_none() {
            return Err(Failure::unavailable(format!(
                "the job `{}` has changed meanwhile; try again",
                spec.name
            )));
        }
        notice(format_args!(
            "steadfast: job {}: {difference}; the job file replaces the earlier one, which left no checkpoint",
            spec.name
        ));
        return Ok(());
    }
    Err(Failure::new(
        ErrorKind::Conflict,
        format!(
            "the job `{}` exists with another spec ({difference}); give the new one another name{}, or, to \
             start over, {}; `steadfast change` gives it another learning rate and other settings that may change, `steadfast extend` \
             trains it further, and `[start]` begins a new one from its model",
            spec.name,
            if is_ours { " or another --data-dir" } else { "" },
            removal(&spec.name, &directory.shown(), is_ours)
        ),
    ))
}

/// Returns whether the file that the job starts from can be read and is another one than when the job was created.
async fn has_other_start(held: &JobRecord) -> bool {
    let Some(start) = &held.start else { return false };
    let Ok(file) = steadfast_store::open(&start.url) else { return false };
    steadfast_checkpoint::describe_start(&file).await.is_ok_and(|found| found != *start)
}

/// Returns whether the job has ended, or a resumed run would continue from a checkpoint.
async fn has_progress(etcd: &Etcd, keys: &Keys) -> Result<bool, Failure> {
    let has_result = etcd.get(&keys.result()).await?.is_some();
    Ok(has_result || etcd.get(&keys.checkpoint_latest()).await?.is_some())
}

/// Changes the number of slots of a resumed job if `wanted` is given, as `steadfast scale` does; returns the
/// number of pservers to start.
async fn settle_slots(etcd: &Etcd, spec: &JobSpec, wanted: Option<u32>) -> Result<u32, Failure> {
    let keys = Keys::of_job(&spec.name);
    let held: Option<u32> = etcd.get_json(&keys.ps_desired()).await?;
    let is_over = etcd.get(&keys.result()).await?.is_some();
    match (held, wanted) {
        (Some(held), Some(wanted)) if held != wanted && !is_over => {
            etcd.put(&keys.ps_desired(), wanted.to_string().as_bytes()).await?;
            notice(format_args!("steadfast: job {}: {wanted} slots (was {held})", spec.name));
            Ok(wanted)
        }
        (_, Some(wanted)) => Ok(wanted),
        (Some(held), None) => Ok(held.clamp(1, SLOTS_MAX)),
        (None, None) => Ok(SLOTS_DEFAULT),
    }
}

struct Cluster {
    etcd: Etcd,
    endpoints: Vec<String>,
    /// Supervises the embedded etcd, if it is used.
    supervisor: Option<Supervisor>,
}

async fn open_etcd(
    args: &LocalArgs,
    directory: &Directory,
    own: &Path,
    notices_tx: &mpsc::Sender<Notice>,
    notices: &mut mpsc::Receiver<Notice>,
    starter: &Arc<Starter>,
) -> Result<Cluster, Failure> {
    if !args.etcd.is_empty() {
        let urls: Vec<String> = args.etcd.iter().map(|it| args.auth.url(it)).collect();
        let options = args.auth.options(urls.clone(), &TlsArgs::default());
        let etcd = Etcd::connect(&options).await?;
        return Ok(Cluster { etcd, endpoints: urls, supervisor: None });
    }
    let child = etcd_child::start(directory, own, notices_tx, notices, starter).await?;
    let endpoints = vec![child.endpoint];
    Ok(Cluster { etcd: child.client, endpoints, supervisor: Some(child.supervisor) })
}

/// Triggers `shutdown` when standard input ends: when the process that holds its other end has ended.
fn stop_with_stdin(shutdown: Shutdown) -> Result<(), Failure> {
    let wait = move || {
        // What is written there has no meaning.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        shutdown.trigger();
    };
    let started = std::thread::Builder::new().name("stdin".to_owned()).spawn(wait);
    // It is not joined: it ends with the process.
    started.map(drop).map_err(|error| Failure::io("cannot start a thread", &error))
}

/// A run that is connected to etcd.
struct Run<'a> {
    spec: &'a JobSpec,
    plan: Plan<'a>,
    directory: &'a Directory,
    etcd: &'a Etcd,
    shutdown: Shutdown,
    started: Instant,
}

/// Why the run ends.
enum End {
    Result(Box<ResultRecord>),
    Interrupted,
    Fatal(Failure),
}

impl Run<'_> {
    /// Runs the processes until the job has a result.
    async fn drive(
        &self,
        notices_tx: &mpsc::Sender<Notice>,
        notices: &mut mpsc::Receiver<Notice>,
        starter: &Arc<Starter>,
    ) -> Result<Summary, Failure> {
        let keys = Keys::of_job(&self.spec.name);
        if let Some(result) = self.etcd.get_json(&keys.result()).await? {
            return Ok(self.repeated_summary(result));
        }
        let stderr = match std::io::stderr().is_terminal() {
            true => Stderr::Terminal,
            false => Stderr::Other,
        };
        // The columns of a stream are those of its first file, so that no master acts before.
        let mut progress = match self.spec.dataset.follow && !self.spec.model.has_closures() {
            true => Progress::new(stderr, "the first file of the stream"),
            false => Progress::new(stderr, "a master"),
        };
        progress.note(&self.greeting());
        let mirror = Mirror::start(self.etcd, Range::Key(keys.result())).await?;
        let mut observer = Observer::start(JobMaster::new(
            self.etcd.clone(),
            keys.clone(),
            TlsIdentity::default(),
        ));
        let supervisor = Supervisor::start(self.plan.processes(), notices_tx, starter);
        let mut outages = Outages::default();
        let end = self.watch(&mirror, &mut observer, notices, &mut progress, &mut outages).await;
        let mut seen = observer.seen().status;
        let end = match end {
            End::Interrupted => self.drain(&keys, &supervisor, &progress, &mut seen).await,
            end => end,
        };
        progress.clear();
        let wall_seconds = self.started.elapsed().as_secs_f64();
        match end {
            End::Result(result) => {
                supervisor.stop(LEAVE_TIMEOUT).await;
                let mut summary = Summary::of_result(self.spec, *result, wall_seconds);
                summary.outages = outages.outages();
                let summary = summary.with_status(seen.as_ref());
                summary.save(&self.directory.summary());
                self.print_next_steps(&summary);
                Ok(summary)
            }
            End::Interrupted => {
                supervisor.stop(Duration::ZERO).await;
                print_resume_command();
                let mut summary = Summary::of_drained(self.spec, seen.as_ref(), wall_seconds);
                summary.outages = outages.outages();
                Ok(summary.with_status(seen.as_ref()))
            }
            End::Fatal(failure) => {
                supervisor.stop(Duration::ZERO).await;
                Err(failure)
            }
        }
    }

    fn greeting(&self) -> String {
        let status_command = match self.plan.args.etcd.is_empty() {
            true => format!("steadfast status --data-dir {}", quote(&self.directory.shown())),
            false => format!("steadfast status --etcd-endpoints {}", self.plan.endpoints.join(",")),
        };
        format!(
            "job {}; logs in {}; show its status with `{status_command}`",
            self.spec.name,
            self.directory.logs().display()
        )
    }

    /// Watches the job until the run ends.
    async fn watch(
        &self,
        mirror: &Mirror,
        observer: &mut Observer,
        notices: &mut mpsc::Receiver<Notice>,
        progress: &mut Progress,
        outages: &mut Outages,
    ) -> End {
        let mut results = mirror.subscribe();
        results.mark_changed();
        let mut warned = 0;
        loop {
            tokio::select! {
                () = self.shutdown.drain() => return End::Interrupted,
                // `changed` cannot fail: the sender lives as long as the mirror.
                Ok(()) = results.changed() => {
                    let view = results.borrow_and_update().clone();
                    match view.single() {
                        Ok(Some(result)) => return End::Result(Box::new(result)),
                        Ok(None) => {}
                        Err(error) => return End::Fatal(error.into()),
                    }
                }
                Some(notice) = notices.recv() => match notice {
                    Notice::Fatal(failure) => return End::Fatal(failure),
                    Notice::Restart { name, exit, pause } => {
                        let words = exit.words.as_deref().and_then(|words| words.lines().next());
                        let words = words.map_or_else(String::new, |words| format!(", {words}"));
                        outages.add(format!("{name} ended ({})", exit.how), unix_ms());
                        progress.note(&format!(
                            "{name} ended ({}{words}); restarting it in {pause:?}",
                            exit.how
                        ));
                    }
                },
                () = observer.changed() => {
                    let seen = observer.seen();
                    if let Some(status) = &seen.status {
                        outages.follow(&status.recoveries);
                        for warning in status.warnings.iter().skip(warned) {
                            progress.note(&format!("warning: {warning}"));
                        }
                        warned = status.warnings.len();
                    }
                    progress.update(&seen);
                }
            }
        }
    }

    /// Takes a last checkpoint, within a timeout; the job can also end in the meantime.
    async fn drain(
        &self,
        keys: &Keys,
        supervisor: &Supervisor,
        progress: &Progress,
        seen: &mut Option<JobStatus>,
    ) -> End {
        progress.note("stopping after a last checkpoint; a second Ctrl-C stops at once");
        supervisor.leave();
        let mut master = JobMaster::new(self.etcd.clone(), keys.clone(), TlsIdentity::default());
        let taken = master.take_checkpoint(DRAIN_TIMEOUT).await;
        let latest = taken.as_ref().ok().and_then(|taken| taken.latest.clone());
        match taken {
            Ok(CheckpointOutcome { latest: Some(id), error: None }) => {
                progress.note(&format!("took checkpoint {id}"));
            }
            Ok(CheckpointOutcome { latest: Some(id), error: Some(error) }) => {
                progress.note(&format!("took no new checkpoint: {error}; the latest one is {id}"));
            }
            Ok(CheckpointOutcome { latest: None, error: Some(error) }) => {
                progress.note(&format!("took no checkpoint: {error}"));
            }
            Ok(CheckpointOutcome { latest: None, error: None }) => {
                progress.note("took no checkpoint: there is nothing to save yet");
            }
            Err(failure) => progress.note(&format!("took no checkpoint: {failure}")),
        }
        // The master updates its status ten times a second: the first one can predate the checkpoint.
        for _ in 0..STATUS_LOOKS {
            let Ok(status) = master.status().await else { break };
            let is_current = status.checkpoint == latest;
            *seen = Some(status);
            if is_current {
                break;
            }
            tokio::time::sleep(STATUS_PAUSE).await;
        }
        match self.etcd.get_json(&keys.result()).await {
            Ok(Some(result)) => End::Result(Box::new(result)),
            Ok(None) | Err(_) => End::Interrupted,
        }
    }

    /// Prints what the user can do about a job that failed or whose model file is missing.
    fn print_next_steps(&self, summary: &Summary) {
        let directory = self.directory.shown();
        let is_embedded = self.plan.args.etcd.is_empty();
        match (summary.state, &summary.model) {
            (State::Failed, _) => notice(format_args!(
                "steadfast: to start over, {}",
                removal(&self.spec.name, &directory, is_embedded)
            )),
            (State::Finished, Some(model))
                if model.starts_with('/') && !Path::new(model).exists() =>
            {
                let (id, what) = match self.spec.evaluation.keep == Keep::Best {
                    true => ("latest ", "the last parameters; the best ones are in no checkpoint"),
                    false => ("", "it again from the last checkpoint"),
                };
                let source = match is_embedded {
                    true => format!("--data-dir {}", quote(&directory)),
                    false => format!("--etcd-endpoints {}", self.plan.endpoints.join(",")),
                };
                notice(format_args!(
                    "steadfast: the model file {model} does not exist; `steadfast checkpoint export {id}{source} \
                     --to {}` writes {what}",
                    quote(model)
                ));
            }
            (State::Finished | State::Drained, _) => {}
        }
    }

    /// Returns the summary of a job that had ended before this run.
    fn repeated_summary(&self, result: ResultRecord) -> Summary {
        let sha256 = result.parameters_sha256.clone();
        notice(format_args!(
            "steadfast: nothing is started, since job {} has ended before: {}",
            self.spec.name,
            result.describe()
        ));
        let summary = Summary::of_result(self.spec, result, self.started.elapsed().as_secs_f64());
        self.print_next_steps(&summary);
        match Summary::saved(&self.directory.summary(), sha256.as_deref()) {
            // Only the original run has these.
            Some(Summary { wall_seconds, outages, time_breakdown, .. }) => {
                Summary { wall_seconds, outages, time_breakdown, ..summary }
            }
            None => summary,
        }
    }
}

/// Describes how to remove a job.
fn removal(job: &str, directory: &str, is_etcd_embedded: bool) -> String {
    match is_etcd_embedded {
        true => format!("delete {directory}"),
        false => {
            let keys = Keys::of_job(job);
            format!("delete its keys in etcd: etcdctl del --prefix {}/", keys.root())
        }
    }
}

fn print_resume_command() {
    let words: Vec<String> = std::env::args().map(|word| quote(&word)).collect();
    notice(format_args!("steadfast: resume it with the same command: {}", words.join(" ")));
}

/// Quotes a word for a shell, if necessary.
fn quote(word: &str) -> String {
    let plain = |it: char| it.is_ascii_alphanumeric() || "-_./:=,@%+".contains(it);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_quoted_only_if_a_shell_would_split_it() {
        assert_eq!(quote("a/b.toml"), "a/b.toml");
        assert_eq!(quote("my job"), "'my job'");
        assert_eq!(quote("it's"), r"'it'\''s'");
    }

    #[test]
    fn every_error_of_a_job_file_is_reported_with_the_file_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bad.toml");
        std::fs::write(&path, "name = 'a b'\npases = 1\n").unwrap();
        let failure = read_job(&path).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::Invalid);
        assert!(failure.message.lines().all(|line| line.contains("bad.toml: ")), "{failure}");
        let failure = read_job(&directory.path().join("none.toml")).unwrap_err();
        assert!(failure.message.ends_with("none.toml: no such file or directory"), "{failure}");
        assert_eq!(failure.kind, ErrorKind::Invalid);
    }
}
