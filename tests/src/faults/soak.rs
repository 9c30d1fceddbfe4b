//! A stream under faults for a long time, and whether what it takes stays flat.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{Event, Fault, FaultTarget, Kind, Role, When};

/// Time between two faults that do not come together.
const FAULT_EVERY: Duration = Duration::from_secs(5);

const SAMPLE_EVERY: Duration = Duration::from_secs(10);

/// Samples of a third that can be compared: before, etcd still fills with passes.
const SAMPLES_MIN: usize = 20;

/// How much the last third of a run may take in addition to a fourth more than the second one.
const MEMORY_SLACK: u64 = 8 << 20;
const KEYS_SLACK: u64 = 50;

/// What a stream takes at one moment.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// Time since the start of the run.
    pub elapsed: Duration,
    pub files: usize,
    /// Records of passes that are done, and the age of the oldest file that was not trained on, as the status says.
    pub examples: u64,
    pub oldest_seconds: f64,
    pub faults: usize,
    /// Memory of the largest process of each role.
    pub memory_bytes: BTreeMap<Role, u64>,
    pub etcd_keys: usize,
    pub etcd_bytes: u64,
}

/// A long run of a stream.
#[derive(Debug, Default)]
pub struct Soak {
    faults: usize,
    usages: Vec<Usage>,
}

impl Soak {
    /// Injects faults for `length`, one after another; gives what it measures to `report`.
    pub fn run(
        world: &mut FaultTarget<'_>,
        mut faults: impl Iterator<Item = Event>,
        length: Duration,
        mut report: impl FnMut(&Usage),
    ) -> Self {
        world.job.life_max += length;
        let (started, mut soak) = (Instant::now(), Self::default());
        let end = started + length;
        let (mut fault_due, mut sample_due) = (started + FAULT_EVERY, started);
        while Instant::now() < end {
            let due = fault_due.min(sample_due).min(end);
            world.until("time passes", |world| {
                assert!(world.result.is_none(), "the stream ended: {:?}", world.result);
                (due <= Instant::now()).then_some(())
            });
            if sample_due <= Instant::now() {
                sample_due += SAMPLE_EVERY;
                if let Some(usage) = soak.usage(world, started.elapsed()) {
                    report(&usage);
                    soak.usages.push(usage);
                }
                // As any etcd of a job that never ends is compacted.
                world.inject(Fault::of_all(Kind::EtcdCompact));
            }
            if fault_due <= Instant::now() {
                let Some(event) = faults.next() else { break };
                world.inject(event.fault);
                soak.faults += 1;
                if event.when != When::After(0) {
                    fault_due += FAULT_EVERY;
                }
            }
        }
        soak
    }

    /// Measures, unless etcd does not answer.
    fn usage(&self, world: &FaultTarget<'_>, elapsed: Duration) -> Option<Usage> {
        let mut memory_bytes = BTreeMap::new();
        for member in &world.members {
            let largest = memory_bytes.entry(member.role).or_default();
            *largest = member.memory_bytes().unwrap_or(0).max(*largest);
        }
        let status = world.status();
        Some(Usage {
            elapsed,
            files: world.job.feed.as_ref()?.files(),
            examples: status["examples"].as_u64().unwrap_or(0),
            oldest_seconds: status["stream"]["oldest_seconds"].as_f64().unwrap_or(0.0),
            faults: self.faults,
            memory_bytes,
            etcd_keys: world.etcd.keys(world.keys.root())?,
            etcd_bytes: world.etcd.bytes_in_use()?,
        })
    }

    /// Returns the number of faults that were injected.
    pub fn faults(&self) -> usize {
        self.faults
    }

    /// Returns what grew from the second to the last third of the run; of a short run, nothing.
    pub fn grown(&self) -> Vec<String> {
        let third = self.usages.len() / 3;
        if third < SAMPLES_MIN {
            return Vec::new();
        }
        let mut grown = Vec::new();
        let mut compare = |what: &str, slack: u64, of: &dyn Fn(&Usage) -> u64| {
            let middle = |from: usize| {
                let mut values: Vec<u64> = self.usages[from..from + third].iter().map(of).collect();
                values.sort_unstable();
                values.get(third / 2).copied().unwrap_or(0)
            };
            let (before, after) = (middle(third), middle(2 * third));
            if before + before / 4 + slack < after {
                grown.push(format!("{what} grew from {before} to {after}"));
            }
        };
        for role in Role::ALL {
            compare(&format!("memory of a {}", role.name()), MEMORY_SLACK, &|usage| {
                usage.memory_bytes.get(&role).copied().unwrap_or(0)
            });
        }
        compare("the number of keys in etcd", KEYS_SLACK, &|usage| usage.etcd_keys as u64);
        compare("the size of etcd", MEMORY_SLACK, &|usage| usage.etcd_bytes);
        grown
    }
}
