//! A local run from its job file to its summary.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use steadfast_common::error::ErrorKind;
use steadfast_common::job_file::{self, BUILT_IN_MODELS, nearest};
use steadfast_common::keys::Keys;
use steadfast_common::records::{JobRecord, ResultRecord};
use steadfast_common::spec::JobSpec;
use steadfast_common::status::JobStatus;
use steadfast_coord::{Etcd, Mirror, Range};
use steadfast_host::time::unix_ms;
use steadfast_process::{Failure, Shutdown, TlsArgs};
use tokio::sync::mpsc;

use super::args::LocalArgs;
use super::deaths::Deaths;
use super::folder::Folder;
use super::observer::Observer;
use super::plan::{Plan, Programs, absolute};
use super::progress::{Progress, Stderr};
use super::summary::Summary;
use super::supervisor::{Notice, Supervisor};
use super::{etcd_child, log_tail};
use crate::job_master::{JobMaster, Taken};

/// Notices that may wait to be read.
const NOTICES_MAX: usize = 256;

/// How long processes may take to see the job's end and leave.
const LEAVE_PATIENCE: Duration = Duration::from_secs(10);

/// How long the master may take for a last checkpoint.
const DRAIN_PATIENCE: Duration = Duration::from_secs(20);

/// Runs a job to its end, or until it is interrupted.
pub async fn run(args: LocalArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let shutdown = Shutdown::install()?;
    let (job_file, spec) = read_job(&args.job_file)?;
    let own = std::env::current_exe()
        .map_err(|error| Failure::io("cannot find the path of this program", &error))?;
    let programs = Programs::find(&args, &own)?;
    check_model(&args, &spec)?;
    let default_folder = || Path::new("steadfast-data").join(&spec.name);
    let path = args.data_dir.clone().unwrap_or_else(default_folder);
    let folder = Folder::open(&path)?;
    log_tail::put_by(&folder.logs());

    let (notices_tx, mut notices) = mpsc::channel(NOTICES_MAX);
    let opening = open_etcd(&args, &folder, &own, &notices_tx, &mut notices);
    let cluster = tokio::select! {
        opened = opening => opened?,
        () = shutdown.drain() => {
            say_how_to_resume();
            let summary = Summary::of_drained(&spec, None, started.elapsed().as_secs_f64());
            summary.print(args.output);
            return Ok(summary.exit_code());
        }
    };
    check_same_job(&cluster, &spec, &folder).await?;
    let plan = Plan {
        args: &args,
        programs,
        job: &spec.name,
        job_file,
        store: folder.store(),
        endpoints: cluster.endpoints.clone(),
        logs: folder.logs(),
    };
    let run = Run { spec: &spec, plan, folder: &folder, etcd: &cluster.etcd, shutdown, started };
    let outcome = run.drive(&notices_tx, &mut notices).await;
    if let Some(supervisor) = cluster.supervisor {
        supervisor.stop(Duration::ZERO).await;
    }
    let summary = outcome?;
    summary.print(args.output);
    Ok(summary.exit_code())
}

fn read_job(path: &Path) -> Result<(PathBuf, JobSpec), Failure> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::io(format!("cannot read the job file {shown}"), &error))
        .map_err(|failure| Failure::invalid(failure.message))?;
    let spec = job_file::parse(&text).map_err(|error| {
        let faults: Vec<String> =
            error.faults.iter().map(|fault| format!("{shown}: {fault}")).collect();
        Failure::invalid(faults.join("\n"))
    })?;
    Ok((absolute(path)?, spec))
}

/// Without a trainer of the user's own only the built-in models exist.
fn check_model(args: &LocalArgs, spec: &JobSpec) -> Result<(), Failure> {
    let kind = spec.model.kind.as_str();
    if args.trainer_bin.is_some() || BUILT_IN_MODELS.contains(&kind) {
        return Ok(());
    }
    let hint = match nearest(kind, BUILT_IN_MODELS.iter().copied()) {
        Some(known) => format!("did you mean `{known}`?"),
        None => format!(
            "known are {}; a trainer with a model of your own is given with --trainer-bin",
            BUILT_IN_MODELS.join(", ")
        ),
    };
    Err(Failure::invalid(format!("{}: `model.kind` is `{kind}`; {hint}", args.job_file.display())))
}

/// Refuses to go on with a folder (or an etcd) that holds the job with another spec, before
/// anything is started.
async fn check_same_job(cluster: &Cluster, spec: &JobSpec, folder: &Folder) -> Result<(), Failure> {
    let key = Keys::of_job(&spec.name).job();
    match cluster.etcd.get_json::<JobRecord>(&key).await? {
        Some(held) if held.digest != spec.digest() => Err(Failure::new(
            ErrorKind::Conflict,
            format!(
                "the job `{}` exists with another spec; give the new one another name or another \
                 --data-dir, or delete {} to start afresh",
                spec.name,
                folder.shown()
            ),
        )),
        Some(_) | None => Ok(()),
    }
}

struct Cluster {
    etcd: Etcd,
    endpoints: Vec<String>,
    /// Keeps the embedded etcd, if that is used.
    supervisor: Option<Supervisor>,
}

async fn open_etcd(
    args: &LocalArgs,
    folder: &Folder,
    own: &Path,
    notices_tx: &mpsc::Sender<Notice>,
    notices: &mut mpsc::Receiver<Notice>,
) -> Result<Cluster, Failure> {
    if !args.etcd.is_empty() {
        let options = args.auth.options(args.etcd.clone(), &TlsArgs::default())?;
        let etcd = Etcd::connect(&options).await?;
        return Ok(Cluster { etcd, endpoints: args.etcd.clone(), supervisor: None });
    }
    let child = etcd_child::start(folder, own, notices_tx, notices).await?;
    let endpoints = vec![child.endpoint];
    Ok(Cluster { etcd: child.client, endpoints, supervisor: Some(child.supervisor) })
}

/// A run whose etcd is there.
struct Run<'a> {
    spec: &'a JobSpec,
    plan: Plan<'a>,
    folder: &'a Folder,
    etcd: &'a Etcd,
    shutdown: Shutdown,
    started: Instant,
}

/// Why the processes are no longer needed.
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
    ) -> Result<Summary, Failure> {
        let keys = Keys::of_job(&self.spec.name);
        if let Some(result) = self.etcd.get_json(&keys.result()).await? {
            return Ok(self.told_again(result));
        }
        let mut progress = Progress::new(match std::io::stderr().is_terminal() {
            true => Stderr::Terminal,
            false => Stderr::Other,
        });
        progress.note(&self.greeting());
        let mirror = Mirror::start(self.etcd, Range::Key(keys.result())).await?;
        let mut observer = Observer::start(JobMaster::new(self.etcd.clone(), keys.clone()));
        let supervisor = Supervisor::start(self.plan.processes(), notices_tx);
        let mut deaths = Deaths::default();
        let end = self.watch(&mirror, &mut observer, notices, &mut progress, &mut deaths).await;
        let mut seen = observer.seen().status;
        let end = match end {
            End::Interrupted => self.drain(&keys, &supervisor, &progress, &mut seen).await,
            end => end,
        };
        progress.clear();
        let wall_seconds = self.started.elapsed().as_secs_f64();
        match end {
            End::Result(result) => {
                supervisor.stop(LEAVE_PATIENCE).await;
                let mut summary = Summary::of_result(self.spec, *result, wall_seconds);
                summary.outages = deaths.outages();
                summary.spent = seen.map(|status| status.spent).unwrap_or_default();
                summary.save(&self.folder.summary());
                Ok(summary)
            }
            End::Interrupted => {
                supervisor.stop(Duration::ZERO).await;
                say_how_to_resume();
                let mut summary = Summary::of_drained(self.spec, seen.as_ref(), wall_seconds);
                summary.outages = deaths.outages();
                Ok(summary)
            }
            End::Fatal(failure) => {
                supervisor.stop(Duration::ZERO).await;
                Err(failure)
            }
        }
    }

    fn greeting(&self) -> String {
        let look = match self.plan.args.etcd.is_empty() {
            true => format!("steadfast status --data-dir {}", quote(&self.folder.shown())),
            false => format!("steadfast status --etcd-endpoints {}", self.plan.endpoints.join(",")),
        };
        format!(
            "job {}; logs in {}; look at it with `{look}`",
            self.spec.name,
            self.folder.logs().display()
        )
    }

    /// Follows the job until something ends the run.
    async fn watch(
        &self,
        mirror: &Mirror,
        observer: &mut Observer,
        notices: &mut mpsc::Receiver<Notice>,
        progress: &mut Progress,
        deaths: &mut Deaths,
    ) -> End {
        let mut results = mirror.subscribe();
        results.mark_changed();
        loop {
            tokio::select! {
                () = self.shutdown.drain() => return End::Interrupted,
                // The sender lives as long as the mirror.
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
                    Notice::Restart { name, death, pause } => {
                        let words = death.words.as_deref().and_then(|words| words.lines().next());
                        let words = words.map_or_else(String::new, |words| format!(", {words}"));
                        deaths.add(format!("{name} ended ({})", death.how), unix_ms());
                        progress.note(&format!(
                            "{name} ended ({}{words}); starting it again in {pause:?}",
                            death.how
                        ));
                    }
                },
                () = observer.changed() => {
                    let seen = observer.seen();
                    seen.status.iter().for_each(|status| deaths.follow(&status.recoveries));
                    progress.update(&seen);
                }
            }
        }
    }

    /// Has the job put away, within bounds; it may also come to its end meanwhile.
    async fn drain(
        &self,
        keys: &Keys,
        supervisor: &Supervisor,
        progress: &Progress,
        seen: &mut Option<JobStatus>,
    ) -> End {
        progress.note("stopping after a last checkpoint; a second Ctrl-C stops at once");
        supervisor.leave();
        let mut master = JobMaster::new(self.etcd.clone(), keys.clone());
        match master.take_checkpoint(DRAIN_PATIENCE).await {
            Ok(Taken { latest: Some(id), trouble: None }) => {
                progress.note(&format!("took checkpoint {id}"));
            }
            Ok(Taken { latest: Some(id), trouble: Some(trouble) }) => {
                progress.note(&format!("kept checkpoint {id}; took no new one: {trouble}"));
            }
            Ok(Taken { latest: None, trouble: Some(trouble) }) => {
                progress.note(&format!("took no checkpoint: {trouble}"));
            }
            Ok(Taken { latest: None, trouble: None }) => {
                progress.note("there was nothing to save yet");
            }
            Err(failure) => progress.note(&format!("took no last checkpoint: {failure}")),
        }
        if let Ok(status) = master.status().await {
            *seen = Some(status);
        }
        match self.etcd.get_json(&keys.result()).await {
            Ok(Some(result)) => End::Result(Box::new(result)),
            Ok(None) | Err(_) => End::Interrupted,
        }
    }

    /// Repeats the summary of a job that ended before.
    fn told_again(&self, result: ResultRecord) -> Summary {
        let sha256 = result.parameters_sha256.clone();
        let told = Summary::of_result(self.spec, result, self.started.elapsed().as_secs_f64());
        match Summary::saved(&self.folder.summary(), sha256.as_deref()) {
            // Only the run itself saw these.
            Some(Summary { wall_seconds, outages, spent, .. }) => {
                Summary { wall_seconds, outages, spent, ..told }
            }
            None => told,
        }
    }
}

fn say_how_to_resume() {
    let words: Vec<String> = std::env::args().map(|word| quote(&word)).collect();
    eprintln!("steadfast: resume it with the same command: {}", words.join(" "));
}

/// Quotes a word for a shell, if it needs to be.
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
    fn a_word_is_quoted_only_if_a_shell_would_take_it_apart() {
        assert_eq!(quote("a/b.toml"), "a/b.toml");
        assert_eq!(quote("my job"), "'my job'");
        assert_eq!(quote("it's"), r"'it'\''s'");
    }

    #[test]
    fn every_fault_of_a_job_file_is_reported_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bad.toml");
        std::fs::write(&path, "name = 'a b'\npases = 1\n").unwrap();
        let failure = read_job(&path).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::Invalid);
        assert!(failure.message.lines().all(|line| line.contains("bad.toml: ")), "{failure}");
        let failure = read_job(&folder.path().join("none.toml")).unwrap_err();
        assert!(failure.message.ends_with("none.toml: no such file or folder"), "{failure}");
        assert_eq!(failure.kind, ErrorKind::Invalid);
    }
}
