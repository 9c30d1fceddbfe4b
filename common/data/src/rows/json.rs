//! JSON lines: one object in each line.

use std::borrow::Cow;

use serde_json::{Map, Value as Json};

use super::lines::Fields;
use crate::values::Value;

/// The members of an object, whose map is sorted by name.
pub(super) fn fields(line: &str) -> Result<Fields<'_>, String> {
    let members: Map<String, Json> = serde_json::from_str(line).map_err(|error| {
        // The parser knows this line alone.
        let error = error.to_string().replace(" at line 1 column", " at byte");
        format!("it is not a JSON object in one line ({error})")
    })?;
    let field = |(name, value)| (Cow::Owned(name), self::value(value));
    Ok(Some(members.into_iter().map(field).collect()))
}

fn value(json: Json) -> Value<'static> {
    match json {
        Json::Null => Value::Missing,
        Json::Bool(value) => Value::Bool(value),
        Json::Number(number) => match number.as_i64() {
            Some(value) => Value::Int(value),
            None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::Text(Cow::Owned(text)),
        Json::Array(values) => Value::List(values.into_iter().map(value).collect()),
        Json::Object(_) => Value::Other("an object"),
    }
}
