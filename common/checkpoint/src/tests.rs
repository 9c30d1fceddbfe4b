//! Tests of the format with small checkpoints, valid, damaged and malicious.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as SafeDtype, TensorView};
use steadfast_common::ids::{Generation, Incarnation, Pass, Slot, Version};
use steadfast_common::records::applied_records::AppliedRecords;
use steadfast_common::records::position::Position;
use steadfast_common::records::{CheckpointRecord, RowFilesRecord, ShardRecord};
use steadfast_common::tensor::layout::{Layout, ParamSpec, UpdateRule};
use steadfast_common::tensor::placement::{Placement, PlacementRecord};
use steadfast_common::tensor::table::{Initial, RANGES, Rows, range_of};
use steadfast_store::{Location, StoreError};
use tempfile::TempDir;

use crate::row_file::{RangeTensors, RowFile, RowFileMeta, RowFileRecord, RowsMeta, encode_rows};
use crate::*;

const STATES: [&str; 2] = ["m", "v"];

/// A checkpoint of two slots in a directory.
struct Scene {
    directory: TempDir,
    store: Location,
    layout: Arc<Layout>,
    record: CheckpointRecord,
}

impl Scene {
    fn new() -> Self {
        let params = [("w", vec![2, 3]), ("b", vec![2]), ("c", vec![])];
        let params: Vec<ParamSpec> =
            params.iter().map(|(name, shape)| ParamSpec::new(*name, shape)).collect();
        let layout = Arc::new(Layout::new(params.clone()));
        let directory = tempfile::tempdir().unwrap();
        let store = steadfast_store::open(directory.path().to_str().unwrap()).unwrap();
        let position = Position { version: Version(7), ..Position::default() };
        let record = CheckpointRecord {
            generation: Generation(1),
            params,
            placement: PlacementRecord::LargestFirst { slots: 2 },
            position,
            ..CheckpointRecord::default()
        };
        let mut scene = Self { directory, store, layout, record };
        scene.put(0, encoded(&scene.layout, &scene.blocks_of(0)));
        scene.put(1, encoded(&scene.layout, &scene.blocks_of(1)));
        scene
    }

    fn blocks_of(&self, slot: u32) -> Vec<u32> {
        Placement::of(&self.layout, &self.record.placement).blocks_of(Slot(slot)).to_vec()
    }

    /// Stores `bytes` as the shard of a slot and lists it in the manifest.
    fn put(&mut self, slot: u32, bytes: Bytes) {
        let shard = ShardRecord {
            slot: Slot(slot),
            incarnation: Incarnation(5),
            object: format!("shards/{slot}.safetensors"),
            sha256: digest(std::slice::from_ref(&bytes)),
            size_bytes: bytes.len() as u64,
            version: Version(7),
            rows: Vec::new(),
        };
        self.overwrite(&shard.object, &bytes);
        self.record.shards.retain(|shard| shard.slot.0 != slot);
        self.record.shards.insert(slot as usize, shard);
    }

    /// Replaces an object without changing the manifest.
    fn overwrite(&self, object: &str, bytes: &[u8]) {
        let path = self.directory.path().join(object);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    fn names(&self) -> BlockNames {
        BlockNames::new(Arc::clone(&self.layout))
    }

    fn verify(&self) -> Result<Verified, CheckpointError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(verify(&self.store, &self.record))
    }

    #[track_caller]
    fn invalid_reason(&self) -> String {
        let error = self.verify().expect_err("the checkpoint is invalid");
        assert!(error.is_permanent(), "{error}");
        error.to_string()
    }
}

fn values(layout: &Layout) -> Vec<f32> {
    (0..layout.len()).map(|it| it as f32 * 0.25 - 1.0).collect()
}

fn counted(records: u64) -> AppliedRecords {
    let mut counted = AppliedRecords::default();
    counted.count(Pass(0), records, records ^ 77);
    counted
}

fn meta() -> ShardMeta {
    ShardMeta { version: Version(7), counts: vec![counted(40)], ..ShardMeta::default() }
}

fn encoded(layout: &Layout, numbers: &[u32]) -> Bytes {
    let values = values(layout);
    encoded_with(layout, numbers, &meta(), &STATES, &values)
}

fn encoded_with(
    layout: &Layout,
    numbers: &[u32],
    meta: &ShardMeta,
    states: &[&str],
    values: &[f32],
) -> Bytes {
    let range = |number: u32| layout.blocks()[number as usize].range();
    let state: Vec<Vec<Vec<f32>>> = (0..layout.blocks().len() as u32)
        .map(|number| {
            states
                .iter()
                .map(|_| values[range(number)].iter().map(|it| it * it).collect())
                .collect()
        })
        .collect();
    let blocks = numbers.iter().map(|number| BlockTensors {
        number: *number,
        values: Arc::new(values[range(*number)].to_vec()),
        states: Arc::new(state[*number as usize].clone()),
    });
    encode_shard(layout, states, meta, blocks).unwrap().concat().into()
}

/// Returns the layout of a model with a table alone, and its range 3 with two rows and a candidate.
fn table() -> (Arc<Layout>, RangeTensors) {
    let params = vec![ParamSpec::table("rows", 2, Initial::Zeros)];
    let layout = Arc::new(Layout::new(params));
    let ids: Vec<u64> = (0..).filter(|id| range_of(*id) == 3).take(3).collect();
    let range = RangeTensors {
        number: layout.number_of_range(0, 3),
        ids: ids[..2].to_vec(),
        counts: vec![[5, 1], [u32::MAX, 2]],
        values: vec![0.5, 1.5, 2.5, 3.5],
        states: [("m".to_owned(), vec![-1.0, -2.0, -3.0, -4.0])].into(),
        candidate_ids: ids[2..].to_vec(),
        candidate_counts: vec![[1, 0]],
    };
    (layout, range)
}

fn with_range(layout: &Layout, range: RangeTensors) -> Bytes {
    encode_rows(layout, &RowFileMeta { version: Version(7) }, vec![range]).unwrap().concat().into()
}

/// Decodes a row file in segments of `len` bytes.
fn rows_in(len: usize, names: &BlockNames, bytes: &[u8]) -> Result<RowFile, String> {
    let mut decoder = RowFileDecoder::new(names, bytes.len() as u64, u64::MAX, &|_| true);
    bytes.chunks(len).try_for_each(|segment| decoder.push(Bytes::copy_from_slice(segment)))?;
    decoder.finish()
}

#[test]
fn the_rows_of_a_table_read_back_as_they_were_written() {
    let (layout, range) = table();
    let names = BlockNames::new(layout.clone());
    let bytes = with_range(&layout, range.clone());
    for len in [1, 7, 4_096] {
        let read = rows_in(len, &names, &bytes).unwrap();
        assert_eq!(read.meta().version, Version(7));
        assert_eq!(read.numbers().collect::<Vec<_>>(), [3]);
        assert_eq!(read.into_ranges().remove(&range.number).as_ref(), Some(&range));
    }
    assert_eq!(range.check(&layout), Ok(()));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("rows#3").unwrap().shape(), [2, 2]);
    assert_eq!(tensors.tensor("ids/rows#3").unwrap().dtype(), safetensors::Dtype::U64);
    let none = RangeTensors { number: 4, ..RangeTensors::default() };
    let read = rows_in(7, &names, &with_range(&layout, none.clone())).unwrap();
    assert_eq!(read.into_ranges().remove(&4), Some(none));
}

/// The rows of each file of a layer: an id, the pass of its last update, and its first value.
type Layer<'a> = &'a [&'a [(u64, u32, f32)]];

/// Creates a checkpoint of one slot with a table, whose rows are in layers of files.
fn layered(layers: &[Layer<'_>]) -> Scene {
    let mut scene = Scene::new();
    scene.record.params = vec![ParamSpec::table("rows", 2, Initial::Zeros)];
    scene.layout = Arc::new(Layout::new(scene.record.params.clone()));
    scene.record.placement = PlacementRecord::LargestFirst { slots: 1 };
    scene.record.shards.pop();
    let mut rows = RowsMeta {
        pass: Pass(5),
        ranges: [0, RANGES],
        expire_after: vec![Some(2)],
        layers: vec![],
    };
    let mut records = Vec::new();
    for (layer, files) in layers.iter().enumerate() {
        let (name, files_len) = (format!("shards/{layer}"), files.len() as u32);
        let mut record = RowFilesRecord { name, files: files_len, size_bytes: 0 };
        let mut described = Vec::new();
        let objects: Vec<String> = record.objects().collect();
        for (object, file) in objects.into_iter().zip(*files) {
            let mut ranges = std::collections::BTreeMap::<u32, RangeTensors>::new();
            for (id, pass, value) in *file {
                let number = scene.layout.number_of_range(0, range_of(*id));
                let row = RangeTensors {
                    number,
                    ids: vec![*id],
                    counts: vec![[1, *pass]],
                    values: vec![*value, -value],
                    ..RangeTensors::default()
                };
                ranges.entry(number).or_default().append(row);
                ranges.entry(number).and_modify(|range| range.number = number);
            }
            let numbers = [ranges.keys().min(), ranges.keys().max()].map(|it| *it.unwrap());
            let ranges = ranges.into_values().collect();
            let bytes = encode_rows(&scene.layout, &RowFileMeta::default(), ranges).unwrap();
            let sha256 = digest(&bytes);
            let bytes = bytes.concat();
            record.size_bytes += bytes.len() as u64;
            described.push(RowFileRecord {
                sha256,
                size_bytes: bytes.len() as u64,
                ranges: numbers,
            });
            scene.overwrite(&object, &bytes);
        }
        rows.layers.push(described);
        records.push(record);
    }
    let meta = ShardMeta { rows: Some(rows), ..meta() };
    let shard = encode_shard(&scene.layout, &[""; 0], &meta, std::iter::empty()).unwrap();
    scene.put(0, shard.concat().into());
    scene.record.shards[0].rows = records;
    scene
}

/// Returns three ids of one range, ascending, and one of a later range.
fn ids() -> [u64; 4] {
    let of = |range| (0..).filter(move |id| range_of(*id) == range);
    let same: Vec<u64> = of(3).take(3).collect();
    [same[0], same[1], same[2], of(9).next().unwrap()]
}

/// Rows are read from the last layer that has them, wherever a range was divided into files, and without those that
/// have expired.
#[test]
fn the_rows_of_a_checkpoint_are_those_of_the_last_layer_without_expired_ones() {
    let [a, b, c, d] = ids();
    // `c` expired in pass 5; `b` had, but was created anew.
    let base: Layer<'_> = &[&[(a, 4, 1.0), (b, 1, 2.0)], &[(c, 2, 3.0), (d, 5, 4.0)]];
    let scene = layered(&[base, &[&[(b, 5, 5.0)]], &[&[(a, 5, 6.0)]]]);
    let verified = scene.verify().unwrap();
    assert_eq!(verified.rows, [("rows".to_owned(), 3)]);
    let mut ranges = vec![Rows::new(2); RANGES as usize];
    ranges[3] = Rows::of(2, vec![a, b], vec![6.0, -6.0, 5.0, -5.0]);
    ranges[9] = Rows::of(2, vec![d], vec![4.0, -4.0]);
    let ranges: Vec<_> = ranges.iter().map(Rows::digest).collect();
    assert_eq!(verified.parameters_sha256, scene.layout.digest(&[], &ranges));
    assert!(verified.counted[0].blocks == RANGES as usize);
}

/// F34
#[test]
fn row_files_other_than_those_of_the_shard_are_refused() {
    let [a, b, _, d] = ids();
    let scene = || layered(&[&[&[(a, 5, 1.0)], &[(d, 5, 4.0)]], &[&[(b, 5, 2.0)]]]);
    let mut fewer = scene();
    fewer.record.shards[0].rows.pop();
    assert!(fewer.invalid_reason().ends_with("it has other row files than the manifest"));
    let mut exchanged = scene();
    exchanged.record.shards[0].rows[1].name = "shards/0".to_owned();
    let error = exchanged.invalid_reason();
    assert!(
        error.starts_with("shards/0-rows-0.safetensors is damaged: its SHA-256 is "),
        "{error}"
    );
    let descending = layered(&[&[&[(b, 5, 1.0)], &[(a, 5, 4.0)]]]);
    let error = descending.invalid_reason();
    assert!(
        error.ends_with("rows-1.safetensors is damaged: rows of `rows#3` do not ascend"),
        "{error}"
    );
    let shard = encode_shard(&scene().layout, &[""; 0], &meta(), std::iter::empty()).unwrap();
    let mut without = scene();
    without.put(0, shard.concat().into());
    assert_eq!(without.invalid_reason(), "no shard holds `rows#0`");
    let mut forged = scene();
    forged.record.shards[0].rows[0].files = u32::MAX;
    let error = forged.invalid_reason();
    assert_eq!(error, "the manifest is invalid: the shard of slot 0 has 4294967295 row files");
    // A row file in place of a shard, and the reverse.
    let mut confused = scene();
    let object = confused.record.shards[0].rows[0].objects().next().unwrap();
    let bytes = std::fs::read(confused.directory.path().join(object)).unwrap();
    confused.put(0, bytes.into());
    assert!(confused.invalid_reason().contains("its metadata cannot be parsed"));
}

/// I10: rows that no pserver could have written are refused by name.
#[test]
fn rows_that_do_not_belong_together_are_refused() {
    let (layout, range) = table();
    let refused = |change: &dyn Fn(&mut RangeTensors)| {
        let mut other = range.clone();
        change(&mut other);
        other.check(&layout).unwrap_err()
    };
    let order = refused(&|it| it.ids.reverse());
    assert!(order.contains("ids must ascend"), "{order}");
    assert!(refused(&|it| it.number = 5).contains("belongs to another slot"));
    assert!(refused(&|it| it.values[1] = f32::NAN).contains("not finite"));
    for incomplete in [
        refused(&|it| it.counts.truncate(1)),
        refused(&|it| it.values.truncate(3)),
        refused(&|it| it.candidate_counts.clear()),
        refused(&|it| it.states.values_mut().for_each(|state| state.truncate(1))),
    ] {
        assert_eq!(incomplete, "does not have each part of every row");
    }
}

/// Decodes a file in segments of `len` bytes.
fn decoded_in(len: usize, names: &BlockNames, bytes: &[u8]) -> Result<ShardFile, String> {
    let mut decoder = ShardDecoder::new(names, bytes.len() as u64, u64::MAX, &|_| true);
    bytes.chunks(len).try_for_each(|segment| decoder.push(Bytes::copy_from_slice(segment)))?;
    decoder.finish()
}

fn decoded(names: &BlockNames, bytes: Bytes) -> Result<ShardFile, String> {
    decoded_in(bytes.len().max(1), names, &bytes)
}

/// Returns a file with the header `json`.
fn file(json: &str, data: &[u8]) -> Bytes {
    [&(json.len() as u64).to_le_bytes(), json.as_bytes(), data].concat().into()
}

/// Returns a valid file with `meta` as its metadata.
fn with_meta(meta: &str) -> Bytes {
    let json = serde_json::json!({
        "__metadata__": { "steadfast": meta },
        "b@0": { "dtype": "F32", "shape": [2], "data_offsets": [0, 8] },
    });
    file(&json.to_string(), &[0; 8])
}

/// I10
#[test]
fn a_valid_checkpoint_restores_the_parameters_bit_for_bit() {
    let scene = Scene::new();
    let expected = values(&scene.layout);
    let verified = scene.verify().unwrap();
    assert_eq!(verified.parameters_sha256, scene.layout.digest(&expected, &[]));
    assert_eq!(verified.values, 9);
    assert_eq!(verified.states, STATES);
    assert_eq!(verified.counted, [AppliedToBlocks { counted: counted(40), blocks: 3 }]);

    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let read = |wanted| runtime.block_on(contents(&scene.store, &scene.record, wanted)).unwrap();
    let found = read(Wanted::Parameters);
    assert_eq!(found.parameters_sha256, verified.parameters_sha256);
    assert_eq!(*found.layout, *scene.layout);
    assert_eq!(found.values, expected);
    assert_eq!(found.optimizer, None);

    let found = read(Wanted::WithOptimizer);
    let state = found.optimizer.unwrap();
    assert!(state.states.keys().eq(&STATES), "{:?}", state.states.keys());
    assert_eq!(state.updates, meta().updates);
    let about = OptimizerFile { job: "digits", optimizer: "adam", parameters_sha256: "5a" };
    let bytes = encode_optimizer(&found.layout, &state, about).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    assert_eq!((&metadata["optimizer"][..], &metadata["job"][..]), ("adam", "digits"));
    assert_eq!(metadata["updates"], meta().updates.to_string());
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), STATES.len() * scene.layout.params().len());
    for (index, param) in scene.layout.params().iter().enumerate() {
        for name in STATES {
            let tensor = file.tensor(&format!("{name}/{}", param.name)).unwrap();
            let values = &state.states[name][scene.layout.range_of(index)];
            assert_eq!(tensor.shape(), param.shape);
            assert_eq!(tensor.data(), bytemuck::cast_slice::<f32, u8>(values));
        }
    }
}

/// Parameters that no optimizer updates have no state that another program could use.
#[test]
fn the_state_of_frozen_and_averaged_parameters_is_not_exported() {
    let frozen = ParamSpec { update: UpdateRule::Frozen, ..ParamSpec::new("frozen", &[1]) };
    let params = vec![ParamSpec::averaged("mean", &[1]), ParamSpec::new("w", &[1]), frozen];
    let layout = Layout::new(params);
    let states = [("m".to_owned(), vec![1.0, 2.0, 3.0])].into();
    let state = OptimizerState { updates: 7, states };
    let about = OptimizerFile { job: "digits", optimizer: "lion", parameters_sha256: "5a" };
    let bytes = encode_optimizer(&layout, &state, about).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.names(), ["m/w"]);
    assert_eq!(file.tensor("m/w").unwrap().data(), 2f32.to_le_bytes());
}

/// I10
#[test]
fn a_shard_reads_back_as_it_was_written() {
    let layout = Scene::new().layout;
    let mut meta = meta();
    meta.counts.push(counted(41));
    meta.count_of.insert(1, 1);
    meta.loss = Some(0.1);
    let values = values(&layout);
    let bytes = encoded_with(&layout, &[0, 1], &meta, &STATES, &values);
    let read = decoded(&BlockNames::new(Arc::clone(&layout)), bytes).unwrap();
    assert_eq!(*read.meta(), meta);
    assert!(read.numbers().eq([0, 1]) && read.blocks().keys().eq(&[0, 1]));
    for (number, block) in read.blocks() {
        let range = layout.blocks()[*number as usize].range();
        assert_eq!(block.values, values[range.clone()]);
        assert!(block.states.keys().eq(&STATES));
        assert!(block.states["v"].iter().copied().eq(values[range].iter().map(|it| it * it)));
    }
    assert_eq!([0, 1].map(|it| read.meta().counted(it).unwrap().records()), [40, 41]);
}

/// I10
#[test]
fn a_shard_reads_the_same_however_its_bytes_are_split() {
    let scene = Scene::new();
    let bytes = encoded(&scene.layout, &[0, 1, 2]);
    let names = scene.names();
    let whole = decoded(&names, bytes.clone()).unwrap();
    for len in 1..bytes.len() {
        let read = decoded_in(len, &names, &bytes).unwrap();
        assert_eq!((read.meta(), read.blocks()), (whole.meta(), whole.blocks()), "by {len}");
    }
}

#[test]
fn an_unrequested_block_is_verified_and_not_kept() {
    let scene = Scene::new();
    let bytes = encoded(&scene.layout, &[0, 1, 2]);
    let names = scene.names();
    let mut decoder =
        ShardDecoder::new(&names, bytes.len() as u64, u64::MAX, &|number| number == 1);
    decoder.push(bytes.clone()).unwrap();
    let read = decoder.finish().unwrap();
    assert!(read.numbers().eq(0..3) && read.blocks().keys().eq(&[1]));
    let error = decoded(&names, with_meta("{}")).unwrap_err();
    let mut decoder = ShardDecoder::new(&names, with_meta("{}").len() as u64, u64::MAX, &|_| false);
    assert_eq!(decoder.push(with_meta("{}")).unwrap_err(), error);
}

/// S004-36
#[test]
fn a_model_file_has_every_parameter_with_name_and_shape_and_names_its_job() {
    let layout = Scene::new().layout;
    let values = values(&layout);
    let about = ModelFile { job: "digits", model: "softmax", parameters_sha256: "5a" };
    let bytes = encode_model(&layout, &values, about, None).unwrap();
    assert_eq!(bytes, encode_model(&layout, &values, about, None).unwrap());
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    let entries = [("job", "digits"), ("model", "softmax"), ("parameters_sha256", "5a")];
    assert_eq!(metadata.len(), entries.len());
    entries.iter().for_each(|(key, value)| assert_eq!(metadata[*key], *value));
    let model = SafeTensors::deserialize(&bytes).unwrap();
    for (index, param) in layout.params().iter().enumerate() {
        let tensor = model.tensor(&param.name).unwrap();
        assert_eq!(tensor.shape(), param.shape);
        let expected: Vec<u8> =
            values[layout.range_of(index)].iter().flat_map(|it| it.to_le_bytes()).collect();
        assert_eq!(tensor.data(), expected);
    }
}

/// Other programs find every name of a module in the file: frozen parameters, constant buffers, tied tensors.
#[tokio::test]
async fn a_model_file_has_what_training_does_not_change_under_every_name() {
    let layout = Scene::new().layout;
    let (values, name) = (values(&layout), layout.params()[0].name.clone());
    let about = ModelFile { job: "digits", model: "softmax", parameters_sha256: "5a" };
    let encoded = |aliases: &str, frozen: &str| {
        let masks = [f32::NEG_INFINITY, 1.0].map(f32::to_le_bytes).concat();
        let steps = [1i64, 1 << 40].map(i64::to_le_bytes).concat();
        let tensors = [
            (frozen, TensorView::new(SafeDtype::F32, vec![2], &masks).unwrap()),
            ("steps", TensorView::new(SafeDtype::I64, vec![2, 1], &steps).unwrap()),
        ];
        let metadata = HashMap::from([("aliases".to_owned(), aliases.to_owned())]);
        let fixed = safetensors::serialize(tensors, Some(metadata)).unwrap();
        encode_model(&layout, &values, about, Some(&fixed)).map(|file| (file, fixed))
    };
    let aliases = format!("{{\"steps too\": \"steps\", \"tied\": \"{name}\"}}");
    let (bytes, fixed) = encoded(&aliases, "mask").unwrap();
    let model = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(model.len(), layout.params().len() + 4);
    for (other, first) in [("tied", &name[..]), ("steps too", "steps")] {
        assert_eq!(model.tensor(other).unwrap(), model.tensor(first).unwrap());
    }
    assert_eq!(model.tensor("steps").unwrap().dtype(), SafeDtype::I64);
    let without = encode_model(&layout, &values, about, None).unwrap();
    let plain = SafeTensors::deserialize(&without).unwrap();
    assert_eq!(model.tensor(&name).unwrap(), plain.tensor(&name).unwrap());
    assert_eq!(
        encoded("{\"too\": \"nowhere\"}", "mask").unwrap_err(),
        EncodeError::Fixed {
            reason: "`too` is another name of `nowhere`, which does not exist".to_owned()
        }
    );
    assert!(matches!(encoded("[]", "mask"), Err(EncodeError::Fixed { .. })));
    assert_eq!(encoded("{}", &name).unwrap_err(), EncodeError::SameName { name: name.clone() });

    let store = TempDir::new().unwrap();
    let store = steadfast_store::open(store.path().to_str().unwrap()).unwrap();
    let record = describe_fixed("digits", &fixed);
    let missing = read_fixed(&store, &record).await.unwrap_err();
    assert!(matches!(missing, FixedError::Missing { .. }), "{missing}");
    let place = store.child(&record.object).unwrap();
    place.write(fixed.clone().into()).await.unwrap();
    assert_eq!(read_fixed(&store, &record).await.unwrap(), fixed);
    place.write(fixed[1..].to_vec().into()).await.unwrap();
    let damaged = read_fixed(&store, &record).await.unwrap_err();
    assert!(matches!(damaged, FixedError::Damaged { .. }), "{damaged}");
}

/// F34
#[test]
fn a_shard_truncated_anywhere_is_rejected() {
    let scene = Scene::new();
    let whole = encoded(&scene.layout, &[0, 1, 2]);
    let names = scene.names();
    assert!(decoded(&names, whole.clone()).is_ok());
    for len in 0..whole.len() {
        decoded(&names, whole.slice(..len)).unwrap_err();
    }
    let object = &scene.record.shards[0].object;
    let whole = encoded(&scene.layout, &scene.blocks_of(0));
    for len in [0, 1, 8, whole.len() - 1] {
        scene.overwrite(object, &whole[..len]);
        let expected = format!("{object} is damaged: it has {len} bytes, not {}", whole.len());
        assert_eq!(scene.invalid_reason(), expected);
    }
}

/// S004-62, F34
#[test]
fn any_flipped_bit_is_found_and_its_object_named() {
    let scene = Scene::new();
    let object = scene.record.shards[0].object.clone();
    let whole = encoded(&scene.layout, &scene.blocks_of(0));
    let names = scene.names();
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.to_vec();
        flipped[bit / 8] ^= 1 << (bit % 8);
        // Without the hash, a damaged shard may look valid; it must not cause a panic.
        let _ = decoded(&names, flipped.into());
    }
    for bit in (0..whole.len() * 8).step_by(97) {
        let mut flipped = whole.to_vec();
        flipped[bit / 8] ^= 1 << (bit % 8);
        scene.overwrite(&object, &flipped);
        let error = scene.invalid_reason();
        assert!(error.starts_with(&format!("{object} is damaged: its SHA-256 is ")), "{error}");
    }
}

/// F34
#[test]
fn bytes_that_are_not_a_shard_are_rejected_whatever_their_header_claims() {
    let scene = Scene::new();
    let names = scene.names();
    let whole = encoded(&scene.layout, &[0, 1, 2]).to_vec();
    let len = whole.len() as u64;
    for claimed in [0, 1, len - 8, len - 7, len, 99_999_999, 1 << 40, u64::MAX - 8, u64::MAX] {
        let mut file = whole.clone();
        file[..8].copy_from_slice(&claimed.to_le_bytes());
        decoded(&names, file.into()).unwrap_err();
    }
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        let tensor = format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#);
        let meta = r#"{"steadfast":"{\"updates\":0,\"examples\":0,\"version\":7,\"loss\":null,\"counts\":[{\"passes\":[]}]}"}"#;
        file(&format!(r#"{{"__metadata__":{meta},"b@0":{tensor}}}"#), &[0; 8])
    };
    assert!(decoded(&names, tensor("F32", "[2]", "[0,8]")).is_ok());
    let most = u64::MAX;
    for (dtype, shape, offsets) in [
        ("F64", "[1]", "[0,8]".to_owned()),
        ("F32", "[1,2]", "[0,8]".to_owned()),
        ("F32", "[2]", "[8,0]".to_owned()),
        ("F32", "[2]", "[0,9]".to_owned()),
        ("F32", "[2]", "[1,9]".to_owned()),
        ("F32", "[-2]", "[0,8]".to_owned()),
        ("F32", "[1152921504606846976]", format!("[0,{most}]")),
        ("F32", "[4611686018427387904,4]", "[0,8]".to_owned()),
        ("U8", "[18446744073709551615]", format!("[0,{most}]")),
    ] {
        let error = decoded(&names, tensor(dtype, shape, &offsets));
        assert!(error.is_err(), "{dtype} {shape} {offsets}");
    }
    let deep = "[".repeat(100_000);
    for json in ["", "{", "[]", "null", "{\"b@0\":1}", "\u{7f}", deep.as_str()] {
        assert!(decoded(&names, file(json, &[])).is_err(), "{json}");
    }
}

/// F34
#[test]
fn invalid_metadata_is_rejected() {
    let names = Scene::new().names();
    let refused = |meta: &str| decoded(&names, with_meta(meta)).unwrap_err();
    let sound = serde_json::to_value(meta()).unwrap();
    assert!(decoded(&names, with_meta(&sound.to_string())).is_ok());
    for text in ["", "{}", "[]", "7", "{\"updates\":-1}", "{\"counts\":[[[["] {
        assert!(refused(text).starts_with("its metadata cannot be parsed: "), "{text}");
    }
    for key in ["updates", "examples", "version", "counts"] {
        let mut other = sound.clone();
        other[key] = "much".into();
        refused(&other.to_string());
        other.as_object_mut().unwrap().remove(key);
        refused(&other.to_string());
    }
    let mut other = sound.clone();
    other["counts"] = serde_json::json!([]);
    assert_eq!(refused(&other.to_string()), "its tensor `b@0` has no applied records");
    let mut other = sound;
    other["count_of"] = serde_json::json!({ "1": u64::MAX });
    assert_eq!(refused(&other.to_string()), "its tensor `b@0` has no applied records");

    let none = file(r#"{"b@0":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, &[0; 8]);
    let error = decoded(&names, none).unwrap_err();
    assert_eq!(error, "it has no metadata entry `steadfast`");
}

/// F54
#[test]
fn a_long_header_is_parsed_only_if_the_manifest_confirms_its_hash() {
    let mut scene = Scene::new();
    // A header with so many numbers that parsing it would take much memory.
    let json = format!("{{\"x\":[{}0]}}", "0,".repeat(1 << 20));
    let long = file(&json, &[0; 8]);
    scene.put(0, long.clone());
    let object = scene.record.shards[0].object.clone();
    assert!(
        scene.invalid_reason().contains("its header cannot be parsed"),
        "the hash is that of the manifest"
    );
    let mut other = long.to_vec();
    *other.last_mut().unwrap() = 1;
    scene.overwrite(&object, &other);
    assert!(scene.invalid_reason().starts_with(&format!("{object} is damaged: its SHA-256 is ")));
}

/// F34
#[test]
fn a_missing_object_is_named() {
    let scene = Scene::new();
    let object = &scene.record.shards[1].object;
    std::fs::remove_file(scene.directory.path().join(object)).unwrap();
    assert_eq!(scene.invalid_reason(), format!("{object} is missing"));
}

/// F34
#[test]
fn valid_shards_of_different_checkpoints_are_rejected() {
    let first = "shards/0.safetensors";
    let second = "shards/1.safetensors";

    let mut scene = Scene::new();
    scene.put(1, encoded(&scene.layout, &[0, 1, 2]));
    let name = scene.names().block(scene.blocks_of(0)[0]).1;
    let expected = format!("{second} is damaged: it holds `{name}`, which {first} also holds");
    assert_eq!(scene.invalid_reason(), expected);

    let mut scene = Scene::new();
    scene.put(0, encoded(&scene.layout, &[0]));
    scene.put(1, encoded(&scene.layout, &[2]));
    assert_eq!(scene.invalid_reason(), "no shard holds `b@0`");

    let mut scene = Scene::new();
    let (blocks, values) = (scene.blocks_of(1), values(&scene.layout));
    scene.put(1, encoded_with(&scene.layout, &blocks, &meta(), &["m"], &values));
    let error = scene.invalid_reason();
    assert!(error.starts_with(second) && error.contains(r#"state ["m"]"#), "{error}");

    let mut scene = Scene::new();
    let later = ShardMeta { version: Version(8), ..meta() };
    scene.put(1, encoded_with(&scene.layout, &blocks, &later, &STATES, &values));
    assert_eq!(scene.invalid_reason(), format!("{second} is damaged: it has version 8, not 7"));

    let mut scene = Scene::new();
    let other = Layout::new(vec![ParamSpec::new("unknown", &[2])]);
    scene.put(1, encoded(&other, &[0]));
    let expected = "its tensor `m/unknown@0` is not a block of the model";
    assert_eq!(scene.invalid_reason(), format!("{second} is damaged: {expected}"));
}

/// I11
#[test]
fn a_value_that_is_not_finite_is_found_in_parameters_and_in_state() {
    const MARK: f32 = 0.8125;
    let mut scene = Scene::new();
    let blocks = scene.blocks_of(0);
    let mut values = values(&scene.layout);
    values[3] = MARK;
    let sound = encoded_with(&scene.layout, &blocks, &meta(), &STATES, &values);
    // A state is the square of its value.
    for (mark, tensor) in [(MARK, "w@0"), (MARK * MARK, "m/w@0")] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            scene.put(0, with_value(&sound, mark, bad));
            let error = scene.invalid_reason();
            let expected = format!("value 3 of `{tensor}` is not finite");
            assert!(error.ends_with(&expected), "{error}");
        }
    }
}

/// Returns the file with `new` in place of `old`, because the encoder does not write values that are not finite.
fn with_value(file: &[u8], old: f32, new: f32) -> Bytes {
    let words = file.chunks(4).flat_map(|word| match word == old.to_le_bytes() {
        true => new.to_le_bytes().to_vec(),
        false => word.to_vec(),
    });
    words.collect()
}

/// F35
#[test]
fn a_forged_manifest_is_rejected_before_anything_is_read_or_allocated() {
    let mut scene = Scene::new();
    scene.record.params[0].shape = vec![1 << 60];
    assert!(scene.invalid_reason().starts_with("the manifest is invalid: "));
    scene.record.shards[0].size_bytes = u64::MAX;
    assert!(scene.invalid_reason().contains(" bytes, not 18446744073709551615"));

    let mut scene = Scene::new();
    scene.record.shards[0].object = "../../etc/passwd".to_owned();
    let expected = "the manifest is invalid: `../../etc/passwd` is not a valid object name";
    assert_eq!(scene.invalid_reason(), expected);
}

#[test]
fn an_unreachable_store_does_not_invalidate_a_checkpoint() {
    let url = || "s3://bucket/x".to_owned();
    let limit = std::time::Duration::from_secs(1);
    let cause = || Box::new(std::io::Error::other("no"));
    for error in [
        StoreError::TimedOut { url: url(), operation: "reading", limit },
        StoreError::Failed { url: url(), operation: "reading", source: cause() },
        StoreError::Denied { url: url(), operation: "reading", source: cause() },
        StoreError::Configuration { url: url(), source: cause() },
    ] {
        let error = CheckpointError::of_store("shards/x", error);
        assert!(!error.is_permanent(), "{error}");
        assert!(error.to_string().starts_with("shards/x cannot be read: "), "{error}");
    }
    assert!(
        CheckpointError::of_store("shards/x", StoreError::NotFound { url: url() }).is_permanent()
    );
}
