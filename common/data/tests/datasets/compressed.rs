//! Compressed text files.

use std::io::Write;

use crate::files::{Directory, example, spec};
use bzip2::write::BzEncoder;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use steadfast_common::job::dataset::{Manifest, ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec};
use steadfast_data::{DataError, ErrorKind, plan, read};

/// All records of a dataset, task by task.
async fn all(directory: &Directory, spec: &DatasetSpec) -> Result<(Manifest, Records), DataError> {
    let manifest = plan(spec, &Default::default(), Some(directory.path())).await?;
    let options = ReadOptions::new(spec, &manifest);
    let mut records = Records::default();
    for task in manifest.training_tasks() {
        records.extend(&read(&manifest, &options, manifest.chunks_of(task)).await?);
    }
    Ok((manifest, records))
}

type Compress = fn(&[u8]) -> Vec<u8>;

const CODECS: [(&str, Compress); 3] = [("gzip", gzip), ("zstd", zstd), ("bzip2", bzip2)];

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn zstd(text: &[u8]) -> Vec<u8> {
    zstd::encode_all(text, 3).unwrap()
}

fn bzip2(text: &[u8]) -> Vec<u8> {
    let mut encoder = BzEncoder::new(Vec::new(), bzip2::Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

/// S004-82: the records read do not depend on how they are stored.
#[tokio::test]
async fn a_compressed_file_has_the_tasks_and_records_of_its_text() {
    let directory = Directory::new();
    let text = std::fs::read(example("digits.csv")).unwrap();
    directory.write_bytes("plain", &text);
    for records_per_task in [None, Some(100)] {
        let digits = |name: &str| DatasetSpec {
            features: vec!["pixel_*".to_owned()],
            label: "digit".to_owned(),
            records_per_task,
            ..spec(DataFormat::Csv, &[name])
        };
        let (planned, expected) = all(&directory, &digits("plain")).await.unwrap();
        for (name, compress) in CODECS {
            // The content decides, not the name.
            directory.write_bytes(name, &compress(&text));
            let (manifest, found) = all(&directory, &digits(name)).await.unwrap();
            assert_eq!(manifest.chunks, planned.chunks, "{name}");
            assert_eq!(manifest.task_ends, planned.task_ends, "{name}");
            assert_eq!(found, expected, "{name}");
        }
    }
}

#[tokio::test]
async fn all_members_frames_and_streams_of_a_file_are_read() {
    let directory = Directory::new();
    let parts: [&[u8]; 4] = [b"x,y\n1,2\n3,", b"", b"4\n5,6\n", b"7,8\n"];
    for (name, compress) in CODECS {
        directory.write_bytes(name, &parts.map(compress).concat());
        let (_, found) = all(&directory, &spec(DataFormat::Csv, &[name])).await.unwrap();
        assert_eq!(found.features, [1.0, 3.0, 5.0, 7.0], "{name}");
        assert_eq!(found.labels, [2.0, 4.0, 6.0, 8.0], "{name}");
    }
    // Like the output of pzstd: a skippable frame first.
    let skippable = [&b"\x50\x2a\x4d\x18\x04\0\0\0abcd"[..], &zstd(&parts.concat())].concat();
    directory.write_bytes("pzstd", &skippable);
    let (_, found) = all(&directory, &spec(DataFormat::Csv, &["pzstd"])).await.unwrap();
    assert_eq!(found.features, [1.0, 3.0, 5.0, 7.0]);
}

#[tokio::test]
async fn a_damaged_or_truncated_compressed_file_is_one_permanent_error_that_names_it() {
    let directory = Directory::new();
    let text: Vec<u8> = (0..30_000_u64)
        .flat_map(|i| {
            format!("{},{}\n", i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 30, i).into_bytes()
        })
        .collect();
    let text = [b"x,y\n", &text[..]].concat();
    for (codec, compress) in CODECS {
        let whole = compress(&text);
        // Longer than the head, which is decompressed separately.
        assert!(whole.len() > 64 << 10, "{codec}");
        let (spec, name) = (spec(DataFormat::Csv, &[codec]), format!("/{codec}"));
        for length in [20, 1000, whole.len() / 2, whole.len() - 9, whole.len() - 1] {
            directory.write_bytes(codec, &whole[..length]);
            let error = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Permanent);
            let message = error.to_string();
            assert!(
                message.contains(&name) && message.contains("truncated"),
                "{length}: {message}"
            );
            assert!(message.contains(&format!("its {codec} data")), "{length}: {message}");
        }
        for place in [1000, whole.len() / 2] {
            let mut damaged = whole.clone();
            damaged[place] ^= 0xff;
            directory.write_bytes(codec, &damaged);
            // Without checksums, the default of zstd, the result may be other records.
            let Err(error) = plan(&spec, &Default::default(), Some(directory.path())).await else {
                continue;
            };
            assert_eq!(error.kind(), ErrorKind::Permanent, "{codec} {place}: {error}");
            assert!(error.to_string().contains(&name), "{codec} {place}: {error}");
        }
    }
}

#[tokio::test]
async fn a_compressed_file_that_changed_is_an_error() {
    let directory = Directory::new();
    let text = "x,y\n1,2\n";
    let spec = spec(DataFormat::Csv, &["a.csv.gz"]);
    directory.write_bytes("a.csv.gz", &gzip(format!("{text}3,4\n").as_bytes()));
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
    let mut shorter = gzip(text.as_bytes());
    shorter.resize(manifest.files[0].size_bytes as usize, 0);
    directory.write_bytes("a.csv.gz", &shorter);
    let options = ReadOptions::new(&spec, &manifest);
    let error = read(&manifest, &options, &manifest.chunks).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Permanent, "{error}");
}

/// The text has 600 MB, so that holding all of it in memory would be detected.
#[tokio::test]
async fn a_decompression_bomb_does_not_fill_the_memory() {
    let directory = Directory::new();
    let records = "1,2\n".repeat(256 << 10);
    for (name, compress) in [("gzip", gzip as Compress), ("zstd", zstd)] {
        let file = [compress(b"x,y\n"), compress(records.as_bytes()).repeat(600)].concat();
        directory.write_bytes(name, &file);
        let before = peak_kib();
        let spec = spec(DataFormat::Csv, &[name]);
        let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
        assert_eq!(manifest.training_records(), 600 * (256 << 10));
        let grown = peak_kib() - before;
        // Includes the memory of other tests in this process.
        assert!(grown < 500 << 10, "{grown} KiB");
        // A line longer than the limit.
        directory.write_bytes("line", &compress(&vec![b'1'; 100 << 20]));
        let options = DatasetSpec { source: vec!["line".to_owned()], ..spec.clone() };
        let error = plan(&options, &Default::default(), Some(directory.path())).await.unwrap_err();
        assert!(error.to_string().contains("first line does not end"), "{error}");
    }
}

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn every_record_of_a_compressed_file_is_read_in_exactly_one_task(
        values in prop::collection::vec(any::<i16>(), 1..2000),
        codec in 0..3_usize,
        records_per_task in prop::option::of(1_u32..300),
    ) {
        let directory = Directory::new();
        let lines: String = values.iter().map(|value| format!("{value},1\n")).collect();
        directory.write_bytes("a", &CODECS[codec].1(format!("x,y\n{lines}").as_bytes()));
        let spec = DatasetSpec { records_per_task, ..spec(DataFormat::Csv, &["a"]) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (_, found) = runtime.block_on(all(&directory, &spec)).unwrap();
        let expected: Vec<f32> = values.iter().map(|value| f32::from(*value)).collect();
        prop_assert_eq!(found.features, expected);
    }
}
