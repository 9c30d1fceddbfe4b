//! Copies the output of a worker, line by line, and remembers its end and its time.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Child;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::lines::Lines;
use crate::{Output, StartError, Target, WorkerSpec};

const READ_BYTES: usize = 16 << 10;
const LAST_LINES_MAX: usize = 20;
const LAST_LINE_CHARS_MAX: usize = 1000;

/// Time for printing what a worker wrote before it ended: this process may itself write to a slow pipe.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The tasks that copy stdout and stderr of a worker; they end when this is dropped.
#[derive(Debug)]
pub(crate) struct OutputTasks {
    tasks: JoinSet<()>,
    /// Ends the tasks although a descendant of the worker keeps a pipe open.
    end: CancellationToken,
    activity: Arc<Activity>,
}

/// What is remembered of the output, and how it is printed.
#[derive(Debug)]
struct Activity {
    /// The text before each printed line. The mutex guards only this text.
    prefix: Mutex<String>,
    /// The time of the last output, and the last lines of stderr. The mutex guards only these.
    state: Mutex<(Instant, VecDeque<String>)>,
}

#[derive(Clone, Copy, Debug)]
enum Stream {
    Stdout,
    Stderr,
}

/// The open log files of a worker, if it has any.
#[derive(Debug, Default)]
pub(crate) struct LogFiles {
    stdout: Option<File>,
    stderr: Option<File>,
    /// Files for the worker itself, which writes both streams to one file.
    own: Option<(File, File)>,
}

impl LogFiles {
    /// Opens the files that `spec` asks for.
    pub fn open(spec: &WorkerSpec) -> Result<Self, StartError> {
        let error = |path: &Path| {
            let (worker, path) = (spec.name.clone(), path.to_owned());
            move |source| StartError::Output { worker, path, source }
        };
        let open = |path: &Path| {
            OpenOptions::new().create(true).append(true).open(path).map_err(error(path))
        };
        if let Output::File { path } = &spec.output {
            let own = Some((open(path)?, open(path)?));
            return Ok(Self { own, ..Self::default() });
        }
        let (Some(directory), Some([stdout, stderr])) =
            (spec.output.directory(), spec.output.targets())
        else {
            return Ok(Self::default());
        };
        if stdout.is_filed() || stderr.is_filed() {
            std::fs::create_dir_all(directory).map_err(error(directory))?;
        }
        let open_if = |target: Target, name: &str| {
            target.is_filed().then(|| open(&directory.join(name))).transpose()
        };
        let (stdout, stderr) = (open_if(stdout, "stdout.log")?, open_if(stderr, "stderr.log")?);
        Ok(Self { stdout, stderr, own: None })
    }

    /// Takes the files for stdout and stderr that the worker writes itself.
    pub fn take_own(&mut self) -> Option<(File, File)> {
        self.own.take()
    }
}

impl OutputTasks {
    /// Starts to copy the piped output of `child`.
    pub fn start(
        spec: &WorkerSpec,
        [stdout, stderr]: [Target; 2],
        child: &mut Child,
        files: LogFiles,
    ) -> Self {
        let activity = Arc::new(Activity {
            prefix: Mutex::new(spec.output.prefix().to_owned()),
            state: Mutex::new((Instant::now(), VecDeque::new())),
        });
        let mut output = Self { tasks: JoinSet::new(), end: CancellationToken::new(), activity };
        let copier = |stream, target: Target, file, activity: &Arc<Activity>| Copier {
            worker: spec.name.clone(),
            stream,
            lines: Lines::default(),
            is_printed: target.is_printed(),
            file,
            activity: Arc::clone(activity),
        };
        if let Some(pipe) = child.stdout.take() {
            let copier = copier(Stream::Stdout, stdout, files.stdout, &output.activity);
            output.tasks.spawn(copy(pipe, copier, output.end.clone()));
        }
        if let Some(pipe) = child.stderr.take() {
            let copier = copier(Stream::Stderr, stderr, files.stderr, &output.activity);
            output.tasks.spawn(copy(pipe, copier, output.end.clone()));
        }
        output
    }

    /// Sets the prefix of the lines that are printed from now on.
    pub fn set_prefix(&self, prefix: &str) {
        prefix.clone_into(&mut self.activity.prefix());
    }

    /// Waits until the worker and its descendants have closed the pipes.
    pub async fn closed(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }

    /// Copies what is in the pipes, then ends, even if a pipe is still open.
    pub async fn finish(&mut self) {
        self.end.cancel();
        if timeout(FLUSH_TIMEOUT, self.closed()).await.is_err() {
            self.tasks.abort_all();
        }
    }

    /// Returns the time of the last output, or of the start.
    pub fn last_output(&self) -> Instant {
        self.activity.lock().0
    }

    /// Returns the last lines of stderr.
    pub fn last_lines(&self) -> Vec<String> {
        self.activity.lock().1.iter().cloned().collect()
    }
}

impl Activity {
    fn prefix(&self) -> std::sync::MutexGuard<'_, String> {
        self.prefix.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (Instant, VecDeque<String>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn copy(mut pipe: impl AsyncRead + Unpin, mut copier: Copier, end: CancellationToken) {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let read = tokio::select! {
            // Whatever is in the pipe comes before the end.
            biased;
            read = pipe.read(&mut buffer) => read,
            () = end.cancelled() => break,
        };
        let Ok(count @ 1..) = read else { break };
        let chunk = buffer[..count].to_vec();
        copier.activity.lock().0 = Instant::now();
        // A paused terminal or a slow disk must hold up the worker, not this runtime.
        let written = spawn_blocking(move || {
            copier.write(&chunk);
            copier
        });
        match written.await {
            Ok(returned) => copier = returned,
            Err(_) => return,
        }
    }
    // Fails only if the runtime is shutting down.
    let _ = spawn_blocking(move || copier.finish()).await;
}

/// Writes one stream of a worker to its targets.
#[derive(Debug)]
struct Copier {
    worker: String,
    stream: Stream,
    lines: Lines,
    /// Whether lines are printed, and can be.
    is_printed: bool,
    file: Option<File>,
    activity: Arc<Activity>,
}

impl Copier {
    fn write(&mut self, chunk: &[u8]) {
        if let Some(Err(error)) = self.file.as_mut().map(|file| file.write_all(chunk)) {
            warn!(worker = self.worker, %error, "cannot write the log of a worker; it is cut off");
            self.file = None;
        }
        let mut lines = std::mem::take(&mut self.lines);
        let mut text = Vec::new();
        lines.push(chunk, std::time::Instant::now(), &mut |line| self.add_line(line, &mut text));
        self.lines = lines;
        self.print(&text);
    }

    fn finish(mut self) {
        let mut lines = std::mem::take(&mut self.lines);
        let mut text = Vec::new();
        lines.finish(&mut |line| self.add_line(line, &mut text));
        self.print(&text);
    }

    fn add_line(&self, line: &[u8], text: &mut Vec<u8>) {
        if self.is_printed {
            text.extend_from_slice(self.activity.prefix().as_bytes());
            text.extend_from_slice(line);
            text.push(b'\n');
        }
        match self.stream {
            Stream::Stdout => {}
            Stream::Stderr => {
                let mut state = self.activity.lock();
                if state.1.len() == LAST_LINES_MAX {
                    state.1.pop_front();
                }
                state.1.push_back(printable(line));
            }
        }
    }

    /// Writes whole lines at once: those of several workers never mix.
    fn print(&mut self, text: &[u8]) {
        if text.is_empty() {
            return;
        }
        let written = match self.stream {
            Stream::Stdout => write_all(&mut io::stdout().lock(), text),
            Stream::Stderr => write_all(&mut io::stderr().lock(), text),
        };
        if let Err(error) = written {
            warn!(worker = self.worker, %error, "cannot print the output of a worker");
            self.is_printed = false;
        }
    }
}

fn write_all(stream: &mut impl Write, text: &[u8]) -> io::Result<()> {
    stream.write_all(text)?;
    stream.flush()
}

fn printable(line: &[u8]) -> String {
    let start = &line[..line.len().min(4 * LAST_LINE_CHARS_MAX)];
    let text = String::from_utf8_lossy(start);
    let is_shown = |it: &char| *it == '\t' || !it.is_control();
    text.chars().filter(is_shown).take(LAST_LINE_CHARS_MAX).collect()
}
