//! `steadfast convert`: writes the records of a dataset in another format.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use steadfast_common::error::ErrorKind;
use steadfast_common::job::columns::{ColumnSpec, ColumnType};
use steadfast_common::job::spec::{DataFormat, DatasetSpec, Header, Transform};
use steadfast_data::{DataError, IfThere, Target, convert};
use steadfast_process::{Failure, print_line};

use crate::checkpoint::manifests::store_failure;
use crate::output::notice;

const READ: [&str; 7] = ["parquet", "csv", "tsv", "jsonl", "tfrecord", "libsvm", "webdataset"];
const WRITTEN: [&str; 5] = ["parquet", "csv", "tsv", "jsonl", "tfrecord"];

/// Write the records of a dataset in another format.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Files to read: paths, URLs or patterns, as in `dataset.source` of a job file.
    #[arg(value_name = "SOURCE", required = true)]
    source: Vec<String>,
    /// Format of the files to read [default: by the extension of the first one].
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(READ).map(named))]
    from_format: Option<DataFormat>,
    /// Directory to write to: a path, or a URL of an object store.
    #[arg(long, value_name = "DIR_OR_URL")]
    to: String,
    /// Format of the files to write.
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(WRITTEN).map(named))]
    format: DataFormat,
    /// Number of files to write.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=99_999))]
    shards: u32,
    /// Beginning of the names of these files, which go on with `-00000-of-00005.parquet`.
    #[arg(long, value_name = "PREFIX", default_value = "data")]
    name_prefix: String,
    /// Columns to convert; `*` in a name matches any characters.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', default_value = "*")]
    columns: Vec<String>,
    /// Type of a column, as in `dataset.types` of a job file; repeatable.
    #[arg(long = "type", value_name = "NAME=TYPE", value_parser = column_type)]
    types: Vec<(String, ColumnType)>,
    /// The first line of CSV and TSV files to read is a record: columns are called 0, 1, ….
    #[arg(long)]
    no_header: bool,
    /// Overwrite existing files.
    #[arg(long)]
    force: bool,
}

/// Converts the dataset; prints the URLs of the files to stdout.
pub async fn run(args: ConvertArgs) -> Result<ExitCode, Failure> {
    let format = match args.from_format {
        Some(format) => format,
        None => by_extension(&args.source[0])?,
    };
    let header = if args.no_header { Header::Absent } else { Header::Present };
    let if_there = if args.force { IfThere::Replace } else { IfThere::Fail };
    let spec = DatasetSpec {
        source: args.source,
        format,
        features: vec![],
        label: String::new(),
        classes: Vec::new(),
        weight: None,
        columns: args.columns,
        categories: vec![],
        crosses: BTreeMap::new(),
        types: args.types.into_iter().collect(),
        missing: None,
        transform: Transform::None,
        feature_scale: 1.0,
        records_per_task: None,
        header,
        follow: false,
    };
    let target = Target {
        directory: steadfast_store::open(&args.to).map_err(store_failure)?,
        format: args.format,
        shards: args.shards,
        prefix: args.name_prefix,
        if_there,
    };
    let converted = convert(&spec, &target).await.map_err(failure)?;
    converted.files.iter().for_each(print_line);
    let (records, types) = (converted.records, types(&converted.columns));
    notice(format_args!("steadfast: wrote {records} records; in a job file: types = {types}"));
    Ok(ExitCode::SUCCESS)
}

fn named(name: String) -> DataFormat {
    serde_json::from_value(name.into()).expect("it is a format of job files")
}

fn by_extension(source: &str) -> Result<DataFormat, Failure> {
    DataFormat::of_name(source).ok_or_else(|| {
        let message = format!("the name of {source} does not tell its format; set --from-format");
        Failure::invalid(message)
    })
}

fn column_type(text: &str) -> Result<(String, ColumnType), String> {
    let (name, kind) = text.rsplit_once('=').ok_or("write NAME=TYPE, such as id=uint64")?;
    Ok((name.to_owned(), kind.parse()?))
}

/// Formats the types of columns as an inline table of TOML.
fn types(columns: &[ColumnSpec]) -> String {
    let pair = |it: &ColumnSpec| format!("{} = \"{}\"", serde_json::json!(it.name), it.kind);
    let pairs: Vec<String> = columns.iter().map(pair).collect();
    format!("{{ {} }}", pairs.join(", "))
}

fn failure(error: DataError) -> Failure {
    let kind = match (&error, error.kind()) {
        (DataError::Exists { .. }, _) => ErrorKind::Conflict,
        (_, steadfast_data::ErrorKind::Permanent) => ErrorKind::Invalid,
        (_, steadfast_data::ErrorKind::Transient) => ErrorKind::Unavailable,
    };
    match error {
        DataError::Store(error) => store_failure(error),
        // Errors of datasets name the key of a job file.
        error => Failure::new(kind, error.to_string().replace("`dataset.types`", "`--type`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_of_a_source_is_told_by_its_name_unless_it_has_none() {
        let of = |source| by_extension(source).ok();
        assert_eq!(of("s3://b/x/*.csv.gz"), Some(DataFormat::Csv));
        assert_eq!(of("a.b.tar"), Some(DataFormat::Webdataset));
        assert_eq!(of("a.gz"), None);
        assert_eq!(of("a"), None);
    }

    #[test]
    fn a_type_belongs_to_the_name_before_the_last_equals_sign() {
        let (name, kind) = column_type("a=b=int64[]").unwrap();
        assert_eq!((name.as_str(), kind.to_string().as_str()), ("a=b", "int64[]"));
        assert!(column_type("a").is_err());
        assert!(column_type("a=int").is_err());
        let columns = [ColumnSpec { name: "a \"b\"".to_owned(), kind }];
        assert_eq!(types(&columns), r#"{ "a \"b\"" = "int64[]" }"#);
    }
}
