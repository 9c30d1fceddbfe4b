//! Draws an elastic job.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Stylize;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Table};
use steadfast_common::elastic_status::{
    ElasticPhase, ElasticStatus, HostStatus, LauncherStatus, NodePhase, NodeStatus, WorkersPhase,
};

use super::{EVENTS_ROWS, draw_events, draw_reasons, reasons_rows};
use crate::format::{plain, plural, span};
use crate::status::elastic::round;

pub fn draw(
    frame: &mut Frame<'_>,
    status: &ElasticStatus,
    reasons: &[String],
    above: usize,
    now_unix_ms: u64,
) {
    let [head, why, nodes, events] = Layout::vertical([
        Constraint::Length(5),
        Constraint::Length(reasons_rows(reasons)),
        Constraint::Min(4),
        Constraint::Length(EVENTS_ROWS),
    ])
    .areas(frame.area());
    draw_head(frame, head, status);
    draw_reasons(frame, why, reasons);
    match &status.launcher {
        Some(launcher) => {
            let [nodes, hosts] =
                Layout::horizontal([Constraint::Fill(3), Constraint::Fill(1)]).areas(nodes);
            draw_nodes(frame, nodes, &status.nodes, above, now_unix_ms);
            draw_blacklist(frame, hosts, launcher, now_unix_ms);
        }
        None => draw_nodes(frame, nodes, &status.nodes, above, now_unix_ms),
    }
    draw_events(frame, events, &status.events, now_unix_ms);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, status: &ElasticStatus) {
    let name = status.state.name();
    let state = match status.state {
        ElasticPhase::Gathering => name.yellow(),
        ElasticPhase::Running | ElasticPhase::Finished => name.green(),
        ElasticPhase::Failed => name.red(),
    };
    let title = Line::from(vec![
        Span::from(plain(&status.job)).bold(),
        ": ".into(),
        state,
        ", elastic".into(),
    ]);
    let members = status.nodes.iter().filter(|it| it.state == NodePhase::Member).count();
    let (min, max) = (status.nodes_min, status.nodes_max);
    let rounds =
        format!("round {}; {} of {min} to {max} nodes", round(status), plural(members, "member"));
    let restarts = format!("{} restarts after failures", status.restarts());
    let launcher = status.launcher.as_ref().map(|it| {
        let outcome = it.outcome.as_ref().map_or_else(String::new, |it| format!("; {it}"));
        format!(", launcher: {} agents started, {} changes{outcome}", it.launches, it.resets)
    });
    let master = match &status.master {
        Some(it) => format!("master {} (epoch {})", it.address, it.epoch),
        None => "no master; the state in etcd".to_owned(),
    };
    let facts = [rounds, restarts + &launcher.unwrap_or_default(), master];
    let facts: Vec<Line<'_>> = facts.iter().map(|it| Line::from(plain(it))).collect();
    let block =
        Block::bordered().title(title).title_bottom(Line::from(" q quits ").right_aligned());
    frame.render_widget(Paragraph::new(facts).block(block), area);
}

fn draw_nodes(
    frame: &mut Frame<'_>,
    area: Rect,
    nodes: &[NodeStatus],
    above: usize,
    now_unix_ms: u64,
) {
    let dash = || "–".to_owned();
    let rows = nodes.iter().skip(above).map(|it| {
        let state = Cell::from(it.workers.map_or(it.state.name(), WorkersPhase::name));
        let state = if it.state == NodePhase::Gone { state.red() } else { state };
        let since = it.member_since_unix_ms;
        let age = since.map(|since| span(now_unix_ms.saturating_sub(since) as f64 / 1000.0));
        let report = it.report.as_ref();
        let restarts = report.map(|it| format!("{} of {}", it.restarts, it.restarts_max));
        Row::new([
            Cell::from(it.rank.map_or_else(dash, |rank| rank.to_string())),
            Cell::from(plain(&it.address)),
            Cell::from(it.slots.to_string()),
            state,
            Cell::from(age.unwrap_or_else(dash)),
            Cell::from(restarts.unwrap_or_else(dash)),
            Cell::from(report.map_or_else(dash, |it| it.changes.to_string())),
            Cell::from(plain(it.host.as_deref().unwrap_or("–"))),
            Cell::from(it.node.to_string().chars().take(8).collect::<String>()),
        ])
    });
    let head = ["rank", "address", "wrk", "state", "member", "restarts", "chg", "host", "node"];
    let widths = [
        Constraint::Length(4),
        Constraint::Min(16),
        Constraint::Length(3),
        Constraint::Length(9),
        Constraint::Length(7),
        Constraint::Length(8),
        Constraint::Length(3),
        Constraint::Min(4),
        Constraint::Length(8),
    ];
    let title = match above {
        0 => plural(nodes.len(), "node"),
        above => format!("{} ({above} above)", plural(nodes.len(), "node")),
    };
    let table = Table::new(rows, widths).header(Row::new(head).bold());
    frame.render_widget(table.block(Block::bordered().title(title)), area);
}

fn draw_blacklist(frame: &mut Frame<'_>, area: Rect, launcher: &LauncherStatus, now_unix_ms: u64) {
    let line = |it: &HostStatus| {
        let failures = plural(it.record.failures as usize, "failure");
        let left = it.time_left(now_unix_ms);
        Line::from(plain(&format!("{}: {failures}, {left}", it.host))).red()
    };
    let lines: Vec<Line<'_>> = launcher.blacklist().map(line).collect();
    let block = Block::bordered().title("blacklist");
    frame.render_widget(Paragraph::new(lines).block(block), area);
}
