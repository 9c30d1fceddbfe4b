//! Parquet: two splits into tasks give the same records, unless one of them fails. The library may panic on
//! an invalid file; our code may not.

#![no_main]

use std::panic::{set_hook, take_hook};
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::data_type::{BoolType, ByteArrayType, DataType, DoubleType, Int32Type};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use steadfast_common::job::spec::{DataFormat, DatasetSpec, Header};
use steadfast_fuzz::datasets::{DECODER, records, spec};
use steadfast_fuzz::{seeds, within};

/// Compressed values are decoded in batches.
const BYTES_MAX: usize = 64 << 20;

fuzz_target!(init: begin(), |file: &[u8]| {
    let numbers = spec(DataFormat::Parquet, Header::Present, "y");
    let columns = DatasetSpec {
        features: vec![],
        label: String::new(),
        columns: vec!["*".to_owned()],
        feature_scale: 1.0,
        ..numbers.clone()
    };
    for spec in [numbers, columns] {
        let by = |size| within(BYTES_MAX, || records(&spec, size, file).ok());
        if let (Some(whole), Some(split)) = (by(None), by(Some(3))) {
            assert_eq!(whole, split);
        }
    }
});

fn begin() {
    seeds("parquet", well_formed());
    let end = take_hook();
    set_hook(Box::new(move |panic| {
        let is_ours = panic.location().is_none_or(|it| it.file().contains("common/data/"));
        if is_ours || std::thread::current().name() != Some(DECODER) {
            end(panic);
        }
    }));
}

const SCHEMA: &str = "message file {
    required double x;
    required int32 n;
    required boolean b;
    required binary d (DECIMAL(9,2));
    optional double y;
}";

fn well_formed() -> Vec<Vec<u8>> {
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
        Compression::LZ4,
        Compression::LZ4_RAW,
    ];
    let versions = [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0];
    codecs
        .into_iter()
        .zip(versions.into_iter().cycle())
        .map(|(codec, version)| file(codec, version))
        .chain([include_bytes!("../../common/data/tests/datasets/files/columns.parquet").to_vec()])
        .collect()
}

fn file(codec: Compression, version: WriterVersion) -> Vec<u8> {
    let schema = parse_message_type(SCHEMA).expect("the schema is valid");
    let properties =
        WriterProperties::builder().set_compression(codec).set_writer_version(version).build();
    let mut file = Vec::new();
    let writer = SerializedFileWriter::new(&mut file, Arc::new(schema), Arc::new(properties));
    let mut writer = writer.expect("writing to memory succeeds");
    for rows in [0..4, 4..5] {
        let mut group = writer.next_row_group().expect("writing to memory succeeds");
        column::<DoubleType>(&mut group, &[1.0, -2.5, 3.0, 3.0, 0.0][rows.clone()]);
        column::<Int32Type>(&mut group, &[1, 2, 3, 4, -5][rows.clone()]);
        column::<BoolType>(&mut group, &[true, false, true, true, false][rows.clone()]);
        let decimals = ["\x01", "\x02\x03", "\x04", "\x05", "\x06\x07\x08"].map(Into::into);
        column::<ByteArrayType>(&mut group, &decimals[rows.clone()]);
        column::<DoubleType>(&mut group, &[1.0, 0.0, 1.0, 2.0, 2.0][rows]);
        group.close().expect("writing to memory succeeds");
    }
    writer.close().expect("writing to memory succeeds");
    file
}

fn column<T: DataType>(group: &mut SerializedRowGroupWriter<&mut Vec<u8>>, values: &[T::T]) {
    let column = group.next_column().expect("writing to memory succeeds");
    let mut column = column.expect("the schema has a column for each list of values");
    let levels = vec![1; values.len()];
    let written = column.typed::<T>().write_batch(values, Some(&levels), None);
    written.expect("writing to memory succeeds");
    column.close().expect("writing to memory succeeds");
}
