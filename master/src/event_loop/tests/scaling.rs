//! The number of trainers: who works, and what the policy makes of speeds.

use steadfast_common::ids::Millis;
use steadfast_common::records::scale::{ScaleMode, ScaleReason, ScaleRecord};
use steadfast_master_core::ledger::Next;

use super::super::scaling::trainer_counts;
use super::*;

/// A job that trains, and its clock.
struct Watch {
    job: TrainingJob,
    outside: Outside,
    now: Millis,
    examples: u64,
    /// The sum of the times that trainers have worked.
    worked: f64,
}

impl Watch {
    /// Begins a job with so many trainers, which have joined in the order of their numbers.
    fn begin(mode: &str, trainers: u128) -> Self {
        let mut outside = world(&job(mode, 400), &[], Death::Never);
        outside.slots = BTreeMap::from([(0, 1), (1, 2)]);
        outside.trainers = (1..=trainers).collect();
        let job = machine(&outside, 1);
        let mut watch = Self { job, outside, now: Millis(0), examples: 0, worked: 0.0 };
        watch.feed(Input::Members(watch.outside.views()));
        watch
    }

    fn moment(&self) -> Moment {
        Moment { now: self.now, ..Moment::default() }
    }

    /// Lets the machine decide, as its driver does; returns the answers.
    fn feed(&mut self, input: Input) -> Vec<Answer> {
        let (mut inputs, mut answers) = (VecDeque::from([input]), Vec::new());
        while let Some(input) = inputs.pop_front() {
            let mut decision = Decision::default();
            self.job.handle(self.moment(), input, &mut decision);
            loop {
                let before = (decision.facts.len(), decision.effects.len());
                self.job.due(self.moment(), &mut decision);
                if (decision.facts.len(), decision.effects.len()) == before {
                    break;
                }
                if let Some(Effect::Read { .. }) = decision.effects.last() {
                    break;
                }
            }
            for effect in decision.effects {
                match effect {
                    Effect::Read { round } => {
                        let Outside { memory, keys, .. } = &self.outside;
                        let stored = block_on(stored_state::read_stored(memory, keys, round));
                        inputs.push_back(Input::Stored(stored.unwrap()));
                    }
                    Effect::Answer(answer) => answers.push(answer),
                    _ => {}
                }
            }
        }
        answers
    }

    fn wish(&mut self, wish: ScaleWish) -> ScaleRecord {
        let answers = self.feed(Input::Request(Event::Scale { wish, reply: reply() }));
        let [Answer::Scaled(_, Ok(record))] = &answers[..] else { panic!("{answers:?}") };
        record.clone()
    }

    fn wants(&mut self, workers: Option<u32>) -> ScaleRecord {
        self.wish(ScaleWish { workers: Some(workers), ..ScaleWish::default() })
    }

    fn working(&self) -> u32 {
        self.job.members.working.len() as u32
    }

    /// Trains for some time at a speed that depends on the trainers that work.
    fn train(&mut self, minutes: u64, speed: impl Fn(u32) -> f64) {
        for _ in 0..minutes * 60 {
            self.now.0 += 1000;
            self.worked += f64::from(self.working());
            self.examples += speed(self.working()) as u64;
            let version = Version(self.now.0);
            let position = Position { version, examples: self.examples, ..Position::default() };
            let generation = self.job.state.generation.as_ref().unwrap().generation;
            let (trainer, time_breakdown) = (trainer(1), None);
            let event = Event::Position { generation, trainer, position, time_breakdown };
            self.feed(Input::Request(event));
            self.feed(Input::Tick);
        }
    }

    fn lanes(&self) -> Vec<usize> {
        let lanes = self.outside.trainers.iter().map(|id| self.job.live.lanes.of(trainer(*id)));
        lanes.map(|it| it.len()).collect()
    }

    fn ask_for_task(&mut self, id: u128) -> Next {
        let generation = self.job.state.generation.as_ref().unwrap().generation;
        self.outside.count += 1;
        let request = RequestId(Uuid::from_u128(self.outside.count.into()));
        let (report, wants, held) = (None, Wants::Task, None);
        let request = Request { id: request, trainer: trainer(id), report, wants, held };
        let (done, time_breakdown, reply) = (None, None, reply());
        let event = Event::NextTask { generation, request, done, time_breakdown, reply };
        let mut answers = self.feed(Input::Request(event));
        match answers.pop() {
            Some(Answer::Task(_, Ok(reply))) => reply.next,
            other => panic!("{other:?}"),
        }
    }
}

fn auto() -> ScaleWish {
    ScaleWish { mode: Some(ScaleMode::Auto), ..ScaleWish::default() }
}

/// S002-10, S004-34: the trainers that joined first work, and another one takes the place of one that is lost.
#[test]
fn as_many_trainers_work_as_are_desired() {
    let mut watch = Watch::begin("", 3);
    assert_eq!(watch.lanes(), [3, 3, 2]);
    assert_eq!(watch.wants(Some(1)).workers, Some(1));
    assert_eq!(watch.lanes(), [8, 0, 0]);
    watch.outside.trainers.remove(&1);
    watch.feed(Input::Members(watch.outside.views()));
    assert_eq!(watch.lanes(), [8, 0]);
    watch.wants(None);
    assert_eq!(watch.lanes(), [4, 4]);
}

/// S002-10, S004-10: a trainer that does not work gets no task, and finishes what it has.
#[test]
fn a_surplus_trainer_gets_no_task() {
    let mut watch = Watch::begin("mode = 'async'", 2);
    assert!(matches!(watch.ask_for_task(2), Next::Task(_)));
    watch.wants(Some(1));
    assert_eq!(watch.ask_for_task(2), Next::NotYet);
    assert!(matches!(watch.ask_for_task(1), Next::Task(_)));
    assert_eq!(watch.job.state.ledger.held_by(trainer(2)).count(), 1);
    watch.wants(None);
    assert!(matches!(watch.ask_for_task(2), Next::Task(_)));
}

/// S002-10: a job that waits for its parameter servers needs at least 30 % less time of trainers, and takes at most 5 %
/// longer.
#[test]
fn trainers_that_only_wait_are_given_back() {
    let speed = |trainers: u32| (100 * trainers).min(400).into();
    let (mut fixed, mut chosen) = (Watch::begin("", 8), Watch::begin("", 8));
    fixed.train(240, speed);
    chosen.wish(auto());
    chosen.train(240, speed);
    assert!(chosen.worked < 0.7 * fixed.worked, "{} of {}", chosen.worked, fixed.worked);
    let (all, some) = (fixed.examples as f64, chosen.examples as f64);
    assert!(0.95 * all <= some, "{some} of {all}");
    let record = chosen.job.state.scale.as_deref().unwrap();
    assert_eq!(record.workers, Some(4), "{record}");
}

/// S002-10: a job that computes keeps its trainers, and trains at least 0.95 times as fast as with all of them.
#[test]
fn trainers_that_compute_stay() {
    let speed = |trainers: u32| 800.0 / f64::from(8_u32.div_ceil(trainers));
    let (mut fixed, mut chosen) = (Watch::begin("", 8), Watch::begin("", 8));
    fixed.train(240, speed);
    chosen.wish(auto());
    chosen.train(240, speed);
    assert_eq!(chosen.working(), 8);
    assert!(0.95 * fixed.examples as f64 <= chosen.examples as f64);
    // It begins with one, and adds them.
    let mut chosen = Watch::begin("", 8);
    chosen.wants(Some(1));
    chosen.wish(auto());
    chosen.train(120, speed);
    assert_eq!(chosen.working(), 8);
}

/// S002-10: without a word of a person, the master only says what it would do.
#[test]
fn the_master_only_advises() {
    let mut watch = Watch::begin("", 4);
    watch.train(10, |_| 100.0);
    assert_eq!((watch.working(), watch.job.state.scale.as_ref()), (4, None));
    let status = watch.job.live.scaling.status(None).unwrap();
    let advice = status.advice.unwrap();
    assert_eq!(advice, "3 trainers, to see whether fewer suffice");
    assert_eq!(status.record.reason, ScaleReason::Chosen);
}

/// S002-10: in synchronous mode, only numbers with different shares of lanes are tried.
#[test]
fn numbers_that_change_no_share_are_left_out() {
    let spec = &job("", 3).record.spec;
    assert_eq!(spec.sync.lanes, 8);
    assert_eq!(trainer_counts(spec, 20), [1, 2, 3, 4, 8]);
    assert_eq!(trainer_counts(spec, 3), [1, 2, 3]);
    let spec = &job("mode = 'async'", 3).record.spec;
    assert_eq!(trainer_counts(spec, 4), [1, 2, 3, 4]);
}
