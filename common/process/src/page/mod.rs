//! The page of the admin port: sections, sent in full at first and then as server-sent events when they
//! change. The page loads nothing from other hosts and runs only its own script.

mod tables;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, header};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream};
use maud::{DOCTYPE, Markup, html};
use tokio::time::{Interval, MissedTickBehavior, interval};

pub use tables::tables;

/// Interval of checks for changes.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Delay after which a browser reconnects.
const RETRY: Duration = Duration::from_millis(500);

/// Id of the element that shows readiness.
const READY: &str = "ready";

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; \
     frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// A part of a page.
#[derive(Clone, Debug)]
pub struct Section {
    /// The anchor of the section; letters only.
    pub id: &'static str,
    pub title: &'static str,
    pub body: Markup,
}

/// Renders the sections of a page; must not block.
pub type Sections = Box<dyn Fn() -> Vec<Section> + Send + Sync>;

/// The header above the sections.
pub(crate) struct Head<'a> {
    pub role: &'a str,
    pub job: &'a str,
    pub ready: &'a str,
    pub warning: Option<&'a str>,
}

pub(crate) fn page(head: &Head<'_>, sections: &[Section]) -> Response {
    let Head { role, job, ready, warning } = head;
    let title = format!("{job}: {role}");
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                link rel="stylesheet" href="page.css";
                script src="page.js" defer {}
            }
            body {
                header {
                    h1 { (title) }
                    @if let Some(warning) = warning { p.warning role="alert" { (warning) } }
                    p {
                        span id=(READY) { (ready) }
                        " · "
                        span id="connection" role="status" { "as of page load" }
                    }
                    nav aria-label="Sections" {
                        ul {
                            @for it in sections { li { a href={ "#" (it.id) } { (it.title) } } }
                            li { a href="status" { "status (JSON)" } }
                            li { a href="metrics" { "metrics" } }
                        }
                    }
                }
                main {
                    @for it in sections {
                        section id=(it.id) aria-labelledby={ (it.id) "-title" } {
                            h2 id={ (it.id) "-title" } { (it.title) }
                            div.scroll id=(place(it)) tabindex="0" { (it.body) }
                        }
                    }
                }
            }
        }
    };
    guarded("text/html; charset=utf-8", page.into_string())
}

pub(crate) async fn style() -> Response {
    guarded("text/css; charset=utf-8", STYLE.to_owned())
}

pub(crate) async fn script() -> Response {
    guarded("text/javascript; charset=utf-8", SCRIPT.to_owned())
}

fn guarded(content_type: &'static str, body: String) -> Response {
    let headers: [(HeaderName, &str); 4] = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, body).into_response()
}

/// Returns the id of the element with a section's body.
fn place(section: &Section) -> String {
    format!("{}-body", section.id)
}

/// Streams the changes of a page until the client disconnects.
pub(crate) fn events(render: impl Fn() -> (String, Vec<Section>) + Send + 'static) -> Response {
    let mut clock = interval(CHECK_INTERVAL);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let sent = changes(clock, render);
    let headers =
        [(header::CACHE_CONTROL, "no-store"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, Sse::new(sent)).into_response()
}

fn changes(
    clock: Interval,
    render: impl Fn() -> (String, Vec<Section>) + Send + 'static,
) -> impl Stream<Item = Result<Event, Infallible>> + Send {
    stream::unfold((clock, BTreeMap::new(), render), |(mut clock, mut sent, render)| async move {
        loop {
            clock.tick().await;
            let (ready, sections) = render();
            let mut now: BTreeMap<String, String> =
                sections.into_iter().map(|it| (place(&it), it.body.into_string())).collect();
            now.insert(READY.to_owned(), html! { (ready) }.into_string());
            let changed = changed(&mut sent, now);
            if !changed.is_empty() {
                let data = serde_json::json!(changed).to_string();
                let event = Event::default().retry(RETRY).data(data);
                return Some((Ok(event), (clock, sent, render)));
            }
        }
    })
}

/// Returns the elements whose content differs from `sent`, and records them in it.
fn changed(
    sent: &mut BTreeMap<String, String>,
    now: BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut changed = now;
    changed.retain(|place, body| sent.get(place) != Some(body));
    sent.extend(changed.clone());
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_are_sent() {
        let now = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(place, body)| ((*place).to_owned(), (*body).to_owned())).collect()
        };
        let mut sent = BTreeMap::new();
        assert_eq!(changed(&mut sent, now(&[("a", "1"), ("b", "2")])).len(), 2);
        assert_eq!(changed(&mut sent, now(&[("a", "1"), ("b", "3")])), now(&[("b", "3")]));
        assert!(changed(&mut sent, now(&[("a", "1"), ("b", "3")])).is_empty());
    }
}
