//! The admin port's page: sections that the process writes, sent whole at first and then, by server-sent
//! events, as they change. It loads nothing from elsewhere and runs no script but its own.

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

/// How often it is looked whether something changed.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// When a browser comes back after its connection ended.
const RETRY: Duration = Duration::from_millis(500);

/// Where readiness is put.
const READY: &str = "ready";

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; \
     frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// A part of a page.
#[derive(Clone, Debug)]
pub struct Section {
    /// Its name in links: letters.
    pub id: &'static str,
    pub title: &'static str,
    pub body: Markup,
}

/// Writes a page's sections; must not wait.
pub type Sections = Box<dyn Fn() -> Vec<Section> + Send + Sync>;

/// What stands above the sections.
pub(crate) struct Head<'a> {
    pub role: &'a str,
    pub job: &'a str,
    pub ready: &'a str,
    pub warning: Option<&'a str>,
}

/// The page as it is now.
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
                        span id="connection" role="status" { "as of when it was loaded" }
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

/// Where a section's body is put.
fn place(section: &Section) -> String {
    format!("{}-body", section.id)
}

/// Tells what changes of a page, for as long as somebody listens.
pub(crate) fn events(look: impl Fn() -> (String, Vec<Section>) + Send + 'static) -> Response {
    let mut clock = interval(LOOK_EVERY);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let told = changes(clock, look);
    let headers =
        [(header::CACHE_CONTROL, "no-store"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, Sse::new(told)).into_response()
}

fn changes(
    clock: Interval,
    look: impl Fn() -> (String, Vec<Section>) + Send + 'static,
) -> impl Stream<Item = Result<Event, Infallible>> + Send {
    stream::unfold((clock, BTreeMap::new(), look), |(mut clock, mut told, look)| async move {
        loop {
            clock.tick().await;
            let (ready, sections) = look();
            let mut now: BTreeMap<String, String> =
                sections.into_iter().map(|it| (place(&it), it.body.into_string())).collect();
            now.insert(READY.to_owned(), html! { (ready) }.into_string());
            let changed = changed(&mut told, now);
            if !changed.is_empty() {
                let data = serde_json::json!(changed).to_string();
                let event = Event::default().retry(RETRY).data(data);
                return Some((Ok(event), (clock, told, look)));
            }
        }
    })
}

/// What is not as it was told, which is told now.
fn changed(
    told: &mut BTreeMap<String, String>,
    now: BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut changed = now;
    changed.retain(|place, body| told.get(place) != Some(body));
    told.extend(changed.clone());
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changed_is_told() {
        let now = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(place, body)| ((*place).to_owned(), (*body).to_owned())).collect()
        };
        let mut told = BTreeMap::new();
        assert_eq!(changed(&mut told, now(&[("a", "1"), ("b", "2")])).len(), 2);
        assert_eq!(changed(&mut told, now(&[("a", "1"), ("b", "3")])), now(&[("b", "3")]));
        assert!(changed(&mut told, now(&[("a", "1"), ("b", "3")])).is_empty());
    }
}
