//! Columns that combine categories.

use steadfast_common::job::categories::{category_id, cross_id};
use steadfast_common::job::columns::{Column, Values};
use steadfast_common::job::dataset::{ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec};
use steadfast_data::{DataError, plan, read};

use crate::files::{Directory, spec};

/// Label `y`, categories `user`, `city` and `seen`, and crosses of them.
fn crossed(file: &str, format: DataFormat, crosses: &[(&str, &[&str])]) -> DatasetSpec {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let crosses = crosses.iter().map(|(name, parts)| ((*name).to_owned(), names(parts)));
    DatasetSpec {
        features: vec![],
        categories: names(&["user", "city", "seen"]),
        crosses: crosses.collect(),
        ..spec(format, &[file])
    }
}

async fn records(directory: &Directory, spec: &DatasetSpec) -> Result<Records, DataError> {
    let manifest = plan(spec, &Default::default(), Some(directory.path())).await?;
    let options = ReadOptions::new(spec, &manifest);
    let names: Vec<&str> = manifest.columns.iter().map(|column| &column.name[..]).collect();
    let mut all = Records::new(&options);
    for task in manifest.training_tasks() {
        all.extend(&read(&manifest, &options, manifest.chunks_of(task)).await?);
    }
    assert!(all.columns.iter().map(|column| &column.name[..]).eq(names));
    Ok(all)
}

fn integers(column: &Column) -> Vec<u64> {
    let Values::Int64(values) = &column.values else { panic!("{column:?}") };
    values.iter().map(|value| *value as u64).collect()
}

const LINES: &str = "{\"y\": 0, \"user\": \"u1\", \"city\": 7, \"seen\": [1, 2]}\n\
                     {\"y\": 1, \"user\": \"u2\", \"city\": 7, \"seen\": []}\n\
                     {\"y\": 1, \"user\": \"u1\", \"city\": -7, \"seen\": [2]}\n";

#[tokio::test]
async fn a_cross_has_an_id_for_each_combination_of_its_parts() {
    let directory = Directory::new();
    directory.write("a.jsonl", LINES);
    let with = |records_per_task| DatasetSpec {
        records_per_task,
        ..crossed("a.jsonl", DataFormat::Jsonl, &[("user_city", &["user", "city"])])
    };
    let found = records(&directory, &with(None)).await.unwrap();
    let id = |column: &str, value: &[u8]| category_id(column, value);
    let city = |city: i64| id("city", &city.to_le_bytes());
    let expected = [("u1", 7), ("u2", 7), ("u1", -7)]
        .map(|(user, at)| cross_id([id("user", user.as_bytes()), city(at)]));
    assert_eq!(integers(&found.columns[3]), expected);
    assert_eq!(records(&directory, &with(Some(1))).await.unwrap(), found, "in any tasks");

    let spec = crossed("a.jsonl", DataFormat::Jsonl, &[("of_list", &["seen", "user"])]);
    let found = records(&directory, &spec).await.unwrap();
    let seen = |seen: i64, user: &str| {
        cross_id([id("seen", &seen.to_le_bytes()), id("user", user.as_bytes())])
    };
    assert_eq!(integers(&found.columns[3]), [seen(1, "u1"), seen(2, "u1"), seen(2, "u1")]);
    assert_eq!(found.columns[3].offsets, [0, 2, 2, 3]);
}

#[tokio::test]
async fn every_format_gives_the_same_crosses() {
    let directory = Directory::new();
    directory.write("a.csv", "y,user,city,seen\n0,u1,Cork,a\n1,u2,,b\n");
    directory.write(
        "a.jsonl",
        "{\"y\": 0, \"user\": \"u1\", \"city\": \"Cork\", \"seen\": \"a\"}\n\
         {\"y\": 1, \"user\": \"u2\", \"city\": \"\", \"seen\": \"b\"}\n",
    );
    let crosses: [(&str, &[&str]); 2] =
        [("x", &["user", "city"]), ("a", &["seen", "city", "user"])];
    let one = records(&directory, &crossed("a.csv", DataFormat::Csv, &crosses)).await.unwrap();
    let two = records(&directory, &crossed("a.jsonl", DataFormat::Jsonl, &crosses)).await.unwrap();
    assert_eq!(one, two);
    assert_eq!(one.columns.len(), 5);
}

/// A Python model reads its columns, and crosses as others.
#[tokio::test]
async fn columns_of_any_type_are_crossed_too() {
    let directory = Directory::new();
    directory.write("a.jsonl", LINES);
    let spec = crossed("a.jsonl", DataFormat::Jsonl, &[("x", &["user", "city"])]);
    let columns = DatasetSpec {
        columns: vec!["*".to_owned()],
        categories: vec![],
        label: String::new(),
        ..spec.clone()
    };
    let found = records(&directory, &columns).await.unwrap();
    let expected = records(&directory, &spec).await.unwrap();
    assert_eq!(found.columns.last(), expected.columns.last());
}

#[tokio::test]
async fn parts_and_names_that_cannot_be_are_named() {
    let directory = Directory::new();
    directory.write("a.jsonl", LINES);
    let error = async |crosses: &[(&str, &[&str])]| {
        let spec = crossed("a.jsonl", DataFormat::Jsonl, crosses);
        records(&directory, &spec).await.unwrap_err().to_string()
    };
    let unknown = error(&[("x", &["user", "town"])]).await;
    assert!(
        unknown.contains("the part `town`, which is not among `dataset.categories`"),
        "{unknown}"
    );
    for name in ["city", "y"] {
        let taken = error(&[(name, &["user", "city"])]).await;
        assert!(taken.contains(&format!("`{name}` has the name of a column")), "{taken}");
    }
    let spec = DatasetSpec {
        columns: vec!["*".to_owned()],
        categories: vec![],
        label: String::new(),
        types: [("y".to_owned(), "float32".parse().unwrap())].into(),
        ..crossed("a.jsonl", DataFormat::Jsonl, &[("x", &["user", "y"])])
    };
    let fraction = records(&directory, &spec).await.unwrap_err().to_string();
    assert!(fraction.contains("`y`, which holds fractions"), "{fraction}");
}

#[tokio::test]
async fn a_record_with_too_many_combinations_is_named() {
    let directory = Directory::new();
    let list = format!("{:?}", [1; 101]);
    let line =
        |list: &str| format!("{{\"y\": 0, \"user\": {list}, \"city\": 1, \"seen\": {list}}}\n");
    directory.write("a.jsonl", &(line("[1]") + &line("[1]") + &line(&list)));
    for records_per_task in [None, Some(1)] {
        let spec = DatasetSpec {
            records_per_task,
            ..crossed("a.jsonl", DataFormat::Jsonl, &[("x", &["user", "seen"])])
        };
        let error = records(&directory, &spec).await.unwrap_err().to_string();
        let expected = "a.jsonl, column `x`: it has 10201 combinations";
        assert!(error.contains(expected) && error.contains("record 2 of"), "{error}");
    }
}
