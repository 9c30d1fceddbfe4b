//! Features that are empty, functions of features, and logs in the shape of Criteo's.

use steadfast_common::job::columns::Values as Columns;
use steadfast_common::job::dataset::{ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec, Header, Transform};
use steadfast_data::{DataError, plan, read};

use crate::files::{Directory, Values, parquet, spec};

async fn records(directory: &Directory, spec: &DatasetSpec) -> Result<Records, DataError> {
    let manifest = plan(spec, &Default::default(), Some(directory.path())).await?;
    let options = ReadOptions::new(spec, &manifest);
    read(&manifest, &options, &manifest.chunks).await
}

/// The same two records in four formats; of the first, feature `x0` is empty.
fn in_every_format(directory: &Directory) -> [DatasetSpec; 4] {
    directory.write("a.csv", "x0,x1,y\n,3,1\n-2.5, ,0\n");
    directory.write("a.tsv", "x0\tx1\ty\n \t3\t1\n-2.5\t\t0\n");
    directory.write(
        "a.jsonl",
        "{\"x0\": null, \"x1\": 3, \"y\": 1}\n{\"x0\": -2.5, \"x1\": null, \"y\": 0}\n",
    );
    let columns = [
        Values::Nullable(vec![None, Some(-2.5)]),
        Values::Nullable(vec![Some(3.0), None]),
        Values::Nullable(vec![Some(1.0), Some(0.0)]),
    ];
    let schema = "optional double x0; optional double x1; optional double y;";
    directory.write_bytes("a.parquet", &parquet(schema, &columns, 10));
    [
        spec(DataFormat::Csv, &["a.csv"]),
        spec(DataFormat::Tsv, &["a.tsv"]),
        spec(DataFormat::Jsonl, &["a.jsonl"]),
        spec(DataFormat::Parquet, &["a.parquet"]),
    ]
}

#[tokio::test]
async fn an_empty_feature_has_the_value_of_the_job_in_every_format() {
    let directory = Directory::new();
    for plain in in_every_format(&directory) {
        let filled = DatasetSpec { missing: Some(-1.0), feature_scale: 0.5, ..plain.clone() };
        let found = records(&directory, &filled).await.unwrap();
        assert_eq!(found.features, [-0.5, 1.5, -1.25, -0.5], "{:?}", plain.format);
        assert_eq!(found.labels, [1.0, 0.0]);

        let error = records(&directory, &plain).await.unwrap_err().to_string();
        assert!(error.contains("column `x0`: it is empty"), "{error}");
        assert!(error.contains("`dataset.missing` sets the value"), "{error}");

        // A label has no other value.
        let label = DatasetSpec {
            features: vec!["y".to_owned()],
            label: "x0".to_owned(),
            ..filled.clone()
        };
        let error = records(&directory, &label).await.unwrap_err().to_string();
        assert!(error.contains("column `x0`: it is empty"), "{error}");
        assert!(!error.contains("dataset.missing"), "{error}");
    }
}

#[tokio::test]
async fn a_transform_applies_to_features_before_they_are_scaled() {
    let directory = Directory::new();
    let log = |value: f64| (1.0 + value.abs()).ln().copysign(value);
    for plain in in_every_format(&directory) {
        let counts = DatasetSpec {
            missing: Some(7.0),
            transform: Transform::Log1p,
            feature_scale: 2.0,
            ..plain
        };
        let found = records(&directory, &counts).await.unwrap();
        for (found, value) in found.features.iter().zip([7.0, 3.0, -2.5, 7.0]) {
            assert!((f64::from(*found) - 2.0 * log(value)).abs() < 1e-6, "{found} {value}");
        }
        assert_eq!(found.labels, [1.0, 0.0]);
    }
    let sparse = DatasetSpec {
        features: vec!["*".to_owned()],
        label: "label".to_owned(),
        transform: Transform::Log1p,
        ..spec(DataFormat::Libsvm, &["a.svm"])
    };
    directory.write("a.svm", "1 2:1\n0 1:-1\n");
    let found = records(&directory, &sparse).await.unwrap();
    assert!((found.features[1] - std::f32::consts::LN_2).abs() < 1e-6);
    assert_eq!((found.features[0], found.features[2]), (0.0, -found.features[1]));
}

/// A label, 13 counts and 26 categories of 8 hexadecimal digits, without a header, also with all of them empty.
#[tokio::test]
async fn logs_in_the_shape_of_criteos_are_read() {
    let directory = Directory::new();
    let full: Vec<String> = (0..26).map(|it| format!("{:08x}", it * 0x00ab_cdef_u32)).collect();
    let counts: Vec<String> = (0..13).map(|it| (it - 1).to_string()).collect();
    let lines = [
        format!("0\t{}\t{}\n", counts.join("\t"), full.join("\t")),
        format!("1{}\n", "\t".repeat(39)),
        format!("1\t5{}\t68fd1e64{}\n", "\t".repeat(12), "\t".repeat(25)),
    ];
    directory.write("train.txt", &lines.concat());
    let names = |range: std::ops::Range<u32>| range.map(|it| it.to_string()).collect();
    let criteo = DatasetSpec {
        header: Header::Absent,
        features: names(1..14),
        categories: names(14..40),
        label: "0".to_owned(),
        missing: Some(0.0),
        transform: Transform::Log1p,
        ..spec(DataFormat::Tsv, &["train.txt"])
    };
    let found = records(&directory, &criteo).await.unwrap();
    assert_eq!((found.labels.clone(), found.width), (vec![0.0, 1.0, 1.0], 13));
    assert!((found.features[0] + std::f32::consts::LN_2).abs() < 1e-6, "a count of -1");
    assert!(found.features[13..26].iter().all(|value| *value == 0.0));
    assert_eq!(found.columns.len(), 26);
    for (index, column) in found.columns.iter().enumerate() {
        let Columns::Text(bytes) = &column.values else { panic!("{column:?}") };
        let of = |record: usize| {
            let ends = &column.offsets[record..record + 2];
            std::str::from_utf8(&bytes[ends[0] as usize..ends[1] as usize]).unwrap()
        };
        let third = if index == 0 { "68fd1e64" } else { "" };
        assert_eq!([of(0), of(1), of(2)], [&full[index], "", third]);
    }
}
