//! The number of workers of an elastic job, when the master chooses it, and of trainers, in whole runs.

use std::time::Duration;

use steadfast_common::ids::Round;
use steadfast_common::records::commits::RecordOrder;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{NodeRange, RoundRecord};
use steadfast_common::records::scale::{ScaleReason, ScaleRecord};
use steadfast_sim::explore::small;
use steadfast_sim::{Fault, Member, Mode, Plan, Recording, Role, Workload, record, run};

/// Steps of a job that lasts some minutes.
const STEPS: u64 = 1700;

/// A job of three nodes of which one is enough. The master chooses the number of workers, and begins with so many; after
/// a while it dies.
fn plan(order: RecordOrder, workers: Option<u32>) -> Plan {
    let mut plan = small(Mode::Elastic);
    let Workload::Elastic(job) = &mut plan.job else { panic!("it is elastic") };
    job.nodes = NodeRange::new(1, 3).expect("it is a range");
    (job.spec.nodes.min, job.spec.nodes.max) = (1, 3);
    (job.spec.records, job.spec.order) = (Some(1 << 20), order);
    (job.steps, job.records_of_step, job.commit_every) = (STEPS, 8, 5);
    let master = Member { role: Role::Master, number: 0 };
    plan.faults = vec![
        (Duration::from_secs(3), Fault::Workers(workers, true)),
        (Duration::from_secs(100), Fault::Kill(master)),
    ];
    plan
}

/// Returns the rounds, and the numbers of workers that were chosen with the reasons.
fn history(recording: &Recording) -> (Vec<RoundRecord>, Vec<ScaleRecord>) {
    let keys = Keys::of_job("trial");
    let changes = || recording.revisions.iter().flat_map(|it| &it.changes);
    let values = |key: String| {
        changes().filter(move |it| it.key == key).filter_map(|it| it.value.as_deref())
    };
    let rounds =
        values(keys.formed_round()).map(|it| serde_json::from_str(it).expect("a master wrote it"));
    let scales = values(keys.workers_desired())
        .map(|it| serde_json::from_str(it).expect("a master wrote it"));
    (rounds.collect(), scales.collect())
}

/// S002-10: a job whose speed does not depend on its workers gives them back, through the death of the master, and none of
/// its records is lost or counted twice.
#[test]
fn workers_that_add_nothing_are_given_back() {
    let plan = plan(RecordOrder::Fixed, None);
    let (outcome, recording) = record(&plan);
    assert!(outcome.broken.is_empty(), "{plan}{outcome}");
    let (rounds, scales) = history(&recording);
    let last = rounds.last().expect("a round was formed");
    assert_eq!(last.members.len(), 1, "{scales:?}");
    assert!(rounds.iter().any(|it| it.members.len() == 3), "{rounds:?}");
    assert!(last.round <= Round(4), "{rounds:?}");
    assert_eq!(scales.last().map(|it| it.reason), Some(ScaleReason::FewerSuffice));
}

/// S002-10: a job whose speed grows with its workers gets all of them.
#[test]
fn workers_are_added_while_they_pay() {
    let plan = plan(RecordOrder::Dynamic, Some(1));
    let (outcome, recording) = record(&plan);
    assert!(outcome.broken.is_empty(), "{plan}{outcome}");
    let (rounds, scales) = history(&recording);
    assert!(rounds.iter().any(|it| it.members.len() == 3), "{scales:?}");
    // The job may end while fewer are tried once more.
    let tries = [ScaleReason::TriesMore, ScaleReason::TriesFewer];
    let decided = scales.iter().rfind(|it| !tries.contains(&it.reason));
    assert_eq!(decided.map(|it| it.reason), Some(ScaleReason::MorePaid), "{scales:?}");
}

/// S002-10, S004-34: whatever numbers of trainers are desired while processes and links fail, the result is that of the job:
/// each seed checks its bits, or that each record counts once.
#[test]
fn any_numbers_of_trainers_change_nothing() {
    for mode in [Mode::Sync, Mode::Async] {
        for seed in 1..=30 {
            let mut plan = Plan::of_seed(mode, seed);
            let end = plan.faults.last().map_or(Duration::from_secs(2), |(at, _)| *at);
            let wishes = [Some(1), Some(2), None, Some(1), Some(3)].into_iter().zip(1_u32..);
            plan.faults.extend(wishes.map(|(workers, number)| {
                let is_auto = seed % 5 == u64::from(number);
                (end * number / 5, Fault::Workers(workers, is_auto))
            }));
            plan.faults.sort_by_key(|(at, _)| *at);
            let outcome = run(&plan);
            assert!(outcome.broken.is_empty(), "{mode:?}, seed {seed}: {plan}{outcome}");
        }
    }
}
