//! Resolves the columns of a job to those of a file.

use std::collections::{HashMap, HashSet};

use glob::Pattern;
use steadfast_common::spec::DatasetSpec;

use crate::error::DataError;

/// Minimum similarity of a column name to be suggested, from 0 to 1.
const SIMILARITY_MIN: f64 = 0.7;
const CANDIDATES_MAX: usize = 3;

/// A column of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    pub name: String,
    pub content: Content,
}

/// The content of a column, according to the file's schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Numbers,
    /// Known only when the records are read.
    Text,
    Other(String),
}

impl Column {
    /// Checks that the column can hold numbers.
    pub fn check_numeric(&self, file: &str) -> Result<(), DataError> {
        match &self.content {
            Content::Numbers | Content::Text => Ok(()),
            Content::Other(found) => Err(DataError::NotNumeric {
                column: self.name.clone(),
                file: file.to_owned(),
                found: found.clone(),
            }),
        }
    }
}

/// The first column of a name, and the number of columns with that name.
struct Named<'a> {
    column: &'a Column,
    count: usize,
}

impl Named<'_> {
    /// Checks that the name is unique and that the column can hold numbers.
    fn fit(&self, file: &str) -> Result<(), DataError> {
        if self.count > 1 {
            let column = self.column.name.clone();
            return Err(DataError::DuplicateColumn { column, file: file.to_owned() });
        }
        self.column.check_numeric(file)
    }
}

/// Resolves the feature columns of one file in the order of the model's input: the order of the job's
/// list, and within a wildcard the order of the file. A wildcard never matches the label.
pub(crate) fn resolve(
    spec: &DatasetSpec,
    file: &str,
    columns: &[Column],
) -> Result<Vec<String>, DataError> {
    let mut named: HashMap<&str, Named> = HashMap::with_capacity(columns.len());
    for column in columns {
        named.entry(&column.name).or_insert(Named { column, count: 0 }).count += 1;
    }
    let find = |name: &str| named.get(name).ok_or_else(|| unknown(columns, name, file));
    find(&spec.label)?.fit(file)?;
    let mut features = Vec::new();
    let mut taken = HashSet::new();
    for wanted in &spec.features {
        let found = match wanted.contains('*') {
            true => matching(columns, wanted, &spec.label, file)?,
            false => vec![find(wanted)?.column],
        };
        for column in found {
            if column.name == spec.label {
                return Err(DataError::LabelAmongFeatures { column: column.name.clone() });
            }
            if taken.insert(&column.name) {
                find(&column.name)?.fit(file)?;
                features.push(column.name.clone());
            }
        }
    }
    if features.is_empty() {
        return Err(unknown(columns, "*", file));
    }
    Ok(features)
}

fn matching<'a>(
    columns: &'a [Column],
    pattern: &str,
    label: &str,
    file: &str,
) -> Result<Vec<&'a Column>, DataError> {
    // `*` is the only special character; several in a row are one.
    let parts: Vec<String> = pattern.split('*').map(Pattern::escape).collect();
    let mut glob = parts.join("*");
    while glob.contains("**") {
        glob = glob.replace("**", "*");
    }
    let matcher = Pattern::new(&glob).map_err(|_| unknown(columns, pattern, file))?;
    let found: Vec<&Column> = columns
        .iter()
        .filter(|column| column.name != label && matcher.matches(&column.name))
        .collect();
    match found.is_empty() {
        true => Err(unknown(columns, pattern, file)),
        false => Ok(found),
    }
}

fn unknown(columns: &[Column], wanted: &str, file: &str) -> DataError {
    let mut near: Vec<(f64, &str)> = columns
        .iter()
        .map(|column| (similarity(wanted, &column.name), column.name.as_str()))
        .filter(|(similarity, _)| *similarity >= SIMILARITY_MIN)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    near.truncate(CANDIDATES_MAX);
    DataError::UnknownColumn {
        column: wanted.to_owned(),
        file: file.to_owned(),
        candidates: near.into_iter().map(|(_, name)| name.to_owned()).collect(),
    }
}

fn similarity(wanted: &str, name: &str) -> f64 {
    strsim::jaro_winkler(&wanted.to_lowercase(), &name.to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use steadfast_common::spec::{DataFormat, Header};

    fn columns(names: &[&str]) -> Vec<Column> {
        let column = |name: &&str| Column { name: (*name).to_owned(), content: Content::Numbers };
        names.iter().map(column).collect()
    }

    fn spec(features: &[&str], label: &str) -> DatasetSpec {
        DatasetSpec {
            source: vec![],
            format: DataFormat::Parquet,
            features: features.iter().map(|name| (*name).to_owned()).collect(),
            label: label.to_owned(),
            feature_scale: 1.0,
            records_per_task: None,
            header: Header::Present,
        }
    }

    #[test]
    fn features_keep_the_order_of_the_job_and_within_a_wildcard_that_of_the_file() {
        let columns = columns(&["x/1", "x0", "digit", "b", "x[0]"]);
        let named = |features: &[&str]| resolve(&spec(features, "digit"), "f", &columns).unwrap();
        assert_eq!(named(&["b", "x*"]), ["b", "x/1", "x0", "x[0]"]);
        assert_eq!(named(&["x0", "*"]), ["x0", "x/1", "b", "x[0]"]);
        assert_eq!(named(&["x[0]", "x[*"]), ["x[0]"]);
    }

    #[test]
    fn an_unknown_column_is_named_with_the_file_and_a_suggestion() {
        let error = resolve(&spec(&["pixel0"], "digit"), "f.csv", &columns(&["pixel_0", "digit"]));
        assert_eq!(
            error.unwrap_err().to_string(),
            "f.csv has no column `pixel0`; did you mean `pixel_0`?"
        );
        let error = resolve(&spec(&["pixel_0"], "Digit"), "f.csv", &columns(&["pixel_0", "digit"]));
        assert_eq!(
            error.unwrap_err().to_string(),
            "f.csv has no column `Digit`; did you mean `digit`?"
        );
        let error = resolve(&spec(&["q*"], "digit"), "f.csv", &columns(&["pixel_0", "digit"]));
        assert_eq!(error.unwrap_err().to_string(), "f.csv has no column `q*`");
    }

    #[test]
    fn the_label_is_not_a_feature_and_a_name_stands_for_one_column() {
        let error = resolve(&spec(&["y"], "y"), "f", &columns(&["x", "y"])).unwrap_err();
        assert!(matches!(error, DataError::LabelAmongFeatures { .. }), "{error}");
        let error = resolve(&spec(&["x"], "y"), "f", &columns(&["x", "y", "x"])).unwrap_err();
        assert!(matches!(error, DataError::DuplicateColumn { .. }), "{error}");
    }

    #[test]
    fn a_column_without_numbers_is_rejected() {
        let mut columns = columns(&["x", "y"]);
        columns[0].content = Content::Other("Utf8".to_owned());
        let error = resolve(&spec(&["x"], "y"), "f", &columns).unwrap_err();
        assert!(matches!(error, DataError::NotNumeric { .. }), "{error}");
    }
}
