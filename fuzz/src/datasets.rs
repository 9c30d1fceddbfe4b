//! Plans and reads datasets like a job.

use std::cell::LazyCell;

use bytes::Bytes;
use steadfast_common::job::dataset::{ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec, Header};
use steadfast_data::{DataError, plan, read};
use steadfast_store::open;
use tokio::runtime::{Builder, Runtime};

/// The name of decoder threads.
pub const DECODER: &str = "decoder";

thread_local! {
    static RUNTIME: LazyCell<Runtime> = LazyCell::new(|| {
        let mut builder = Builder::new_current_thread();
        builder.enable_time().thread_name(DECODER).max_blocking_threads(1);
        builder.build().expect("the runtime starts")
    });
}

/// A spec with all columns as features, except the label.
pub fn spec(format: DataFormat, header: Header, label: &str) -> DatasetSpec {
    DatasetSpec {
        source: vec!["memory:///file".to_owned()],
        format,
        features: vec!["*".to_owned()],
        label: label.to_owned(),
        classes: Vec::new(),
        weight: None,
        categories: Vec::new(),
        crosses: Default::default(),
        columns: vec![],
        types: Default::default(),
        missing: None,
        transform: Default::default(),
        feature_scale: 0.5,
        records_per_task: None,
        header,
        follow: false,
    }
}

/// Whether a file begins like a compressed one, of which a few bytes may give very many. The target
/// `compressed` covers these.
pub fn is_compressed(file: &[u8]) -> bool {
    let magic: [&[u8]; 4] = [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\x2a\x4d\x18"];
    // A skippable zstd frame begins with any of 16 bytes.
    magic.iter().any(|it| file.starts_with(it)) || file.get(1..4) == Some(magic[3])
}

/// Plans a dataset of one file, and reads all of its tasks.
///
/// # Errors
/// If the file is invalid.
///
/// # Panics
/// If the records differ from the plan.
pub fn records(
    spec: &DatasetSpec,
    records_per_task: Option<u32>,
    file: &[u8],
) -> Result<Records, DataError> {
    let spec = DatasetSpec { records_per_task, ..spec.clone() };
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            open(&spec.source[0])?.write(Bytes::copy_from_slice(file)).await?;
            let manifest = plan(&spec, &Default::default(), None).await?;
            let options = ReadOptions::new(&spec, &manifest);
            let mut all = Records::new(&options);
            for task in manifest.training_tasks() {
                let found = read(&manifest, &options, manifest.chunks_of(task)).await?;
                assert_eq!(found.len() as u64, manifest.records_of(task));
                all.extend(&found);
            }
            assert_eq!(all.features.len(), all.len() * all.width);
            assert!(all.features.iter().chain(&all.labels).all(|value| value.is_finite()));
            Ok(all)
        })
    })
}
