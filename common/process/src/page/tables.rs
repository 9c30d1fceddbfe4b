//! Renders any JSON status as nested tables.

use maud::{Markup, html};
use serde_json::Value;

/// Renders objects, and arrays that contain objects or arrays, as tables, and all other values as text.
pub fn tables(value: &Value) -> Markup {
    match value {
        Value::Null => html! { "–" },
        Value::Bool(it) => html! { (if *it { "yes" } else { "no" }) },
        Value::Number(it) => html! { (it.to_string()) },
        Value::String(it) => html! { (it) },
        Value::Array(items) if items.iter().any(|it| it.is_object() || it.is_array()) => html! {
            table { @for (index, it) in items.iter().enumerate() { (row(&index.to_string(), it)) } }
        },
        Value::Array(items) => html! {
            @for (index, it) in items.iter().enumerate() {
                @if index != 0 { ", " }
                (tables(it))
            }
        },
        Value::Object(members) => html! {
            table { @for (name, it) in members { (row(name, it)) } }
        },
    }
}

fn row(name: &str, value: &Value) -> Markup {
    html! { tr { th scope="row" { (name) } td { (tables(value)) } } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_status_becomes_nested_tables_with_every_text_escaped() {
        let status = serde_json::json!({ "a<b": [1, 2], "slots": [{ "at": "\"x\"" }], "no": null });
        let page = tables(&status).into_string();
        assert!(page.contains("<th scope=\"row\">a&lt;b</th><td>1, 2</td>"), "{page}");
        assert!(page.contains("<th scope=\"row\">at</th><td>&quot;x&quot;</td>"), "{page}");
    }
}
