//! Fault schedules. Faults are triggered by the progress of the job and not by time, so slow and fast
//! machines run the same schedule.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::{Fault, Kind, Role, Shape};
use crate::clicks::mixed;

/// Maximum number of steps between two faults of a random schedule.
const GAP_MAX: u64 = 60;

/// When a fault is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// When this many steps of the job are done.
    Step(u64),
    /// When this many steps are done since the previous fault.
    After(u64),
}

/// A fault and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub when: When,
    pub fault: Fault,
}

/// What the faults of a random schedule can hit: a training job, or an elastic job.
pub trait Targets {
    /// Returns the roles that a kind of fault can hit.
    fn roles(&self, kind: Kind) -> &[Role];

    /// Returns the processes of a role that it can hit.
    fn indexes(&self, kind: Kind, role: Role) -> Range<u32>;

    /// Returns the number of members of etcd.
    fn etcd(&self) -> u32;
}

impl Targets for Shape {
    fn roles(&self, kind: Kind) -> &[Role] {
        // Trainers accept no calls.
        if kind == Kind::Shut { &Role::ALL[..2] } else { &Role::ALL }
    }

    fn indexes(&self, _: Kind, role: Role) -> Range<u32> {
        0..self.count(role)
    }

    fn etcd(&self) -> u32 {
        self.etcd
    }
}

/// A sequence of faults. The text form is one line: `@100 kill master 0; +20 …`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    pub events: Vec<Event>,
}

impl Schedule {
    /// Draws `count` faults of the allowed kinds for a world with these targets. The same arguments give the
    /// same schedule.
    pub fn random(seed: u64, count: usize, allowed: &[Kind], targets: &impl Targets) -> Self {
        let mut random = Random(seed);
        let mut events = Vec::with_capacity(count);
        for number in 0..count {
            let gap = match number {
                0 => When::Step(20 + random.below(GAP_MAX)),
                // Some faults are injected together.
                _ if random.below(6) == 0 => When::After(0),
                _ => When::After(1 + random.below(GAP_MAX)),
            };
            let kind = allowed[random.below(allowed.len() as u64) as usize];
            events.push(Event { when: gap, fault: random.fault(kind, targets) });
        }
        Self { events }
    }
}

/// Random number generator (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        let before = self.0;
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(before)
    }

    /// Returns a number below `bound`. The modulo bias is negligible for small bounds.
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn fault(&mut self, kind: Kind, targets: &impl Targets) -> Fault {
        match (kind.hits_a_process(), kind.hits_an_etcd_member()) {
            (true, _) => {
                let roles = targets.roles(kind);
                let role = roles[self.below(roles.len() as u64) as usize];
                let indexes = targets.indexes(kind, role);
                let index = self.below(indexes.len() as u64) as u32;
                Fault::of(kind, role, indexes.start + index)
            }
            (false, true) => Fault::of_etcd(kind, self.below(u64::from(targets.etcd())) as u32),
            (false, false) => Fault::of_all(kind),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, event) in self.events.iter().enumerate() {
            let separator = if number == 0 { "" } else { "; " };
            match event.when {
                When::Step(step) => write!(f, "{separator}@{step} {}", event.fault)?,
                When::After(steps) => write!(f, "{separator}+{steps} {}", event.fault)?,
            }
        }
        Ok(())
    }
}

impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split(';').map(str::trim).filter(|it| !it.is_empty());
        Ok(Self { events: parts.map(event).collect::<Result<_, _>>()? })
    }
}

fn event(text: &str) -> Result<Event, String> {
    let wrong = || format!("`{text}` does not start with `@STEP` or `+STEPS`");
    let (when, fault) = text.split_once(' ').ok_or_else(wrong)?;
    let number = |it: &str| it.parse::<u64>().map_err(|_| wrong());
    let when = match (when.strip_prefix('@'), when.strip_prefix('+')) {
        (Some(step), _) => When::Step(number(step)?),
        (None, Some(steps)) => When::After(number(steps)?),
        (None, None) => return Err(wrong()),
    };
    Ok(Event { when, fault: fault.parse()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_schedule_follows_from_its_seed_and_survives_its_text() {
        for seed in 0..50 {
            let random = |seed| Schedule::random(seed, 20, &Kind::ALL, &Shape::default());
            let schedule = random(seed);
            assert_eq!(schedule, random(seed));
            assert_ne!(schedule, random(seed + 1));
            let text = schedule.to_string();
            assert!(!text.contains('\n'), "{text}");
            assert_eq!(text.parse::<Schedule>().as_ref(), Ok(&schedule), "{text}");
        }
    }

    #[test]
    fn a_random_schedule_has_only_faults_that_are_allowed_and_possible() {
        let shape = Shape { etcd: 3, ..Shape::default() };
        let allowed = [Kind::Kill, Kind::EtcdKill];
        for event in Schedule::random(7, 200, &allowed, &shape).events {
            let fault = event.fault;
            assert!(allowed.contains(&fault.kind), "{fault}");
            let count = fault.role.map_or(shape.etcd, |role| shape.count(role));
            assert!(fault.index < count, "{fault}");
        }
    }

    #[test]
    fn an_invalid_schedule_is_rejected() {
        for text in ["kill master 0", "@5 kill", "@x kill master 0", "+1 etcd-kill", "@1 burn"] {
            assert!(text.parse::<Schedule>().is_err(), "{text}");
        }
        assert_eq!("".parse::<Schedule>(), Ok(Schedule::default()));
    }
}
