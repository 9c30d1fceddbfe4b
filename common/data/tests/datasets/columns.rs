//! Columns of any type, in every format.

use std::io::Read;

use flate2::read::GzDecoder;
use steadfast_common::job::columns::{Column, Shape, Values};
use steadfast_common::job::dataset::{ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec};
use steadfast_data::{DataError, ErrorKind, plan, read};

use crate::files::{Directory, spec};

const RECORDS: usize = 40;
const TAR_GZ: &[u8] = include_bytes!("files/columns.tar.gz");

fn tar() -> Vec<u8> {
    let mut tar = Vec::new();
    GzDecoder::new(TAR_GZ).read_to_end(&mut tar).unwrap();
    tar
}

/// All columns that match `columns`, in tasks of `records_per_task`.
pub async fn all(
    directory: &Directory,
    format: DataFormat,
    file: &str,
    columns: &[&str],
    types: &[(&str, &str)],
    records_per_task: Option<u32>,
) -> Result<Records, DataError> {
    let types = types.iter().map(|(name, kind)| ((*name).to_owned(), kind.parse().unwrap()));
    let spec = DatasetSpec {
        features: vec![],
        label: String::new(),
        columns: columns.iter().map(|name| (*name).to_owned()).collect(),
        types: types.collect(),
        records_per_task,
        ..spec(format, &[file])
    };
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await?;
    let options = ReadOptions::new(&spec, &manifest);
    let mut records = Records::new(&options);
    for task in manifest.training_tasks() {
        let found = read(&manifest, &options, manifest.chunks_of(task)).await?;
        assert_eq!(found.len() as u64, manifest.records_of(task));
        records.extend(&found);
    }
    Ok(records)
}

async fn error_of(format: DataFormat, file: &[u8], columns: &[&str]) -> String {
    let directory = Directory::new();
    directory.write_bytes("f", file);
    let error = all(&directory, format, "f", columns, &[], None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Permanent);
    error.to_string().replace(&format!("file://{}", directory.path()), "")
}

pub fn column<'a>(records: &'a Records, name: &str) -> &'a Column {
    records.columns.iter().find(|column| column.name == name).unwrap()
}

fn strings(column: &Column) -> Vec<&[u8]> {
    let (Values::Text(bytes) | Values::Bytes(bytes)) = &column.values else { unreachable!() };
    column.offsets.windows(2).map(|ends| &bytes[ends[0] as usize..ends[1] as usize]).collect()
}

/// Checks the records that `files/make.py` writes.
fn expect(records: &Records, columns: &[&str]) {
    let numbers = || 0..RECORDS as i64;
    assert_eq!(records.len(), RECORDS);
    for name in columns {
        let found = column(records, name);
        assert_eq!(found.len(), RECORDS, "{name}");
        match *name {
            "label" => assert_eq!(found.values, Values::Int64(numbers().map(|i| i % 5).collect())),
            "score" => {
                let scores = numbers().map(|i| i as f32 * 0.5).collect();
                assert_eq!(found.values, Values::Float32(scores));
            }
            "pair" => {
                let pairs = numbers().flat_map(|i| [i as f32, -(i as f32)]).collect();
                assert_eq!(found.values, Values::Float32(pairs));
                assert!(found.offsets.is_empty());
            }
            "tokens" => {
                let tokens = numbers().flat_map(|i| i..i + i % 4).collect();
                assert_eq!(found.values, Values::Int64(tokens));
                let ends: Vec<i64> = found.offsets.windows(2).map(|it| it[1] - it[0]).collect();
                assert_eq!(ends, numbers().map(|i| i % 4).collect::<Vec<i64>>());
            }
            "text" => {
                let texts: Vec<String> = numbers().map(|i| format!("ä {i}")).collect();
                assert_eq!(strings(found), texts.iter().map(String::as_bytes).collect::<Vec<_>>());
            }
            "image" => {
                let images: Vec<[u8; 2]> = numbers().map(|i| [i as u8, 255 - i as u8]).collect();
                assert_eq!(strings(found), images.iter().map(|it| &it[..]).collect::<Vec<_>>());
            }
            other => panic!("{other}"),
        }
    }
}

const TYPES: &[(&str, &str)] = &[("pair", "float32[2]")];

#[tokio::test]
async fn files_of_the_defining_libraries_give_the_same_columns_in_tasks_of_any_size() {
    let directory = Directory::new();
    directory.write_bytes("a.parquet", include_bytes!("files/columns.parquet"));
    directory.write_bytes("a.tfrecord", include_bytes!("files/columns.tfrecord"));
    directory.write_bytes("a.tfrecord.gz", include_bytes!("files/columns.tfrecord.gz"));
    let names = ["image", "label", "pair", "score", "text", "tokens"];
    for records_per_task in [None, Some(1), Some(7), Some(16), Some(100)] {
        for (format, file) in [
            (DataFormat::Parquet, "a.parquet"),
            (DataFormat::Tfrecord, "a.tfrecord"),
            (DataFormat::Tfrecord, "a.tfrecord.gz"),
        ] {
            let mut types = TYPES.to_vec();
            if format == DataFormat::Tfrecord {
                // The format does not tell text from bytes.
                types.push(("text", "text"));
            }
            let found =
                all(&directory, format, file, &["*"], &types, records_per_task).await.unwrap();
            expect(&found, &names);
        }
    }
}

/// Parquet has lists of any length only; Arrow's own schema in the file tells which ones have a fixed length.
#[tokio::test]
async fn fixed_size_lists_of_arrow_are_columns_of_that_length() {
    let directory = Directory::new();
    directory.write_bytes("a.parquet", include_bytes!("files/fixed_lists.parquet"));
    let of = async |types: &[(&str, &str)]| {
        all(&directory, DataFormat::Parquet, "a.parquet", &["*"], types, Some(7)).await.unwrap()
    };
    let found = of(&[]).await;
    let shapes = ["pair", "tokens", "image"].map(|name| column(&found, name).shape);
    assert_eq!(shapes, [Shape::Fixed(2), Shape::List, Shape::Fixed(3)]);
    expect(&found, &["pair"]);
    let Values::Uint8(image) = &column(&found, "image").values else { panic!("{found:?}") };
    assert_eq!(image[3 * 39..], [39, 216, 7]);
    // The types of the job count.
    assert_eq!(column(&of(&[("pair", "float64[]")]).await, "pair").shape, Shape::List);
}

#[tokio::test]
async fn files_of_a_tar_archive_with_one_key_are_one_record() {
    let directory = Directory::new();
    directory.write_bytes("a.tar", &tar());
    directory.write_bytes("a.tar.gz", TAR_GZ);
    for (file, records_per_task) in
        [("a.tar", None), ("a.tar", Some(1)), ("a.tar", Some(9)), ("a.tar.gz", Some(9))]
    {
        let format = DataFormat::Webdataset;
        let found = all(&directory, format, file, &["*"], &[], records_per_task).await.unwrap();
        let names: Vec<&str> = found.columns.iter().map(|column| &column.name[..]).collect();
        assert_eq!(names, ["__key__", "bin", "cls", "tokens.json", "txt"]);
        let labels = (0..RECORDS as i64).map(|i| i % 5).collect();
        assert_eq!(column(&found, "cls").values, Values::Int64(labels));
        assert_eq!(strings(column(&found, "txt"))[39], "ä 39".as_bytes());
        assert_eq!(strings(column(&found, "bin"))[39], [39, 216]);
        assert_eq!(strings(column(&found, "__key__"))[39], b"0039");
        assert!(strings(column(&found, "__key__"))[3].ends_with(b"long/0003"));
        assert_eq!(strings(column(&found, "tokens.json"))[39], b"[39, 40, 41]");
    }
    // Raw bytes as numbers.
    let types = [("bin", "uint8[2]")];
    let format = DataFormat::Webdataset;
    let found = all(&directory, format, "a.tar", &["bin"], &types, None).await.unwrap();
    let Values::Uint8(bytes) = &column(&found, "bin").values else { unreachable!() };
    assert_eq!(bytes[78..], [39, 216]);
}

#[tokio::test]
async fn text_formats_give_the_same_columns() {
    let directory = Directory::new();
    let (mut json, mut csv) = (String::new(), "label,score,text,spare\n".to_owned());
    for i in 0..RECORDS {
        let (label, score, tokens) = (i % 5, i as f32 * 0.5, (i..i + i % 4).collect::<Vec<_>>());
        json += &format!(
            "{{\"tokens\": {tokens:?}, \"label\": {label}, \"score\": {score}, \"text\": \"ä {i}\", \
             \"pair\": [{i}, -{i}]}}\n{}",
            if i % 9 == 0 { "\r\n  \n" } else { "" }
        );
        csv += &format!("{label},{score},ä {i},\n");
    }
    directory.write("a.jsonl", &json);
    directory.write("a.csv", &csv);
    for records_per_task in [None, Some(1), Some(7)] {
        let names = ["label", "pair", "score", "text", "tokens"];
        let format = DataFormat::Jsonl;
        let found =
            all(&directory, format, "a.jsonl", &["*"], TYPES, records_per_task).await.unwrap();
        expect(&found, &names);
        let names = ["text", "label", "score"];
        let format = DataFormat::Csv;
        let found = all(&directory, format, "a.csv", &names, &[], records_per_task).await.unwrap();
        expect(&found, &names);
        assert_eq!(found.columns[0].name, "text");
    }
}

#[tokio::test]
async fn libsvm_gives_lists_to_python_and_features_to_built_in_models() {
    let directory = Directory::new();
    let lines = "+1 1:0.5 3:-2 # a comment\n\n# only a comment\n-1 2:1e1\n0\n";
    directory.write("a.svm", lines);
    directory.write("b.svm", "2 5:7\n");
    let format = DataFormat::Libsvm;
    let found = all(&directory, format, "*.svm", &["*"], &[], Some(1)).await.unwrap();
    assert_eq!(column(&found, "label").values, Values::Float32(vec![1.0, -1.0, 0.0, 2.0]));
    assert_eq!(column(&found, "index").values, Values::Int64(vec![1, 3, 2, 5]));
    assert_eq!(column(&found, "value").values, Values::Float32(vec![0.5, -2.0, 10.0, 7.0]));
    assert_eq!(column(&found, "value").offsets, [0, 2, 3, 3, 4]);

    for (features, expected) in [
        (vec!["*"], vec![0.5, 0.0, -2.0, 0.0, 0.0, 0.0, 10.0, 0.0, 0.0, 0.0]),
        (vec!["3", "1"], vec![-2.0, 0.5, 0.0, 0.0]),
    ] {
        let features = features.into_iter().map(str::to_owned).collect();
        let label = "label".to_owned();
        let spec = DatasetSpec { features, label, ..spec(format, &["*.svm"]) };
        let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
        let options = ReadOptions::new(&spec, &manifest);
        let found = read(&manifest, &options, &manifest.chunks).await.unwrap();
        assert_eq!(found.features[..expected.len()], expected);
        assert_eq!(found.labels, [1.0, -1.0, 0.0, 2.0]);
    }
}

#[tokio::test]
async fn built_in_models_read_numbers_of_every_format() {
    let directory = Directory::new();
    directory.write_bytes("a.tfrecord", include_bytes!("files/columns.tfrecord"));
    directory
        .write("a.jsonl", "{\"score\": 1, \"label\": 2}\n{\"label\": true, \"score\": -0.5}\n");
    for (format, file, features, label, last) in [
        (DataFormat::Tfrecord, "a.tfrecord", "score", "label", (19.5, 4.0)),
        (DataFormat::Jsonl, "a.jsonl", "score", "label", (-0.5, 1.0)),
    ] {
        let features = vec![features.to_owned()];
        let spec = DatasetSpec { features, label: label.to_owned(), ..spec(format, &[file]) };
        let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
        let options = ReadOptions::new(&spec, &manifest);
        let (chunks, last_chunk) = (&manifest.chunks, manifest.chunks.len() - 1);
        let found = read(&manifest, &options, &chunks[last_chunk..]).await.unwrap();
        assert_eq!((found.features.last(), found.labels.last()), (Some(&last.0), Some(&last.1)));
    }
}

/// A bad record is named with its file and its place, and what to do.
#[tokio::test]
async fn a_bad_record_is_named_by_file_and_place() {
    let refused = error_of(DataFormat::Jsonl, b"{\"x\": 1}\n{\"x\": 1\n", &["x"]).await;
    assert!(
        refused.starts_with("record 1 of /f: it is not a JSON object in one line (EOF"),
        "{refused}"
    );
    let refused = error_of(DataFormat::Jsonl, b"{\"x\": 1}\n{\"y\": 1}\n", &["x"]).await;
    assert_eq!(refused, "record 1 of /f, column `x`: it is empty (null)");
    let refused = error_of(DataFormat::Jsonl, b"[{\"x\": 1}]", &["x"]).await;
    assert_eq!(refused, "/f is a JSON array, not JSON lines; write one object in each line");
    let refused = error_of(DataFormat::Jsonl, b"{\"x\": {\"y\": 1}}", &["x"]).await;
    assert!(refused.contains("column `x` of /f holds an object; leave it out"), "{refused}");
    let refused = error_of(DataFormat::Jsonl, b"{\"x\": 1}", &["z"]).await;
    assert_eq!(refused, "/f has no column `z`");

    let many = "{\"x\": 1}\n".repeat(300) + "{\"x\": 0.5}\n";
    let refused = error_of(DataFormat::Jsonl, many.as_bytes(), &["x"]).await;
    let way_out = "0.5 is not an integer; set another type in `dataset.types`";
    assert_eq!(refused, format!("record 300 of /f, column `x`: {way_out}"));

    for (line, reason) in [
        ("1 2:x", "record 0 of /f: index 2: `x` is not a number"),
        ("1 2:1 2:1", "record 0 of /f: index 2 follows 2; indices must ascend"),
        ("1 qid:3 1:1", "record 0 of /f: query ids (`qid`) are not supported"),
        ("true 1:1", "record 0 of /f: its label: `true` is not a number"),
        ("1 1", "record 0 of /f: `1` is not `index:value`"),
    ] {
        assert_eq!(error_of(DataFormat::Libsvm, line.as_bytes(), &["*"]).await, reason);
    }
}

#[tokio::test]
async fn damaged_files_are_rejected_at_the_start() {
    let (records, archive) = (include_bytes!("files/columns.tfrecord"), tar());
    let mut flipped = records.to_vec();
    flipped[records.len() / 2] ^= 1;
    let refused = error_of(DataFormat::Tfrecord, &flipped, &["*"]).await;
    assert!(refused.contains("its checksum is wrong: the file is damaged"), "{refused}");
    let refused = error_of(DataFormat::Tfrecord, &records[..records.len() - 3], &["*"]).await;
    assert_eq!(refused, "record 39 of /f: the file ends within it");
    let refused = error_of(DataFormat::Tfrecord, b"a,b\n1,2\n3,4\n", &["*"]).await;
    assert!(refused.contains("ZLIB"), "{refused}");
    let cut = &archive[..archive.len() / 2 + 700];
    let refused = error_of(DataFormat::Webdataset, cut, &["*"]).await;
    assert!(refused.starts_with("/f cannot be read: it is not a whole tar archive"), "{refused}");
    let mut longer = tar::Builder::new(Vec::new());
    for i in 0..300 {
        let mut header = tar::Header::new_gnu();
        header.set_size(700);
        longer.append_data(&mut header, format!("{i}.bin"), &[1; 700][..]).unwrap();
    }
    let longer = longer.into_inner().unwrap();
    let cut = &longer[..longer.len() - 1024 - 400];
    let refused = error_of(DataFormat::Webdataset, cut, &["*"]).await;
    assert_eq!(refused, "/f cannot be read: it ends within record 299");
    let refused = error_of(DataFormat::Webdataset, &[7; 2048], &["*"]).await;
    assert!(refused.starts_with("/f cannot be read"), "{refused}");
}

/// Each file is one record: its content is its number.
fn tar_of(numbers: std::ops::Range<u32>, extension: &str) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for number in numbers {
        let content = number.to_string();
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        let name = format!("{number}.{extension}");
        archive.append_data(&mut header, name, content.as_bytes()).unwrap();
    }
    archive.into_inner().unwrap()
}

#[tokio::test]
async fn concatenated_archives_are_read_to_their_end() {
    let directory = Directory::new();
    directory.write_bytes("a.tar", &[tar_of(0..3, "cls"), tar_of(3..5, "cls")].concat());
    for records_per_task in [None, Some(1), Some(2)] {
        let format = DataFormat::Webdataset;
        let found =
            all(&directory, format, "a.tar", &["cls"], &[], records_per_task).await.unwrap();
        assert_eq!(column(&found, "cls").values, Values::Int64(vec![0, 1, 2, 3, 4]));
    }
}

/// An archive with one entry of this type and content before a file.
fn extended(kind: tar::EntryType, content: &[u8]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(content.len() as u64);
    header.set_path("x").unwrap();
    header.set_cksum();
    archive.append(&header, content).unwrap();
    [
        &archive.into_inner().unwrap()[..content.len().next_multiple_of(512) + 512],
        &tar_of(0..1, "cls")[..],
    ]
    .concat()
}

#[tokio::test]
async fn an_archive_that_would_be_misread_is_rejected() {
    let format = DataFormat::Webdataset;
    let sparse =
        "record 0 of /f: its files are stored without their zeros; pack it without `--sparse`";
    let map = b"22 GNU.sparse.major=1\n";
    for (kind, content, expected) in [
        (tar::EntryType::GNUSparse, &b""[..], sparse),
        (tar::EntryType::XHeader, &map[..], sparse),
        (tar::EntryType::GNULongName, &[b'a'; 70_000], "a header has 70000 bytes, more than 65536"),
    ] {
        let refused = error_of(format, &extended(kind, content), &["cls"]).await;
        assert!(refused.ends_with(expected), "{refused}");
    }
    let mut archive = tar::Builder::new(Vec::new());
    for number in 0..300 {
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        archive.append_data(&mut header, format!("frame.{number}.png"), &b""[..]).unwrap();
    }
    let refused = error_of(format, &archive.into_inner().unwrap(), &["*"]).await;
    assert!(refused.contains("more than 256 files are called `frame.…`"), "{refused}");
}

#[tokio::test]
async fn the_first_file_decides_the_types_and_later_ones_need_not_show_them() {
    let directory = Directory::new();
    directory.write("a.jsonl", "{\"x\": [1]}\n");
    directory.write("b.jsonl", "{\"x\": []}\n{\"x\": []}\n");
    let found = all(&directory, DataFormat::Jsonl, "*.jsonl", &["x"], &[], None).await.unwrap();
    assert_eq!(column(&found, "x").offsets, [0, 1, 1, 1]);
    let refused = error_of(DataFormat::Jsonl, b"{\"x\": []}", &["x"]).await;
    assert!(refused.ends_with("set its type in `dataset.types`"), "{refused}");
    let refused = error_of(DataFormat::Jsonl, b"{}\n{}\n", &["x"]).await;
    assert_eq!(refused, "/f has no column `x`");
}

/// Numbers reach the types of the job as they are written.
#[tokio::test]
async fn large_numbers_of_libsvm_are_not_rounded_to_float32() {
    let directory = Directory::new();
    directory.write("a.svm", "16777217 1:0.1 2:16777217\n");
    let types = [("label", "int64"), ("value", "float64[]")];
    let format = DataFormat::Libsvm;
    let found = all(&directory, format, "a.svm", &["label", "value"], &types, None).await.unwrap();
    assert_eq!(column(&found, "label").values, Values::Int64(vec![16_777_217]));
    assert_eq!(column(&found, "value").values, Values::Float64(vec![0.1, 16_777_217.0]));
}

/// Of a type that no value has: the error names the setting.
#[tokio::test]
async fn a_type_that_is_not_used_or_does_not_fit_is_refused() {
    let directory = Directory::new();
    directory.write("a.csv", "x,y\n1,a\n2,b\n");
    let refused = |types: &'static [(&str, &str)], columns: &'static [&str]| {
        let directory = &directory;
        async move {
            let found = all(directory, DataFormat::Csv, "a.csv", columns, types, None).await;
            let error = found.unwrap_err().to_string();
            error.replace(&format!("file://{}", directory.path()), "")
        }
    };
    assert_eq!(
        refused(&[("y", "int64")], &["y"]).await,
        "record 0 of /a.csv, column `y`: `a` is not a number"
    );
    assert_eq!(
        refused(&[("y", "int64")], &["x"]).await,
        "`dataset.types` has `y`, which is none of the columns; remove it"
    );
    assert_eq!(
        refused(&[("x", "bool")], &["x"]).await,
        "record 1 of /a.csv, column `x`: 2 is neither true nor false"
    );
}

#[tokio::test]
async fn types_of_a_parquet_file_that_are_no_values_are_refused_by_name() {
    let file = crate::files::parquet(
        "required int96 t; required int32 d (DATE);",
        &[
            crate::files::Values::Int96(vec![Default::default(); 2]),
            crate::files::Values::Int32(vec![1, 2]),
        ],
        10,
    );
    let refused = error_of(DataFormat::Parquet, &file, &["t"]).await;
    assert!(
        refused.contains("column `t` of /f holds timestamps; leave it out or convert it"),
        "{refused}"
    );
    let refused = error_of(DataFormat::Parquet, &file, &["d"]).await;
    assert!(
        refused.contains("column `d` of /f holds dates; leave it out or convert it"),
        "{refused}"
    );
}

/// Categories are read beside numbers, in every format that has both, and records keep their parts together.
#[tokio::test]
async fn categories_are_columns_beside_features_and_label() {
    let directory = Directory::new();
    let digits = |ending: &str| crate::files::example(&format!("digits.{ending}"));
    directory.write(
        "a.jsonl",
        "{\"x\": 1, \"y\": 0, \"c\": \"a\"}\n{\"x\": 2, \"y\": 1, \"c\": \"b\"}\n",
    );
    directory.write("a.svm", "1 3:1 7:0.5\n0 5:-2\n");
    let read_all = async |format,
                          file: &str,
                          features: &[&str],
                          label: &str,
                          categories: &[&str]| {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let spec = DatasetSpec {
            features: names(features),
            label: label.to_owned(),
            categories: names(categories),
            records_per_task: Some(100),
            ..spec(format, &[file])
        };
        let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
        let options = ReadOptions::new(&spec, &manifest);
        let mut records = Records::new(&options);
        records.extend(&read(&manifest, &options, &manifest.chunks).await.unwrap());
        let count = records.len();
        assert_eq!((records.labels.len(), records.features.len()), (count, count * features.len()));
        assert!(records.columns.iter().all(|column| column.len() == count), "{file}");
        let last = records.select(&[count as u32 - 1]);
        assert_eq!(last.labels, records.labels[count - 1..]);
        assert_eq!((last.len(), last.columns[0].len()), (1, 1));
        records
    };
    let parquet = (DataFormat::Parquet, digits("parquet"));
    let csv = (DataFormat::Csv, digits("csv"));
    let numbers = ["pixel_2", "pixel_3"];
    let one = read_all(parquet.0, &parquet.1, &numbers, "digit", &["pixel_4", "pixel_5"]).await;
    let two = read_all(csv.0, &csv.1, &numbers, "digit", &["pixel_4", "pixel_5"]).await;
    assert_eq!((&one.features, &one.labels, one.len()), (&two.features, &two.labels, 1797));
    // Those of text files are text, whatever they look like.
    assert!(matches!(two.columns[0].values, Values::Text(_)));
    let lines = read_all(DataFormat::Jsonl, "a.jsonl", &["x"], "y", &["c"]).await;
    assert_eq!(strings(&lines.columns[0]), [b"a", b"b"]);
    let svm = read_all(DataFormat::Libsvm, "a.svm", &[], "label", &["index"]).await;
    assert_eq!(svm.columns[0].values, Values::Int64(vec![3, 7, 5]));
    assert_eq!(svm.columns[0].weights, [1.0, 0.5, -2.0]);
    assert!(lines.columns[0].weights.is_empty());

    let fractions = DatasetSpec {
        features: vec![],
        label: "y".to_owned(),
        categories: vec!["x".to_owned()],
        ..spec(DataFormat::Jsonl, &["f.jsonl"])
    };
    directory.write("f.jsonl", "{\"x\": 1.5, \"y\": 0}\n");
    let error = plan(&fractions, &Default::default(), Some(directory.path()))
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("fractions are no categories"), "{error}");
}

/// Ids are compared, not computed with. A Python model may compute with them, so there they are refused.
#[tokio::test]
async fn large_unsigned_categories_are_the_integers_with_the_same_bits() {
    let directory = Directory::new();
    let columns =
        [crate::files::Values::Int64(vec![-2, 5]), crate::files::Values::Double(vec![1.0, 0.0])];
    let schema = "required int64 user (UINT_64); required double y;";
    let file = crate::files::parquet(schema, &columns, 10);
    directory.write_bytes("a.parquet", &file);
    let spec = DatasetSpec {
        features: vec![],
        categories: vec!["user".to_owned()],
        ..spec(DataFormat::Parquet, &["a.parquet"])
    };
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
    let options = ReadOptions::new(&spec, &manifest);
    let found = read(&manifest, &options, &manifest.chunks).await.unwrap();
    assert_eq!(found.columns[0].values, Values::Int64(vec![-2, 5]));
    let refused = all(&directory, DataFormat::Parquet, "a.parquet", &["user"], &[], None).await;
    let refused = refused.unwrap_err().to_string();
    let way_out = "18446744073709551614 is out of range for int64; set uint64 in `dataset.types`";
    assert!(refused.ends_with(way_out), "{refused}");
    let types = [("user", "uint64")];
    let found = all(&directory, DataFormat::Parquet, "a.parquet", &["user"], &types, None).await;
    assert_eq!(found.unwrap().columns[0].values, Values::Uint64(vec![u64::MAX - 1, 5]));
}
