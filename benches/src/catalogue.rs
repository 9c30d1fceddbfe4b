//! What is measured, and beside what.

use steadfast_common::spec::OptimizerKind;

use crate::kernels::{BLOCK, LARGE};
use crate::sample::Sample;
use crate::{kernels, ping, raw, wire};

/// What a bench counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Steps,
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Bench {
    pub name: String,
    pub what: String,
    /// What the other side is.
    pub beside: &'static str,
    pub unit: Unit,
    /// The least ratio that is good.
    pub bar: f64,
    work: Work,
}

/// Which side of a bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    Ours,
    Beside,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Push,
    Pull,
    SmallSteps,
    Lanes,
    Rule(OptimizerKind, usize),
}

impl Bench {
    /// Takes one sample.
    pub async fn sample(&self, side: Side) -> Sample {
        match (self.work, side) {
            (Work::Push, Side::Ours) => wire::push().await,
            (Work::Push, Side::Beside) => raw::push().await,
            (Work::Pull, Side::Ours) => wire::pull().await,
            (Work::Pull, Side::Beside) => raw::pull().await,
            (Work::SmallSteps, Side::Ours) => wire::small_steps().await,
            (Work::SmallSteps, Side::Beside) => ping::ping_pong().await,
            (Work::Lanes, Side::Ours) => kernels::lanes(),
            (Work::Lanes, Side::Beside) => kernels::unordered(),
            (Work::Rule(kind, values), Side::Ours) => kernels::optimizer(kind, values),
            (Work::Rule(kind, values), Side::Beside) => kernels::copy(kind, values),
        }
    }
}

/// All benches.
pub fn benches() -> Vec<Bench> {
    let bench = |name: &str, what: &str, beside, unit, bar, work| Bench {
        name: name.to_owned(),
        what: what.to_owned(),
        beside,
        unit,
        bar,
        work,
    };
    let mut all = vec![
        bench(
            "push",
            "gradient of 64 MiB to 2 pservers, applied by SGD",
            "tokio TCP into the same update",
            Unit::Bytes,
            0.9,
            Work::Push,
        ),
        bench(
            "pull",
            "parameters of 64 MiB from 2 pservers",
            "tokio TCP",
            Unit::Bytes,
            0.9,
            Work::Pull,
        ),
        bench(
            "small-step",
            "synchronous step of a model of 64 KiB",
            "ping-pong of the same bytes over the same HTTP/2",
            Unit::Steps,
            0.6,
            Work::SmallSteps,
        ),
        bench(
            "lanes",
            "8 lanes of 8 MiB, added in order",
            "the same bytes in any order",
            Unit::Bytes,
            0.8,
            Work::Lanes,
        ),
    ];
    let rules = [
        ("sgd", OptimizerKind::Sgd),
        ("momentum", OptimizerKind::Momentum),
        ("adagrad", OptimizerKind::Adagrad),
        ("adam", OptimizerKind::Adam),
        ("adamw", OptimizerKind::Adamw),
        ("ftrl", OptimizerKind::Ftrl),
    ];
    for (name, kind) in rules {
        for (size, values) in [("cached", BLOCK), ("large", LARGE)] {
            let (name, what) = (format!("{name}-{size}"), format!("{name} on {values} values"));
            let work = Work::Rule(kind, values);
            all.push(bench(&name, &what, "a loop that moves as much", Unit::Bytes, 0.9, work));
        }
    }
    all
}
