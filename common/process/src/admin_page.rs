//! The admin port's page: the status as nested tables, written here, with nothing to load.

use std::fmt::Write;

use serde_json::Value;

use crate::Ready;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;\
color:#1a1a1a;background:#fff}\
table{border-collapse:collapse}th,td{border:1px solid #ccc;padding:.2rem .6rem;text-align:left;\
vertical-align:top}th{font-weight:600;background:#f4f4f4}\
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#161616}\
th{background:#242424}th,td{border-color:#444}a{color:#8ab4f8}}";

/// Writes the page.
pub(crate) fn render(
    role: &str,
    job: &str,
    ready: &Ready,
    warning: Option<&str>,
    status: &Value,
) -> String {
    let (role, job) = (escape(role), escape(job));
    let ready = match ready {
        Ready::Yes => "ready".to_owned(),
        Ready::No(reason) => format!("not ready: {}", escape(reason)),
    };
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <meta http-equiv=\"refresh\" content=\"5\"><title>{job} {role}</title>\
         <style>{STYLE}</style></head><body><h1>{job}: {role}</h1><p>{ready} · \
         <a href=\"/status\">status</a> · <a href=\"/metrics\">metrics</a></p>"
    );
    if let Some(warning) = warning {
        let _ = write!(page, "<p><strong>{}</strong></p>", escape(warning));
    }
    cell(&mut page, status);
    page.push_str("</body></html>\n");
    page
}

fn cell(page: &mut String, value: &Value) {
    match value {
        Value::Null => page.push('–'),
        Value::Bool(it) => page.push_str(if *it { "yes" } else { "no" }),
        Value::Number(it) => page.push_str(&it.to_string()),
        Value::String(it) => page.push_str(&escape(it)),
        Value::Array(items) if items.iter().any(|it| it.is_object() || it.is_array()) => {
            rows(page, items.iter().enumerate().map(|(index, it)| (index.to_string(), it)));
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                page.push_str(if index == 0 { "" } else { ", " });
                cell(page, item);
            }
        }
        Value::Object(members) => rows(page, members.iter().map(|(name, it)| (escape(name), it))),
    }
}

fn rows<'a>(page: &mut String, rows: impl Iterator<Item = (String, &'a Value)>) {
    page.push_str("<table>");
    for (name, value) in rows {
        let _ = write!(page, "<tr><th>{name}</th><td>");
        cell(page, value);
        page.push_str("</td></tr>");
    }
    page.push_str("</table>");
}

fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for it in text.chars() {
        match it {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_status_becomes_nested_tables_with_every_text_escaped() {
        let status = serde_json::json!({ "a<b": [1, 2], "slots": [{ "at": "\"x\"" }], "no": null });
        let page = render("master", "d&d", &Ready::No("<x>".to_owned()), Some("a&b"), &status);
        assert!(page.contains("<th>a&lt;b</th><td>1, 2</td>"));
        assert!(page.contains("<th>at</th><td>&quot;x&quot;</td>"));
        assert!(page.contains("<title>d&amp;d master</title>"));
        assert!(page.contains("not ready: &lt;x&gt;"));
        assert!(page.contains("<strong>a&amp;b</strong>"));
    }
}
