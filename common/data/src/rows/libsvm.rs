//! LibSVM (SVMlight) files: `label index:value …` in each line. Indices begin at 1 and ascend; `#` begins a
//! comment.

use std::borrow::Cow;
use std::collections::BTreeMap;

use steadfast_common::job::columns::{ColumnType, Element};

use super::lines::Fields;
use crate::columns::{Column, Content};
use crate::error::DataError;
use crate::read::Conversion;
use crate::values::{Value, parse};

pub(super) const INDEX: &str = "index";
pub(super) const LABEL: &str = "label";
pub(super) const VALUE: &str = "value";

/// The most features that a record is expanded to.
const FEATURES_MAX: u64 = 16_384;

/// Returns the columns that every file has, to choose from.
pub(super) fn columns() -> Vec<Column> {
    let typed = |name: &str, kind| Column { name: name.to_owned(), content: Content::Typed(kind) };
    vec![
        typed(INDEX, ColumnType::list(Element::Int64)),
        typed(LABEL, ColumnType::one(Element::Float32)),
        typed(VALUE, ColumnType::list(Element::Float32)),
    ]
}

/// Returns the columns to which features expand: `1`, `2`, … up to the largest index, and the label.
pub(crate) fn expanded(file: &str, index_max: u64) -> Result<Vec<Column>, DataError> {
    if FEATURES_MAX < index_max {
        return Err(DataError::TooManyFeatures {
            file: file.to_owned(),
            features: index_max,
            max: FEATURES_MAX,
        });
    }
    let number = Content::Typed(ColumnType::one(Element::Float32));
    let names = (1..=index_max).map(|index| index.to_string()).chain([LABEL.to_owned()]);
    Ok(names.map(|name| Column { name, content: number.clone() }).collect())
}

/// Parses a line into its fields: indices, label, and values. Returns `None` for a line without a record.
pub(super) fn fields(line: &str) -> Result<Fields<'_>, String> {
    let line = line.split('#').next().unwrap_or("");
    let mut words = line.split_ascii_whitespace();
    let Some(label) = words.next() else { return Ok(None) };
    let label = number(label).map_err(|reason| format!("its label: {reason}"))?;
    let (mut indices, mut values, mut last) = (Vec::new(), Vec::new(), None);
    for word in words {
        let Some((index, value)) = word.split_once(':') else {
            return Err(format!("`{word}` is not `index:value`"));
        };
        let Ok(place) = index.parse::<u64>() else {
            return Err(match index {
                "qid" => "query ids (`qid`) are not supported".to_owned(),
                _ => format!("`{index}` is not an index"),
            });
        };
        if let Some(last) = last.replace(place).filter(|last| place <= *last) {
            return Err(format!("index {place} follows {last}; indices must ascend"));
        }
        indices.push(Value::unsigned(place));
        values.push(number(value).map_err(|reason| format!("index {place}: {reason}"))?);
    }
    let named = |name, value| (Cow::Borrowed(name), value);
    Ok(Some(vec![
        named(INDEX, Value::List(indices)),
        named(LABEL, label),
        named(VALUE, Value::List(values)),
    ]))
}

fn number(text: &str) -> Result<Value<'_>, String> {
    // Truth values are words of other formats.
    if !text.bytes().any(|byte| byte.is_ascii_digit()) {
        return Err(format!("`{text}` is not a number"));
    }
    match parse(text)? {
        value if value.is_finite() => Ok(Value::written(text)),
        value => Err(format!("{value} is not finite")),
    }
}

/// Returns the largest index of a record; 0 if it has none, and for other formats.
pub(super) fn index_max(fields: &[(Cow<'_, str>, Value)]) -> u64 {
    match fields {
        [(name, Value::List(indices)), ..] if name == INDEX => match indices.last() {
            Some(Value::Int(index)) => index.unsigned_abs(),
            Some(Value::Uint(index)) => *index,
            _ => 0,
        },
        _ => 0,
    }
}

/// The place of each wanted feature among the wanted ones, by the index of the feature.
pub(super) type Places = BTreeMap<i64, usize>;

/// Returns the places of the features `wanted`. Names that are not indices have none.
pub(super) fn places(wanted: &[String]) -> Places {
    let place = |(place, name): (usize, &String)| Some((name.parse().ok()?, place));
    wanted.iter().enumerate().filter_map(place).collect()
}

/// Appends the values of all features of a record.
pub(super) fn append(
    fields: &[(Cow<'_, str>, Value)],
    conversion: Conversion,
    numbers: &mut Vec<f32>,
) -> Result<(), String> {
    if let [_, _, (_, Value::List(values))] = fields {
        for value in values {
            numbers.push(value.number(conversion)?);
        }
    }
    Ok(())
}

/// Appends the wanted features, of which most are zero.
pub(super) fn fill(
    fields: &[(Cow<'_, str>, Value)],
    wanted: &Places,
    conversion: Conversion,
    features: &mut Vec<f32>,
) -> Result<(), String> {
    let [(_, Value::List(indices)), _, (_, Value::List(values))] = fields else {
        return Err("it is missing".to_owned());
    };
    let first = features.len();
    features.resize(first + wanted.len(), 0.0);
    if indices.first() == Some(&Value::Int(0)) {
        return Err(
            "index 0: indices of features begin at 1; add 1 to all of them, or read `columns` \
                    with a Python model"
                .to_owned(),
        );
    }
    for (index, value) in indices.iter().zip(values) {
        let Value::Int(index) = index else { continue };
        if let Some(place) = wanted.get(index) {
            features[first + place] = value.number(conversion)?;
        }
    }
    Ok(())
}
