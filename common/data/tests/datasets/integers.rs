//! Integers of 64 bits in every format: exact, or refused with a type that holds them.

use crc_fast::{CrcAlgorithm, checksum};
use steadfast_common::job::categories::push_ids;
use steadfast_common::job::columns::Values;
use steadfast_common::job::dataset::{ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec};
use steadfast_data::{DataError, plan, read};

use crate::columns::{all, column};
use crate::files::{self, Directory, spec};

/// Around the limits of floats and of 64-bit integers.
const INTEGERS: [i128; 16] = [
    0,
    -1,
    16_777_216,
    16_777_217,
    -16_777_217,
    (1 << 53) - 1,
    1 << 53,
    (1 << 53) + 1,
    -(1 << 53) - 1,
    1_700_000_000_123_456_789,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    (1 << 63) + 1,
    12_345_678_901_234_567_891,
    (1 << 64) - 1,
];

/// The ways in which a format writes an integer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Written {
    Digits,
    /// As `5.0`, as some programs write integers of columns with empty fields.
    WithPoint,
}

impl Written {
    fn text(self, value: i128) -> String {
        match self {
            Self::Digits => value.to_string(),
            Self::WithPoint => format!("{value}.0"),
        }
    }
}

/// A file with a column of these integers; its name.
fn file(format: DataFormat, values: &[i128], written: Written) -> (Vec<u8>, &'static str) {
    let lines = |line: &dyn Fn(String) -> String| {
        values.iter().map(|value| line(written.text(*value))).collect::<String>().into_bytes()
    };
    match format {
        DataFormat::Csv => ([&b"x,y\n"[..], &lines(&|it| format!("{it},1\n"))].concat(), "x"),
        DataFormat::Tsv => ([&b"x\ty\n"[..], &lines(&|it| format!("{it}\t1\n"))].concat(), "x"),
        DataFormat::Jsonl => (lines(&|it| format!("{{\"x\": {it}, \"y\": 1}}\n")), "x"),
        DataFormat::Libsvm => (lines(&|it| format!("{it} 1:1\n")), "label"),
        DataFormat::Tfrecord => (values.iter().flat_map(|it| example(*it as i64)).collect(), "x"),
        DataFormat::Webdataset => {
            let mut archive = tar::Builder::new(Vec::new());
            for (number, value) in values.iter().enumerate() {
                let content = written.text(*value);
                let mut header = tar::Header::new_gnu();
                header.set_size(content.len() as u64);
                archive
                    .append_data(&mut header, format!("{number}.id"), content.as_bytes())
                    .unwrap();
            }
            (archive.into_inner().unwrap(), "id")
        }
        DataFormat::Parquet => {
            let is_unsigned = values.iter().all(|value| 0 <= *value);
            let kind = if is_unsigned { " (UINT_64)" } else { "" };
            let schema = format!("required int64 x{kind}; required double y;");
            let bits = values.iter().map(|value| *value as i64).collect();
            let labels = files::Values::Double(vec![1.0; values.len()]);
            (files::parquet(&schema, &[files::Values::Int64(bits), labels], 100), "x")
        }
    }
}

/// A `tf.train.Example` with the feature `x`, as TensorFlow writes it.
fn example(value: i64) -> Vec<u8> {
    let field = |tag: u8, content: &[u8]| [&[tag, content.len() as u8], content].concat();
    let mut varint = Vec::new();
    let mut rest = value as u64;
    while 0x80 <= rest {
        varint.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    varint.push(rest as u8);
    let feature = field(0x1a, &field(0x0a, &varint));
    let entry = [field(0x0a, b"x"), field(0x12, &feature)].concat();
    let message = field(0x0a, &field(0x0a, &entry));
    let masked = |bytes: &[u8]| {
        let sum = checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
        sum.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
    };
    let length = (message.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), &message, &masked(&message)].concat()
}

/// Whether a column holds exactly these integers.
fn holds(found: &Values, integers: &[i128]) -> bool {
    match found {
        Values::Int64(found) => found.iter().map(|it| i128::from(*it)).eq(integers.iter().copied()),
        Values::Uint64(found) => {
            found.iter().map(|it| i128::from(*it)).eq(integers.iter().copied())
        }
        Values::Float32(found) => found.iter().map(|it| *it as i128).eq(integers.iter().copied()),
        Values::Float64(found) => found.iter().map(|it| *it as i128).eq(integers.iter().copied()),
        other => panic!("{other:?}"),
    }
}

/// The type that an error says to set.
fn remedy(error: &DataError) -> Option<String> {
    let text = error.to_string();
    let (before, _) = text.split_once(" in `dataset.types`")?;
    let (_, kind) = before.rsplit_once("set ")?;
    match kind {
        "its type" => Some("int64".to_owned()),
        kind => Some(kind.split(',').next().unwrap_or(kind).to_owned()),
    }
}

const FORMATS: [DataFormat; 7] = [
    DataFormat::Csv,
    DataFormat::Tsv,
    DataFormat::Jsonl,
    DataFormat::Tfrecord,
    DataFormat::Libsvm,
    DataFormat::Webdataset,
    DataFormat::Parquet,
];

/// Ids of users and hashes are integers of 64 bits. Two of them must not become one.
#[tokio::test]
async fn an_integer_of_64_bits_is_exact_in_every_format_or_its_type_is_asked_for() {
    let directory = Directory::new();
    for format in FORMATS {
        for written in [Written::Digits, Written::WithPoint] {
            for value in INTEGERS {
                let is_text = !matches!(format, DataFormat::Tfrecord | DataFormat::Parquet);
                let has_it = is_text || (written == Written::Digits);
                // TFRecord has no unsigned integers.
                if !has_it || (format == DataFormat::Tfrecord && i64::try_from(value).is_err()) {
                    continue;
                }
                let (bytes, name) = file(format, &[5, value], written);
                directory.write_bytes("f", &bytes);
                let of = async |types: &[(&str, &str)]| {
                    let read = all(&directory, format, "f", &[name], types, None).await;
                    read.map(|found| column(&found, name).values.clone())
                };
                // The labels of LibSVM are `float32`, unless the job says otherwise.
                let mut kind = match format {
                    DataFormat::Libsvm => Some("int64".to_owned()),
                    _ => None,
                };
                let found = loop {
                    let types: Vec<_> = kind.iter().map(|kind| (name, kind.as_str())).collect();
                    match of(&types).await {
                        Ok(found) => break found,
                        Err(error) => {
                            let wanted = remedy(&error);
                            assert!(wanted.is_some() && wanted != kind, "{format:?} {error}");
                            kind = wanted;
                        }
                    }
                };
                let what = format!("{format:?} {value} {written:?} as {kind:?}: {found:?}");
                assert!(holds(&found, &[5, value]), "{what}");
                if kind.is_none() {
                    assert!(!matches!(found, Values::Float64(_)), "{what}");
                }
            }
        }
    }
}

/// Without types, too.
#[tokio::test]
async fn integers_from_2_to_the_63_on_are_uint64_in_files_without_types() {
    let directory = Directory::new();
    let integers = [5, 1 << 63, (1 << 64) - 1, 16_777_217];
    for format in [DataFormat::Csv, DataFormat::Tsv, DataFormat::Jsonl] {
        directory.write_bytes("f", &file(format, &integers, Written::Digits).0);
        let found = all(&directory, format, "f", &["x"], &[], None).await.unwrap();
        let expected = Values::Uint64(integers.iter().map(|it| *it as u64).collect());
        assert_eq!(column(&found, "x").values, expected, "{format:?}");
    }
    directory.write("lists.jsonl", "{\"x\": [1, 18446744073709551615]}\n{\"x\": []}\n");
    let found = all(&directory, DataFormat::Jsonl, "lists.jsonl", &["x"], &[], None).await.unwrap();
    assert_eq!(column(&found, "x").values, Values::Uint64(vec![1, u64::MAX]));
    assert_eq!(column(&found, "x").offsets, [0, 2, 2]);
}

/// The type is decided by the first records.
#[tokio::test]
async fn a_column_that_no_type_holds_exactly_is_refused_by_name_and_reason() {
    let directory = Directory::new();
    let refused = async |format, bytes: &str| {
        directory.write("f", bytes);
        let error = all(&directory, format, "f", &["x"], &[], None).await.unwrap_err();
        error.to_string().replace(&format!("file://{}", directory.path()), "")
    };
    let both = "column `x` of /f holds negative integers and ones from 2⁶³ on, which no type holds as they are; leave \
                it out or set its type in `dataset.types`";
    assert_eq!(refused(DataFormat::Csv, "x,y\n-1,1\n9223372036854775808,1\n").await, both);
    let both_in_json = "{\"x\": -1}\n{\"x\": 9223372036854775808}\n";
    assert_eq!(refused(DataFormat::Jsonl, both_in_json).await, both);
    let rounded = "column `x` of /f holds integers that `float32` would round; leave it out or set its type in \
                   `dataset.types`";
    for bytes in ["x,y\n5.0,1\n16777217.0,1\n", "x,y\n5,1\n36893488147419103233,1\n"] {
        assert_eq!(refused(DataFormat::Csv, bytes).await, rounded);
    }
    assert_eq!(refused(DataFormat::Jsonl, "{\"x\": 16777217}\n{\"x\": 5.0}\n").await, rounded);
    // Later records than those that decided the type.
    let small = "{\"x\": 1}\n".repeat(300);
    let late = format!("{small}{{\"x\": 9223372036854775808}}\n");
    let way_out = "9223372036854775808 is out of range for int64; set uint64 in `dataset.types`";
    assert_eq!(
        refused(DataFormat::Jsonl, &late).await,
        format!("record 300 of /f, column `x`: {way_out}")
    );
    // Numbers of which some are fractions are rounded, as all numbers.
    directory.write("f", "x,y\n0.5,1\n16777217,1\n");
    let found = all(&directory, DataFormat::Csv, "f", &["x"], &[], None).await.unwrap();
    assert_eq!(column(&found, "x").values, Values::Float32(vec![0.5, 16_777_216.0]));
}

/// Features are numbers, and numbers are rounded.
#[tokio::test]
async fn a_feature_may_be_an_integer_that_float32_rounds() {
    let directory = Directory::new();
    for (format, written) in
        [(DataFormat::Csv, Written::WithPoint), (DataFormat::Jsonl, Written::WithPoint)]
    {
        directory.write_bytes("f", &file(format, &[1 << 40, (1 << 40) + 1], written).0);
        let spec = spec(format, &["f"]);
        let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
        let options = ReadOptions::new(&spec, &manifest);
        let found = read(&manifest, &options, &manifest.chunks).await.unwrap();
        assert_eq!(found.features, [(1_u64 << 40) as f32; 2]);
    }
}

/// The ids of a file's column of categories.
async fn category_ids(
    directory: &Directory,
    format: DataFormat,
    types: &[(&str, &str)],
) -> Vec<u64> {
    let types = types.iter().map(|(name, kind)| ((*name).to_owned(), kind.parse().unwrap()));
    let spec = DatasetSpec {
        features: vec![],
        categories: vec!["x".to_owned()],
        types: types.collect(),
        ..spec(format, &["f"])
    };
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
    let options = ReadOptions::new(&spec, &manifest);
    let found: Records = read(&manifest, &options, &manifest.chunks).await.unwrap();
    let mut ids = Vec::new();
    (0..found.len()).for_each(|record| push_ids(&found.columns[0], record, &mut ids));
    ids
}

/// Each format and each type of integers gives the same row of an embedding table to the same integer.
#[tokio::test]
async fn unsigned_categories_have_the_same_ids_in_every_format_and_type() {
    let directory = Directory::new();
    let integers = [5, 1 << 63, (1 << 64) - 1, (1 << 63) + 1];
    let mut found = Vec::new();
    for format in [DataFormat::Jsonl, DataFormat::Parquet, DataFormat::Csv] {
        directory.write_bytes("f", &file(format, &integers, Written::Digits).0);
        for kind in ["int64", "uint64"] {
            found.push(category_ids(&directory, format, &[("x", kind)]).await);
        }
        if format != DataFormat::Csv {
            found.push(category_ids(&directory, format, &[]).await);
        }
    }
    assert!(found.iter().all(|ids| *ids == found[0]), "{found:?}");
    assert_eq!(std::collections::BTreeSet::from_iter(&found[0]).len(), integers.len());
    // Of text files, categories are text: exact whatever they look like.
    let ambiguous = [-1, (1 << 63) + 1];
    directory.write_bytes("f", &file(DataFormat::Csv, &ambiguous, Written::Digits).0);
    let ids = category_ids(&directory, DataFormat::Csv, &[]).await;
    assert_eq!(std::collections::BTreeSet::from_iter(ids).len(), 2);
}

/// A decimal without decimal places is an integer, as databases export their numbers.
#[tokio::test]
async fn decimals_without_fractions_are_exact_integers() {
    let directory = Directory::new();
    let fixed = |value: i128| value.to_be_bytes().to_vec().into();
    let large = [(1 << 53) + 1, -(1 << 53) - 1];
    for (kind, column, integers, expected) in [
        (
            "required int64 x (DECIMAL(18,0))",
            files::Values::Int64(large.map(|it| it as i64).to_vec()),
            large,
            None,
        ),
        (
            "required fixed_len_byte_array (16) x (DECIMAL(38,0))",
            files::Values::Fixed(large.map(fixed).to_vec()),
            large,
            None,
        ),
        (
            "required fixed_len_byte_array (16) x (DECIMAL(20,0))",
            files::Values::Fixed([5, (1 << 64) - 1].map(fixed).to_vec()),
            [5, (1 << 64) - 1],
            Some("uint64"),
        ),
    ] {
        directory.write_bytes("f", &files::parquet(&format!("{kind};"), &[column], 10));
        let of = async |types: &[(&str, &str)]| {
            all(&directory, DataFormat::Parquet, "f", &["x"], types, None).await
        };
        let found = match expected {
            None => of(&[]).await,
            Some(wanted) => {
                assert_eq!(remedy(&of(&[]).await.unwrap_err()).as_deref(), Some(wanted));
                of(&[("x", wanted)]).await
            }
        };
        assert!(holds(&found.unwrap().columns[0].values, &integers), "{kind}");
    }
}

/// As the page says: however large.
#[tokio::test]
async fn indices_of_libsvm_may_have_64_bits() {
    let directory = Directory::new();
    directory.write("f", "1 7:0.5 4294967296:2 9223372036854775807:1\n0 4294967295:1\n");
    let format = DataFormat::Libsvm;
    let found = all(&directory, format, "f", &["index"], &[], None).await.unwrap();
    let indices = vec![7, 1 << 32, i64::MAX, (1 << 32) - 1];
    assert_eq!(column(&found, "index").values, Values::Int64(indices));
    let categories = |label: &str| DatasetSpec {
        features: vec![],
        label: label.to_owned(),
        categories: vec!["index".to_owned()],
        ..spec(format, &["f"])
    };
    for (last, types) in [("9223372036854775808", Some("uint64[]")), ("18446744073709551615", None)]
    {
        directory.write("f", &format!("1 7:0.5 4294967296:2 {last}:1\n"));
        let spec = categories("label");
        let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
        let options = ReadOptions::new(&spec, &manifest);
        let found = read(&manifest, &options, &manifest.chunks).await.unwrap();
        let bits = last.parse::<u64>().unwrap() as i64;
        assert_eq!(found.columns[0].values, Values::Int64(vec![7, 1 << 32, bits]));
        assert_eq!(found.columns[0].weights, [0.5, 2.0, 1.0]);
        let refused = all(&directory, format, "f", &["index"], &[], None).await.unwrap_err();
        if let Some(kind) = types {
            assert_eq!(remedy(&refused).as_deref(), Some(kind));
            let types = [("index", kind)];
            assert!(all(&directory, format, "f", &["index"], &types, None).await.is_ok());
        }
    }
    directory.write("f", "1 18446744073709551616:1\n");
    let refused = all(&directory, format, "f", &["index"], &[], None).await.unwrap_err();
    assert!(refused.to_string().ends_with("`18446744073709551616` is not an index"), "{refused}");
    directory.write("f", "1 4294967297:1\n");
    let features = DatasetSpec { label: "label".to_owned(), ..spec(format, &["f"]) };
    let refused =
        plan(&features, &Default::default(), Some(directory.path())).await.unwrap_err().to_string();
    assert!(refused.contains("has 4294967297 features, and at most 16384"), "{refused}");
}
