//! JSON lines: one object in each line.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::lines::Fields;
use crate::values::Value;

/// Parses an object in one line; returns its members, sorted by name.
pub(super) fn fields(line: &str) -> Result<Fields<'_>, String> {
    // The parser would round numbers, so they are kept as they are written.
    let members: BTreeMap<String, &RawValue> = serde_json::from_str(line).map_err(|error| {
        // The parser knows this line alone.
        let error = error.to_string().replace(" at line 1 column", " at byte");
        format!("it is not a JSON object in one line ({error})")
    })?;
    let field = |(name, raw)| Ok((Cow::Owned(name), value(raw)?));
    members.into_iter().map(field).collect::<Result<_, String>>().map(Some)
}

fn value(raw: &RawValue) -> Result<Value<'_>, String> {
    if !raw.get().starts_with('[') {
        return element(raw);
    }
    let elements: Vec<&RawValue> = parsed(raw)?;
    elements.into_iter().map(element).collect::<Result<_, _>>().map(Value::List)
}

/// Parses a value outside of lists, or an element of one. Lists in it are not read: no column holds lists of lists.
fn element(raw: &RawValue) -> Result<Value<'_>, String> {
    Ok(match raw.get().as_bytes().first() {
        Some(b'n') => Value::Missing,
        Some(b't') => Value::Bool(true),
        Some(b'f') => Value::Bool(false),
        Some(b'"') => Value::Text(Cow::Owned(parsed(raw)?)),
        Some(b'[') => Value::List(Vec::new()),
        Some(b'{') => Value::Other("an object"),
        Some(_) | None => Value::written(raw.get()),
    })
}

fn parsed<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Result<T, String> {
    serde_json::from_str(raw.get()).map_err(|error| format!("it is not JSON ({error})"))
}
