//! Compressed columns of Parquet files.

use parquet::basic::Compression;
use parquet::file::metadata::{
    ParquetMetaData, ParquetMetaDataBuilder, ParquetMetaDataReader, ParquetMetaDataWriter,
};
use steadfast_common::job::dataset::{ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec};
use steadfast_data::{DataError, ErrorKind, plan, read};

use crate::files::{Directory, Values, compressed_parquet, parquet, parquet_of, spec};

async fn records(directory: &Directory, spec: &DatasetSpec) -> Result<Records, DataError> {
    let manifest = plan(spec, &Default::default(), Some(directory.path())).await?;
    read(&manifest, &ReadOptions::new(spec, &manifest), &manifest.chunks).await
}

/// The columns of both fixtures, written by pyarrow: `write_table(…, compression=…, use_dictionary=False,
/// store_schema=False, write_statistics=False)`.
fn x_of_fixture() -> Vec<f32> {
    (0..40).map(|x| x as f32).collect()
}

#[tokio::test]
async fn both_lz4_formats_are_read() {
    let directory = Directory::new();
    directory.write_bytes("pyarrow.parquet", include_bytes!("files/lz4.parquet"));
    let values: Vec<f64> = (0..40).map(f64::from).collect();
    for (name, codec) in [("raw.parquet", Compression::LZ4_RAW), ("old.parquet", Compression::LZ4)]
    {
        directory.write_bytes(name, &compressed_parquet(&values, codec));
    }
    for name in ["pyarrow.parquet", "raw.parquet", "old.parquet"] {
        let found = records(&directory, &spec(DataFormat::Parquet, &[name])).await.unwrap();
        assert_eq!(found.features, x_of_fixture(), "{name}");
    }
}

#[tokio::test]
async fn the_planner_rejects_an_unsupported_codec_with_a_hint() {
    let directory = Directory::new();
    directory.write_bytes("a.parquet", include_bytes!("files/brotli.parquet"));
    let (plain, numbers) = (parquet_of(&[1.0; 40], &[2.0; 40], 10), DataFormat::Parquet);
    directory.write_bytes("b.parquet", &relabeled(&plain, Compression::LZO));
    for (name, codec) in [("a.parquet", "Brotli"), ("b.parquet", "LZO")] {
        let error = plan(&spec(numbers, &[name]), &Default::default(), Some(directory.path()))
            .await
            .unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Permanent);
        for part in [name, codec, "column `x`", "zstd or snappy"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

#[tokio::test]
async fn a_codec_of_a_column_that_is_not_used_does_not_matter() {
    let directory = Directory::new();
    let columns = [1.0, 2.0, 3.0].map(|value| Values::Double(vec![value; 4]));
    let file = parquet("required double x; required double y; required double z;", &columns, 9);
    directory.write_bytes("a.parquet", &relabeled_from(&file, Compression::LZO, 2));
    let found = records(&directory, &spec(DataFormat::Parquet, &["a.parquet"])).await.unwrap();
    assert_eq!((found.features, found.labels), (vec![1.0; 4], vec![2.0; 4]));
}

/// The file with `codec` as the codec of all columns in its metadata, since no writer here supports LZO.
fn relabeled(file: &[u8], codec: Compression) -> Vec<u8> {
    relabeled_from(file, codec, 0)
}

/// The same for the columns from `first` on.
fn relabeled_from(file: &[u8], codec: Compression, first: usize) -> Vec<u8> {
    let bytes = bytes::Bytes::copy_from_slice(file);
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&bytes).unwrap();
    let mut builder = ParquetMetaData::into_builder(metadata);
    for group in builder.take_row_groups() {
        let mut columns = group.columns().to_vec();
        for column in &mut columns[first..] {
            *column = column.clone().into_builder().set_compression(codec).build().unwrap();
        }
        let group = group.into_builder().set_column_metadata(columns).build().unwrap();
        builder = ParquetMetaDataBuilder::add_row_group(builder, group);
    }
    // The old metadata remains in the file, as bytes outside of any column.
    let mut relabeled = file.to_vec();
    ParquetMetaDataWriter::new(&mut relabeled, &builder.build()).finish().unwrap();
    relabeled
}

/// The fixture is by DuckDB 2.0.1: 3000 rows of `u` and `i`, random integers of 32 bits, and `id`, which ascends.
#[tokio::test]
async fn differences_of_more_than_32_bits_are_rejected_by_the_planner() {
    let directory = Directory::new();
    directory.write_bytes("a.parquet", include_bytes!("files/wide_deltas.parquet"));
    let of = |features: &str, label: &str| DatasetSpec {
        features: vec![features.to_owned()],
        label: label.to_owned(),
        ..spec(DataFormat::Parquet, &["a.parquet"])
    };
    for name in ["u", "i"] {
        let error =
            plan(&of(name, "id"), &Default::default(), Some(directory.path())).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Permanent);
        let text = error.to_string();
        for part in ["a.parquet", &format!("column `{name}`"), "write it again with v1", "BIGINT"] {
            assert!(text.contains(part), "{text}");
        }
    }
    // A column that is not used does not matter.
    let found = records(&directory, &of("id", "id2")).await.unwrap_err();
    assert!(matches!(found, DataError::UnknownColumn { .. }), "{found}");
}

/// Other writers let differences wrap around, as the format says.
#[tokio::test]
async fn integers_that_are_far_apart_are_read_if_their_differences_have_32_bits() {
    let directory = Directory::new();
    let numbers: Vec<i32> =
        (0..200).map(|i| if i % 2 == 0 { i32::MIN } else { i32::MAX }).collect();
    let labels = Values::Int32(vec![1; numbers.len()]);
    let file = crate::files::parquet_of_differences(
        "required int32 x; required int32 y;",
        &[Values::Int32(numbers.clone()), labels],
    );
    directory.write_bytes("a.parquet", &file);
    let found = records(&directory, &spec(DataFormat::Parquet, &["a.parquet"])).await.unwrap();
    assert_eq!(found.features, numbers.iter().map(|it| *it as f32).collect::<Vec<_>>());
}
