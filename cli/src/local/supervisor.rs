//! Keeps processes running: one that dies is started again, with growing pauses.

use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::backoff::Backoff;
use super::child::{Death, Life};
use super::plan::{Process, Role};

/// How long a clean exit may precede the news that the job has ended.
const NEWS_DELAY: Duration = Duration::from_millis(500);

/// What the reader of the notices must know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A process ended and will be started again.
    Restart { name: String, death: Death, pause: Duration },
    /// A process ended in a way that another start cannot cure.
    Fatal(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Run,
    /// Whoever ends is not started again.
    Leave,
    Terminate,
}

/// A group of supervised processes; all die when this is dropped.
#[derive(Debug)]
pub struct Supervisor {
    orders: watch::Sender<Order>,
    keepers: JoinSet<()>,
}

impl Supervisor {
    /// Starts the processes.
    pub fn start(processes: Vec<Process>, notices: &mpsc::Sender<Notice>) -> Self {
        let orders = watch::Sender::new(Order::Run);
        let mut keepers = JoinSet::new();
        for process in processes {
            keepers.spawn(keep(process, orders.subscribe(), notices.clone()));
        }
        Self { orders, keepers }
    }

    /// From now on, whoever ends is not started again.
    pub fn leave(&self) {
        self.orders.send_replace(Order::Leave);
    }

    /// Lets the processes end by themselves for a while, then asks them to, then ends them.
    pub async fn stop(mut self, patience: Duration) {
        self.leave();
        let ended = async { while self.keepers.join_next().await.is_some() {} };
        if tokio::time::timeout(patience, ended).await.is_ok() {
            return;
        }
        self.orders.send_replace(Order::Terminate);
        while self.keepers.join_next().await.is_some() {}
    }
}

/// Starts one process again and again.
async fn keep(process: Process, mut orders: watch::Receiver<Order>, notices: mpsc::Sender<Notice>) {
    // The reader is quick and a notice rare; should the channel be full, one of many is lost.
    let tell = |notice| drop(notices.try_send(notice));
    let mut backoff = Backoff::new();
    while *orders.borrow() == Order::Run {
        let born = Instant::now();
        let mut life = match Life::start(&process) {
            Ok(life) => life,
            Err(failure) => return tell(Notice::Fatal(failure)),
        };
        let death = tokio::select! {
            death = life.end(&process) => death,
            () = until(&mut orders, Order::Terminate) => return life.terminate().await,
        };
        if let Some(failure) = fatal(&process, &death) {
            return tell(Notice::Fatal(failure));
        }
        let pause = backoff.after(born.elapsed());
        if death.code == Some(0) {
            // Most likely it saw the job's end before we did.
            let news = tokio::time::timeout(NEWS_DELAY, until(&mut orders, Order::Leave));
            if news.await.is_ok() {
                return;
            }
        }
        if *orders.borrow() != Order::Run {
            return;
        }
        tell(Notice::Restart { name: process.name.clone(), death, pause });
        let _ = tokio::time::timeout(pause, until(&mut orders, Order::Leave)).await;
    }
}

/// Completes when the order is at least as strict as `order`.
async fn until(orders: &mut watch::Receiver<Order>, order: Order) {
    let strict = |given: &Order| match order {
        Order::Run => true,
        Order::Leave => *given != Order::Run,
        Order::Terminate => *given == Order::Terminate,
    };
    // The sender is gone when the supervisor was dropped, and this task is about to be aborted.
    let _ = orders.wait_for(strict).await;
}

/// Judges whether a death calls for a person rather than another start.
fn fatal(process: &Process, death: &Death) -> Option<Failure> {
    let is = |kind: ErrorKind| death.code == Some(i32::from(kind.exit_code()));
    let anybody = [ErrorKind::Invalid, ErrorKind::Conflict, ErrorKind::Denied];
    // For the master these speak of the job's data; others may just be early.
    let master = [ErrorKind::NotFound, ErrorKind::TooLarge];
    let kind = anybody
        .into_iter()
        .find(|kind| is(*kind))
        .or_else(|| master.into_iter().find(|kind| process.role == Role::Master && is(*kind)))?;
    let words = death.words.as_deref().unwrap_or("it said nothing");
    let lines: Vec<String> = words
        .lines()
        .map(|line| format!("{} ended ({}): {line}", process.name, death.how))
        .collect();
    Some(Failure::new(kind, lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use nix::sys::signal::kill;
    use nix::unistd::Pid;

    use super::*;

    fn shell(folder: &Path, role: Role, script: &str) -> Process {
        Process {
            role,
            name: format!("{role}-0"),
            program: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            log: folder.join("it.log"),
        }
    }

    async fn next(notices: &mut mpsc::Receiver<Notice>) -> Notice {
        tokio::time::timeout(Duration::from_secs(20), notices.recv()).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn a_process_that_dies_is_started_again_after_growing_pauses() {
        let folder = tempfile::tempdir().unwrap();
        let (tx, mut notices) = mpsc::channel(8);
        let process = shell(folder.path(), Role::Trainer, "echo broken; exit 1");
        let supervisor = Supervisor::start(vec![process], &tx);
        for expected_ms in [100, 200, 400] {
            let Notice::Restart { name, death, pause } = next(&mut notices).await else {
                panic!("fatal");
            };
            assert_eq!(name, "trainer-0");
            assert_eq!(death.how, "exit code 1");
            assert_eq!(death.words.as_deref(), Some("broken"));
            assert_eq!(pause.as_millis(), expected_ms);
        }
        supervisor.stop(Duration::ZERO).await;
    }

    #[tokio::test]
    async fn bad_configuration_is_fatal_and_shown_in_the_words_of_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let (tx, mut notices) = mpsc::channel(8);
        let script = "echo 'steadfast-master: error: unknown column `x`' >&2; exit 2";
        let process = shell(folder.path(), Role::Master, script);
        let supervisor = Supervisor::start(vec![process], &tx);
        let expected = "master-0 ended (exit code 2): unknown column `x`";
        assert_eq!(next(&mut notices).await, Notice::Fatal(Failure::invalid(expected)));
        supervisor.stop(Duration::ZERO).await;
    }

    #[test]
    fn only_a_master_may_give_up_because_something_is_not_there() {
        let death = Death { code: Some(3), how: "exit code 3".to_owned(), words: None };
        assert!(fatal(&shell(Path::new("/"), Role::Master, ""), &death).is_some());
        assert!(fatal(&shell(Path::new("/"), Role::Trainer, ""), &death).is_none());
        for code in [None, Some(0), Some(1), Some(5), Some(6), Some(101)] {
            let death = Death { code, ..death.clone() };
            assert!(fatal(&shell(Path::new("/"), Role::Master, ""), &death).is_none());
        }
    }

    #[tokio::test]
    async fn a_clean_exit_shortly_before_the_news_of_the_end_is_no_death() {
        let folder = tempfile::tempdir().unwrap();
        let (tx, mut notices) = mpsc::channel(8);
        let supervisor = Supervisor::start(vec![shell(folder.path(), Role::Trainer, "")], &tx);
        tokio::time::sleep(Duration::from_millis(100)).await;
        supervisor.stop(Duration::from_secs(10)).await;
        drop(tx);
        assert_eq!(notices.recv().await, None);
    }

    #[tokio::test]
    async fn stopping_asks_politely_and_leaves_no_process_behind() {
        let folder = tempfile::tempdir().unwrap();
        let (tx, _notices) = mpsc::channel(8);
        let script = "trap 'echo bye; exit 0' TERM; echo $$; while :; do sleep 0.05; done";
        let process = shell(folder.path(), Role::Trainer, script);
        let log = process.log.clone();
        let supervisor = Supervisor::start(vec![process], &tx);
        let pid = loop {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            if let Some(line) = text.lines().next() {
                break Pid::from_raw(line.parse().unwrap());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        supervisor.stop(Duration::ZERO).await;
        assert!(kill(pid, None).is_err());
        assert!(std::fs::read_to_string(&log).unwrap().ends_with("bye\n"));
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_fatal() {
        let folder = tempfile::tempdir().unwrap();
        let (tx, mut notices) = mpsc::channel(8);
        let mut process = shell(folder.path(), Role::Trainer, "");
        process.program = folder.path().join("nothing");
        let _supervisor = Supervisor::start(vec![process], &tx);
        let Notice::Fatal(failure) = next(&mut notices).await else { panic!("restarted") };
        assert!(failure.message.starts_with("cannot start "), "{failure}");
    }
}
