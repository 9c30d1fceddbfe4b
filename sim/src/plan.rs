//! What a seed determines before the run: the job, the shape of the cluster, the network model, and the
//! schedule of faults. Each seed draws its own mix of faults: some seeds repeat one kind, others combine
//! many.

use std::fmt;
use std::time::Duration;

use crate::cluster::{Member, Role, Shape};
use crate::explore::{Deviation, Deviations};
use crate::fault::{End, Fault};
use crate::host::Addresses;
use crate::job::{JOBS, Job};
use crate::network_model::NetworkModel;
use crate::rng::Rng;
use crate::store::StoreModel;
use crate::workload::{ElasticJob, Mode, Workload};

/// Maximum number of faults in a run.
const FAULTS_MAX: u64 = 12;

/// Everything that is determined before a run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub job: Workload,
    pub shape: Shape,
    pub network_model: NetworkModel,
    pub store_model: StoreModel,
    /// Faults, by the simulated time at which they are injected.
    pub faults: Vec<(Duration, Fault)>,
    /// A trainer without permission to write to the store; another one must save the model.
    pub forbidden: Option<Member>,
    /// Injected deviations from the random schedule.
    pub deviations: Deviations,
    /// Number of turns after which the run counts as a livelock.
    pub turns_max: u64,
    /// Whether turns take no simulated time.
    pub has_instant_turns: bool,
}

/// Turns of a small cluster.
pub(crate) const TURNS_MAX: u64 = 4_000_000;

impl Plan {
    /// Returns the plan of `seed` for a job of `mode`.
    pub fn of_seed(mode: Mode, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let job = Workload::numbered(mode, rng.below(JOBS));
        let shape = shape(&mut rng, &job);
        let latency = *rng.one_of(&[(1, 4), (1, 40), (5, 20), (10, 200), (20, 60), (50, 300)]);
        let latency = (Duration::from_millis(latency.0), Duration::from_millis(latency.1));
        let mut network_model = NetworkModel::fair(latency);
        if rng.happens(0.4) {
            let mut rate = || if rng.happens(0.5) { 0.0 } else { 0.04 * rng.share() };
            network_model.broken_before = rate();
            network_model.cut_off = rate();
            network_model.answer_lost = rate();
            network_model.delayed_duplicate = rate();
        }
        let mut store_model = StoreModel::fair(latency);
        if rng.happens(0.25) {
            store_model.refused = 0.1 * rng.share();
            store_model.answer_lost = 0.05 * rng.share();
            store_model.torn = 0.05 * rng.share();
        }
        let mut faults = Mix::draw(&mut rng, &job, &shape, latency.1).faults(&mut rng);
        // It forgets evaluations, so these may decide otherwise than in the undisturbed run.
        if job.decides() {
            faults.retain(|(_, fault)| !matches!(fault, Fault::RollBack | Fault::Change(_)));
        }
        let deviations = Deviations::default();
        let diverges = rng.happens(0.04);
        let job = match mode.of_training().filter(|_| diverges) {
            Some(mode) => Workload::Training(Box::new(Job::diverging(mode))),
            None => job,
        };
        // Member 0 is never removed, so another trainer always exists.
        let forbidden = Member { role: Role::Trainer, number: 1 };
        let forbidden = Some(forbidden).filter(|_| 1 < shape.trainers && rng.happens(0.2));
        let turns_max = TURNS_MAX;
        Self {
            seed,
            job,
            shape,
            network_model,
            store_model,
            faults,
            forbidden,
            deviations,
            turns_max,
            has_instant_turns: false,
        }
    }

    /// Returns the plan with only these of its faults, by number.
    #[must_use]
    pub fn with_only(mut self, only: &[usize]) -> Self {
        let numbered = std::mem::take(&mut self.faults).into_iter().enumerate();
        let kept = numbered.filter(|(number, _)| only.contains(number));
        self.faults = kept.map(|(_, fault)| fault).collect();
        self
    }

    /// Returns the plan without failures of single calls and requests.
    #[must_use]
    pub fn without_network_faults(mut self) -> Self {
        self.network_model = NetworkModel::fair(self.network_model.latency);
        self.store_model = StoreModel::fair(self.store_model.latency);
        self
    }

    /// Returns the plan with additional deviations.
    #[must_use]
    pub fn with(mut self, deviations: &[Deviation]) -> Self {
        self.deviations = deviations.iter().cloned().fold(self.deviations, Deviations::and);
        self
    }

    /// Returns `sync`, `async` or `elastic`.
    pub fn mode_name(&self) -> &'static str {
        self.job.mode().name()
    }

    /// Returns a plan that runs `job` without faults, with as few processes as possible.
    pub fn undisturbed(job: &Job) -> Self {
        let short = (Duration::from_micros(100), Duration::from_micros(200));
        Self {
            seed: 0,
            job: Workload::Training(Box::new(job.clone())),
            shape: Shape {
                addresses: Addresses::OneHost,
                masters: 1,
                slots: 1,
                pservers: 1,
                trainers: 1,
                agents: 0,
                lease_ttl: Duration::from_secs(5),
                sync: short,
                drift: 0.0,
            },
            network_model: NetworkModel::fair(short),
            store_model: StoreModel::fair(short),
            faults: Vec::new(),
            forbidden: None,
            deviations: Deviations::default(),
            turns_max: TURNS_MAX,
            has_instant_turns: false,
        }
    }

    /// Returns the plan with a record on which the model of its job crashes, if that may be.
    #[must_use]
    pub fn with_crashes(mut self) -> Option<Self> {
        self.job = match self.job {
            Workload::Training(job) => Workload::Training(Box::new(job.with_crashes()?)),
            Workload::Elastic(_) => return None,
        };
        Some(self)
    }

    /// Returns a plan that runs a job of [`Job::large`] with that many trainers and pservers, without faults.
    pub fn large(job: &Job, trainers: u16, pservers: u16) -> Self {
        let mut plan = Self::undisturbed(job);
        plan.shape.addresses = Addresses::ManyHosts;
        (plan.shape.slots, plan.shape.pservers) = (pservers.into(), pservers);
        plan.shape.trainers = trainers;
        (plan.turns_max, plan.has_instant_turns) = (u64::MAX, true);
        plan
    }

    /// Returns the simulated time at which faults have stopped, links are restored, and all processes run.
    pub(crate) fn calm(&self) -> Duration {
        let last = self.faults.iter().map(|(at, _)| *at).max().unwrap_or_default();
        last + self.shape.lease_ttl * 2
    }
}

fn shape(rng: &mut Rng, job: &Workload) -> Shape {
    let slots = rng.between(1, 3) as u32;
    let shape = Shape {
        addresses: *rng.one_of(&[Addresses::OneHost, Addresses::ManyHosts]),
        masters: rng.between(1, 3) as u16,
        slots,
        pservers: slots as u16 + rng.between(0, 2) as u16,
        trainers: rng.between(1, 4) as u16,
        agents: 0,
        lease_ttl: Duration::from_secs(rng.between(2, 5)),
        sync: (Duration::from_micros(100), Duration::from_millis(*rng.one_of(&[1, 10, 50]))),
        drift: if rng.happens(0.5) { 0.02 } else { 0.0 },
    };
    match job {
        // A job whose slots are to be followed has a spare at least.
        Workload::Training(job) => {
            let least = shape.slots as u16 + u16::from(0 < job.spec.warm_spares);
            Shape { pservers: shape.pservers.max(least), ..shape }
        }
        Workload::Elastic(ElasticJob { nodes, .. }) => {
            let (min, max) = (u64::from(nodes.min()), u64::from(nodes.max()));
            let agents = rng.between(min, max + 1) as u16;
            Shape { slots: 0, pservers: 0, trainers: 0, agents, ..shape }
        }
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
    Congest,
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
    RollBack,
    Change,
    Workers,
}

const KINDS: [Kind; 22] = [
    Kind::Kill,
    Kind::Power,
    Kind::Stop,
    Kind::Leave,
    Kind::Come,
    Kind::Cut,
    Kind::OneWay,
    Kind::Slow,
    Kind::Congest,
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
    Kind::RollBack,
    Kind::Change,
    Kind::Workers,
];

/// Kinds of faults that need a store or slots, which elastic jobs do not have.
const TRAINING_KINDS: [Kind; 6] =
    [Kind::Store, Kind::Rot, Kind::Slots, Kind::Checkpoint, Kind::RollBack, Kind::Change];

/// The distribution from which faults are drawn.
struct Mix {
    kinds: Vec<Kind>,
    members: Vec<Member>,
    /// The member that most faults hit, together with its link to etcd, if any.
    victim: Option<Member>,
    pservers: u16,
    /// Members that come and leave: their role, the number of those that never leave, and of all.
    coming: (Role, u16, u16),
    /// Maximum duration of a fault.
    longest: Duration,
    /// Period in which faults are injected.
    horizon: Duration,
    count: u64,
}

impl Mix {
    fn draw(rng: &mut Rng, job: &Workload, shape: &Shape, latency: Duration) -> Self {
        let (all, coming): (Vec<Kind>, _) = match job {
            Workload::Training(_) => {
                let all = KINDS.into_iter().filter(|kind| *kind != Kind::Workers);
                (all.collect(), (Role::Trainer, 1, shape.trainers))
            }
            Workload::Elastic(job) => {
                let all = KINDS.into_iter().filter(|kind| !TRAINING_KINDS.contains(kind));
                (all.collect(), (Role::Agent, job.nodes.min() as u16, shape.agents))
            }
        };
        let share = *rng.one_of(&[0.15, 0.4, 1.0]);
        let mut kinds: Vec<Kind> = all.iter().copied().filter(|_| rng.happens(share)).collect();
        if kinds.is_empty() {
            kinds.push(*rng.one_of(&all));
        }
        let of = |role, count| (0..count).map(move |number| Member { role, number });
        let members = of(Role::Master, shape.masters)
            .chain(of(Role::Pserver, shape.pservers))
            .chain(of(Role::Trainer, shape.trainers))
            .chain(of(Role::Agent, shape.agents));
        // Longer than a lease, usually much longer.
        let longest = shape.lease_ttl * rng.between(1, 4) as u32;
        // A job exchanges some hundred messages in sequence, and more when it is disturbed.
        let messages = rng.between(40, 400) as u32;
        let members: Vec<Member> = members.collect();
        let victim = if rng.happens(0.4) { Some(*rng.one_of(&members)) } else { None };
        Self {
            kinds,
            members,
            victim,
            pservers: shape.pservers,
            coming,
            longest,
            horizon: latency * messages,
            count: rng.between(1, FAULTS_MAX),
        }
    }

    fn faults(&self, rng: &mut Rng) -> Vec<(Duration, Fault)> {
        let mut faults: Vec<(Duration, Fault)> =
            (0..self.count).map(|_| (self.horizon.mul_f64(rng.share()), self.fault(rng))).collect();
        faults.sort_by_key(|(at, _)| *at);
        faults
    }

    fn fault(&self, rng: &mut Rng) -> Fault {
        let kind = *rng.one_of(&self.kinds);
        let is_aimed = rng.happens(0.8);
        let victim = self.victim.filter(|_| is_aimed);
        let member = victim.unwrap_or(*rng.one_of(&self.members));
        let other = match rng.happens(if victim.is_some() { 0.8 } else { 0.5 }) {
            true => End::Etcd,
            false => End::Member(*rng.one_of(&self.members)),
        };
        let (one, other) = match rng.happens(0.5) {
            true => (End::Member(member), other),
            false => (other, End::Member(member)),
        };
        let time = rng.time(Duration::from_millis(100), self.longest);
        match kind {
            Kind::Kill => Fault::Kill(member),
            Kind::Power => Fault::Power(member),
            Kind::Stop => Fault::Stop(member, time),
            Kind::Leave => Fault::Leave(member),
            Kind::Come => self.join_or_leave(rng),
            Kind::Cut => Fault::Cut(one, other, time),
            Kind::OneWay => Fault::OneWay(one, other, time),
            Kind::Slow => {
                let late = rng.time(Duration::from_millis(50), Duration::from_secs(3));
                Fault::Slow(one, other, late, time)
            }
            Kind::Congest => {
                let late = rng.time(Duration::from_millis(100), Duration::from_secs(2));
                let time = self.longest.max(time * 2);
                Fault::Congest(End::Member(member), End::Etcd, late, time)
            }
            Kind::Break => Fault::Break(one, other),
            Kind::KillAll => Fault::KillAll,
            Kind::EtcdKill => Fault::EtcdKill(time),
            Kind::EtcdStop => Fault::EtcdStop(time),
            Kind::Compact => Fault::Compact(rng.between(0, 20) as i64),
            Kind::Store if rng.happens(0.5) => Fault::StoreAway(time),
            Kind::Store => Fault::StoreErrors(time),
            Kind::Rot => Fault::Rot,
            Kind::Storm => Fault::Storm(time),
            Kind::Checkpoint => Fault::Checkpoint,
            Kind::RollBack => Fault::RollBack,
            Kind::Change => Fault::Change(rng.between(1, 4) as u32),
            Kind::Workers => {
                let workers = (!rng.happens(0.2)).then(|| rng.between(1, 8) as u32);
                Fault::Workers(workers, rng.happens(0.2))
            }
            Kind::Slots => Fault::Slots(rng.between(1, u64::from(self.pservers)) as u32),
        }
    }

    fn join_or_leave(&self, rng: &mut Rng) -> Fault {
        let (role, staying, count) = self.coming;
        let number = rng.between(u64::from(staying), u64::from(count) + 2) as u16;
        let member = Member { role, number };
        match number < count && rng.happens(0.6) {
            true => Fault::Remove(member),
            false => Fault::Add(member),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = &self.shape;
        writeln!(
            f,
            "job {} ({}), {} masters, {} slots, {} pservers, {} trainers, {} agents, leases of {:?}",
            self.job.number(),
            self.mode_name(),
            shape.masters,
            shape.slots,
            shape.pservers,
            shape.trainers,
            shape.agents,
            shape.lease_ttl,
        )?;
        if let Some(member) = self.forbidden {
            writeln!(f, "  {member} may not write to the store")?;
        }
        let mut faults = self.faults.iter().enumerate();
        faults.try_for_each(|(number, (at, fault))| writeln!(f, "  {number}. {at:.3?}: {fault}"))
    }
}
