//! Parquet: two splits into tasks give the same records, unless one of them fails. The library may panic on
//! an invalid file; our code may not.

#![no_main]

use std::panic::{set_hook, take_hook};
use std::sync::Arc;

use arrow_array::{ArrayRef, BooleanArray, Float64Array, Int32Array, RecordBatch};
use libfuzzer_sys::fuzz_target;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterVersion};
use steadfast_common::spec::{DataFormat, Header};
use steadfast_fuzz::datasets::{DECODER, records, spec};
use steadfast_fuzz::{seeds, within};

/// Compressed values are decoded in batches.
const BYTES_MAX: usize = 64 << 20;

fuzz_target!(init: begin(), |file: &[u8]| {
    let spec = spec(DataFormat::Parquet, Header::Present, "y");
    let by = |size| within(BYTES_MAX, || records(&spec, size, file).ok());
    if let (Some(whole), Some(split)) = (by(None), by(Some(3))) {
        assert_eq!(whole, split);
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

fn well_formed() -> Vec<Vec<u8>> {
    let x = Arc::new(Float64Array::from(vec![1.0, -2.5, 3.0, 3.0, 0.0]));
    let n = Arc::new(Int32Array::from(vec![1, 2, 3, 4, -5]));
    let b = Arc::new(BooleanArray::from(vec![true, false, true, true, false]));
    let y =
        Arc::new(Float64Array::from(vec![Some(1.0), Some(0.0), Some(1.0), Some(2.0), Some(2.0)]));
    let columns: Vec<(&str, ArrayRef)> = vec![("x", x), ("n", n), ("b", b), ("y", y)];
    let batch = RecordBatch::try_from_iter(columns).expect("all columns have the same length");
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
        Compression::LZ4,
        Compression::LZ4_RAW,
    ];
    let mut files = Vec::new();
    for (codec, version) in
        codecs.iter().zip([WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0].iter().cycle())
    {
        let properties = WriterProperties::builder()
            .set_compression(*codec)
            .set_writer_version(*version)
            .set_max_row_group_row_count(Some(4))
            .build();
        let mut file = Vec::new();
        let writer = ArrowWriter::try_new(&mut file, batch.schema(), Some(properties));
        let mut writer = writer.expect("the column types are supported");
        writer.write(&batch).expect("writing to memory succeeds");
        writer.close().expect("writing to memory succeeds");
        files.push(file);
    }
    files
}
