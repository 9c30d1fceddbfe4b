//! What a seed decides beforehand: the job, the cluster's shape, the weather, and which faults happen
//! when. Each seed draws its own mix of faults, so that some seeds try one kind again and again, and
//! others everything at once.

use std::fmt;
use std::time::Duration;

use steadfast_common::spec::Mode;

use crate::cluster::{Member, Role, Shape};
use crate::dice::Dice;
use crate::explore::{Detour, Detours};
use crate::fault::{End, Fault};
use crate::host::Addresses;
use crate::job::{JOBS, Job};
use crate::store::StoreWeather;
use crate::weather::Weather;

/// Most faults of one run.
const FAULTS_MAX: u64 = 12;

/// Everything that is decided before a run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub job: Job,
    pub shape: Shape,
    pub weather: Weather,
    pub store_weather: StoreWeather,
    /// Faults by the time of the world at which they happen.
    pub faults: Vec<(Duration, Fault)>,
    /// What is to go another way than the dice say.
    pub detours: Detours,
}

impl Plan {
    /// What `seed` decides for a job of `mode`.
    pub fn of_seed(mode: Mode, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let job = Job::numbered(mode, dice.below(JOBS));
        let shape = shape(&mut dice);
        let latency = *dice.one_of(&[(1, 4), (1, 40), (5, 20), (10, 200), (20, 60), (50, 300)]);
        let latency = (Duration::from_millis(latency.0), Duration::from_millis(latency.1));
        let mut weather = Weather::fair(latency);
        if dice.happens(0.4) {
            let mut rate = || if dice.happens(0.5) { 0.0 } else { 0.04 * dice.share() };
            weather.broken_before = rate();
            weather.cut_off = rate();
            weather.answer_lost = rate();
            weather.ghost = rate();
        }
        let mut store_weather = StoreWeather::fair(latency);
        if dice.happens(0.25) {
            store_weather.refused = 0.1 * dice.share();
            store_weather.answer_lost = 0.05 * dice.share();
            store_weather.torn = 0.05 * dice.share();
        }
        let faults = Mix::draw(&mut dice, &shape, latency.1).faults(&mut dice);
        let detours = Detours::default();
        let job = if dice.happens(0.04) { Job::diverging(mode) } else { job };
        Self { seed, job, shape, weather, store_weather, faults, detours }
    }

    /// The same with only some of its faults, by their numbers.
    #[must_use]
    pub fn with_only(mut self, only: &[usize]) -> Self {
        let numbered = std::mem::take(&mut self.faults).into_iter().enumerate();
        let kept = numbered.filter(|(number, _)| only.contains(number));
        self.faults = kept.map(|(_, fault)| fault).collect();
        self
    }

    /// The same without trouble for single calls and requests.
    #[must_use]
    pub fn in_fair_weather(mut self) -> Self {
        self.weather = Weather::fair(self.weather.latency);
        self.store_weather = StoreWeather::fair(self.store_weather.latency);
        self
    }

    /// The same with one more detour.
    #[must_use]
    pub fn with(mut self, detours: &[Detour]) -> Self {
        self.detours = detours.iter().cloned().fold(self.detours, Detours::and);
        self
    }

    /// `sync` or `async`.
    pub fn mode_name(&self) -> &'static str {
        match self.job.spec.mode {
            Mode::Sync => "sync",
            Mode::Async => "async",
        }
    }

    /// The same job where nothing goes wrong, by as few processes as can be.
    pub fn undisturbed(job: &Job) -> Self {
        let short = (Duration::from_micros(100), Duration::from_micros(200));
        Self {
            seed: 0,
            job: job.clone(),
            shape: Shape {
                addresses: Addresses::OneHost,
                masters: 1,
                slots: 1,
                pservers: 1,
                trainers: 1,
                lease_ttl: Duration::from_secs(5),
                sync: short,
                drift: 0.0,
            },
            weather: Weather::fair(short),
            store_weather: StoreWeather::fair(short),
            faults: Vec::new(),
            detours: Detours::default(),
        }
    }
}

fn shape(dice: &mut Dice) -> Shape {
    let slots = dice.between(1, 3) as u32;
    Shape {
        addresses: *dice.one_of(&[Addresses::OneHost, Addresses::ManyHosts]),
        masters: dice.between(1, 3) as u16,
        slots,
        pservers: slots as u16 + dice.between(0, 2) as u16,
        trainers: dice.between(1, 4) as u16,
        lease_ttl: Duration::from_secs(dice.between(2, 5)),
        sync: (Duration::from_micros(100), Duration::from_millis(*dice.one_of(&[1, 10, 50]))),
        drift: if dice.happens(0.5) { 0.02 } else { 0.0 },
    }
}

/// Kinds of faults, as a mix draws them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Kill,
    Power,
    Stop,
    Leave,
    Come,
    Cut,
    OneWay,
    Slow,
    Choke,
    Break,
    KillAll,
    EtcdKill,
    EtcdStop,
    Compact,
    Store,
    Rot,
    Storm,
    Slots,
    Checkpoint,
    SetBack,
}

const KINDS: [Kind; 20] = [
    Kind::Kill,
    Kind::Power,
    Kind::Stop,
    Kind::Leave,
    Kind::Come,
    Kind::Cut,
    Kind::OneWay,
    Kind::Slow,
    Kind::Choke,
    Kind::Break,
    Kind::KillAll,
    Kind::EtcdKill,
    Kind::EtcdStop,
    Kind::Compact,
    Kind::Store,
    Kind::Rot,
    Kind::Storm,
    Kind::Slots,
    Kind::Checkpoint,
    Kind::SetBack,
];

/// What faults are drawn from.
struct Mix {
    kinds: Vec<Kind>,
    members: Vec<Member>,
    /// Whom most faults hit, together with its link to etcd, if anybody.
    victim: Option<Member>,
    pservers: u16,
    trainers: u16,
    /// How long the longest trouble lasts.
    longest: Duration,
    /// The time in which faults happen.
    horizon: Duration,
    count: u64,
}

impl Mix {
    fn draw(dice: &mut Dice, shape: &Shape, latency: Duration) -> Self {
        let share = *dice.one_of(&[0.15, 0.4, 1.0]);
        let mut kinds: Vec<Kind> = KINDS.into_iter().filter(|_| dice.happens(share)).collect();
        if kinds.is_empty() {
            kinds.push(*dice.one_of(&KINDS));
        }
        let of = |role, count| (0..count).map(move |number| Member { role, number });
        let members = of(Role::Master, shape.masters)
            .chain(of(Role::Pserver, shape.pservers))
            .chain(of(Role::Trainer, shape.trainers));
        // Longer than a lease, more often than not much longer.
        let longest = shape.lease_ttl * dice.between(1, 4) as u32;
        // A job goes on for some hundred messages, one after the other, and for longer when it is
        // disturbed.
        let messages = dice.between(40, 400) as u32;
        let members: Vec<Member> = members.collect();
        let victim = if dice.happens(0.4) { Some(*dice.one_of(&members)) } else { None };
        Self {
            kinds,
            members,
            victim,
            pservers: shape.pservers,
            trainers: shape.trainers,
            longest,
            horizon: latency * messages,
            count: dice.between(1, FAULTS_MAX),
        }
    }

    fn faults(&self, dice: &mut Dice) -> Vec<(Duration, Fault)> {
        let mut faults: Vec<(Duration, Fault)> = (0..self.count)
            .map(|_| (self.horizon.mul_f64(dice.share()), self.fault(dice)))
            .collect();
        faults.sort_by_key(|(at, _)| *at);
        faults
    }

    fn fault(&self, dice: &mut Dice) -> Fault {
        let kind = *dice.one_of(&self.kinds);
        let is_aimed = dice.happens(0.8);
        let victim = self.victim.filter(|_| is_aimed);
        let member = victim.unwrap_or(*dice.one_of(&self.members));
        let other = match dice.happens(if victim.is_some() { 0.8 } else { 0.5 }) {
            true => End::Etcd,
            false => End::Member(*dice.one_of(&self.members)),
        };
        let (one, other) = match dice.happens(0.5) {
            true => (End::Member(member), other),
            false => (other, End::Member(member)),
        };
        let time = dice.time(Duration::from_millis(100), self.longest);
        match kind {
            Kind::Kill => Fault::Kill(member),
            Kind::Power => Fault::Power(member),
            Kind::Stop => Fault::Stop(member, time),
            Kind::Leave => Fault::Leave(member),
            Kind::Come => self.coming_or_going(dice),
            Kind::Cut => Fault::Cut(one, other, time),
            Kind::OneWay => Fault::OneWay(one, other, time),
            Kind::Slow => {
                let late = dice.time(Duration::from_millis(50), Duration::from_secs(3));
                Fault::Slow(one, other, late, time)
            }
            Kind::Choke => {
                let late = dice.time(Duration::from_millis(100), Duration::from_secs(2));
                let time = self.longest.max(time * 2);
                Fault::Choke(End::Member(member), End::Etcd, late, time)
            }
            Kind::Break => Fault::Break(one, other),
            Kind::KillAll => Fault::KillAll,
            Kind::EtcdKill => Fault::EtcdKill(time),
            Kind::EtcdStop => Fault::EtcdStop(time),
            Kind::Compact => Fault::Compact(dice.between(0, 20) as i64),
            Kind::Store if dice.happens(0.5) => Fault::StoreAway(time),
            Kind::Store => Fault::StoreTrouble(time),
            Kind::Rot => Fault::Rot,
            Kind::Storm => Fault::Storm(time),
            Kind::Checkpoint => Fault::Checkpoint,
            Kind::SetBack => Fault::SetBack,
            Kind::Slots => Fault::Slots(dice.between(1, u64::from(self.pservers)) as u32),
        }
    }

    fn coming_or_going(&self, dice: &mut Dice) -> Fault {
        let number = dice.between(1, u64::from(self.trainers) + 2) as u16;
        let trainer = Member { role: Role::Trainer, number };
        match number < self.trainers && dice.happens(0.6) {
            true => Fault::Remove(trainer),
            false => Fault::Add(trainer),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = &self.shape;
        writeln!(
            f,
            "job {} ({:?}), {} masters, {} slots, {} pservers, {} trainers, leases of {:?}",
            self.job.number,
            self.job.spec.mode,
            shape.masters,
            shape.slots,
            shape.pservers,
            shape.trainers,
            shape.lease_ttl,
        )?;
        let mut faults = self.faults.iter().enumerate();
        faults.try_for_each(|(number, (at, fault))| writeln!(f, "  {number}. {at:.3?}: {fault}"))
    }
}
