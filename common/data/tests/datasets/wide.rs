//! Files with very many columns.

use std::time::{Duration, Instant};

use steadfast_common::job::dataset::ReadOptions;
use steadfast_common::job::spec::{DataFormat, DatasetSpec};
use steadfast_data::{plan, read};

use crate::files::{Directory, parquet_of_columns, spec};

const COLUMNS: usize = 60_000;
const ROWS: usize = 40;
/// Linear work takes 1 to 2 s, quadratic work 20 s (text) or 50 s (Parquet).
const TIME_MAX: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_wide_text_file_takes_time_in_proportion_to_its_columns() {
    let directory = Directory::new();
    let names: Vec<String> = (0..COLUMNS).map(|i| format!("x{i}")).collect();
    let row = format!("{}1\n", "0.5,".repeat(COLUMNS));
    directory.write("a.csv", &format!("{},y\n{}", names.join(","), row.repeat(ROWS)));
    let by_pattern = spec(DataFormat::Csv, &["a.csv"]);
    let by_name = DatasetSpec { features: names, ..by_pattern.clone() };
    for spec in [by_pattern, by_name] {
        expect_in_time(&directory, &spec).await;
    }
}

#[tokio::test]
async fn a_wide_parquet_file_takes_time_in_proportion_to_its_columns() {
    let directory = Directory::new();
    directory.write_bytes("a.parquet", &parquet_of_columns(COLUMNS, ROWS));
    expect_in_time(&directory, &spec(DataFormat::Parquet, &["a.parquet"])).await;
}

async fn expect_in_time(directory: &Directory, spec: &DatasetSpec) {
    let begin = Instant::now();
    let manifest = plan(spec, &Default::default(), Some(directory.path())).await.unwrap();
    let planned = begin.elapsed();
    let options = ReadOptions::new(spec, &manifest);
    let records = read(&manifest, &options, &manifest.chunks).await.unwrap();
    assert_eq!(records.features.len(), COLUMNS * ROWS);
    let took = begin.elapsed();
    eprintln!("planned in {planned:?}, read in {:?}", took - planned);
    assert!(took < TIME_MAX, "{took:?}");
}
