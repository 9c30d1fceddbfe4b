//! The benchmarks and their references.

use steadfast_common::job::spec::OptimizerKind;

use crate::checkpoint::Meanwhile;
use crate::kernels::{BLOCK, LARGE};
use crate::raw::Adds;
use crate::rig::Via;
use crate::sample::Sample;
use crate::{
    checkpoint, counter, kernels, model, ping, raw, rendezvous, rows, served_rows, tasks, whole,
    wire,
};

/// The unit of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Steps,
    /// Duration of one operation; the reference is an upper bound.
    Seconds,
}

/// One benchmark: a row of the table.
#[derive(Clone, Debug)]
pub struct Bench {
    pub name: String,
    pub what: String,
    /// The reference.
    pub reference: &'static str,
    pub unit: Unit,
    /// The minimum acceptable ratio.
    pub target: f64,
    work: Work,
}

/// A side of a benchmark: our implementation or the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    Ours,
    Reference,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    /// Transport, compression, and how the reference adds gradients.
    Push(Via, &'static str, Adds),
    /// Asynchronous pushes, applied as a whole or not at all, and how the reference adds gradients.
    AsyncPush(Adds),
    Pull(Via),
    TlsPush,
    TlsPull,
    Steps,
    SmallSteps,
    SlowSteps,
    Lanes,
    Rows,
    RowsTiered,
    ServedRows,
    Dispatch,
    /// With a server as reference.
    ServedDispatch,
    TakeOver,
    Checkpoint,
    Restore,
    Move,
    Follow,
    Promote,
    StepsUnderCheckpoints,
    StepsBesideWrites,
    /// With so many spares.
    StepsWithSpares(usize),
    StepsUnderCheckpointsOfSpares,
    Gradient(model::Shape),
    LanesGradient(model::Shape),
    Digits,
    StartAndEnd,
    Idle,
    /// With this number of nodes.
    Rendezvous(u32),
    Regroup(u32),
    Deal,
    Rule(OptimizerKind, usize),
    /// An update rule that is a text.
    Text(usize),
}

impl Bench {
    /// Measures one sample.
    pub async fn sample(&self, side: Side) -> Sample {
        match (self.work, side) {
            (Work::Push(via, form, _), Side::Ours) => wire::push(via, form).await,
            (Work::Push(via, _, adds), Side::Reference) => raw::push(via, adds).await,
            (Work::AsyncPush(_), Side::Ours) => wire::push_asynchronously().await,
            (Work::AsyncPush(adds), Side::Reference) => raw::push(Via::Tcp, adds).await,
            (Work::Pull(via), Side::Ours) => wire::pull(via).await,
            (Work::Pull(via), Side::Reference) => raw::pull(via).await,
            (Work::TlsPush, Side::Ours) => wire::push(Via::Tls, "none").await,
            (Work::TlsPush, Side::Reference) => wire::push(Via::Tcp, "none").await,
            (Work::TlsPull, Side::Ours) => wire::pull(Via::Tls).await,
            (Work::TlsPull, Side::Reference) => wire::pull(Via::Tcp).await,
            (Work::Steps, Side::Ours) => wire::steps().await,
            (Work::Steps, Side::Reference) => raw::steps().await,
            (Work::Checkpoint, Side::Ours) => checkpoint::take().await,
            (Work::Checkpoint, Side::Reference) => checkpoint::write(),
            (Work::Restore, Side::Ours) => checkpoint::restore().await,
            (Work::Restore, Side::Reference) => checkpoint::read(),
            (Work::Move, Side::Ours) => checkpoint::move_slots().await,
            (Work::Move | Work::Follow, Side::Reference) => checkpoint::read(),
            (Work::Follow, Side::Ours) => checkpoint::follow().await,
            (Work::Promote, Side::Ours) => wire::promote().await,
            (Work::Promote, Side::Reference) => Sample::bound(0.3),
            (Work::StepsUnderCheckpoints | Work::StepsBesideWrites, Side::Ours) => {
                checkpoint::steps(Meanwhile::Checkpoints).await
            }
            (Work::StepsUnderCheckpoints, Side::Reference) => {
                checkpoint::steps(Meanwhile::Nothing).await
            }
            (Work::StepsBesideWrites, Side::Reference) => {
                checkpoint::steps(Meanwhile::Writes).await
            }
            (Work::StepsWithSpares(_), Side::Reference) => {
                checkpoint::steps(Meanwhile::Nothing).await
            }
            (Work::StepsWithSpares(spares), Side::Ours) => {
                checkpoint::steps_followed(spares, Meanwhile::Nothing).await
            }
            (Work::StepsUnderCheckpointsOfSpares, Side::Reference) => {
                checkpoint::steps_followed(wire::SLOTS, Meanwhile::Nothing).await
            }
            (Work::StepsUnderCheckpointsOfSpares, Side::Ours) => {
                checkpoint::steps_followed(wire::SLOTS, Meanwhile::Checkpoints).await
            }
            (Work::Gradient(shape), Side::Ours) => model::gradient(shape),
            (Work::Gradient(shape), Side::Reference) => model::products(shape),
            (Work::LanesGradient(shape), Side::Ours) => model::gradient_of_lanes(shape, 4),
            (Work::LanesGradient(shape), Side::Reference) => model::gradient(shape),
            (Work::Digits, Side::Ours) => whole::digits(),
            (Work::Digits, Side::Reference) => Sample::bound(1.0),
            (Work::StartAndEnd, Side::Ours) => whole::start_and_end(),
            (Work::StartAndEnd, Side::Reference) => Sample::bound(1.5),
            (Work::Idle, Side::Ours) => whole::idle().await,
            (Work::Idle, Side::Reference) => Sample::bound(0.005),
            (Work::Rendezvous(nodes), Side::Ours) => rendezvous::form(nodes).await,
            (Work::Regroup(nodes), Side::Ours) => rendezvous::form_again(nodes).await,
            (Work::Rendezvous(_) | Work::Regroup(_), Side::Reference) => Sample::bound(1.0),
            (Work::Deal, Side::Ours) => rendezvous::deal().await,
            // Records in a second.
            (Work::Deal, Side::Reference) => Sample { amount: 2e5, ..Sample::bound(1.0) },
            (Work::SmallSteps, Side::Ours) => wire::small_steps().await,
            (Work::SmallSteps, Side::Reference) => ping::ping_pong().await,
            (Work::SlowSteps, Side::Ours) => wire::slow_steps().await,
            (Work::SlowSteps, Side::Reference) => raw::slow_steps().await,
            (Work::Lanes, Side::Ours) => kernels::lanes(),
            (Work::Lanes, Side::Reference) => kernels::unordered(),
            (Work::Rows, Side::Ours) => rows::shard(),
            (Work::Rows, Side::Reference) => rows::hash_map(),
            (Work::RowsTiered, Side::Ours) => rows::tiered(),
            (Work::RowsTiered, Side::Reference) => rows::untiered(),
            (Work::ServedRows, Side::Ours) => served_rows::steps().await,
            (Work::ServedRows, Side::Reference) => served_rows::hash_map().await,
            (Work::Dispatch, Side::Ours) => tasks::dispatch().await,
            (Work::Dispatch, Side::Reference) => tasks::write().await,
            (Work::ServedDispatch, Side::Ours) => tasks::dispatch().await,
            (Work::ServedDispatch, Side::Reference) => counter::dispatch().await,
            (Work::TakeOver, Side::Ours) => tasks::take_over().await,
            (Work::TakeOver, Side::Reference) => Sample::bound(2.0),
            (Work::Rule(kind, values), Side::Ours) => {
                kernels::optimizer(&kernels::built_in(kind), values)
            }
            (Work::Rule(kind, values), Side::Reference) => kernels::copy(kind, values),
            (Work::Text(values), Side::Ours) => {
                kernels::optimizer(&kernels::adam_as_text(), values)
            }
            (Work::Text(values), Side::Reference) => {
                kernels::optimizer(&kernels::built_in(OptimizerKind::Adam), values)
            }
        }
    }
}

/// The fields of a [`Bench`], in the same order.
type Line = (&'static str, &'static str, &'static str, Unit, f64, Work);

const LINES: [Line; 41] = [
    (
        "push",
        "gradient of 64 MiB to 2 pservers: a synchronous step by SGD",
        "tokio TCP into the same update",
        Unit::Bytes,
        0.9,
        Work::Push(Via::Tcp, "none", Adds::AsItComes),
    ),
    (
        "kept-push",
        "the same as push",
        "tokio TCP into the same update, which preserves the previous values",
        Unit::Bytes,
        0.9,
        Work::Push(Via::Tcp, "none", Adds::IntoCopy),
    ),
    (
        "async-push",
        "the same, asynchronously: applied as a whole or not at all",
        "tokio TCP into the same update",
        Unit::Bytes,
        0.9,
        Work::AsyncPush(Adds::AsItComes),
    ),
    (
        "whole-push",
        "the same as async-push",
        "tokio TCP into memory, then into the same update",
        Unit::Bytes,
        0.9,
        Work::AsyncPush(Adds::Whole),
    ),
    (
        "pull",
        "parameters of 64 MiB from 2 pservers",
        "tokio TCP",
        Unit::Bytes,
        0.9,
        Work::Pull(Via::Tcp),
    ),
    (
        "local-push",
        "the same gradient to pservers of this machine: through shared memory",
        "tokio's Unix sockets into the same update",
        Unit::Bytes,
        0.8,
        Work::Push(Via::Local, "none", Adds::AsItComes),
    ),
    (
        "tls-push",
        "the same gradient over TLS",
        "the same without TLS",
        Unit::Bytes,
        0.5,
        Work::TlsPush,
    ),
    (
        "tls-pull",
        "the same parameters over TLS",
        "the same without TLS",
        Unit::Bytes,
        0.5,
        Work::TlsPull,
    ),
    (
        "bf16-push",
        "the same gradient in 16 bits per value",
        "tokio TCP, uncompressed",
        Unit::Bytes,
        1.0,
        Work::Push(Via::Tcp, "bf16", Adds::AsItComes),
    ),
    (
        "int8-push",
        "the same gradient in 8 bits per value",
        "tokio TCP, uncompressed",
        Unit::Bytes,
        1.0,
        Work::Push(Via::Tcp, "int8", Adds::AsItComes),
    ),
    (
        "slow-push",
        "the same gradient over a link of 32 MiB/s to each pserver",
        "tokio TCP over such links, uncompressed",
        Unit::Bytes,
        0.9,
        Work::Push(Via::SlowTcp, "none", Adds::AsItComes),
    ),
    (
        "slow-bf16-push",
        "the same in 16 bits per value",
        "tokio TCP over such links, uncompressed",
        Unit::Bytes,
        1.8,
        Work::Push(Via::SlowTcp, "bf16", Adds::AsItComes),
    ),
    (
        "slow-int8-push",
        "the same in 8 bits per value",
        "tokio TCP over such links, uncompressed",
        Unit::Bytes,
        3.4,
        Work::Push(Via::SlowTcp, "int8", Adds::AsItComes),
    ),
    (
        "local-pull",
        "the same parameters from pservers of this machine: through shared memory",
        "tokio's Unix sockets",
        Unit::Bytes,
        0.8,
        Work::Pull(Via::Local),
    ),
    (
        "step",
        "synchronous step of 100 MiB, 2 trainers and 2 pservers: push, add, apply, pull",
        "tokio TCP moving the same bytes",
        Unit::Bytes,
        0.8,
        Work::Steps,
    ),
    (
        "small-step",
        "synchronous step of a model of 64 KiB",
        "ping-pong of the same bytes over the same HTTP/2",
        Unit::Steps,
        0.6,
        Work::SmallSteps,
    ),
    (
        "slow-step",
        "synchronous step of 64 MiB over links of 32 MiB/s in each direction: push, apply, pull",
        "tokio TCP over such links: the gradient, then the parameters",
        Unit::Steps,
        1.5,
        Work::SlowSteps,
    ),
    (
        "lanes",
        "8 lanes of 8 MiB, added in order",
        "the same bytes added in any order",
        Unit::Bytes,
        0.8,
        Work::Lanes,
    ),
    (
        "rows",
        "rows of a table for batches of 4 096 × 26 ids by a power law: read, merge, apply Adagrad",
        "a hash map of the standard library with the same rule",
        Unit::Steps,
        0.6,
        Work::Rows,
    ),
    (
        "rows-tiered",
        "the same with memory for a quarter of 2 × 10⁶ rows, of which a tenth takes nine tenths of the accesses",
        "all rows in memory",
        Unit::Steps,
        0.5,
        Work::RowsTiered,
    ),
    (
        "served-rows",
        "the rows of `rows`, pulled from a pserver by a trainer, and their gradients pushed",
        "a hash map of the standard library with the same rule behind unary gRPC calls",
        Unit::Steps,
        0.6,
        Work::ServedRows,
    ),
    (
        "dispatch",
        "40 000 of 10⁶ tasks to 64 trainers and back, over etcd with fsync",
        "one writer of full transactions with the same keys",
        Unit::Steps,
        0.8,
        Work::Dispatch,
    ),
    (
        "served-dispatch",
        "the same as dispatch",
        "a server of the same calls that commits as many keys without any logic",
        Unit::Steps,
        0.8,
        Work::ServedDispatch,
    ),
    (
        "deal",
        "records of a dynamic order, dealt to 64 nodes, 256 at a time",
        "200 000 records a second",
        Unit::Steps,
        1.0,
        Work::Deal,
    ),
    (
        "takeover",
        "from a master's death to the next task of 10⁶",
        "2 s",
        Unit::Seconds,
        1.0,
        Work::TakeOver,
    ),
    (
        "checkpoint",
        "checkpoint of a model of 1 GiB on 2 pservers",
        "plain writes of the same size, with hash and fsync",
        Unit::Bytes,
        0.8,
        Work::Checkpoint,
    ),
    (
        "restore",
        "start of 2 pservers in place of dead ones until a checkpoint of 1 GiB is restored",
        "plain reads of the same size, with hash",
        Unit::Bytes,
        0.8,
        Work::Restore,
    ),
    (
        "move",
        "start of 2 more pservers until the 2 slots of a model of 1 GiB are 4",
        "plain reads of the same size, with hash",
        Unit::Bytes,
        0.8,
        Work::Move,
    ),
    (
        "follow",
        "start of 2 spares until they follow the 2 slots of a model of 1 GiB",
        "plain reads of the same size, with hash",
        Unit::Bytes,
        0.4,
        Work::Follow,
    ),
    (
        "promotion",
        "from the death of a pserver whose slot is followed to the end of the next step",
        "0.3 s",
        Unit::Seconds,
        1.0,
        Work::Promote,
    ),
    (
        "steps-under-checkpoints",
        "steps of a model of 256 MiB while checkpoints are taken continuously",
        "the same steps alone",
        Unit::Steps,
        0.95,
        Work::StepsUnderCheckpoints,
    ),
    (
        "steps-beside-writes",
        "the same as steps-under-checkpoints",
        "the same steps while as many threads of the same priority hash and write the same bytes",
        Unit::Steps,
        0.95,
        Work::StepsBesideWrites,
    ),
    (
        "steps-with-spare",
        "steps of a model of 256 MiB while a spare follows one of its 2 slots",
        "the same steps without spares",
        Unit::Steps,
        0.75,
        Work::StepsWithSpares(1),
    ),
    (
        "steps-with-two-spares",
        "the same while spares follow both slots",
        "the same steps without spares",
        Unit::Steps,
        0.6,
        Work::StepsWithSpares(wire::SLOTS),
    ),
    (
        "steps-under-checkpoints-of-spares",
        "the same while spares follow both slots and take checkpoints continuously",
        "the same steps with the spares alone",
        Unit::Steps,
        0.95,
        Work::StepsUnderCheckpointsOfSpares,
    ),
    (
        "gradient",
        "gradient of a perceptron of 784-512-256-10 over 256 records, on one core",
        "its matrix products alone",
        Unit::Steps,
        0.8,
        Work::Gradient(model::SMALL),
    ),
    (
        "thin-gradient",
        "gradient of a perceptron of 784-4096-4096-1000 over 16 records, on one core",
        "its matrix products alone",
        Unit::Steps,
        0.9,
        Work::Gradient(model::THIN),
    ),
    (
        "lanes-gradient",
        "the same records as 4 lanes, whose gradients are added along their tree",
        "one lane",
        Unit::Steps,
        0.85,
        Work::LanesGradient(model::THIN),
    ),
    (
        "digits",
        "trainers' time in a synchronous job of 1.1 million parameters, 2 trainers and 2 pservers",
        "1 s for each second of computing gradients",
        Unit::Seconds,
        0.85,
        Work::Digits,
    ),
    (
        "start-and-end",
        "`steadfast local` with a job of 12 steps, from command to exit",
        "1.5 s",
        Unit::Seconds,
        1.0,
        Work::StartAndEnd,
    ),
    (
        "idle",
        "CPU time per second of a process in a job without trainers",
        "0.5 % of a core",
        Unit::Seconds,
        1.0,
        Work::Idle,
    ),
];

/// The benchmarked update rules, by name.
const RULES: [(&str, OptimizerKind); 6] = [
    ("sgd", OptimizerKind::Sgd),
    ("momentum", OptimizerKind::Momentum),
    ("adagrad", OptimizerKind::Adagrad),
    ("adam", OptimizerKind::Adam),
    ("adamw", OptimizerKind::Adamw),
    ("ftrl", OptimizerKind::Ftrl),
];

/// Returns all benchmarks.
pub fn benches() -> Vec<Bench> {
    let lines = LINES.map(|(name, what, reference, unit, target, work)| Bench {
        name: name.to_owned(),
        what: what.to_owned(),
        reference,
        unit,
        target,
        work,
    });
    let rules = RULES.iter().flat_map(|(name, kind)| {
        [("cached", BLOCK), ("large", LARGE)].map(|(size, values)| Bench {
            name: format!("{name}-{size}"),
            what: format!("{name} on {values} values"),
            reference: "a loop that moves the same bytes",
            unit: Unit::Bytes,
            target: 0.9,
            work: Work::Rule(*kind, values),
        })
    });
    let texts = [("cached", BLOCK), ("large", LARGE)].map(|(size, values)| Bench {
        name: format!("text-{size}"),
        what: format!("adam as a text of the job file on {values} values"),
        reference: "the built-in rule",
        unit: Unit::Bytes,
        target: 0.7,
        work: Work::Text(values),
    });
    let nodes = [125, 250, 500, 1000];
    let rendezvous = nodes.iter().flat_map(|nodes| {
        let first = ("rendezvous", "form the first round", Work::Rendezvous(*nodes));
        let next = ("regroup", "form the next round after one was lost", Work::Regroup(*nodes));
        [first, next].map(|(name, what, work)| Bench {
            name: format!("{name}-{nodes}"),
            what: format!("CPU time of the master while {nodes} nodes {what}"),
            reference: "1 s",
            unit: Unit::Seconds,
            target: 1.0,
            work,
        })
    });
    lines.into_iter().chain(rendezvous).chain(rules).chain(texts).collect()
}
