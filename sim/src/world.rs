//! The deterministic scheduler: simulated time and tasks on one thread, determined by one seed.
//!
//! In each turn one of the ready tasks is drawn; if none is ready, time advances to the next event. A
//! task belongs to a process, which can be stopped, resumed and killed as a whole, and has its own clock
//! with an offset and a drift.

use std::any::Any;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;

use crate::host::{Simulated, enter};
use crate::rng::Rng;

/// Simulated duration of one turn of a task.
const TURN: Duration = Duration::from_micros(2);

/// Ends the process of the present turn in the middle of it, as a crash of its code does, and then does `what`: the
/// caller's kill of the process.
pub fn crash(what: impl FnOnce(&World) + Send + 'static) -> ! {
    resume_unwind(Box::new(Crash(Box::new(what))))
}

struct Crash(Box<dyn FnOnce(&World) + Send>);

/// A process. A restarted program is a new process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub usize);

/// A task of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TaskId(u64);

/// Difference between the clock of a machine and simulated time.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Offset at the start of the simulation.
    pub ahead: Duration,
    /// Seconds of the clock per simulated second.
    pub rate: f64,
}

impl Clock {
    /// Returns an exact clock.
    pub fn right() -> Self {
        Self { ahead: Duration::ZERO, rate: 1.0 }
    }
}

/// The simulated world. Cheap to clone.
#[derive(Clone)]
pub struct World(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Tasks woken since the last turn.
    woken: Arc<Mutex<Vec<TaskId>>>,
}

struct State {
    now: Duration,
    /// Simulated duration of a turn.
    turn: Duration,
    rng: Rng,
    tasks: BTreeMap<TaskId, Entry>,
    /// The ready tasks, sorted. A turn draws one by its index.
    ready: Vec<TaskId>,
    events: BinaryHeap<Reverse<Event>>,
    processes: Vec<Process>,
    /// Number of tasks and events so far.
    count: u64,
    turns: u64,
    /// Number of turns with more than one ready task.
    choices: u64,
    /// Injected deviations of scheduling choices.
    deviations: BTreeMap<u64, u64>,
    /// Digest of all events, in order.
    digest: u64,
}

struct Entry {
    process: ProcessId,
    /// Absent during the turn of the task.
    future: Option<BoxFuture<'static, ()>>,
    waker: Waker,
}

struct Process {
    name: String,
    clock: Clock,
    host: Option<Arc<Simulated>>,
    tasks: BTreeSet<TaskId>,
    condition: Condition,
    /// Real time that its tasks have taken.
    busy: Duration,
}

/// Run state of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Condition {
    Running,
    /// Stopped, with the tasks that have become ready since.
    Stopped(BTreeSet<TaskId>),
    Dead,
}

struct Event {
    at: Duration,
    number: u64,
    what: What,
}

enum What {
    Fire(Arc<Timer>),
    Do(Box<dyn FnOnce(&World) + Send>),
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

struct TaskWaker {
    task: TaskId,
    woken: Arc<Mutex<Vec<TaskId>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.woken.lock().expect(LOCK).push(self.task);
    }
}

const LOCK: &str = "single thread; no holder panics";

/// Result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Moved,
    /// No task is ready and no event is pending.
    Still,
}

impl World {
    /// Creates an empty world at time zero.
    pub fn new(seed: u64) -> Self {
        let state = State {
            now: Duration::ZERO,
            turn: TURN,
            rng: Rng::new(seed),
            tasks: BTreeMap::new(),
            ready: Vec::new(),
            events: BinaryHeap::new(),
            processes: Vec::new(),
            count: 0,
            turns: 0,
            choices: 0,
            deviations: BTreeMap::new(),
            digest: 0,
        };
        Self(Arc::new(Shared { state: Mutex::new(state), woken: Arc::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect(LOCK)
    }

    /// Lets turns take no simulated time, as if each process had a processor of its own.
    pub fn make_turns_instant(&self) {
        self.state().turn = Duration::ZERO;
    }

    /// Returns the simulated time since the start.
    pub fn now(&self) -> Duration {
        self.state().now
    }

    /// Returns the number of turns so far.
    pub fn turns(&self) -> u64 {
        self.state().turns
    }

    /// Returns the number of turns with more than one ready task.
    pub fn choices(&self) -> u64 {
        self.state().choices
    }

    /// Sets deviations of scheduling choices: by number of the choice, the offset from the drawn task.
    pub fn deviation(&self, choices: BTreeMap<u64, u64>) {
        self.state().deviations = choices;
    }

    /// Returns a digest of all events so far.
    pub fn digest(&self) -> u64 {
        self.state().digest
    }

    /// Calls `with` with the random number generator of the world.
    pub fn roll<T>(&self, with: impl FnOnce(&mut Rng) -> T) -> T {
        with(&mut self.state().rng)
    }

    /// Schedules `what` after `time`.
    pub fn after(&self, time: Duration, what: impl FnOnce(&World) + Send + 'static) {
        let mut state = self.state();
        let at = state.now.saturating_add(time);
        state.schedule(at, What::Do(Box::new(what)));
    }

    /// Waits for a duration of simulated time, independent of the clocks of processes.
    pub fn sleep(&self, time: Duration) -> Sleep {
        let at = self.now().saturating_add(time);
        Sleep { world: self.clone(), at, timer: None }
    }

    /// Creates a process.
    pub fn begin(&self, name: String, clock: Clock) -> ProcessId {
        let mut state = self.state();
        let (host, tasks, condition) = (None, BTreeSet::new(), Condition::Running);
        let busy = Duration::ZERO;
        state.processes.push(Process { name, clock, host, tasks, condition, busy });
        ProcessId(state.processes.len() - 1)
    }

    /// Sets the host of the tasks of a process.
    pub fn settle(&self, process: ProcessId, host: Arc<Simulated>) {
        self.state().processes[process.0].host = Some(host);
    }

    pub fn name(&self, process: ProcessId) -> String {
        self.state().processes[process.0].name.clone()
    }

    /// Returns the real time that tasks have taken so far, in all processes whose name begins with `prefix`.
    pub fn busy(&self, prefix: &str) -> Duration {
        let state = self.state();
        let those = state.processes.iter().filter(|it| it.name.starts_with(prefix));
        those.map(|it| it.busy).sum()
    }

    /// Returns the time on the clock of a process.
    pub fn local_time(&self, process: ProcessId) -> Duration {
        let state = self.state();
        let clock = state.processes[process.0].clock;
        clock.ahead + state.now.mul_f64(clock.rate)
    }

    /// Waits until the clock of a process shows `local`.
    pub fn sleep_until(&self, process: ProcessId, local: Duration) -> Sleep {
        let clock = self.state().processes[process.0].clock;
        let since = local.saturating_sub(clock.ahead).as_secs_f64() / clock.rate;
        // Waking a nanosecond too early would start another sleep.
        let at = Duration::try_from_secs_f64(since).unwrap_or(Duration::MAX / 2);
        Sleep { world: self.clone(), at: at + Duration::from_nanos(2), timer: None }
    }

    /// Spawns a task of a process. A task of a dead process never runs.
    pub fn spawn(&self, process: ProcessId, future: BoxFuture<'static, ()>) -> TaskId {
        let mut state = self.state();
        state.count += 1;
        let task = TaskId(state.count);
        if state.processes[process.0].condition == Condition::Dead {
            drop(state);
            drop(future);
            return task;
        }
        let waker = Waker::from(Arc::new(TaskWaker { task, woken: self.0.woken.clone() }));
        state.tasks.insert(task, Entry { process, future: Some(future), waker });
        state.processes[process.0].tasks.insert(task);
        state.wake(task);
        task
    }

    pub fn abort(&self, task: TaskId) {
        let entry = self.state().remove(task);
        if let Some(entry) = entry {
            self.discard(entry.process, entry.future);
        }
    }

    /// Drops a value of a process in the context of that process.
    fn discard<T>(&self, process: ProcessId, what: T) {
        let host = self.state().processes[process.0].host.clone();
        match host {
            Some(host) => enter(&host, || drop(what)),
            None => drop(what),
        }
    }

    /// Kills a process with all its tasks.
    pub fn kill(&self, process: ProcessId) {
        let entries: Vec<Entry> = {
            let mut state = self.state();
            state.processes[process.0].condition = Condition::Dead;
            let tasks = std::mem::take(&mut state.processes[process.0].tasks);
            tasks.into_iter().filter_map(|task| state.remove(task)).collect()
        };
        self.discard(process, entries);
    }

    /// Stops a process while time continues.
    pub fn stop(&self, process: ProcessId) {
        self.take_in_woken();
        let mut state = self.state();
        let state = &mut *state;
        let it = &mut state.processes[process.0];
        if it.condition == Condition::Running {
            let parked = state.ready.extract_if(.., |task| it.tasks.contains(task)).collect();
            it.condition = Condition::Stopped(parked);
        }
    }

    /// Resumes a stopped process.
    pub fn resume(&self, process: ProcessId) {
        let mut state = self.state();
        let it = &mut state.processes[process.0];
        if let Condition::Stopped(parked) = &mut it.condition {
            let parked = std::mem::take(parked);
            it.condition = Condition::Running;
            parked.into_iter().for_each(|task| state.make_ready(task));
        }
    }

    /// Returns whether a process is alive.
    pub fn lives(&self, process: ProcessId) -> bool {
        self.state().processes[process.0].condition != Condition::Dead
    }

    /// Drops all tasks and processes. This breaks reference cycles.
    pub fn end(&self) {
        let processes = self.state().processes.len();
        (0..processes).for_each(|process| self.kill(ProcessId(process)));
        let (events, hosts) = {
            let mut state = self.state();
            let hosts: Vec<_> = state.processes.iter_mut().map(|it| it.host.take()).collect();
            (std::mem::take(&mut state.events), hosts)
        };
        drop((events, hosts));
    }

    fn take_in_woken(&self) {
        let woken = std::mem::take(&mut *self.0.woken.lock().expect(LOCK));
        if !woken.is_empty() {
            let mut state = self.state();
            woken.into_iter().for_each(|task| state.wake(task));
        }
    }

    /// Runs one turn of a ready task, or advances to the next event.
    pub fn turn(&self) -> Turn {
        self.take_in_woken();
        let mut state = self.state();
        let is_due = state.events.peek().is_some_and(|Reverse(event)| event.at <= state.now);
        if is_due || state.ready.is_empty() {
            let Some(Reverse(event)) = state.events.pop() else { return Turn::Still };
            state.now = state.now.max(event.at);
            state.mix(event.number);
            crate::trace::turn(state.now, "");
            drop(state);
            match event.what {
                What::Fire(timer) => timer.fire(),
                What::Do(work) => work(self),
            }
            return Turn::Moved;
        }
        let task = state.choose();
        let Some(entry) = state.tasks.get_mut(&task) else { return Turn::Moved };
        let (process, waker) = (entry.process, entry.waker.clone());
        let Some(mut future) = entry.future.take() else { return Turn::Moved };
        let host = state.processes[process.0].host.clone();
        let turn = state.turn;
        state.now += turn;
        state.turns += 1;
        state.mix(task.0);
        crate::trace::turn(state.now, &state.processes[process.0].name);
        drop(state);
        let mut poll = || future.as_mut().poll(&mut Context::from_waker(&waker));
        let started = Instant::now();
        let polled = catch_unwind(AssertUnwindSafe(|| match host {
            Some(host) => enter(&host, poll),
            None => poll(),
        }));
        let polled = match polled {
            Ok(polled) => polled,
            Err(panic) => return self.crashed(task, process, future, panic),
        };
        self.state().processes[process.0].busy += started.elapsed();
        let ended = match polled {
            Poll::Ready(()) => {
                self.state().remove(task);
                Some(future)
            }
            Poll::Pending => match self.state().tasks.get_mut(&task) {
                Some(entry) => {
                    entry.future = Some(future);
                    None
                }
                // The task was aborted during its own turn.
                None => Some(future),
            },
        };
        self.discard(process, ended);
        Turn::Moved
    }
}

impl World {
    /// Ends a task whose turn did not end, and its process.
    fn crashed(
        &self,
        task: TaskId,
        process: ProcessId,
        future: BoxFuture<'static, ()>,
        panic: Box<dyn Any + Send>,
    ) -> Turn {
        let crash = panic.downcast::<Crash>().unwrap_or_else(|panic| resume_unwind(panic));
        self.state().remove(task);
        self.discard(process, future);
        (crash.0)(self);
        Turn::Moved
    }
}

impl State {
    fn mix(&mut self, what: u64) {
        self.digest = (self.digest.rotate_left(5) ^ what).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.digest ^= self.now.as_nanos() as u64;
    }

    /// Draws one of the ready tasks.
    fn choose(&mut self) -> TaskId {
        let count = self.ready.len() as u64;
        let mut nth = 0;
        if 1 < count {
            self.choices += 1;
            let further = self.deviations.get(&self.choices).copied().unwrap_or(0);
            nth = (self.rng.below(count) + further) % count;
        }
        self.ready.remove(nth as usize)
    }

    fn schedule(&mut self, at: Duration, what: What) {
        self.count += 1;
        self.events.push(Reverse(Event { at, number: self.count, what }));
    }

    fn wake(&mut self, task: TaskId) {
        let Some(entry) = self.tasks.get(&task) else { return };
        match &mut self.processes[entry.process.0].condition {
            Condition::Running => self.make_ready(task),
            Condition::Stopped(parked) => drop(parked.insert(task)),
            Condition::Dead => {}
        }
    }

    fn make_ready(&mut self, task: TaskId) {
        if let Err(place) = self.ready.binary_search(&task) {
            self.ready.insert(place, task);
        }
    }

    fn remove(&mut self, task: TaskId) -> Option<Entry> {
        if let Ok(place) = self.ready.binary_search(&task) {
            self.ready.remove(place);
        }
        let entry = self.tasks.remove(&task)?;
        let process = &mut self.processes[entry.process.0];
        process.tasks.remove(&task);
        if let Condition::Stopped(parked) = &mut process.condition {
            parked.remove(&task);
        }
        Some(entry)
    }
}

/// A future that completes at a simulated time.
pub struct Sleep {
    world: World,
    at: Duration,
    timer: Option<Arc<Timer>>,
}

#[derive(Default)]
struct Timer(Mutex<TimerState>);

#[derive(Default)]
enum TimerState {
    #[default]
    Idle,
    Waiting(Waker),
    Fired,
}

impl Timer {
    fn fire(&self) {
        let before = std::mem::replace(&mut *self.0.lock().expect(LOCK), TimerState::Fired);
        if let TimerState::Waiting(waker) = before {
            waker.wake();
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some(timer) = &self.timer {
            let mut state = timer.0.lock().expect(LOCK);
            if matches!(*state, TimerState::Fired) {
                return Poll::Ready(());
            }
            *state = TimerState::Waiting(context.waker().clone());
            return Poll::Pending;
        }
        if self.at <= self.world.now() {
            return Poll::Ready(());
        }
        let timer = Arc::new(Timer(Mutex::new(TimerState::Waiting(context.waker().clone()))));
        self.world.state().schedule(self.at, What::Fire(timer.clone()));
        self.timer = Some(timer);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = &self.timer {
            *timer.0.lock().expect(LOCK) = TimerState::Fired;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    type Log = Arc<Mutex<Vec<(Duration, &'static str)>>>;

    fn process(world: &World) -> ProcessId {
        world.begin("it".to_owned(), Clock::right())
    }

    /// Spawns a task that logs `text` every second.
    fn speaker(world: &World, process: ProcessId, text: &'static str, log: &Log) {
        let (clock, log) = (world.clone(), log.clone());
        let speak = async move {
            loop {
                clock.sleep(Duration::from_secs(1)).await;
                log.lock().unwrap().push((clock.now(), text));
            }
        };
        world.spawn(process, speak.boxed());
    }

    fn run(world: &World, until: Duration) {
        while world.now() < until && world.turn() == Turn::Moved {}
    }

    #[test]
    fn a_stopped_process_sends_nothing_until_it_resumes() {
        let (world, log) = (World::new(1), Log::default());
        let process = process(&world);
        speaker(&world, process, "tick", &log);
        let stop = move |world: &World| world.stop(process);
        world.after(Duration::from_millis(2500), stop);
        let resume = move |world: &World| world.resume(process);
        world.after(Duration::from_millis(7500), resume);
        run(&world, Duration::from_secs(9));
        let seconds: Vec<u64> = log.lock().unwrap().iter().map(|(at, _)| at.as_secs()).collect();
        assert_eq!(seconds, [1, 2, 7, 8]);
        world.end();
    }

    #[test]
    fn a_killed_process_never_runs_again_and_its_tasks_are_dropped() {
        let (world, log) = (World::new(1), Log::default());
        let process = process(&world);
        speaker(&world, process, "tick", &log);
        world.after(Duration::from_millis(1500), move |world| world.kill(process));
        run(&world, Duration::from_secs(9));
        world.spawn(process, async { panic!("a task of a dead process ran") }.boxed());
        run(&world, Duration::from_secs(10));
        assert_eq!(log.lock().unwrap().len(), 1);
        world.end();
        assert_eq!(Arc::strong_count(&log), 1, "a task of a dead process was not dropped");
    }

    #[test]
    fn a_fast_clock_wakes_its_sleepers_early() {
        let world = World::new(1);
        let fast = Clock { ahead: Duration::from_secs(100), rate: 1.25 };
        let process = world.begin("it".to_owned(), fast);
        assert_eq!(world.local_time(process), Duration::from_secs(100));
        let woken = Arc::new(Mutex::new(None));
        let (clock, out) = (world.clone(), woken.clone());
        let sleeper = async move {
            clock.sleep_until(process, Duration::from_secs(110)).await;
            *out.lock().unwrap() = Some(clock.now().as_secs());
        };
        world.spawn(process, sleeper.boxed());
        run(&world, Duration::from_secs(20));
        assert_eq!(*woken.lock().unwrap(), Some(8));
        world.end();
    }
}
