//! Curves for TensorBoard: one event file for each term, in a local directory.
//!
//! Records are framed as TensorFlow's `TFRecord` (length, its masked CRC-32C, data, their masked CRC-32C),
//! and hold messages of TensorFlow's `event.proto` and `summary.proto`. Only the part that scalars need is
//! defined here.

use std::collections::BTreeMap;
use std::fs::{File, create_dir_all};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crc_fast::{CrcAlgorithm, checksum};
use prost::{Message, Oneof};
use steadfast_common::ids::{Pass, Version};
use steadfast_common::records::ResultRecord;
use steadfast_common::status::JobStatus;
use steadfast_host::time::{timeout, unix_ms};
use tokio::sync::{oneshot, watch};
use tracing::warn;
use uuid::Uuid;

use crate::status::status_snapshot::StatusSnapshot;

/// Time between points.
const EVERY: Duration = Duration::from_millis(500);

/// Maximum time to write the last events.
const FINISH_MAX: Duration = Duration::from_secs(2);

/// The format version from which readers discard the steps that a restarted job repeats.
const FILE_VERSION: &str = "brain.Event:2";

/// `tensorflow.SessionLog.SessionStatus.START`: invalidates earlier events of this step and later ones.
const START: i32 = 1;

/// `tensorflow.Event`
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// `tensorflow.Summary`
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

/// `tensorflow.Summary.Value`
#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, tag = "2")]
    simple_value: f32,
}

/// `tensorflow.SessionLog`
#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// Identifies a term in the name of its event file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TermName {
    pub epoch: i64,
    pub master: Uuid,
}

impl TermName {
    /// Returns the name of the event file of a term that begins at the Unix time `now`, in milliseconds. Readers
    /// process files in the order of their names; the epoch orders terms that began in the same second.
    fn file_name(self, now: u64) -> String {
        let Self { epoch, master } = self;
        format!("events.out.tfevents.{:010}.{epoch:019}.{master}", now / 1000)
    }
}

/// Writes a term's event file in a thread of its own: the directory may be on a file server that does not
/// answer, and the job must not wait for it.
#[derive(Debug)]
pub(crate) struct Curves {
    end: mpsc::Sender<ResultRecord>,
    is_finished: oneshot::Receiver<()>,
}

impl Curves {
    /// Creates a file in `directory`, and the directory if it is missing, and writes the job's progress to it. If
    /// the directory is not writable, the term continues without curves.
    pub fn start(
        directory: PathBuf,
        term: TermName,
        snapshot: watch::Receiver<Arc<StatusSnapshot>>,
    ) -> Self {
        let (end, ended) = mpsc::channel();
        let (finished, is_finished) = oneshot::channel();
        let write = move || {
            match create(&directory, term) {
                Ok(file) => TensorBoard::new(file).follow(&snapshot, &ended),
                Err(error) => {
                    warn!(directory = %directory.display(), %error, "no curves for TensorBoard");
                }
            }
            let _ = finished.send(());
        };
        if let Err(error) = thread::Builder::new().name("tensorboard".to_owned()).spawn(write) {
            warn!(%error, "no curves for TensorBoard");
        }
        Self { end, is_finished }
    }

    /// Writes the job's result, within a bounded time.
    pub async fn finish(self, result: ResultRecord) {
        let Self { end, is_finished } = self;
        // Fails only if the thread did not start or could not create its file, which is already logged.
        let _ = end.send(result);
        if timeout(FINISH_MAX, is_finished).await.is_err() {
            warn!("cannot finish the curves for TensorBoard: writing to their directory timed out");
        }
    }
}

/// An event file that holds complete records only.
#[derive(Debug)]
struct EventFile {
    file: File,
    path: PathBuf,
    /// Length of the complete records in bytes.
    len: u64,
    is_failing: bool,
}

fn create(directory: &Path, term: TermName) -> io::Result<EventFile> {
    let now = unix_ms();
    let path = directory.join(term.file_name(now));
    create_dir_all(directory)?;
    let file = File::options().append(true).create(true).open(&path)?;
    let len = file.metadata()?.len();
    let mut file = EventFile { file, path, len, is_failing: false };
    file.append(&[event(now, 0, What::FileVersion(FILE_VERSION.to_owned()))]);
    Ok(file)
}

impl EventFile {
    fn append(&mut self, events: &[Event]) {
        match self.try_to_append(&events.iter().flat_map(record).collect::<Vec<u8>>()) {
            Ok(()) => self.is_failing = false,
            Err(_) if self.is_failing => {}
            Err(error) => {
                self.is_failing = true;
                warn!(file = %self.path.display(), %error, "the curves for TensorBoard have a gap");
            }
        }
    }

    fn try_to_append(&mut self, records: &[u8]) -> io::Result<()> {
        if self.is_failing {
            // Readers stop at a partial record.
            self.file.set_len(self.len)?;
        }
        self.file.write_all(records)?;
        self.len += records.len() as u64;
        Ok(())
    }
}

/// Writes events, and keeps what was written last.
#[derive(Debug)]
struct TensorBoard {
    file: EventFile,
    /// Last version written; 0 before the first.
    version: Version,
    evaluated: Option<(Pass, Version)>,
    /// Records trained on at the last point, and its time, for the rate.
    examples: Option<(u64, u64)>,
}

impl TensorBoard {
    fn new(file: EventFile) -> Self {
        Self { file, version: Version::default(), evaluated: None, examples: None }
    }

    /// Writes the job's progress until its result arrives or the sender is dropped.
    fn follow(
        mut self,
        snapshot: &watch::Receiver<Arc<StatusSnapshot>>,
        ended: &mpsc::Receiver<ResultRecord>,
    ) {
        loop {
            let ended_with = ended.recv_timeout(EVERY);
            let snapshot = snapshot.borrow().clone();
            let mut events = self.new_events(&snapshot.status, unix_ms());
            if let Ok(result) = &ended_with {
                events.extend(end(result));
            }
            self.file.append(&events);
            if ended_with != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    /// Returns the events since the last call.
    fn new_events(&mut self, status: &JobStatus, now: u64) -> Vec<Event> {
        let (mut events, version) = (Vec::new(), status.version);
        // A new master does not know the job's version yet.
        if version == Version(0) {
            return events;
        }
        if self.version == Version(0) || version < self.version {
            let log = What::SessionLog(SessionLog { status: START });
            events.push(event(now, version.0, log));
            (self.evaluated, self.examples) = (None, None);
        }
        if version != std::mem::replace(&mut self.version, version) {
            let mut values: Vec<(String, f64)> = Vec::new();
            values.extend(status.loss.map(|loss| ("train/loss".to_owned(), loss)));
            if let Some((examples, then)) = self.examples.filter(|(_, then)| *then < now) {
                let seconds = (now - then) as f64 / 1000.0;
                let rate = status.examples.saturating_sub(examples) as f64 / seconds;
                values.push(("train/examples_per_second".to_owned(), rate));
            }
            self.examples = Some((status.examples, now));
            events.extend(scalars(now, version, values));
        }
        let evaluation = status.evaluation.as_ref();
        if let Some(it) = evaluation.filter(|it| self.evaluated != Some((it.pass, it.version))) {
            self.evaluated = Some((it.pass, it.version));
            let metric = format!("held_out/{}", it.metric_name);
            let mut values = vec![("held_out/loss".to_owned(), it.loss), (metric, it.metric)];
            values.extend(further(&it.further_metrics));
            let plateau = it.course.as_ref().and_then(|course| course.plateau.as_ref());
            values.extend(
                plateau
                    .map(|it| ("held_out/rate_reductions".to_owned(), it.reductions.len() as f64)),
            );
            events.extend(scalars(now, it.version, values));
        }
        events
    }
}

/// Returns the events of the job's result.
fn end(result: &ResultRecord) -> Vec<Event> {
    // Without held-out records the result's loss is that of the last training step.
    let Some(metric) = result.metric else { return Vec::new() };
    let name = result.metric_name.as_deref().unwrap_or("metric");
    let loss = result.loss.map(|loss| ("held_out/loss".to_owned(), loss));
    let values = loss.into_iter().chain([(format!("held_out/{name}"), metric)]);
    let values = values.chain(further(&result.further_metrics)).collect();
    scalars(unix_ms(), Version(result.steps), values)
}

/// Returns the further metrics of an evaluation.
fn further(metrics: &BTreeMap<String, f64>) -> impl Iterator<Item = (String, f64)> {
    metrics.iter().map(|(name, it)| (format!("held_out/{name}"), *it))
}

fn event(unix_ms: u64, step: u64, what: What) -> Event {
    Event { wall_time: unix_ms as f64 / 1000.0, step: step as i64, what: Some(what) }
}

/// Returns an event with the values of one step, if there are any.
fn scalars(unix_ms: u64, version: Version, values: Vec<(String, f64)>) -> Vec<Event> {
    let value = |(tag, value): (String, f64)| Value { tag, simple_value: value as f32 };
    let summary = Summary { value: values.into_iter().map(value).collect() };
    match summary.value.is_empty() {
        true => Vec::new(),
        false => vec![event(unix_ms, version.0, What::Summary(summary))],
    }
}

/// Encodes an event as a framed record.
fn record(event: &Event) -> Vec<u8> {
    let data = event.encode_to_vec();
    let length = (data.len() as u64).to_le_bytes();
    let sum = |bytes: &[u8]| masked(checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32).to_le_bytes();
    [&length[..], &sum(&length), &data, &sum(&data)].concat()
}

/// Masks a checksum like TensorFlow's `masked_crc32c`: a CRC of data that contains CRCs is weak.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: TermName = TermName { epoch: 7, master: Uuid::nil() };

    #[test]
    fn terms_of_one_second_are_read_in_their_order() {
        let later = TermName { epoch: 10, master: Uuid::nil() };
        let first = TermName { master: Uuid::max(), ..TERM };
        assert!(first.file_name(1_000) < later.file_name(1_999));
        assert!(later.file_name(1_999) < first.file_name(2_000));
    }

    fn at(version: u64, loss: f64) -> JobStatus {
        JobStatus { version: Version(version), loss: Some(loss), ..JobStatus::default() }
    }

    fn board(directory: &Path) -> TensorBoard {
        TensorBoard::new(create(directory, TERM).unwrap())
    }

    #[test]
    fn a_step_is_written_once_and_a_rollback_discards_later_events() {
        let directory = tempfile::tempdir().unwrap();
        let mut board = board(directory.path());
        assert_eq!(board.new_events(&JobStatus::default(), 0), []);
        let first = board.new_events(&at(8, 0.5), 1000);
        assert_eq!(first.iter().map(|it| it.step).collect::<Vec<_>>(), [8, 8], "{first:?}");
        assert_eq!(board.new_events(&at(8, 0.5), 1500), []);
        let steps: Vec<i64> =
            board.new_events(&at(20, 0.4), 2000).iter().map(|it| it.step).collect();
        assert_eq!(steps, [20]);
        let back = board.new_events(&at(10, 0.45), 3000);
        assert!(matches!(back[0].what, Some(What::SessionLog(_))) && back[0].step == 10);
        assert_eq!(back.len(), 2);
    }

    /// A disk that was temporarily full leaves a gap; later events are kept.
    #[test]
    fn half_a_record_is_taken_back() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = create(directory.path(), TERM).unwrap();
        let text = event(1, 1, What::FileVersion("text".to_owned()));
        file.append(std::slice::from_ref(&text));
        let path = file.path.clone();
        let whole = std::fs::read(&path).unwrap();
        // A failed write, and the part of it that the disk had room for.
        let writable = std::mem::replace(&mut file.file, File::open(&path).unwrap());
        file.append(std::slice::from_ref(&text));
        assert!(file.is_failing);
        file.file = writable;
        file.file.write_all(b"half a re").unwrap();
        file.append(std::slice::from_ref(&text));
        let expected = [&whole[..], &record(&text)].concat();
        assert_eq!(std::fs::read(&path).unwrap(), expected);
    }

    /// The frame of a record equals TensorFlow's, byte by byte.
    #[test]
    fn a_record_is_framed_by_its_length_and_masked_sums() {
        // CRC-32C of "123456789" is 0xe3069283 (RFC 3720 and the catalog of CRCs).
        assert_eq!(checksum(CrcAlgorithm::Crc32Iscsi, b"123456789") as u32, 0xe306_9283);
        assert_eq!(masked(0), 0xa282_ead8);
        let event = event(0, 0, What::FileVersion(FILE_VERSION.to_owned()));
        let bytes = record(&event);
        assert_eq!(bytes[..8], (event.encoded_len() as u64).to_le_bytes());
        assert_eq!(bytes.len(), 8 + 4 + event.encoded_len() + 4);
    }
}
