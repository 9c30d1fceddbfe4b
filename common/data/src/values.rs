//! Values of records in any format, and their conversion to the type of a column.

use std::borrow::Cow;

use steadfast_common::columns::{Column, ColumnSpec, ColumnType, Element, Shape, Values};

use crate::columns::Content;
use crate::read::Conversion;

/// What is wrong with values without content, in messages.
pub(crate) const EMPTY: &str = "it is empty";
pub(crate) const NULL: &str = "it is empty (null)";

/// A value of one record, as its file holds it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Missing,
    Bool(bool),
    Int(i64),
    Float32(f32),
    Float(f64),
    Text(Cow<'a, str>),
    Bytes(Cow<'a, [u8]>),
    List(Vec<Value<'a>>),
    /// What cannot be in a column, such as a JSON object.
    Other(&'static str),
}

impl Value<'_> {
    /// The value as a feature or label.
    pub fn number(&self, conversion: Conversion) -> Result<f32, String> {
        let (value, empty) = match self.single()? {
            Self::Missing => (None, NULL),
            Self::Text(text) if text.trim().is_empty() => (None, EMPTY),
            Self::Bytes(bytes) if bytes.trim_ascii().is_empty() => (None, EMPTY),
            value => (Some(float(value)?), NULL),
        };
        conversion.convert(value, empty)
    }

    /// The value itself, or the only one of a list.
    fn single(&self) -> Result<&Self, String> {
        match self {
            Self::List(values) => match &values[..] {
                [value] => Ok(value),
                _ => Err(format!("it is a list of {} values, not one", values.len())),
            },
            value => Ok(value),
        }
    }

    fn describe(&self) -> &'static str {
        match self {
            Self::Missing => "empty (null)",
            Self::Bool(_) => "true or false",
            Self::Int(_) | Self::Float32(_) | Self::Float(_) => "a number",
            Self::Text(_) => "text",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "a list",
            Self::Other(what) => what,
        }
    }
}

/// Appends values to a column.
pub(crate) struct Builder {
    column: Column,
    kind: ColumnType,
}

impl Builder {
    pub fn new(spec: &ColumnSpec) -> Self {
        Self { column: Column::new(spec), kind: spec.kind }
    }

    pub fn finish(self) -> Column {
        self.column
    }

    /// Appends the value of the next record; the reason, if it does not have the type of the column.
    pub fn push(&mut self, value: &Value) -> Result<(), String> {
        match (self.kind.shape, value) {
            (Shape::One, value) => {
                let way_out = |reason| format!("{reason}; set a list in `dataset.types`");
                self.push_element(value.single().map_err(way_out)?)?;
            }
            // Raw bytes are a list of small numbers.
            (shape, Value::Bytes(bytes)) if self.kind.element == Element::Uint8 => {
                expect_length(shape, bytes.len())?;
                let Values::Uint8(values) = &mut self.column.values else { unreachable!() };
                values.extend_from_slice(bytes);
            }
            (_, Value::Missing) => return Err(NULL.to_owned()),
            (shape, value) => {
                let elements = match value {
                    Value::List(elements) => &elements[..],
                    element => std::slice::from_ref(element),
                };
                expect_length(shape, elements.len())?;
                elements.iter().try_for_each(|element| self.push_element(element))?;
            }
        }
        self.column.end_record();
        Ok(())
    }

    fn push_element(&mut self, value: &Value) -> Result<(), String> {
        match &mut self.column.values {
            Values::Bool(values) => values.push(match integer(value)? {
                0 => false,
                1 => true,
                other => return Err(format!("{other} is neither true nor false")),
            }),
            Values::Uint8(values) => {
                let value = integer(value)?;
                values.push(u8::try_from(value).map_err(|_| out_of_range(value, "uint8"))?);
            }
            Values::Int64(values) => values.push(integer(value)?),
            Values::Float32(values) => values.push(value.number(Conversion::Plain)?),
            Values::Float64(values) => {
                let value = float(value)?;
                if !value.is_finite() {
                    return Err(format!("{value} is not finite"));
                }
                values.push(value);
            }
            Values::Text(values) => match value {
                Value::Text(text) => values.extend_from_slice(text.as_bytes()),
                Value::Bytes(bytes) => match std::str::from_utf8(bytes) {
                    Ok(text) => values.extend_from_slice(text.as_bytes()),
                    Err(_) => return Err("it is not UTF-8; read it as \"bytes\"".to_owned()),
                },
                other => return Err(format!("it is {}, not text", other.describe())),
            },
            Values::Bytes(values) => match value {
                Value::Text(text) => values.extend_from_slice(text.as_bytes()),
                Value::Bytes(bytes) => values.extend_from_slice(bytes),
                other => return Err(format!("it is {}, not bytes", other.describe())),
            },
        }
        Ok(())
    }
}

fn expect_length(shape: Shape, found: usize) -> Result<(), String> {
    match shape {
        Shape::Fixed(length) if length as usize != found => {
            Err(format!("it is a list of {found} values, not of {length}"))
        }
        _ => Ok(()),
    }
}

fn out_of_range(value: i64, kind: &str) -> String {
    format!("{value} is out of range for {kind}")
}

/// The first float beyond 64-bit integers.
const INTEGERS_END: f64 = 9_223_372_036_854_775_808.0;
/// The first float whose neighbours are not all integers that it could stand for.
const EXACT_END: f64 = 9_007_199_254_740_992.0;

fn integer(value: &Value) -> Result<i64, String> {
    let not_whole = |value: &dyn std::fmt::Display| {
        format!("{value} is not an integer; set another type in `dataset.types`")
    };
    // Beyond `limit`, the float may not be the number that it was made from.
    let of_float = |value: f64, limit: f64| {
        let is_whole = value.fract() == 0.0 && value.abs() < limit;
        if is_whole { Ok(value as i64) } else { Err(not_whole(&value)) }
    };
    match value {
        Value::Bool(value) => Ok(i64::from(*value)),
        Value::Int(value) => Ok(*value),
        Value::Float32(value) => of_float(f64::from(*value), INTEGERS_END),
        Value::Float(value) => of_float(*value, INTEGERS_END),
        value => match textual(value)?.trim() {
            "true" | "True" | "TRUE" => Ok(1),
            "false" | "False" | "FALSE" => Ok(0),
            text => match text.parse() {
                Ok(value) => Ok(value),
                Err(_) => of_float(parse(text)?, EXACT_END),
            },
        },
    }
}

fn float(value: &Value) -> Result<f64, String> {
    match value {
        Value::Bool(value) => Ok(f64::from(u8::from(*value))),
        Value::Int(value) => Ok(*value as f64),
        Value::Float32(value) => Ok(f64::from(*value)),
        Value::Float(value) => Ok(*value),
        value => parse(textual(value)?),
    }
}

fn textual<'a>(value: &'a Value) -> Result<&'a str, String> {
    match value {
        Value::Text(text) => Ok(text),
        Value::Bytes(bytes) => std::str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned()),
        Value::Missing => Err(NULL.to_owned()),
        other => Err(format!("it is {}, not a number", other.describe())),
    }
}

/// Parses a number or a truth value. Infinity and NaN are parsed; who takes the number refuses them.
pub(crate) fn parse(text: &str) -> Result<f64, String> {
    match text.trim() {
        "" => Err("it is empty".to_owned()),
        "true" | "True" | "TRUE" => Ok(1.0),
        "false" | "False" | "FALSE" => Ok(0.0),
        text => text.parse().map_err(|_| not_a_number(text)),
    }
}

fn not_a_number(text: &str) -> String {
    match text.split_once('\n') {
        None => format!("`{}` is not a number", shortened(text)),
        Some((line, _)) => {
            let line = shortened(line.trim_end());
            format!("a field of several lines begins with `{line}`; is a quote not closed?")
        }
    }
}

fn shortened(text: &str) -> String {
    const CHARACTERS_MAX: usize = 40;
    match text.char_indices().nth(CHARACTERS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Derives the type of a column from some of its values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inference {
    element: Option<Element>,
    is_list: bool,
    is_mixed: bool,
    /// What no column can hold.
    refused: Option<&'static str>,
}

impl Inference {
    pub fn add(&mut self, value: &Value) {
        match value {
            Value::List(values) => {
                self.is_list = true;
                values.iter().for_each(|value| self.add_element(value));
            }
            value => self.add_element(value),
        }
    }

    /// As [`Inference::add`], for a field of a format without types.
    pub fn add_text(&mut self, text: &str) {
        let text = text.trim();
        if text.is_empty() {
            return;
        }
        let value = match text.parse() {
            Ok(value) => Value::Int(value),
            Err(_) if parse(text).is_ok() => Value::Float32(0.0),
            Err(_) => Value::Text(Cow::Borrowed(text)),
        };
        match (self.element, &value) {
            // A column with any text is text.
            (Some(Element::Text), _) => {}
            (_, Value::Text(_)) => self.element = Some(Element::Text),
            (_, value) => self.add_element(value),
        }
    }

    fn add_element(&mut self, value: &Value) {
        let element = match value {
            Value::Missing => return,
            Value::Bool(_) => Element::Bool,
            Value::Int(_) => Element::Int64,
            // Formats that write numbers as text have no precision; models compute with this one.
            Value::Float32(_) | Value::Float(_) => Element::Float32,
            Value::Text(_) => Element::Text,
            Value::Bytes(_) => Element::Bytes,
            Value::List(_) => return self.refuse("lists of lists"),
            Value::Other(what) => return self.refuse(what),
        };
        self.element = match (self.element, element) {
            (None, element) => Some(element),
            (Some(before), element) if before == element => Some(before),
            (Some(before), element) => {
                // The widest of several types of numbers.
                const WIDER: [Element; 3] = [Element::Bool, Element::Int64, Element::Float32];
                let width = |of| WIDER.iter().position(|element| *element == of);
                match (width(before), width(element)) {
                    (Some(a), Some(b)) => Some(WIDER[a.max(b)]),
                    _ => {
                        self.is_mixed = true;
                        Some(before)
                    }
                }
            }
        };
    }

    fn refuse(&mut self, what: &'static str) {
        self.refused = self.refused.or(Some(what));
    }

    /// The content of the column.
    pub fn finish(&self) -> Content {
        match (self.refused, self.element) {
            (Some(what), _) => Content::Other(what.to_owned()),
            (None, _) if self.is_mixed => Content::Unknown("values of several types"),
            (None, None) if self.is_list => Content::Unknown("only empty lists at its beginning"),
            (None, None) => Content::Unknown("only nulls at its beginning"),
            (None, Some(element)) if self.is_list && element.is_string() => {
                Content::Other("lists of text".to_owned())
            }
            (None, Some(element)) if self.is_list => Content::Typed(ColumnType::list(element)),
            (None, Some(element)) => Content::Typed(ColumnType::one(element)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(kind: &str, values: &[Value]) -> Result<Column, String> {
        let kind = kind.parse().unwrap();
        let mut builder = Builder::new(&ColumnSpec { name: "x".to_owned(), kind });
        values.iter().try_for_each(|value| builder.push(value))?;
        Ok(builder.finish())
    }

    fn text(text: &str) -> Value<'_> {
        Value::Text(text.into())
    }

    #[test]
    fn a_value_becomes_the_type_of_its_column_only_without_loss() {
        let ints = [Value::Int(-1), Value::Float(2.0), text(" 3 "), Value::Bool(true)];
        let ints = built("int64", &ints).unwrap();
        assert_eq!(ints.values, Values::Int64(vec![-1, 2, 3, 1]));
        let large = built("int64", &[text("9007199254740993")]).unwrap();
        assert_eq!(large.values, Values::Int64(vec![9_007_199_254_740_993]));
        for (kind, bad) in [
            ("int64", Value::Float(0.5)),
            ("int64", Value::Float(1e19)),
            ("int64", text("0.5")),
            ("int64", text("9007199254740993.0")),
            ("uint8", Value::Int(256)),
            ("bool", Value::Int(2)),
            ("float32", Value::Float(1e300)),
            ("float64", Value::Float(f64::NAN)),
            ("float64", text("inf")),
            ("float32", text("x")),
            ("float32", Value::Missing),
            ("float32", Value::List(vec![Value::Int(1), Value::Int(2)])),
            ("float32[3]", Value::List(vec![Value::Int(1), Value::Int(2)])),
            ("text", Value::Int(1)),
            ("text", Value::Bytes((&b"\xff"[..]).into())),
            ("int64[]", Value::Other("an object")),
        ] {
            assert!(built(kind, std::slice::from_ref(&bad)).is_err(), "{kind} {bad:?}");
        }
    }

    #[test]
    fn raw_bytes_are_a_list_of_small_numbers() {
        let image = Value::Bytes((&[7, 255][..]).into());
        assert_eq!(
            built("uint8[2]", std::slice::from_ref(&image)).unwrap().values,
            Values::Uint8(vec![7, 255])
        );
        assert!(built("uint8[3]", &[image]).is_err());
    }

    fn kind(inference: &Inference) -> Result<String, Content> {
        match inference.finish() {
            Content::Typed(kind) => Ok(kind.to_string()),
            other => Err(other),
        }
    }

    #[test]
    fn a_type_is_derived_from_all_values_that_were_seen() {
        let of = |values: &[Value]| {
            let mut inference = Inference::default();
            values.iter().for_each(|value| inference.add(value));
            kind(&inference)
        };
        assert_eq!(of(&[Value::Missing, Value::Int(1)]).unwrap(), "int64");
        assert_eq!(of(&[Value::Int(1), Value::Float(0.5)]).unwrap(), "float32");
        let lists = [Value::List(vec![]), Value::List(vec![Value::Int(1), Value::Int(2)])];
        assert_eq!(of(&lists).unwrap(), "int64[]");
        assert_eq!(of(&[Value::List(vec![Value::Float32(1.0)])]).unwrap(), "float32[]");
        assert!(matches!(of(&[]), Err(Content::Unknown(_))));
        assert!(matches!(of(&[text("a"), Value::Int(1)]), Err(Content::Unknown(_))));
        let lists = [Value::List(vec![text("a"), text("b")])];
        assert!(matches!(of(&lists), Err(Content::Other(_))));
        let of = |fields: &[&str]| {
            let mut inference = Inference::default();
            fields.iter().for_each(|field| inference.add_text(field));
            kind(&inference)
        };
        assert_eq!(of(&["1", " 2"]).unwrap(), "int64");
        assert_eq!(of(&["1", "2.5"]).unwrap(), "float32");
        assert_eq!(of(&["1", "x", "2"]).unwrap(), "text");
        assert_eq!(of(&["", "1"]).unwrap(), "int64");
    }
}
