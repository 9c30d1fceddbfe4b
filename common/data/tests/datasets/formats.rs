//! Files of another format than the job states: the message names the actual format and the fix.

use crate::files::{Directory, parquet_of, spec};
use steadfast_common::job::spec::{DataFormat, Header};
use steadfast_data::{DataError, ErrorKind, plan};
use steadfast_store::open;

async fn expect(directory: &Directory, format: DataFormat, source: &str, parts: &[&str]) {
    let error = plan(&spec(format, &[source]), &Default::default(), Some(directory.path()))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{text}; {parts:?}");
    assert_eq!(error.kind(), ErrorKind::Permanent);
}

#[tokio::test]
async fn an_unexpected_separator_is_reported_with_a_hint() {
    let directory = Directory::new();
    directory.write("a.csv", "x0;x1;y\n1,5;2;3\n");
    let way_out = "write it with commas";
    expect(&directory, DataFormat::Csv, "a.csv", &["semicolons", "`x0;x1;y`", way_out]).await;
    directory.write("b.csv", "x0\tx1\ty\n1\t2\t3\n");
    expect(&directory, DataFormat::Csv, "b.csv", &["tabs", "`format = \"tsv\"`"]).await;
    directory.write("c.tsv", "x0,x1,y\n1,2,3\n");
    expect(&directory, DataFormat::Tsv, "c.tsv", &["commas", "`format = \"csv\"`"]).await;

    directory.write("d.csv", "1;2;3\n4;5;6\n");
    let mut headless = spec(DataFormat::Csv, &["d.csv"]);
    headless.header = Header::Absent;
    let error = plan(&headless, &Default::default(), Some(directory.path())).await.unwrap_err();
    assert!(matches!(error, DataError::Separator { .. }), "{error}");
}

#[tokio::test]
async fn a_directory_is_rejected_with_a_pattern_for_its_files() {
    let directory = Directory::new();
    directory.write("data/a.csv", "x0,x1,y\n1,2,3\n");
    std::fs::create_dir(format!("{}/empty", directory.path())).unwrap();
    for source in ["data", "data/", "empty"] {
        let pattern = format!("/{}/*.csv`", source.trim_end_matches('/'));
        expect(&directory, DataFormat::Csv, source, &["is a directory", &pattern]).await;
    }
    expect(&directory, DataFormat::Parquet, "data", &["is a directory", "/data/*.parquet`"]).await;

    let object = open("memory:///formats/data/a.csv").unwrap();
    object.write("x0,x1,y\n1,2,3\n".into()).await.unwrap();
    let source = "memory:///formats/data";
    expect(&directory, DataFormat::Csv, source, &["is a directory", "/data/*.csv`"]).await;
    expect(&directory, DataFormat::Csv, "memory:///formats/dat", &["does not exist"]).await;
}

#[tokio::test]
async fn a_file_of_another_format_is_detected_whatever_its_name() {
    let directory = Directory::new();
    directory.write_bytes("a.csv", &parquet_of(&[1.0; 20], &[2.0; 20], 10));
    let way_out = "`format = \"parquet\"`";
    expect(&directory, DataFormat::Csv, "a.csv", &["a.csv is a Parquet file", way_out]).await;
    directory.write("b.parquet", "x,y\n1,2\n");
    let parts = ["b.parquet is a text file", "`x,y`", "`format = \"csv\"`"];
    expect(&directory, DataFormat::Parquet, "b.parquet", &parts).await;
    directory.write_bytes("c.csv", b"PK\x03\x04 and more");
    expect(&directory, DataFormat::Csv, "c.csv", &["zip archive", "extract it"]).await;
    directory.write_bytes("d.csv", b"\xfd7zXZ\0 and more");
    expect(&directory, DataFormat::Csv, "d.csv", &["xz", "gzip, zstd or bzip2"]).await;
    directory.write_bytes("e.parquet", b"\x1f\x8b\x08 and more");
    expect(&directory, DataFormat::Parquet, "e.parquet", &["gzip", "decompress it"]).await;
    directory.write_bytes("f.parquet", &[0xff; 100]);
    expect(&directory, DataFormat::Parquet, "f.parquet", &["not a valid Parquet file"]).await;
}
