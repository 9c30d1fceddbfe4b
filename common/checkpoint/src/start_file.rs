//! Reads initial values of parameters from a safetensors file of any program.

use std::collections::BTreeMap;

use bytemuck::AnyBitPattern;
use futures::TryStreamExt;
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, TensorView};
use sha2::{Digest, Sha256};
use steadfast_common::error::ErrorKind;
use steadfast_common::job::dataset::{hex, sha256};
use steadfast_common::job::start::{Shapes, StartPlan};
use steadfast_common::records::{StartOptimizer, StartRecord, UPDATES_BEFORE_MAX};
use steadfast_common::tensor::layout::Layout;
use steadfast_host::task::in_place;
use steadfast_store::{Location, StoreError};

use crate::encode::{HEADER_BYTES_MAX, WORD};
use crate::fixed_file::compare;

/// A file from which no parameter can start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("`start.file`: {url} does not exist")]
    Missing { url: String },
    #[error(
        "`start.file`: {url} is no safetensors file: {reason}; files of PyTorch are converted by \
         `safetensors.torch.save_file(net.state_dict(), …)`"
    )]
    Format { url: String, reason: String },
    #[error(
        "`start.file`: the values of `{tensor}` in {url} are {dtype:?}; parameters start from F64, F32, F16, BF16, \
         I64 or I32, or are listed in `start.new`"
    )]
    Dtype { url: String, tensor: String, dtype: Dtype },
    #[error(
        "`start.file`: a value of `{tensor}` in {url} is not finite, or has no equal, among floats of 32 bits"
    )]
    NotFinite { url: String, tensor: String },
    #[error(
        "`start.file`: {url} has changed since the job was created ({found}, then {expected}); put the file back, or \
         begin a new job: with another name, or after the keys or the data directory of this one are deleted"
    )]
    Changed { url: String, found: String, expected: String },
    /// The file and the parameters do not fit together.
    #[error("{0}")]
    Unfit(String),
    #[error("`start.file`: {0}")]
    Store(StoreError),
    #[error(
        "training does not change {names}, which the file of `start` has with other values than the code builds: load them \
         in the function that builds the model, or let them require a gradient (parameters, which a group with `frozen` \
         keeps as they are in the file) or be averaged (`buffers=\"mean\"`)"
    )]
    Fixed { names: String },
    #[error("{}", .0.to_string().replacen("`start.file`", "`start.optimizer`", 1))]
    Optimizer(Box<StartError>),
    #[error(
        "`start.optimizer`: {url} has no state of an optimizer; `steadfast checkpoint export --optimizer` and \
         `steadfast.torch.save_optimizer_state` write one"
    )]
    NoState { url: String },
    #[error(
        "`start.optimizer`: {url} has the state of `{found}`, and the optimizer of the job is `{wanted}`; set \
         `optimizer.kind`, or leave out `start.optimizer`"
    )]
    OtherKind { url: String, found: String, wanted: String },
}

impl StartError {
    /// Returns whether the error is permanent, or caused by a store that does not answer.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Store(error) if error.kind() == steadfast_store::ErrorKind::Transient => {
                ErrorKind::Unavailable
            }
            Self::Optimizer(error) => error.kind(),
            Self::Missing { .. }
            | Self::Format { .. }
            | Self::Dtype { .. }
            | Self::NotFinite { .. }
            | Self::Changed { .. }
            | Self::Unfit(_)
            | Self::Fixed { .. }
            | Self::NoState { .. }
            | Self::OtherKind { .. }
            | Self::Store(_) => ErrorKind::Invalid,
        }
    }
}

impl From<StoreError> for StartError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound { url } => Self::Missing { url },
            error => Self::Store(error),
        }
    }
}

/// Computes the record of a file, without holding it in memory.
///
/// # Errors
/// If the file does not exist, is no safetensors file, or cannot be read.
pub async fn describe_start(file: &Location) -> Result<StartRecord, StartError> {
    start_shapes(file).await?;
    let (size_bytes, mut hash) = (size(file).await?, Sha256::new());
    let mut chunks = file.read_in_chunks(size_bytes);
    while let Some(chunk) = chunks.try_next().await? {
        in_place(|| hash.update(&chunk));
    }
    let (url, sha256) = (file.url().to_owned(), hex(&hash.finalize()));
    Ok(StartRecord { url, size_bytes, sha256, optimizer: None })
}

/// Computes the record of a file with the state of an optimizer of this kind.
///
/// # Errors
/// If it is none, or is that of another kind.
pub async fn describe_start_optimizer(
    file: &Location,
    kind: &str,
) -> Result<StartOptimizer, StartError> {
    let of_optimizer = |error| StartError::Optimizer(Box::new(error));
    let header = header(file).await.map_err(of_optimizer)?;
    let entry = |key: &str| header.metadata().as_ref().and_then(|it| it.get(key));
    let updates = entry("updates").and_then(|it| it.parse().ok());
    let updates = updates.filter(|it| *it <= UPDATES_BEFORE_MAX);
    let found = entry("optimizer");
    let (Some(found), Some(updates)) = (found, updates) else {
        return Err(StartError::NoState { url: file.url().to_owned() });
    };
    if found != kind {
        let (url, found, wanted) = (file.url().to_owned(), found.clone(), kind.to_owned());
        return Err(StartError::OtherKind { url, found, wanted });
    }
    let StartRecord { url, size_bytes, sha256, .. } =
        describe_start(file).await.map_err(of_optimizer)?;
    Ok(StartOptimizer { url, size_bytes, sha256, updates })
}

/// Reads the shapes of a file's tensors; of its values, nothing is read.
///
/// # Errors
/// If the file does not exist, is no safetensors file, or cannot be read.
pub async fn start_shapes(file: &Location) -> Result<Shapes, StartError> {
    let header = header(file).await?;
    let tensors = header.tensors().into_iter();
    Ok(tensors.map(|(name, info)| (name, info.shape.clone())).collect())
}

async fn header(file: &Location) -> Result<Metadata, StartError> {
    let bad = |reason: String| StartError::Format { url: file.url().to_owned(), reason };
    let size = size(file).await?;
    let word = match file.read_range(0..size.min(WORD as u64)).await?.first_chunk::<WORD>() {
        Some(word) => u64::from_le_bytes(*word),
        None => return Err(bad(format!("it has {size} bytes"))),
    };
    let end = word.saturating_add(WORD as u64);
    if size < end || word > HEADER_BYTES_MAX as u64 {
        return Err(bad(format!("its header claims a length of {word} bytes")));
    }
    let header = file.read_range(WORD as u64..end).await?;
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| bad(format!("its header cannot be parsed: {error}")))?;
    let whole = end.saturating_add(header.data_len() as u64);
    if size != whole {
        return Err(bad(format!("it has {size} bytes, and its header describes {whole}")));
    }
    Ok(header)
}

/// Reads the state of the optimizer that parameters begin with, by the names of its vectors: flat, as the values of
/// `layout`. The whole file is in memory meanwhile.
///
/// # Errors
/// If the file cannot be read, is not the one of `record`, does not fit the parameters, or has values that no state can
/// have.
///
/// # Panics
/// If `plan` is not of this layout.
pub async fn read_start_optimizer(
    record: &StartOptimizer,
    plan: &StartPlan,
    layout: &Layout,
) -> Result<BTreeMap<String, Vec<f32>>, StartError> {
    let of_optimizer = |error| StartError::Optimizer(Box::new(error));
    let file = steadfast_store::open(&record.url).map_err(|it| of_optimizer(it.into()))?;
    let shapes = start_shapes(&file).await.map_err(of_optimizer)?;
    let plans = plan.states(layout.params(), &shapes).map_err(StartError::Unfit)?;
    let StartOptimizer { url, size_bytes, sha256, .. } = record.clone();
    let record = StartRecord { url, size_bytes, sha256, optimizer: None };
    let mut vectors = BTreeMap::new();
    for (name, plan) in plans {
        let mut values = vec![0.0; layout.len()];
        let read = read_start(&file, &record, &plan, layout, &mut values).await;
        read.map_err(of_optimizer)?;
        vectors.insert(name, values);
    }
    Ok(vectors)
}

/// Overwrites the parameters of `layout` that start from the file; others keep their values. The whole file is in memory
/// meanwhile.
///
/// # Errors
/// If the file cannot be read, is not the one of `record`, or has values that no parameter can have.
///
/// # Panics
/// If `plan` is not of this layout.
pub async fn read_start(
    file: &Location,
    record: &StartRecord,
    plan: &StartPlan,
    layout: &Layout,
    values: &mut [f32],
) -> Result<(), StartError> {
    let size = size(file).await?;
    if size != record.size_bytes {
        let (found, expected) = (format!("{size} bytes"), format!("{} bytes", record.size_bytes));
        return Err(StartError::Changed { url: record.url.clone(), found, expected });
    }
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or_default());
    let mut chunks = file.read_in_chunks(size);
    while let Some(chunk) = chunks.try_next().await? {
        bytes.extend_from_slice(&chunk);
    }
    in_place(|| decode(&bytes, record, plan, layout, values))
}

fn decode(
    bytes: &[u8],
    record: &StartRecord,
    plan: &StartPlan,
    layout: &Layout,
    values: &mut [f32],
) -> Result<(), StartError> {
    let url = || record.url.clone();
    let digest = sha256(bytes);
    if digest != record.sha256 {
        let (found, expected) = (format!("SHA-256 {digest}"), record.sha256.clone());
        return Err(StartError::Changed { url: url(), found, expected });
    }
    let bad = |error: &dyn ToString| StartError::Format { url: url(), reason: error.to_string() };
    let file = SafeTensors::deserialize(bytes).map_err(|error| bad(&error))?;
    for (index, name) in plan.tensors.iter().enumerate() {
        let Some(name) = name else { continue };
        let tensor = file.tensor(name).map_err(|error| bad(&error))?;
        let target = &mut values[layout.range_of(index)];
        match tensor.dtype() {
            Dtype::F32 => convert(&tensor, target, |value: f32| value),
            Dtype::F64 => convert(&tensor, target, |value: f64| value as f32),
            Dtype::F16 => convert(&tensor, target, |bits: u16| f16::from_bits(bits).to_f32()),
            Dtype::BF16 => convert(&tensor, target, |bits: u16| bf16::from_bits(bits).to_f32()),
            // Counters, such as that of a BatchNorm.
            Dtype::I64 => convert(&tensor, target, |value: i64| exact(value)),
            Dtype::I32 => convert(&tensor, target, |value: i32| exact(value.into())),
            dtype => return Err(StartError::Dtype { url: url(), tensor: name.clone(), dtype }),
        }
        if !target.iter().all(|value| value.is_finite()) {
            return Err(StartError::NotFinite { url: url(), tensor: name.clone() });
        }
    }
    Ok(())
}

/// Checks that the tensors that training does not change are as in the file, if that has them: they stay as the code builds
/// them, so other values there would be ignored. Returns the tensors of the file that the model does not have.
///
/// # Errors
/// If some differ, or the file cannot be read.
pub async fn check_fixed(
    file: &Location,
    plan: &StartPlan,
    fixed: &[u8],
) -> Result<Vec<String>, StartError> {
    let bytes = file.read().await?;
    let bad = |reason: String| StartError::Format { url: file.url().to_owned(), reason };
    let names = in_place(|| {
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| error.to_string())?;
        compare(fixed, &tensors, &plan.unused)
    });
    let (names, unknown) = names.map_err(bad)?;
    if names.is_empty() {
        return Ok(unknown);
    }
    let more = names.len().saturating_sub(SHOWN);
    let more = if more == 0 { String::new() } else { format!(", and {more} more") };
    let shown: Vec<String> = names.iter().take(SHOWN).map(|it| format!("`{it}`")).collect();
    Err(StartError::Fixed { names: format!("{}{more}", shown.join(", ")) })
}

/// Number of names in a message.
const SHOWN: usize = 8;

/// Returns an integer as a float; one that floats do not have is no number.
fn exact(value: i64) -> f32 {
    let float = value as f32;
    if float as i64 == value { float } else { f32::NAN }
}

/// Writes the values of a tensor, which need not be aligned in the file, to a parameter of the same shape.
fn convert<T: AnyBitPattern>(
    tensor: &TensorView<'_>,
    target: &mut [f32],
    value: impl Fn(T) -> f32,
) {
    let source = tensor.data().chunks_exact(size_of::<T>());
    assert_eq!(source.len(), target.len(), "the plan compared the shapes");
    for (place, bytes) in target.iter_mut().zip(source) {
        *place = value(bytemuck::pod_read_unaligned(bytes));
    }
}

async fn size(file: &Location) -> Result<u64, StartError> {
    let size = file.size().await?;
    size.ok_or_else(|| StartError::Missing { url: file.url().to_owned() })
}

#[cfg(test)]
mod tests {
    use safetensors::serialize;
    use steadfast_common::job::spec::StartSpec;
    use steadfast_common::tensor::layout::ParamSpec;
    use tempfile::TempDir;

    use super::*;

    /// A file with three values in one tensor.
    struct Scene {
        _directory: TempDir,
        file: Location,
    }

    impl Scene {
        fn new() -> Self {
            let directory = TempDir::new().unwrap();
            let file = directory.path().join("a.safetensors");
            let file = steadfast_store::open(file.to_str().unwrap()).unwrap();
            Self { _directory: directory, file }
        }

        async fn write(&self, dtype: Dtype, bytes: &[u8]) {
            let shape = vec![bytes.len() * 8 / dtype.bitsize()];
            let tensor = TensorView::new(dtype, shape, bytes).unwrap();
            let file = serialize([("w", tensor)], None).unwrap();
            self.file.write(file.into()).await.unwrap();
        }

        /// Returns the values of a model whose parameter `w` starts from the file, and `v` does not.
        async fn start(&self, record: &StartRecord) -> Result<Vec<f32>, StartError> {
            let parameters = vec![ParamSpec::new("v", &[1]), ParamSpec::new("w", &[3])];
            let spec = StartSpec { new: vec!["v".to_owned()], ..StartSpec::default() };
            let plan = spec.plan(&parameters, &start_shapes(&self.file).await?).unwrap();
            let layout = Layout::new(parameters);
            let mut values = vec![7.0; layout.len()];
            read_start(&self.file, record, &plan, &layout, &mut values).await?;
            Ok(values)
        }

        async fn started(&self) -> Result<Vec<f32>, StartError> {
            self.start(&describe_start(&self.file).await?).await
        }
    }

    #[tokio::test]
    async fn values_of_every_float_type_are_read() {
        let scene = Scene::new();
        let values = [1.5f32, -0.0, 0.25];
        let wide = values.map(f64::from);
        let halves = values.map(|value| f16::from_f32(value).to_bits());
        let brain = values.map(|value| bf16::from_f32(value).to_bits());
        scene.write(Dtype::I64, bytemuck::cast_slice(&[0i64, 17, -3])).await;
        assert_eq!(scene.started().await.unwrap(), [7.0, 0.0, 17.0, -3.0]);
        for (dtype, bytes) in [
            (Dtype::F32, bytemuck::cast_slice(&values)),
            (Dtype::F64, bytemuck::cast_slice(&wide)),
            (Dtype::F16, bytemuck::cast_slice(&halves)),
            (Dtype::BF16, bytemuck::cast_slice(&brain)),
        ] {
            scene.write(dtype, bytes).await;
            let started = scene.started().await.unwrap();
            assert_eq!(
                started.iter().map(|it| it.to_bits()).collect::<Vec<_>>(),
                [7f32.to_bits(), 1.5f32.to_bits(), (-0f32).to_bits(), 0.25f32.to_bits()]
            );
        }
    }

    /// I11: no job begins with values that training cannot recover from.
    #[tokio::test]
    async fn values_that_no_parameter_can_have_are_refused() {
        let scene = Scene::new();
        let wide = [1.0, f64::MAX, 0.0];
        scene.write(Dtype::F64, bytemuck::cast_slice(&wide)).await;
        assert!(matches!(scene.started().await, Err(StartError::NotFinite { .. })));
        scene.write(Dtype::F32, bytemuck::cast_slice(&[1.0, f32::NAN, 0.0])).await;
        assert!(matches!(scene.started().await, Err(StartError::NotFinite { .. })));
        scene.write(Dtype::I64, bytemuck::cast_slice(&[1i64, 1 << 24, (1 << 24) + 1])).await;
        assert!(matches!(scene.started().await, Err(StartError::NotFinite { .. })));
        scene.write(Dtype::BOOL, &[1, 0, 1]).await;
        let error = scene.started().await.unwrap_err();
        assert!(error.to_string().contains("the values of `w` in "), "{error}");
    }

    /// F34, F54
    #[tokio::test]
    async fn files_that_are_no_safetensors_files_are_refused() {
        let scene = Scene::new();
        let missing = scene.started().await.unwrap_err();
        assert!(matches!(missing, StartError::Missing { .. }), "{missing}");
        let claims = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
        let cut = [&10u64.to_le_bytes()[..], b"{\"w\": 1"].concat();
        for bytes in [&b""[..], b"abc", b"PK\x03\x04 a file of torch.save", &claims, &cut] {
            scene.file.write(bytes.to_vec().into()).await.unwrap();
            let error = scene.started().await.unwrap_err();
            assert!(matches!(error, StartError::Format { .. }), "{error}");
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
        scene.write(Dtype::F32, bytemuck::cast_slice(&[1f32, 2.0, 3.0])).await;
        let whole = scene.file.read().await.unwrap();
        scene.file.write(whole.slice(..whole.len() - 1)).await.unwrap();
        let error = scene.started().await.unwrap_err();
        assert!(matches!(error, StartError::Format { .. }), "{error}");
    }

    /// Where the state of an optimizer comes from is checked before the job exists, and what it holds when it begins.
    #[tokio::test]
    async fn the_state_of_an_optimizer_is_that_of_its_kind_and_of_all_updated_parameters() {
        let scene = Scene::new();
        let write = async |tensors: &[(&str, &[f32])], metadata: &[(&str, &str)]| {
            let views = tensors.iter().map(|(name, values)| {
                let bytes = bytemuck::cast_slice(values);
                (*name, TensorView::new(Dtype::F32, vec![values.len()], bytes).unwrap())
            });
            let entries = metadata.iter().map(|(key, it)| ((*key).to_owned(), (*it).to_owned()));
            let file = serialize(views, Some(entries.collect())).unwrap();
            scene.file.write(file.into()).await.unwrap();
        };
        let about = [("optimizer", "adam"), ("updates", "12")];
        let whole: &[(&str, &[f32])] = &[("m/w", &[1.0, 2.0]), ("v/w", &[3.0, 4.0])];
        write(whole, &about).await;
        let record = describe_start_optimizer(&scene.file, "adam").await.unwrap();
        assert_eq!(record.updates, 12);
        let other = describe_start_optimizer(&scene.file, "sgd").await.unwrap_err().to_string();
        assert!(other.ends_with(
            "has the state of `adam`, and the optimizer of the job is `sgd`; set `optimizer.kind`, or leave out \
             `start.optimizer`"
        ));
        let frozen = ParamSpec {
            update: steadfast_common::tensor::layout::UpdateRule::Frozen,
            ..ParamSpec::new("frozen", &[1])
        };
        let params = vec![ParamSpec::new("new", &[3]), ParamSpec::new("w", &[2]), frozen];
        let layout = Layout::new(params);
        let tensors = [None, Some("w"), Some("frozen")].map(|it| it.map(str::to_owned)).to_vec();
        let plan = StartPlan { tensors, unused: Vec::new() };
        let read = read_start_optimizer(&record, &plan, &layout).await.unwrap();
        let expected =
            [("m", [0.0, 0.0, 0.0, 1.0, 2.0, 0.0]), ("v", [0.0, 0.0, 0.0, 3.0, 4.0, 0.0])];
        assert_eq!(read, expected.map(|(name, it)| (name.to_owned(), it.to_vec())).into());
        let unfit = async |tensors: &[(&str, &[f32])]| {
            write(tensors, &about).await;
            let record = describe_start_optimizer(&scene.file, "adam").await.unwrap();
            read_start_optimizer(&record, &plan, &layout).await.unwrap_err().to_string()
        };
        let shape = unfit(&[("m/w", &[1.0])]).await;
        assert_eq!(shape, "`m/w` in the file of `start.optimizer` is [1], not [2]");
        write(&[("m/w", &[1.0, 2.5]), ("v/w", &[3.0, 4.0])], &about).await;
        let changed = read_start_optimizer(&record, &plan, &layout).await.unwrap_err().to_string();
        assert!(changed.contains("has changed since the job was created"), "{changed}");
        write(whole, &about[..1]).await;
        let none = describe_start_optimizer(&scene.file, "adam").await.unwrap_err();
        assert!(matches!(none, StartError::NoState { .. }), "{none}");
        scene.file.write(b"abc".to_vec().into()).await.unwrap();
        let bad = describe_start_optimizer(&scene.file, "adam").await.unwrap_err();
        assert!(bad.to_string().starts_with("`start.optimizer`: "), "{bad}");
        assert_eq!(bad.kind(), ErrorKind::Invalid);
    }

    /// A frozen layer that the code has not loaded would stay random, whatever the file has.
    #[tokio::test]
    async fn a_fixed_tensor_that_the_file_has_otherwise_is_an_error() {
        let scene = Scene::new();
        let encoded = |value: f32| {
            let bytes = value.to_le_bytes();
            let tensor = TensorView::new(Dtype::F32, vec![1], &bytes).unwrap();
            serialize([("body", tensor)], None).unwrap()
        };
        scene.file.write(encoded(1.0).into()).await.unwrap();
        let plan = StartPlan { tensors: Vec::new(), unused: vec!["body".to_owned()] };
        let none: [String; 0] = [];
        assert_eq!(check_fixed(&scene.file, &plan, &encoded(1.0)).await.unwrap(), none);
        let error = check_fixed(&scene.file, &plan, &encoded(2.0)).await.unwrap_err();
        assert!(error.to_string().starts_with("training does not change `body`, which"), "{error}");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let other = StartPlan { unused: vec!["tail".to_owned()], ..plan };
        assert_eq!(check_fixed(&scene.file, &other, &encoded(2.0)).await.unwrap(), ["tail"]);
    }

    /// A job that begins anew from another file would end with other bits.
    #[tokio::test]
    async fn a_file_that_has_changed_since_the_job_was_created_is_refused() {
        let scene = Scene::new();
        scene.write(Dtype::F32, bytemuck::cast_slice(&[1f32, 2.0, 3.0])).await;
        let record = describe_start(&scene.file).await.unwrap();
        scene.write(Dtype::F32, bytemuck::cast_slice(&[1f32, 2.0, 4.0])).await;
        let error = scene.start(&record).await.unwrap_err();
        assert!(matches!(error, StartError::Changed { .. }), "{error}");
    }
}
