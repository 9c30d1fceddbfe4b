//! Resolves the columns of a job to those of a file.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::job::columns::{ColumnType, Element, Shape};
use steadfast_common::job::spec::DatasetSpec;
use steadfast_common::job::wildcard::wildcard;

use crate::error::DataError;
use crate::text::Dialect;

/// Minimum similarity of a column name to be suggested, from 0 to 1.
const SIMILARITY_MIN: f64 = 0.7;
const CANDIDATES_MAX: usize = 3;

const CONVERT: &str = "convert it";
const NO_CATEGORY: &str = "fractions are no categories: name it in `dataset.features`, or set its type in `dataset.types`";
const SET_TYPE: &str = "set its type in `dataset.types`";

/// A column of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    pub name: String,
    pub content: Content,
}

/// The content of a column, according to the file's schema or its first records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Typed(ColumnType),
    /// Text or bytes that may hold numbers, which is known only when the records are read; with the type
    /// that its first records or its name suggest.
    Text(ColumnType),
    /// Numbers whose first ones do not tell the type, with the reason and whether they are lists.
    Ambiguous(&'static str, Shape),
    /// Values whose first ones do not tell the type: nulls, empty lists, or values of several types.
    Unknown(&'static str),
    /// Content that cannot be read, with its description.
    Other(String),
}

impl Column {
    /// Checks that the column can hold features or labels.
    pub fn check_numeric(&self, file: &str) -> Result<(), DataError> {
        let found = match &self.content {
            Content::Text(_) => return Ok(()),
            Content::Typed(ColumnType { element: Element::Text, .. }) => "text".to_owned(),
            Content::Typed(ColumnType { element: Element::Bytes, .. }) => "bytes".to_owned(),
            Content::Typed(ColumnType { shape: Shape::One, .. })
            | Content::Ambiguous(_, Shape::One) => return Ok(()),
            Content::Typed(_) | Content::Ambiguous(..) => "lists".to_owned(),
            Content::Unknown(found) => (*found).to_owned(),
            Content::Other(found) => found.clone(),
        };
        let (column, file) = (self.name.clone(), file.to_owned());
        Err(DataError::NotNumeric { column, file, found })
    }

    /// Checks that the column can hold labels that name classes: one text or number for each record.
    pub fn check_class(&self, file: &str) -> Result<(), DataError> {
        match self.is_text() {
            true => Ok(()),
            false => self.check_numeric(file),
        }
    }

    /// Returns whether each record has one text.
    pub fn is_text(&self) -> bool {
        let Content::Typed(kind) = self.content else { return false };
        kind.shape == Shape::One && matches!(kind.element, Element::Text | Element::Bytes)
    }

    /// Checks that the values of the column can be read.
    pub fn check_readable(&self, file: &str) -> Result<(), DataError> {
        match &self.content {
            Content::Typed(_) | Content::Text(_) | Content::Ambiguous(..) | Content::Unknown(_) => {
                Ok(())
            }
            Content::Other(_) => Err(self.untyped(file, CONVERT)),
        }
    }

    fn untyped(&self, file: &str, way_out: &'static str) -> DataError {
        let found = match &self.content {
            Content::Typed(kind) | Content::Text(kind) => kind.to_string(),
            Content::Ambiguous(found, _) | Content::Unknown(found) => (*found).to_owned(),
            Content::Other(found) => found.clone(),
        };
        DataError::Untyped { column: self.name.clone(), file: file.to_owned(), found, way_out }
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
        self.check_unique(file)?;
        self.column.check_numeric(file)
    }

    /// Checks that the name is unique and that the column can name classes.
    fn fit_classes(&self, file: &str) -> Result<(), DataError> {
        self.check_unique(file)?;
        self.column.check_class(file)
    }

    fn check_unique(&self, file: &str) -> Result<(), DataError> {
        if self.count > 1 {
            let column = self.column.name.clone();
            return Err(DataError::DuplicateColumn { column, file: file.to_owned() });
        }
        Ok(())
    }
}

/// Resolves the feature columns of one file in the order of the model's input: the order of the job's
/// list, and within a wildcard the order of the file. A wildcard never matches the label or the weight.
pub(crate) fn resolve(
    spec: &DatasetSpec,
    file: &str,
    columns: &[Column],
) -> Result<Vec<String>, DataError> {
    let mut named: BTreeMap<&str, Named> = BTreeMap::new();
    for column in columns {
        named.entry(&column.name).or_insert(Named { column, count: 0 }).count += 1;
    }
    let find = |name: &str| named.get(name).ok_or_else(|| unknown(columns, name, file));
    let label = find(&spec.label)?;
    match spec.classes.is_empty() {
        true => label.fit(file)?,
        false => label.fit_classes(file)?,
    }
    if let Some(weight) = &spec.weight {
        find(weight)?.fit(file)?;
    }
    let mut features = Vec::new();
    let mut taken = BTreeSet::new();
    for wanted in &spec.features {
        let found = match wanted.contains('*') {
            true => matching(columns, wanted, spec, file)?,
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
    if features.is_empty() && spec.categories.is_empty() {
        return Err(unknown(columns, "*", file));
    }
    Ok(features)
}

/// A column that was found, with its type. The type in the first file applies to all files.
pub(crate) struct Typed {
    pub name: String,
    pub kind: Result<ColumnType, DataError>,
}

/// Resolves the columns of a job without features and label, or its categories, in the same order.
pub(crate) fn resolve_typed(
    spec: &DatasetSpec,
    file: &str,
    columns: &[Column],
) -> Result<Vec<Typed>, DataError> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for column in columns {
        *counts.entry(&column.name).or_default() += 1;
    }
    let mut found = Vec::new();
    let mut taken = BTreeSet::new();
    for wanted in spec.columns.iter().chain(&spec.categories) {
        for column in matching(columns, wanted, spec, file)? {
            if !taken.insert(&column.name) {
                continue;
            }
            if counts[column.name.as_str()] > 1 {
                let column = column.name.clone();
                return Err(DataError::DuplicateColumn { column, file: file.to_owned() });
            }
            let mut kind = typed(spec, file, column);
            if !spec.categories.is_empty()
                && kind
                    .as_ref()
                    .is_ok_and(|kind| matches!(kind.element, Element::Float32 | Element::Float64))
            {
                kind = Err(column.untyped(file, NO_CATEGORY));
            }
            found.push(Typed { name: column.name.clone(), kind });
        }
    }
    match spec.types.keys().find(|name| !taken.contains(name)) {
        Some(column) => Err(DataError::UnusedType { column: column.clone() }),
        None => Ok(found),
    }
}

/// Returns the type that the job sets for the column, or else that of the file.
fn typed(spec: &DatasetSpec, file: &str, column: &Column) -> Result<ColumnType, DataError> {
    match (spec.types.get(&column.name), &column.content) {
        (
            Some(kind),
            Content::Typed(_) | Content::Text(_) | Content::Ambiguous(..) | Content::Unknown(_),
        ) => Ok(*kind),
        // Of a category, the first records of a text file tell no type: `07` may be the name of a city.
        (None, Content::Text(_)) if !spec.categories.is_empty() => {
            Ok(ColumnType::one(Element::Text))
        }
        (None, Content::Ambiguous(..))
            if !spec.categories.is_empty() && Dialect::of_spec(spec).is_some() =>
        {
            Ok(ColumnType::one(Element::Text))
        }
        (None, Content::Typed(kind) | Content::Text(kind)) => Ok(*kind),
        (None, Content::Ambiguous(..) | Content::Unknown(_)) => Err(column.untyped(file, SET_TYPE)),
        (_, Content::Other(_)) => Err(column.untyped(file, CONVERT)),
    }
}

fn matching<'a>(
    columns: &'a [Column],
    pattern: &str,
    spec: &DatasetSpec,
    file: &str,
) -> Result<Vec<&'a Column>, DataError> {
    let matcher = wildcard(pattern);
    let found: Vec<&Column> = columns
        .iter()
        .filter(|column| column.name != spec.label && spec.weight.as_ref() != Some(&column.name))
        .filter(|column| matcher.matches(&column.name))
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
    use steadfast_common::job::spec::{DataFormat, Header};

    fn columns(names: &[&str]) -> Vec<Column> {
        let content = Content::Typed(ColumnType::one(Element::Float64));
        let column = |name: &&str| Column { name: (*name).to_owned(), content: content.clone() };
        names.iter().map(column).collect()
    }

    fn spec(features: &[&str], label: &str) -> DatasetSpec {
        DatasetSpec {
            source: vec![],
            format: DataFormat::Parquet,
            features: features.iter().map(|name| (*name).to_owned()).collect(),
            label: label.to_owned(),
            classes: vec![],
            weight: None,
            columns: vec![],
            categories: vec![],
            crosses: Default::default(),
            types: Default::default(),
            missing: None,
            transform: Default::default(),
            feature_scale: 1.0,
            records_per_task: None,
            header: Header::Present,
            follow: false,
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
