//! Values of records in any format, and their conversion to the type of a column.

use std::borrow::Cow;
use std::fmt::Display;

use steadfast_common::job::columns::{Column, ColumnSpec, ColumnType, Element, Shape, Values};
use steadfast_common::job::dataset::ReadOptions;

use crate::columns::Content;
use crate::read::Conversion;

/// The reason that messages state for values without content.
pub(crate) const EMPTY: &str = "it is empty";
pub(crate) const NULL: &str = "it is empty (null)";

/// A value of one record, as its file holds it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Missing,
    Bool(bool),
    Int(i64),
    /// An integer beyond [`Value::Int`].
    Uint(u64),
    Float32(f32),
    Float(f64),
    /// Another number as it is written: which one it stands for depends on the type of its column.
    Number(Cow<'a, str>),
    Text(Cow<'a, str>),
    Bytes(Cow<'a, [u8]>),
    List(Vec<Value<'a>>),
    /// A value that no column can hold, such as a JSON object.
    Other(&'static str),
}

impl<'a> Value<'a> {
    /// Creates an integer from 0 on, as [`Value::Int`] if that can hold it.
    pub fn unsigned(value: u64) -> Self {
        i64::try_from(value).map_or(Self::Uint(value), Self::Int)
    }

    /// Creates the number that is written as `text`, which must be one. Integers of 64 bits are converted; other
    /// numbers are kept as text.
    pub fn written(text: impl Into<Cow<'a, str>>) -> Self {
        let text = text.into();
        if let Ok(value) = text.parse() {
            return Self::Int(value);
        }
        text.parse().map_or(Self::Number(text), Self::Uint)
    }
}

impl Value<'_> {
    /// Converts the value to a feature or label.
    pub fn number(&self, conversion: Conversion) -> Result<f32, String> {
        let (value, empty) = match self.single()? {
            Self::Missing => (None, NULL),
            Self::Text(text) if text.trim().is_empty() => (None, EMPTY),
            Self::Bytes(bytes) if bytes.trim_ascii().is_empty() => (None, EMPTY),
            value => (Some(float(value)?), NULL),
        };
        conversion.convert(value, empty)
    }

    /// Returns the value itself, or the only one of a list.
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
            Self::Int(_) | Self::Uint(_) | Self::Float32(_) | Self::Float(_) | Self::Number(_) => {
                "a number"
            }
            Self::Text(_) => "text",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "a list",
            Self::Other(what) => what,
        }
    }
}

/// The values of a label that are classes.
pub(crate) struct Classes(Vec<(String, Option<f64>)>);

impl Classes {
    /// Returns the classes of a job; `None` if its labels are numbers.
    pub fn of(options: &ReadOptions) -> Option<Self> {
        let names = options.classes.iter().map(|name| (name.clone(), parse(name).ok()));
        (!options.classes.is_empty()).then(|| Self(names.collect()))
    }

    /// Converts the value of a label: to its class, or without classes to a number.
    pub fn label(classes: Option<&Self>, value: &Value) -> Result<f32, String> {
        classes.map_or_else(|| value.number(Conversion::Plain), |classes| classes.index(value))
    }

    /// Returns the class that a value names: by its text, or as the same number.
    pub fn index(&self, value: &Value) -> Result<f32, String> {
        let value = value.single()?;
        let text = match value {
            Value::Text(_) | Value::Number(_) | Value::Bytes(_) => {
                textual(value)?.trim().to_owned()
            }
            Value::Missing => return Err(NULL.to_owned()),
            value => float(value)?.to_string(),
        };
        let number = parse(&text).ok();
        let is =
            |(name, of): &(String, Option<f64>)| *name == text || of.is_some() && *of == number;
        let index = self.0.iter().position(is).map(|index| index as f32);
        index.ok_or_else(|| match text.is_empty() {
            true => EMPTY.to_owned(),
            false => format!("`{}` is none of `dataset.classes`", shortened(&text)),
        })
    }
}

/// Tells how a column of `int64` reads integers from 2⁶³ on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Large {
    /// Reads them as ids: as the integers with the same bits.
    SameBits,
    Refused,
}

impl Large {
    /// Returns how the job's columns are read. Columns beside a label are categories, whose ids are only compared; a
    /// Python model may compute with its columns.
    pub fn of(options: &ReadOptions) -> Self {
        if options.label.is_some() { Self::SameBits } else { Self::Refused }
    }
}

/// Appends values to a column.
pub(crate) struct Builder {
    column: Column,
    kind: ColumnType,
    large: Large,
}

impl Builder {
    pub fn new(spec: &ColumnSpec, large: Large) -> Self {
        Self { column: Column::new(spec), kind: spec.kind, large }
    }

    /// Creates one builder for each column of the files.
    pub fn all(options: &ReadOptions) -> Vec<Self> {
        let large = Large::of(options);
        options.columns.iter().map(|spec| Self::new(spec, large)).collect()
    }

    pub fn finish(self) -> Column {
        self.column
    }

    /// Appends the value of the next record. The error is the reason why it does not have the type of the column.
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
        let shape = self.kind.shape;
        match &mut self.column.values {
            Values::Bool(values) => values.push(match integer(value)? {
                0 => false,
                1 => true,
                other => return Err(format!("{other} is neither true nor false")),
            }),
            Values::Uint8(values) => {
                let value = integer(value)?;
                values.push(
                    u8::try_from(value).map_err(|_| out_of_range(value, Element::Uint8, shape))?,
                );
            }
            Values::Int64(values) => {
                let value = integer(value)?;
                let same_bits = || u64::try_from(value).ok().map(|value| value as i64);
                let narrow = i64::try_from(value).ok().or_else(|| match self.large {
                    Large::SameBits => same_bits(),
                    Large::Refused => None,
                });
                values.push(narrow.ok_or_else(|| out_of_range(value, Element::Int64, shape))?);
            }
            Values::Uint64(values) => {
                let value = integer(value)?;
                values.push(
                    u64::try_from(value)
                        .map_err(|_| out_of_range(value, Element::Uint64, shape))?,
                );
            }
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

/// Returns the reason why an integer is not in a column, and the type that holds it.
fn out_of_range(value: i128, element: Element, shape: Shape) -> String {
    let (wider, but) = if i64::try_from(value).is_ok() {
        (Element::Int64, "")
    } else if u64::try_from(value).is_ok() {
        (Element::Uint64, "")
    } else {
        (Element::Float64, ", which rounds it,")
    };
    let [found, wider] = [element, wider].map(|element| ColumnType { element, shape });
    format!("{value} is out of range for {found}; set {wider}{but} in `dataset.types`")
}

/// The first float whose neighbours are not all integers that it could stand for.
const EXACT_END: f64 = 9_007_199_254_740_992.0;
/// The first float that no 64-bit integer reaches.
const INTEGERS_END: f64 = 18_446_744_073_709_551_616.0;

fn integer(value: &Value) -> Result<i128, String> {
    match value {
        Value::Bool(value) => Ok(i128::from(*value)),
        Value::Int(value) => Ok(i128::from(*value)),
        Value::Uint(value) => Ok(i128::from(*value)),
        Value::Float32(value) => whole(f64::from(*value), INTEGERS_END, value),
        Value::Float(value) => whole(*value, INTEGERS_END, value),
        value => match textual(value)?.trim() {
            "true" | "True" | "TRUE" => Ok(1),
            "false" | "False" | "FALSE" => Ok(0),
            text => match written_integer(text) {
                Some(value) => Ok(value),
                None => whole(parse(text)?, EXACT_END, &text),
            },
        },
    }
}

/// Converts a float to the integer that it is. Refuses floats from `end` on, which may not be the number that they were
/// made from, which is `shown`.
fn whole(value: f64, end: f64, shown: &dyn Display) -> Result<i128, String> {
    if value.fract() != 0.0 {
        return Err(format!("{shown} is not an integer; set another type in `dataset.types`"));
    }
    if end <= value.abs() {
        return Err(format!(
            "{shown} is not written as a 64-bit integer; write all its digits without an exponent, or set another \
             type in `dataset.types`"
        ));
    }
    Ok(value as i128)
}

/// Parses an integer that is written as digits; returns `None` for other text, and if it has many more than 64 bits.
fn written_integer(text: &str) -> Option<i128> {
    let digits = integer_digits(text)?;
    digits.parse::<i64>().map(i128::from).or_else(|_| digits.parse()).ok()
}

/// Returns the sign and the digits of an integer, without zeros after a decimal point; `None` for other text.
fn integer_digits(text: &str) -> Option<&str> {
    let (digits, zeros) = text.split_once('.').unwrap_or((text, ""));
    let unsigned = digits.strip_prefix(['+', '-']).unwrap_or(digits);
    let is_integer = !unsigned.is_empty()
        && unsigned.bytes().all(|byte| byte.is_ascii_digit())
        && zeros.bytes().all(|byte| byte == b'0');
    is_integer.then_some(digits)
}

fn float(value: &Value) -> Result<f64, String> {
    match value {
        Value::Bool(value) => Ok(f64::from(u8::from(*value))),
        Value::Int(value) => Ok(*value as f64),
        Value::Uint(value) => Ok(*value as f64),
        Value::Float32(value) => Ok(f64::from(*value)),
        Value::Float(value) => Ok(*value),
        value => parse(textual(value)?),
    }
}

fn textual<'a>(value: &'a Value) -> Result<&'a str, String> {
    match value {
        Value::Text(text) | Value::Number(text) => Ok(text),
        Value::Bytes(bytes) => std::str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned()),
        Value::Missing => Err(NULL.to_owned()),
        other => Err(format!("it is {}, not a number", other.describe())),
    }
}

/// Parses a number or a truth value. Accepts infinity and NaN; the code that takes the number refuses them.
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
    /// Whether there are negative integers.
    is_negative: bool,
    /// Whether there are numbers that are not written as integers.
    has_fractions: bool,
    /// Whether there are integers that `float32` would change.
    is_rounded: bool,
    /// A description of the first value that no column can hold.
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

    /// Adds a field of a format without types, as [`Inference::add`] adds a value. Empty fields are ignored.
    pub fn add_text(&mut self, text: &str) {
        let text = text.trim();
        if text.is_empty() {
            return;
        }
        let value = match parse(text) {
            Ok(_) => Value::written(text),
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
            Value::Int(value) => {
                self.note_integer(i128::from(*value));
                Element::Int64
            }
            Value::Uint(value) => {
                self.note_integer(i128::from(*value));
                Element::Uint64
            }
            // Formats that write numbers as text have no precision; models compute with this one.
            Value::Float32(_) | Value::Float(_) => {
                self.has_fractions = true;
                Element::Float32
            }
            Value::Number(text) => {
                match integer_digits(text).map(str::parse) {
                    Some(Ok(value)) => self.note_integer(value),
                    Some(Err(_)) => self.is_rounded = true,
                    None => self.has_fractions = true,
                }
                Element::Float32
            }
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
                const WIDER: [Element; 4] =
                    [Element::Bool, Element::Int64, Element::Uint64, Element::Float32];
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

    fn note_integer(&mut self, value: i128) {
        self.is_negative |= value < 0;
        self.is_rounded |= value as f32 as i128 != value;
    }

    fn refuse(&mut self, what: &'static str) {
        self.refused = self.refused.or(Some(what));
    }

    /// Returns the content of the column that the values suggest.
    pub fn finish(&self) -> Content {
        match (self.refused, self.element) {
            (Some(what), _) => Content::Other(what.to_owned()),
            (None, _) if self.is_mixed => Content::Unknown("values of several types"),
            (None, None) if self.is_list => Content::Unknown("only empty lists at its beginning"),
            (None, None) => Content::Unknown("only nulls at its beginning"),
            (None, Some(element)) if self.is_list && element.is_string() => {
                Content::Other("lists of text".to_owned())
            }
            (None, Some(element)) => {
                let shape = if self.is_list { Shape::List } else { Shape::One };
                match self.ambiguous(element) {
                    Some(found) => Content::Ambiguous(found, shape),
                    None => Content::Typed(ColumnType { element, shape }),
                }
            }
        }
    }

    /// Returns the reason why no type holds all integers that were seen exactly, although they are numbers.
    fn ambiguous(&self, element: Element) -> Option<&'static str> {
        match element {
            Element::Uint64 if self.is_negative => {
                Some("negative integers and ones from 2⁶³ on, which no type holds as they are")
            }
            // Ids that are written like `5.0` are still ids.
            Element::Float32 if self.is_rounded && !self.has_fractions => {
                Some("integers that `float32` would round")
            }
            Element::Bool
            | Element::Uint8
            | Element::Int64
            | Element::Uint64
            | Element::Float32
            | Element::Float64
            | Element::Text
            | Element::Bytes => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(kind: &str, values: &[Value]) -> Result<Column, String> {
        let kind = kind.parse().unwrap();
        let mut builder = Builder::new(&ColumnSpec { name: "x".to_owned(), kind }, Large::Refused);
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
            ("int64", text("9007199254740993e0")),
            ("int64", Value::Uint(1 << 63)),
            ("uint64", Value::Int(-1)),
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
        assert_eq!(of(&["1", "true"]).unwrap(), "float32");
    }
}
