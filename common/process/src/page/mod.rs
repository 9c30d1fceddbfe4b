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

/// Id of the element that holds all sections.
const CONTENT: &str = "content";

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
                }
                div id=(CONTENT) { (content(sections)) }
            }
        }
    };
    guarded("text/html; charset=utf-8", page.into_string())
}

/// Renders the links to all sections, and the sections.
fn content(sections: &[Section]) -> Markup {
    html! {
        nav aria-label="Sections" {
            ul {
                @for it in sections { li { a href={ "#" (it.id) } { (it.title) } } }
                li { a href="status" { "status (JSON)" } }
                li { a href="metrics" { "metrics" } }
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
            let changed = changed(&mut sent, &ready, sections);
            if !changed.is_empty() {
                let data = serde_json::json!(changed).to_string();
                let event = Event::default().retry(RETRY).data(data);
                return Some((Ok(event), (clock, sent, render)));
            }
        }
    })
}

/// Returns the elements whose content differs from `sent`, and records them in it. If sections came or went, that is
/// the element that holds all of them.
fn changed(
    sent: &mut BTreeMap<String, String>,
    ready: &str,
    sections: Vec<Section>,
) -> BTreeMap<String, String> {
    let all = content(&sections);
    let mut now: BTreeMap<String, String> =
        sections.into_iter().map(|it| (place(&it), it.body.into_string())).collect();
    now.insert(READY.to_owned(), html! { (ready) }.into_string());
    if !sent.keys().eq(now.keys()) {
        let whole = [(READY, now[READY].clone()), (CONTENT, all.into_string())];
        *sent = now;
        return whole.map(|(id, content)| (id.to_owned(), content)).into();
    }
    now.retain(|place, body| sent.get(place) != Some(body));
    sent.extend(now.clone());
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_are_sent_and_all_sections_when_one_comes_or_goes() {
        let section = |id, body: &str| Section { id, title: "A section", body: html! { (body) } };
        let mut sent = BTreeMap::new();
        let mut send =
            |sections| changed(&mut sent, "ready", sections).into_keys().collect::<Vec<String>>();
        assert_eq!(send(vec![section("a", "1"), section("b", "2")]), [CONTENT, READY]);
        assert_eq!(send(vec![section("a", "1"), section("b", "3")]), ["b-body"]);
        assert!(send(vec![section("a", "1"), section("b", "3")]).is_empty());
        assert_eq!(send(vec![section("a", "1")]), [CONTENT, READY]);
    }
}
