//! Columns of any type: what a dataset holds beside the features and labels of built-in models.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The type of a column: `int64`, `float32[64]` (lists of 64), `int64[]` (lists of any length).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ColumnType {
    pub element: Element,
    pub shape: Shape,
}

impl ColumnType {
    /// Returns the type of a column with one element in each record.
    pub const fn one(element: Element) -> Self {
        Self { element, shape: Shape::One }
    }

    /// Returns the type of a column with a list of any length in each record.
    pub const fn list(element: Element) -> Self {
        Self { element, shape: Shape::List }
    }
}

/// The type of single values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    Bool,
    Uint8,
    Int64,
    Uint64,
    Float32,
    Float64,
    Text,
    Bytes,
}

impl Element {
    const ALL: [Self; 8] = [
        Self::Bool,
        Self::Uint8,
        Self::Int64,
        Self::Uint64,
        Self::Float32,
        Self::Float64,
        Self::Text,
        Self::Bytes,
    ];

    /// Returns the name of the type in a job file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::Uint8 => "uint8",
            Self::Int64 => "int64",
            Self::Uint64 => "uint64",
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Text => "text",
            Self::Bytes => "bytes",
        }
    }

    /// Returns whether values are text or bytes, which have a length of their own and cannot be elements of a list.
    pub const fn is_string(self) -> bool {
        matches!(self, Self::Text | Self::Bytes)
    }
}

/// How many elements a record has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    One,
    /// A list of this length.
    Fixed(u32),
    /// A list of any length.
    List,
}

impl fmt::Display for ColumnType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.element.name())?;
        match self.shape {
            Shape::One => Ok(()),
            Shape::Fixed(length) => write!(f, "[{length}]"),
            Shape::List => f.write_str("[]"),
        }
    }
}

impl FromStr for ColumnType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, shape) = match text.strip_suffix(']').and_then(|it| it.split_once('[')) {
            None => (text, Some(Shape::One)),
            Some((name, "")) => (name, Some(Shape::List)),
            Some((name, length)) => {
                let length = length.parse().ok().filter(|length| *length > 0);
                (name, length.map(Shape::Fixed))
            }
        };
        let element = Element::ALL.into_iter().find(|element| element.name() == name);
        let (Some(element), Some(shape)) = (element, shape) else {
            let names: Vec<&str> = Element::ALL.iter().map(|element| element.name()).collect();
            return Err(format!(
                "`{text}` is not a type; use {}, or a list such as float32[64] or int64[]",
                names.join(", ")
            ));
        };
        if element.is_string() && shape != Shape::One {
            return Err(format!("`{text}`: lists of {name} are not supported"));
        }
        Ok(Self { element, shape })
    }
}

impl TryFrom<String> for ColumnType {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<ColumnType> for String {
    fn from(kind: ColumnType) -> Self {
        kind.to_string()
    }
}

/// A column of a dataset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnSpec {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: ColumnType,
}

/// A column of some records.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    pub name: String,
    pub shape: Shape,
    /// The elements of all records, one record after the other.
    pub values: Values,
    /// For lists of any length, text and bytes: where each record begins in `values`, and at last where they
    /// end. Empty for others. Signed, as NumPy indexes.
    pub offsets: Vec<i64>,
    /// The number by which each element counts, for categories with weights. Empty for other columns, whose elements
    /// count as 1.
    pub weights: Vec<f32>,
}

/// Elements of one type. Text is UTF-8.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    Bool(Vec<bool>),
    Uint8(Vec<u8>),
    Int64(Vec<i64>),
    Uint64(Vec<u64>),
    Float32(Vec<f32>),
    Float64(Vec<f64>),
    Text(Vec<u8>),
    Bytes(Vec<u8>),
}

/// Evaluates an expression with the vector of any type of [`Values`].
macro_rules! each {
    ($values:expr, $vector:ident => $result:expr) => {
        match $values {
            Values::Bool($vector) => $result,
            Values::Uint8($vector) => $result,
            Values::Int64($vector) => $result,
            Values::Uint64($vector) => $result,
            Values::Float32($vector) => $result,
            Values::Float64($vector) => $result,
            Values::Text($vector) => $result,
            Values::Bytes($vector) => $result,
        }
    };
}

impl Values {
    /// Creates an empty vector of values of this type.
    pub const fn new(element: Element) -> Self {
        match element {
            Element::Bool => Self::Bool(Vec::new()),
            Element::Uint8 => Self::Uint8(Vec::new()),
            Element::Int64 => Self::Int64(Vec::new()),
            Element::Uint64 => Self::Uint64(Vec::new()),
            Element::Float32 => Self::Float32(Vec::new()),
            Element::Float64 => Self::Float64(Vec::new()),
            Element::Text => Self::Text(Vec::new()),
            Element::Bytes => Self::Bytes(Vec::new()),
        }
    }

    /// Returns the number of elements; for text and bytes, the number of bytes.
    pub fn len(&self) -> usize {
        each!(self, vector => vector.len())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn size_bytes(&self) -> usize {
        each!(self, vector => size_of_val(&vector[..]))
    }

    /// Appends the elements `range` of `other`.
    fn append(&mut self, other: &Self, range: std::ops::Range<usize>) {
        match (self, other) {
            (Self::Bool(to), Self::Bool(from)) => to.extend_from_slice(&from[range]),
            (Self::Uint8(to), Self::Uint8(from))
            | (Self::Text(to), Self::Text(from))
            | (Self::Bytes(to), Self::Bytes(from)) => to.extend_from_slice(&from[range]),
            (Self::Int64(to), Self::Int64(from)) => to.extend_from_slice(&from[range]),
            (Self::Uint64(to), Self::Uint64(from)) => to.extend_from_slice(&from[range]),
            (Self::Float32(to), Self::Float32(from)) => to.extend_from_slice(&from[range]),
            (Self::Float64(to), Self::Float64(from)) => to.extend_from_slice(&from[range]),
            _ => panic!("the columns of one dataset have one type"),
        }
    }
}

impl Column {
    /// Creates a column without records.
    pub fn new(spec: &ColumnSpec) -> Self {
        let ColumnType { element, shape } = spec.kind;
        let offsets = match element.is_string() || shape == Shape::List {
            true => vec![0],
            false => Vec::new(),
        };
        let (name, values) = (spec.name.clone(), Values::new(element));
        Self { name, shape, values, offsets, weights: Vec::new() }
    }

    /// Returns the number of records, not of elements.
    pub fn len(&self) -> usize {
        match (self.offsets.len(), self.shape) {
            (0, Shape::Fixed(length)) => self.values.len() / length as usize,
            (0, _) => self.values.len(),
            (offsets, _) => offsets - 1,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory that the values, their offsets and their weights take, in bytes.
    pub fn size_bytes(&self) -> usize {
        let offsets = size_of_val(&self.offsets[..]);
        self.values.size_bytes() + offsets + size_of_val(&self.weights[..])
    }

    /// Ends a record whose elements were added to the values.
    pub fn end_record(&mut self) {
        if !self.offsets.is_empty() {
            self.offsets.push(self.values.len() as i64);
        }
    }

    /// Returns where the elements of one record are in the values.
    ///
    /// # Panics
    /// If there is no such record.
    pub fn elements_of(&self, record: usize) -> std::ops::Range<usize> {
        match (self.offsets.get(record..record + 2), self.shape) {
            (Some(ends), _) => ends[0] as usize..ends[1] as usize,
            (None, Shape::Fixed(length)) => {
                let length = length as usize;
                record * length..(record + 1) * length
            }
            (None, _) => record..record + 1,
        }
    }

    /// Appends one record of `other`, which has the same type.
    ///
    /// # Panics
    /// If there is no such record.
    fn push_record(&mut self, other: &Self, record: usize) {
        let elements = other.elements_of(record);
        self.weights.extend(other.weights.get(elements.clone()).unwrap_or_default());
        self.values.append(&other.values, elements);
        self.end_record();
    }

    /// Returns the records at `indices`, in that order.
    ///
    /// # Panics
    /// If an index is out of range.
    pub fn select(&self, indices: &[u32]) -> Self {
        let mut picked = self.without_records();
        for index in indices {
            picked.push_record(self, *index as usize);
        }
        picked
    }

    /// Appends all records of `other`, which has the same type.
    pub fn extend(&mut self, other: &Self) {
        let before = self.values.len() as i64;
        self.values.append(&other.values, 0..other.values.len());
        self.weights.extend(&other.weights);
        self.offsets.extend(other.offsets.iter().skip(1).map(|offset| before + offset));
    }

    fn without_records(&self) -> Self {
        let values = match &self.values {
            Values::Bool(_) => Values::Bool(Vec::new()),
            Values::Uint8(_) => Values::Uint8(Vec::new()),
            Values::Int64(_) => Values::Int64(Vec::new()),
            Values::Uint64(_) => Values::Uint64(Vec::new()),
            Values::Float32(_) => Values::Float32(Vec::new()),
            Values::Float64(_) => Values::Float64(Vec::new()),
            Values::Text(_) => Values::Text(Vec::new()),
            Values::Bytes(_) => Values::Bytes(Vec::new()),
        };
        let offsets = self.offsets.first().map(|_| 0).into_iter().collect();
        let weights = Vec::new();
        Self { name: self.name.clone(), shape: self.shape, values, offsets, weights }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(kind: &str) -> Column {
        Column::new(&ColumnSpec { name: "x".to_owned(), kind: kind.parse().unwrap() })
    }

    #[test]
    fn a_type_is_read_as_it_is_written() {
        for text in [
            "bool",
            "uint8[784]",
            "int64",
            "int64[]",
            "uint64",
            "float32[2]",
            "float64",
            "text",
            "bytes",
        ] {
            assert_eq!(text.parse::<ColumnType>().unwrap().to_string(), text);
        }
        for text in
            ["", "int", "int32", "int64[", "int64]", "int64[0]", "int64[-1]", "text[]", "[2]"]
        {
            assert!(text.parse::<ColumnType>().is_err(), "{text}");
        }
    }

    #[test]
    fn records_are_selected_and_joined_with_all_their_elements() {
        let mut lists = column("int64[]");
        for record in [&[1, 2][..], &[], &[3]] {
            let Values::Int64(values) = &mut lists.values else { unreachable!() };
            values.extend(record);
            lists.end_record();
        }
        lists.weights = vec![0.1, 0.2, 0.3];
        let picked = lists.select(&[2, 0, 1]);
        assert_eq!(picked.values, Values::Int64(vec![3, 1, 2]));
        assert_eq!(picked.weights, [0.3, 0.1, 0.2]);
        assert_eq!(picked.offsets, [0, 1, 3, 3]);
        lists.extend(&picked);
        assert_eq!((lists.len(), &lists.offsets[..]), (6, &[0, 2, 2, 3, 4, 6, 6][..]));
        assert_eq!(lists.weights, [0.1, 0.2, 0.3, 0.3, 0.1, 0.2]);

        let mut pairs = column("float32[2]");
        pairs.values = Values::Float32(vec![1.0, 2.0, 3.0, 4.0]);
        assert_eq!(pairs.select(&[1]).values, Values::Float32(vec![3.0, 4.0]));
        pairs.extend(&pairs.clone());
        assert_eq!((pairs.len(), pairs.offsets.len()), (4, 0));
    }
}
