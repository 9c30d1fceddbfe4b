//! `steadfast top`: a job on the whole terminal, as it goes on.

mod screen;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use steadfast_process::{Failure, Shutdown};
use tokio::sync::mpsc;
use tokio::time::{Instant, interval, timeout};

use crate::job_args::JobArgs;
use crate::job_master::JobMaster;
use screen::View;

/// Time between looks at the job.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long one look may take before the terminal says that nobody answers.
const PATIENCE: Duration = Duration::from_secs(3);

/// How soon the reader of keys notices that nobody listens any more.
const KEY_WAIT: Duration = Duration::from_millis(200);

/// Watch a job on the whole terminal: progress, curves, who waits for whom, slots, trainers, what happened.
///
/// `q` ends it, the arrow keys and page keys move among trainers.
#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    job: JobArgs,
}

/// What a key means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Quit,
    /// Down, or up if it is negative.
    Move(isize),
    Redraw,
}

/// Watches until somebody quits.
pub async fn run(args: TopArgs) -> Result<ExitCode, Failure> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::invalid(
            "`steadfast top` needs a terminal; `steadfast status --watch` does not",
        ));
    }
    let job = args.job.find_running().await?;
    let shutdown = Shutdown::install()?;
    let mut view = View::new(&job.name);
    let mut master = JobMaster::new(job.etcd, job.keys);
    let mut terminal =
        ratatui::try_init().map_err(|error| Failure::io("cannot use the terminal", &error))?;
    let watched = watch(&mut terminal, &mut view, &mut master, &shutdown).await;
    ratatui::restore();
    watched.map_err(|error| Failure::io("the terminal", &error))?;
    Ok(ExitCode::SUCCESS)
}

async fn watch(
    terminal: &mut DefaultTerminal,
    view: &mut View,
    master: &mut JobMaster,
    shutdown: &Shutdown,
) -> std::io::Result<()> {
    let mut wishes = wishes();
    let mut looks = interval(LOOK_EVERY);
    loop {
        terminal.draw(|frame| screen::draw(frame, view))?;
        tokio::select! {
            biased;
            () = shutdown.drain() => return Ok(()),
            wish = wishes.recv() => match wish {
                None | Some(Wish::Quit) => return Ok(()),
                Some(Wish::Move(rows)) => view.scroll(rows),
                Some(Wish::Redraw) => {}
            },
            looked = look(&mut looks, master) => view.note(looked),
        }
    }
}

/// Waits until it is time, then asks. Whoever drops this has asked for nothing.
async fn look(
    looks: &mut tokio::time::Interval,
    master: &mut JobMaster,
) -> Result<steadfast_common::status::JobStatus, Failure> {
    looks.tick().await;
    let started = Instant::now();
    timeout(PATIENCE, master.status()).await.unwrap_or_else(|_| {
        Err(Failure::unavailable(format!("no answer for {:.0?}", started.elapsed())))
    })
}

/// What the keys mean that are pressed from now on. They are read by a thread of their own, which ends some
/// time after nobody listens any more.
fn wishes() -> mpsc::Receiver<Wish> {
    let (tx, wishes) = mpsc::channel(16);
    std::thread::spawn(move || {
        while !tx.is_closed() {
            match event::poll(KEY_WAIT) {
                Ok(false) => continue,
                Ok(true) => {}
                Err(_) => return,
            }
            let Ok(event) = event::read() else { return };
            if let Some(wish) = meant(&event)
                && tx.blocking_send(wish).is_err()
            {
                return;
            }
        }
    });
    wishes
}

fn meant(event: &Event) -> Option<Wish> {
    match event {
        Event::Resize(..) => Some(Wish::Redraw),
        Event::Key(KeyEvent { code, modifiers, .. }) => match code {
            KeyCode::Char('q') | KeyCode::Esc => Some(Wish::Quit),
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Some(Wish::Quit),
            KeyCode::Down | KeyCode::Char('j') => Some(Wish::Move(1)),
            KeyCode::Up | KeyCode::Char('k') => Some(Wish::Move(-1)),
            KeyCode::PageDown => Some(Wish::Move(10)),
            KeyCode::PageUp => Some(Wish::Move(-10)),
            _ => None,
        },
        _ => None,
    }
}
