//! The acting master's web page: summary and details of its job.

use maud::{Markup, PreEscaped, html};
use steadfast_common::given_up::DiscardedTask;
use steadfast_common::spec::Mode;
use steadfast_common::status::{
    Curves, JobPhase, JobStatus, Point, SlotTables, TimeBreakdown, TimelineEvent, TrainerStatus,
};
use steadfast_process::Section;

use crate::status::curve::curve;

/// Maximum number of rows of a table.
pub(super) const ROWS_MAX: usize = 100;

/// Maximum number of timeline events on the page; the status lists more.
const EVENTS_SHOWN: usize = 40;

/// Renders the sections of a job's page.
pub(crate) fn sections(status: &JobStatus, now_unix_ms: u64) -> Vec<Section> {
    let section = |id, title, body| Section { id, title, body };
    vec![
        section("job", "Job", job(status)),
        section("why", "Waiting for", why(status)),
        section("curves", "Curves", curves(&status.points)),
        section("tasks", "Tasks", tasks(status)),
        section("slots", "Slots", slots(status)),
        section("trainers", "Trainers", trainers(status)),
        section("checkpoints", "Checkpoints", checkpoints(status)),
        section("events", "Events", events(&status.events, now_unix_ms)),
    ]
}

/// Renders the page of a standby master, or of one that waits before it accepts calls.
pub(crate) fn standby(waits_for: Option<&str>) -> Vec<Section> {
    let body = match waits_for {
        Some(waits_for) => html! { p { "This master waits for " (waits_for) "." } },
        None => {
            html! { p { "This master is a standby. To find the acting one, run " code { "steadfast members" } "." } }
        }
    };
    vec![Section { id: "job", title: "Job", body }]
}

fn job(status: &JobStatus) -> Markup {
    let state = match status.state {
        JobPhase::Waiting => "waiting",
        JobPhase::Starting => "starting",
        JobPhase::Training => "training",
        JobPhase::Evaluating => "evaluating",
        JobPhase::Saving => "saving the model",
        JobPhase::Finished => "finished",
        JobPhase::Failed => "failed",
    };
    let mode = match status.mode {
        Mode::Sync => "synchronous",
        Mode::Async => "asynchronous",
    };
    let of = |now: u64, all: Option<u64>| match all {
        Some(all) => format!("{now} of {all}"),
        None => now.to_string(),
    };
    let pass = u64::from(status.pass.0) + 1;
    let passes = status.passes.map(u64::from);
    html! {
        @if let Some(total) = status.examples_total {
            progress max=(total) value=(status.examples) aria-label="Share of the job that is done" {}
        }
        table {
            (row("state", html! { (state) ", " (mode) }))
            @if let Some(reason) = status.result.as_ref().and_then(|it| it.reason.as_ref()) {
                (row("reason", html! { (reason) }))
            }
            (row("pass", html! { (of(passes.map_or(pass, |all| pass.min(all)), passes)) }))
            (row("step", html! { (of(status.version.0, status.steps)) }))
            (row("records", html! { (of(status.examples, status.examples_total)) }))
            (row("records/s", html! { (rounded(status.examples_per_second)) }))
            @if let Some(seconds) = status.seconds_left {
                (row("time left", html! { (span(seconds)) }))
            }
            @if let Some(stream) = &status.stream {
                (row("stream", html! {
                    (stream.files) " files read; " (stream.waiting_records) " records and "
                    (stream.waiting_files) " more files wait, the oldest for " (span(stream.oldest_seconds))
                    @if stream.is_draining { "; being drained" }
                }))
                @for (file, reason) in &stream.left_out {
                    (row("left out", html! { (file) ": " (reason) }))
                }
            }
            @if let Some(loss) = status.loss { (row("loss", html! { (figure(loss)) })) }
            @if let Some(it) = &status.evaluation {
                (row(&it.metric_name, html! {
                    (figure(it.metric)) " (loss " (figure(it.loss)) ") on " (it.records) " held-out records"
                }))
            }
            (row("generation", html! { (status.generation) }))
            (row("master", html! { (status.master.address) ", epoch " (status.master.epoch) }))
            @if let Some(sha) = status.result.as_ref().and_then(|it| it.parameters_sha256.as_ref()) {
                (row("SHA-256", html! { code { (sha) } }))
            }
        }
    }
}

fn row(name: &str, value: Markup) -> Markup {
    html! { tr { th scope="row" { (name) } td { (value) } } }
}

fn why(status: &JobStatus) -> Markup {
    html! {
        @if status.waiting.is_empty() { p { "Nothing." } }
        @else { ul { @for reason in &status.waiting { li.bad { (reason) } } } }
    }
}

fn curves(points: &[Point]) -> Markup {
    let curves = Curves::through(points);
    html! {
        div.curves {
            (figure_of("Loss", &curves.loss))
            (figure_of("Metric on held-out records", &curves.metric))
            (figure_of("Records/s", &curves.examples_per_second))
        }
    }
}

fn figure_of(title: &str, points: &[(f64, f64)]) -> Markup {
    let last = points.last().map_or_else(|| "no data yet".to_owned(), |it| figure(it.1));
    html! {
        figure role="img" aria-label={ (title) ": " (last) } {
            figcaption { (title) ": " (last) }
            @if 1 < points.len() { (PreEscaped(curve(points))) }
        }
    }
}

fn tasks(status: &JobStatus) -> Markup {
    let queues = status.queues;
    html! {
        table {
            thead { tr { th scope="col" { "todo" } th scope="col" { "pending" } th scope="col" { "done" } th scope="col" { "discarded" } } }
            tbody { tr {
                @for count in [queues.todo, queues.pending, queues.done, queues.discarded] {
                    td.number { (count) }
                }
            } }
        }
        @if !status.discarded.is_empty() {
            table {
                thead { tr { th scope="col" { "given up" } th scope="col" { "passes" } th scope="col" { "why" } } }
                tbody { @for it in status.discarded.listed.iter().take(ROWS_MAX) { tr {
                    td.number { (it.task) } td.number { (passes(it)) } td { (it.reason) }
                } } }
            }
            (more(status.discarded.tasks as usize))
        }
    }
}

fn passes(task: &DiscardedTask) -> String {
    if task.held_out { "held out".to_owned() } else { task.times.to_string() }
}

fn slots(status: &JobStatus) -> Markup {
    html! {
        table {
            thead { tr { th scope="col" { "slot" } th scope="col" { "pserver" } th scope="col" { "incarnation" } } }
            tbody { @for it in status.slots.iter().take(ROWS_MAX) { tr {
                td.number { (it.slot) }
                @match &it.address { Some(address) => td { (address) }, None => td.bad { "none" } }
                td.number { @if let Some(it) = it.incarnation { (it) } }
            } } }
        }
        (more(status.slots.len()))
        @if !status.tables.is_empty() { (tables(&status.tables)) }
    }
}

/// Renders a table of the memory and the disk space that the rows of embedding tables take in each slot.
fn tables(slots: &[SlotTables]) -> Markup {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    html! {
        table {
            thead { tr {
                th scope="col" { "slot" } th scope="col" { "rows of tables" } th scope="col" { "in memory" }
                th scope="col" { "MiB in memory" } th scope="col" { "MiB on disk" }
                th scope="col" { "accesses/s" } th scope="col" { "found in memory" }
            } }
            tbody { @for it in slots.iter().take(ROWS_MAX) { tr {
                td.number { (it.slot) }
                td { @for (index, (name, rows)) in it.rows.iter().enumerate() {
                    @if 0 < index { ", " }
                    (name) " " (rows)
                } }
                td.number { (percent(it.share_in_memory())) }
                td.number { (mib(it.memory_bytes)) }
                td.number { (mib(it.disk_bytes)) }
                td.number { (rounded(it.accesses_per_second)) }
                td.number { (percent(it.hit_rate())) }
            } } }
        }
    }
}

fn trainers(status: &JobStatus) -> Markup {
    html! {
        @if status.trainers.is_empty() { p.bad { "None." } }
        @else {
            table {
                thead { tr {
                    th scope="col" { "trainer" } th scope="col" { "admin port" } th scope="col" { "works on" }
                    @for (what, _) in shares(&TimeBreakdown::default()) { th scope="col" { (what) } }
                    th scope="col" { "MB/s" }
                    th scope="col" { "pushes ahead" }
                } }
                tbody { @for it in status.trainers.iter().take(ROWS_MAX) { (trainer(it)) } }
            }
            (more(status.trainers.len()))
        }
    }
}

fn trainer(it: &TrainerStatus) -> Markup {
    let lanes: Vec<String> = it.lanes.iter().map(ToString::to_string).collect();
    html! {
        tr {
            td { code { (it.id) } }
            td { (it.admin) }
            td { @if lanes.is_empty() { (it.tasks) " tasks" } @else { "lanes " (lanes.join(", ")) } }
            @for (_, share) in shares(&it.time_breakdown) { td.number { (share) } }
            td.number { (format!("{:.1}", it.time_breakdown.bytes_per_second() / 1e6)) }
            td.number { @match it.lead { Some(lead) => (lead), None => "–" } }
        }
    }
}

/// Returns the shares of a trainer's time breakdown, with their labels.
fn shares(time_breakdown: &TimeBreakdown) -> [(&'static str, String); 5] {
    let total = time_breakdown.total();
    let share = |part: f64| {
        if total <= 0.0 { "–".to_owned() } else { format!("{:.0} %", part / total * 100.0) }
    };
    [
        ("computing", share(time_breakdown.compute)),
        ("pushing", share(time_breakdown.push)),
        ("waiting", share(time_breakdown.wait)),
        ("pulling", share(time_breakdown.pull)),
        ("reading", share(time_breakdown.data)),
    ]
}

fn checkpoints(status: &JobStatus) -> Markup {
    html! {
        @match &status.checkpoint {
            Some(id) => p { "Latest: " code { (id) } },
            None => p { "No checkpoint yet." },
        }
        @if let Some(error) = &status.checkpoint_error {
            p.bad { "The last checkpoint failed: " (error) }
        }
    }
}

pub(super) fn events(events: &[TimelineEvent], now_unix_ms: u64) -> Markup {
    html! {
        table {
            thead { tr { th scope="col" { "ago" } th scope="col" { "what" } } }
            tbody { @for it in events.iter().rev().take(EVENTS_SHOWN) { tr {
                // Older events are rounded to minutes: most rows do not change on every refresh.
                td.number { (ago(now_unix_ms.saturating_sub(it.unix_ms))) }
                td { (it.what) }
            } } }
        }
    }
}

pub(super) fn more(count: usize) -> Markup {
    html! { @if ROWS_MAX < count { p { "and " (count - ROWS_MAX) " more" } } }
}

pub(super) fn ago(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

fn span(seconds: f64) -> String {
    ago((seconds.clamp(0.0, 1e12) * 1000.0) as u64)
}

fn rounded(value: f64) -> String {
    if value.is_finite() { format!("{value:.0}") } else { "–".to_owned() }
}

fn figure(value: f64) -> String {
    match value.abs() {
        it if !it.is_finite() => "–".to_owned(),
        it if it != 0.0 && !(1e-3..1e9).contains(&it) => format!("{value:.3e}"),
        it if 100.0 <= it => format!("{value:.0}"),
        _ => format!("{value:.4}"),
    }
}
