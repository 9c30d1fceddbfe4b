//! Records of tasks, loaded ahead of use and shared between lanes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::job::dataset::{Manifest, ReadOptions, Records};
use steadfast_common::job::schedule::record_order;
use steadfast_data::DataError;
use steadfast_host::task::spawn;
use steadfast_store::StoreError;
use steadfast_trainer_core::{Batch, Model, ModelError};
use steadfast_training_client::FailureCause;

use crate::dataset::Dataset;

/// Minimum number of tasks kept in memory.
const KEPT_MIN: usize = 8;

/// Maximum size of records kept between passes; smaller datasets are read once.
const KEPT_BYTES_MAX: usize = 256 << 20;

/// The reason why the records of a task could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error("record {record} of {file}: {source}")]
    BadRecord { file: String, record: u64, source: ModelError },
    #[error(transparent)]
    Model(ModelError),
    #[error("the reader failed: {0}")]
    ReaderFailed(String),
    /// The manifest of the pass cannot be loaded.
    #[error("{0}")]
    Manifest(String),
}

impl TaskError {
    /// Returns the cause: whether every trainer would fail in the same way.
    pub fn cause(&self) -> FailureCause {
        match self {
            // Another machine may have the file, and unchanged. Part of a task may be trained on already, so a file
            // that was deleted must not count as bad data.
            Self::Data(
                DataError::Changed { .. } | DataError::Store(StoreError::NotFound { .. }),
            ) => FailureCause::Transient,
            Self::Data(error) => match error.kind() {
                steadfast_data::ErrorKind::Permanent => FailureCause::Data,
                steadfast_data::ErrorKind::Transient => FailureCause::Transient,
            },
            Self::BadRecord { .. } | Self::Model(_) => FailureCause::Data,
            Self::ReaderFailed(_) | Self::Manifest(_) => FailureCause::Transient,
        }
    }
}

/// The records of a task, or the error of loading it.
pub type Loaded = Result<Arc<Records>, Arc<TaskError>>;

type Load = Shared<BoxFuture<'static, Loaded>>;

/// Reads tasks in the background and keeps the latest ones.
pub struct Tasks {
    dataset: Dataset,
    options: ReadOptions,
    seed: u64,
    model: Arc<dyn Model>,
    /// Loads by pass and task, with a queue from oldest to newest. The mutex guards only this field.
    loads: Mutex<Loads>,
    /// Records in the order of the files. The mutex guards only this field.
    kept: Mutex<Kept>,
}

/// The first tasks that were read, up to the maximum size.
#[derive(Default)]
struct Kept {
    of: BTreeMap<TaskId, Arc<Records>>,
    size_bytes: usize,
}

#[derive(Default)]
struct Loads {
    of: BTreeMap<(Pass, TaskId), Load>,
    age: VecDeque<(Pass, TaskId)>,
    kept_max: usize,
}

impl Tasks {
    /// Creates a reader for a dataset that keeps about `in_use` tasks, and as many ahead.
    pub fn new(
        dataset: Dataset,
        options: ReadOptions,
        seed: u64,
        model: Arc<dyn Model>,
        in_use: usize,
    ) -> Self {
        let kept_max = KEPT_MIN.max(3 * in_use);
        Self {
            dataset,
            options,
            seed,
            model,
            loads: Mutex::new(Loads { kept_max, ..Loads::default() }),
            kept: Mutex::default(),
        }
    }

    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Starts to load a task, unless it is loaded or loading.
    pub fn prefetch(self: &Arc<Self>, pass: Pass, task: TaskId) {
        drop(self.load(pass, task));
    }

    /// Returns the records of a task in the order of `pass`.
    ///
    /// # Errors
    /// If the records cannot be read, or the model does not accept one. The next call retries.
    pub async fn get(self: &Arc<Self>, pass: Pass, task: TaskId) -> Loaded {
        let loaded = self.load(pass, task).await;
        if loaded.is_err() {
            self.loads.lock().expect("no holder panics").forget((pass, task));
        }
        loaded
    }

    fn load(self: &Arc<Self>, pass: Pass, task: TaskId) -> Load {
        let mut loads = self.loads.lock().expect("no holder panics");
        if let Some(load) = loads.of.get(&(pass, task)) {
            return load.clone();
        }
        let this = self.clone();
        let reading = spawn(async move { this.read(pass, task).await });
        let load: Load = async move {
            match reading.await {
                Ok(Ok(records)) => Ok(Arc::new(records)),
                Ok(Err(error)) => Err(Arc::new(error)),
                Err(error) => Err(Arc::new(TaskError::ReaderFailed(error.to_string()))),
            }
        }
        .boxed()
        .shared();
        loads.keep((pass, task), load.clone());
        load
    }

    async fn read(&self, pass: Pass, task: TaskId) -> Result<Records, TaskError> {
        let records = match self.dataset.is_fixed() {
            true => self.read_in_order(task).await?,
            false => {
                let manifest = self.dataset.load(pass).await.map_err(TaskError::Manifest)?;
                Arc::new(self.read_checked(&manifest, task).await?)
            }
        };
        let order = record_order(records.len() as u32, self.seed, pass, task);
        Ok(records.select(&order))
    }

    /// Returns the records of a task that is the same in every pass, in the order of the files, checked against the
    /// model.
    ///
    /// # Errors
    /// As [`Tasks::get`].
    pub async fn read_in_order(&self, task: TaskId) -> Result<Arc<Records>, TaskError> {
        if let Some(kept) = self.kept.lock().expect("no holder panics").of.get(&task) {
            return Ok(kept.clone());
        }
        let records = Arc::new(self.read_checked(self.dataset.manifest(), task).await?);
        self.kept.lock().expect("no holder panics").keep(task, &records);
        Ok(records)
    }

    async fn read_checked(&self, manifest: &Manifest, task: TaskId) -> Result<Records, TaskError> {
        let chunks = manifest.chunks_of(task);
        let records = steadfast_data::read(manifest, &self.options, chunks).await?;
        let checked = self.model.check(&Batch::from(&records));
        checked.map_err(|error| located(manifest, task, error))?;
        Ok(records)
    }
}

/// Adds the file and record number of a bad record to its error.
fn located(manifest: &Manifest, task: TaskId, source: ModelError) -> TaskError {
    let (ModelError::BadFeature { record, .. }
    | ModelError::BadLabel { record, .. }
    | ModelError::LabelNotFinite { record, .. }) = source
    else {
        return TaskError::Model(source);
    };
    match manifest.record_named(task, record as u64) {
        Some(named) => TaskError::BadRecord { file: named.file, record: named.first, source },
        None => TaskError::Model(source),
    }
}

impl Kept {
    fn keep(&mut self, task: TaskId, records: &Arc<Records>) {
        let size_bytes = records.size_bytes();
        if self.size_bytes + size_bytes <= KEPT_BYTES_MAX && !self.of.contains_key(&task) {
            self.size_bytes += size_bytes;
            self.of.insert(task, records.clone());
        }
    }
}

impl Loads {
    fn keep(&mut self, key: (Pass, TaskId), load: Load) {
        self.of.insert(key, load);
        self.age.push_back(key);
        while self.kept_max < self.age.len() {
            if let Some(oldest) = self.age.pop_front() {
                self.of.remove(&oldest);
            }
        }
    }

    fn forget(&mut self, key: (Pass, TaskId)) {
        self.of.remove(&key);
        self.age.retain(|kept| *kept != key);
    }
}
