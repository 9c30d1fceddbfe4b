//! The settings of a launcher, and what its decisions depend on besides its durable state.

use steadfast_common::ids::Millis;

use crate::blacklist::Cooldown;
use crate::hosts::Host;
use crate::timers::Timers;

/// How many workers a job may have; both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerRange {
    min_np: u32,
    max_np: u32,
}

impl WorkerRange {
    /// Returns the range, if 1 ≤ `min_np` ≤ `max_np`. Without a maximum, it is `u32::MAX`.
    pub fn new(min_np: u32, max_np: u32) -> Option<Self> {
        (1 <= min_np && min_np <= max_np).then_some(Self { min_np, max_np })
    }

    /// Returns the minimum number of workers with which agents are started.
    pub fn min_np(self) -> u32 {
        self.min_np
    }

    /// Returns the maximum number of workers; `u32::MAX` if there is no maximum.
    pub fn max_np(self) -> u32 {
        self.max_np
    }
}

/// The settings of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub workers: WorkerRange,
    /// How long fewer than `min_np` slots are found before the job ends.
    pub elastic_timeout_ms: u64,
    /// How often the agents of a job may change. `None`: without a limit.
    pub reset_limit: Option<u32>,
    pub cooldown: Cooldown,
    /// How long an agent runs, or a host is away, before the host's failures are forgotten.
    pub forget_after_ms: u64,
    /// How long other agents may run after the first one has succeeded: as long as workers wait for each
    /// other at the end.
    pub finish_timeout_ms: u64,
}

impl Settings {
    /// Creates settings with the defaults.
    pub fn new(workers: WorkerRange) -> Self {
        Self {
            workers,
            elastic_timeout_ms: 600_000,
            reset_limit: None,
            cooldown: Cooldown::default(),
            forget_after_ms: 3_600_000,
            finish_timeout_ms: 300_000,
        }
    }
}

/// What a decision depends on besides the durable state.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    pub settings: &'a Settings,
    /// The hosts that were found last; see [`crate::discovery::Discovery::hosts`].
    pub discovered: Option<&'a [Host]>,
    pub timers: &'a Timers,
    pub now: Millis,
}
