//! `steadfast top`: shows a job live on the full terminal.

mod screen;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use steadfast_common::status::Document;
use steadfast_process::{Failure, Shutdown};
use tokio::sync::mpsc;
use tokio::time::{Instant, interval, timeout};

use crate::job_args::{Job, JobArgs};
use crate::job_master::JobMaster;
use crate::status::{self, AnyStatus};
use screen::ScreenState;

/// Polling interval.
const POLL_EVERY: Duration = Duration::from_millis(500);

/// Timeout of one status request.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Time for the key reader to notice that its receiver was dropped.
const KEY_WAIT: Duration = Duration::from_millis(200);

/// Show a job live on the full terminal: progress, curves, what it waits for, slots, trainers, events; of an
/// elastic job rounds, nodes and the blacklist.
///
/// `q` quits; the arrow and page keys scroll the list of trainers or nodes.
#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    job: JobArgs,
}

/// Action of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Quit,
    /// Scrolls down by this number of rows, or up if negative.
    Move(isize),
    Redraw,
}

/// Shows the job until the user quits.
pub async fn run(args: TopArgs) -> Result<ExitCode, Failure> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::invalid(
            "`steadfast top` needs a terminal; `steadfast status --watch` does not",
        ));
    }
    let job = args.job.find_running().await?;
    let shutdown = Shutdown::install()?;
    let mut view = ScreenState::new(&job.name);
    let mut master = job.master();
    let mut terminal =
        ratatui::try_init().map_err(|error| Failure::io("cannot use the terminal", &error))?;
    let watched = watch(&mut terminal, &mut view, &job, &mut master, &shutdown).await;
    ratatui::restore();
    watched.map_err(|error| Failure::io("cannot draw on the terminal", &error))?;
    Ok(ExitCode::SUCCESS)
}

async fn watch(
    terminal: &mut DefaultTerminal,
    view: &mut ScreenState,
    job: &Job,
    master: &mut JobMaster,
    shutdown: &Shutdown,
) -> std::io::Result<()> {
    let mut actions = read_keys();
    let mut ticks = interval(POLL_EVERY);
    loop {
        terminal.draw(|frame| screen::draw(frame, view))?;
        tokio::select! {
            biased;
            () = shutdown.drain() => return Ok(()),
            action = actions.recv() => match action {
                None | Some(Action::Quit) => return Ok(()),
                Some(Action::Move(rows)) => view.scroll(rows),
                Some(Action::Redraw) => {}
            },
            answer = poll(&mut ticks, job, master) => view.note(answer),
        }
    }
}

/// Waits for the next tick, then requests the status. Cancelling it is safe.
async fn poll(
    ticks: &mut tokio::time::Interval,
    job: &Job,
    master: &mut JobMaster,
) -> Result<Document, Failure> {
    ticks.tick().await;
    let started = Instant::now();
    timeout(TIMEOUT, read(job, master)).await.unwrap_or_else(|_| {
        Err(Failure::unavailable(format!(
            "the master has not answered for {:.0?}",
            started.elapsed()
        )))
    })
}

async fn read(job: &Job, master: &mut JobMaster) -> Result<Document, Failure> {
    match status::read(job, master).await? {
        // The last status of a master says more.
        AnyStatus::Stored(status) if status.result.is_none() => {
            Err(Failure::unavailable(status.error))
        }
        status @ (AnyStatus::Live(_) | AnyStatus::Stored(_) | AnyStatus::Elastic(_)) => {
            Ok(status.document())
        }
    }
}

/// Returns a channel of the actions of pressed keys. A separate thread reads the keys and ends shortly after
/// the receiver is dropped.
fn read_keys() -> mpsc::Receiver<Action> {
    let (tx, actions) = mpsc::channel(16);
    std::thread::spawn(move || {
        while !tx.is_closed() {
            match event::poll(KEY_WAIT) {
                Ok(false) => continue,
                Ok(true) => {}
                Err(_) => return,
            }
            let Ok(event) = event::read() else { return };
            if let Some(action) = action_of(&event)
                && tx.blocking_send(action).is_err()
            {
                return;
            }
        }
    });
    actions
}

fn action_of(event: &Event) -> Option<Action> {
    match event {
        Event::Resize(..) => Some(Action::Redraw),
        Event::Key(KeyEvent { code, modifiers, .. }) => match code {
            KeyCode::Char('q') | KeyCode::Esc => Some(Action::Quit),
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Some(Action::Quit),
            KeyCode::Down | KeyCode::Char('j') => Some(Action::Move(1)),
            KeyCode::Up | KeyCode::Char('k') => Some(Action::Move(-1)),
            KeyCode::PageDown => Some(Action::Move(10)),
            KeyCode::PageUp => Some(Action::Move(-10)),
            _ => None,
        },
        _ => None,
    }
}
