//! Histories of elastic jobs: those of the real rendezvous are clean, and with one wrong commit the check
//! reports the broken rule at the right revision.

use proptest::prelude::*;
use steadfast_audit::history::Rule;
use steadfast_common::ids::{Incarnation, NodeId, Phase, Round};
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_common::rendezvous::{EXIT_TAG, NodeRecord, NodeState, ReleaseRecord, RoundRecord};
use steadfast_master_core::rendezvous::{Fact, Rendezvous};
use uuid::Uuid;

use crate::elastic_world::ElasticWorld;
use crate::etcd::put;

const SEEDS: u64 = 60;

fn worlds() -> impl Iterator<Item = ElasticWorld> {
    (1..=SEEDS).map(ElasticWorld::with_round)
}

/// Asserts that the last revision breaks this rule with this text, and that no other revision breaks any.
fn assert_reports(world: &ElasticWorld, rule: Rule, text: &str) {
    let report = world.check();
    let last = world.etcd.revisions.last().expect("there are some").revision;
    assert!(report.broken.iter().all(|it| it.revision == last), "{report}");
    let found = report.broken.iter().any(|it| it.rule == rule && it.text.contains(text));
    assert!(found, "{rule:?}, `{text}`: {report}");
}

/// Writes a round, and asserts that it breaks a rule of rounds, and no other.
fn assert_wrong_round(mut world: ElasticWorld, formed: &RoundRecord, text: &str) {
    world.write(vec![put(&world.etcd.keys.formed_round(), formed)]);
    assert_reports(&world, Rule::Rounds, text);
    let report = world.check();
    assert!(report.broken.iter().all(|it| it.rule == Rule::Rounds), "{report}");
}

/// All other nodes leave, and all members ask for the next round; returns it as the master would form it.
fn next_round(world: &mut ElasticWorld) -> RoundRecord {
    let mut formed = world.round();
    let others = world.state.known().map(|(node, _)| node);
    let others = others.filter(|node| formed.members.iter().all(|member| member.node != *node));
    for node in others.collect::<Vec<NodeId>>() {
        world.commit(&[Fact::Removed { node }]);
    }
    for member in &formed.members {
        let record = NodeRecord {
            incarnation: member.incarnation,
            address: member.address.clone(),
            slots: member.slots,
            order: None,
            state: NodeState::Asked { after: formed.round },
        };
        world.commit(&[Fact::Node { node: member.node, record }]);
    }
    formed.round = Round(formed.round.0 + 1);
    formed
}

/// Numbers the ranks anew.
fn renumber(formed: &mut RoundRecord) {
    formed.world_size = 0;
    for member in &mut formed.members {
        member.first_rank = formed.world_size;
        formed.world_size += member.slots;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_history_of_an_honest_rendezvous_is_clean(seed in any::<u64>()) {
        let mut world = ElasticWorld::new(seed);
        world.run();
        let report = world.check();
        prop_assert!(report.is_clean(), "{report}");
        prop_assert_eq!(report.rounds, world.state.number().0);
        prop_assert!(0 < report.rounds && 0 < report.commits, "{report}");
    }
}

#[test]
fn the_next_round_of_all_members_is_clean() {
    for mut world in worlds() {
        let formed = next_round(&mut world);
        world.write(vec![put(&world.etcd.keys.formed_round(), &formed)]);
        let report = world.check();
        assert!(report.is_clean(), "{report}");
    }
}

#[test]
fn rounds_that_do_not_grow_by_one_are_reported() {
    for (case, mut world) in worlds().enumerate() {
        let mut formed = next_round(&mut world);
        let next = formed.round.0;
        formed.round = Round([next - 1, next + 1, 0, u64::MAX][case % 4]);
        assert_wrong_round(world, &formed, &format!("follows round {}", next - 1));
    }
}

#[test]
fn a_deleted_round_is_reported() {
    for mut world in worlds() {
        world.write(vec![(world.etcd.keys.formed_round(), None)]);
        assert_reports(&world, Rule::Rounds, "deleted");
    }
}

#[test]
fn ranks_with_a_gap_are_reported() {
    for (case, mut world) in worlds().enumerate() {
        let mut formed = next_round(&mut world);
        let index = world.rng.below(formed.members.len());
        match case % 2 {
            0 => formed.members[index].first_rank += 1,
            _ => formed.world_size += 1,
        }
        assert_wrong_round(world, &formed, "ranks");
    }
}

#[test]
fn a_member_that_is_in_a_round_twice_is_reported() {
    for mut world in worlds() {
        let mut formed = next_round(&mut world);
        formed.members.truncate(3);
        formed.members.push(formed.members[2].clone());
        renumber(&mut formed);
        assert_wrong_round(world, &formed, "is the next one");
    }
}

#[test]
fn more_or_fewer_members_than_allowed_are_reported() {
    for (case, mut world) in worlds().enumerate() {
        let mut formed = next_round(&mut world);
        match case % 2 {
            0 => {
                for member in formed.members.split_off(1) {
                    world.commit(&[Fact::Removed { node: member.node }]);
                }
            }
            _ => {
                let mut member = formed.members[0].clone();
                while formed.members.len() < 5 {
                    member.node = NodeId(Uuid::from_u128(100 + formed.members.len() as u128));
                    member.incarnation = Incarnation(1_000_000 + formed.members.len() as i64);
                    let record = NodeRecord {
                        incarnation: member.incarnation,
                        address: member.address.clone(),
                        slots: member.slots,
                        order: None,
                        state: NodeState::Asked { after: Round(formed.round.0 - 1) },
                    };
                    world.commit(&[Fact::Node { node: member.node, record }]);
                    formed.members.push(member.clone());
                }
            }
        }
        renumber(&mut formed);
        assert_wrong_round(world, &formed, "2 to 4 are allowed");
    }
}

#[test]
fn survivors_that_change_their_order_are_reported() {
    for mut world in worlds() {
        let mut formed = next_round(&mut world);
        let first = world.rng.below(formed.members.len() - 1);
        formed.members.swap(first, first + 1);
        renumber(&mut formed);
        assert_wrong_round(world, &formed, "order");
    }
}

#[test]
fn a_member_that_has_not_asked_is_reported() {
    for (case, mut world) in worlds().enumerate() {
        let last = world.round();
        let mut formed = next_round(&mut world);
        let index = world.rng.below(formed.members.len());
        let member = formed.members[index].clone();
        let record = |state| NodeRecord {
            incarnation: member.incarnation,
            address: member.address.clone(),
            slots: member.slots,
            order: None,
            state,
        };
        match case % 5 {
            0 => world.write(vec![(world.etcd.keys.node(member.node), None)]),
            1 => {
                let record = record(NodeState::Starting);
                world.commit(&[Fact::Node { node: member.node, record }]);
            }
            2 => {
                let record = record(NodeState::Late);
                world.commit(&[Fact::Node { node: member.node, record }]);
            }
            // It asked for the round that it is in.
            3 => {
                let record = record(NodeState::Asked { after: Round(last.round.0 - 1) });
                world.commit(&[Fact::Node { node: member.node, record }]);
            }
            // Another incarnation of it asked.
            _ => formed.members[index].incarnation = Incarnation(member.incarnation.0 - 1),
        }
        world.write(vec![put(&world.etcd.keys.formed_round(), &formed)]);
        assert_reports(&world, Rule::Asked, "has not asked");
    }
}

#[test]
fn a_node_that_asked_and_is_left_out_is_reported() {
    for mut world in worlds() {
        let mut formed = next_round(&mut world);
        let index = world.rng.below(formed.members.len());
        formed.members.remove(index);
        renumber(&mut formed);
        world.write(vec![put(&world.etcd.keys.formed_round(), &formed)]);
        assert_reports(&world, Rule::Asked, "has room");
    }
}

/// The first `count` members of the round succeed.
fn succeed(world: &mut ElasticWorld, count: usize) {
    let round = world.round();
    for member in &round.members[..count] {
        let (tag, phase, data) = (EXIT_TAG.to_owned(), Phase(0), [].into());
        let (round, node) = (round.round, member.node);
        world.commit(&[Fact::Entered { round, tag, phase, node, data }]);
    }
}

#[test]
fn a_round_after_the_success_of_all_members_is_reported() {
    for mut world in worlds() {
        let members = world.round().members.len();
        succeed(&mut world, members);
        let formed = next_round(&mut world);
        world.write(vec![put(&world.etcd.keys.formed_round(), &formed)]);
        assert_reports(&world, Rule::End, "had succeeded");
    }
}

/// S003-25: a member that failed after another had succeeded brings both into the next round.
#[test]
fn a_round_after_a_success_and_a_failure_is_clean() {
    for mut world in worlds() {
        succeed(&mut world, 1);
        let formed = next_round(&mut world);
        world.write(vec![put(&world.etcd.keys.formed_round(), &formed)]);
        let report = world.check();
        assert!(report.is_clean(), "{report}");
    }
}

/// S003-25: the success of a job in which a member has not succeeded.
#[test]
fn a_success_of_a_job_without_that_of_each_member_is_reported() {
    for (case, mut world) in worlds().enumerate() {
        let members = world.round().members.len();
        succeed(&mut world, case % members);
        let facts = Rendezvous::default().shut_down(JobOutcome::Finished, "");
        let Fact::Ended(result) = &facts[0] else { panic!("{facts:?}") };
        // A result with a reason was asked for.
        let result = ResultRecord { reason: None, ..(**result).clone() };
        world.write(vec![put(&world.etcd.keys.result(), &result)]);
        assert_reports(&world, Rule::End, "the job succeeded, and node");
    }
}

#[test]
fn a_job_that_a_node_shut_down_is_clean() {
    for mut world in worlds() {
        let facts = world.state.shut_down(JobOutcome::Finished, "");
        world.commit(&facts);
        let report = world.check();
        assert!(report.is_clean(), "{report}");
    }
}

#[test]
fn a_phase_that_is_released_without_all_members_is_reported() {
    for (case, mut world) in worlds().enumerate() {
        let (round, keys) = (world.round(), world.etcd.keys.clone());
        let (tag, phase) = ("other", Phase(0));
        let missing = world.rng.below(round.members.len());
        let entered = round.members.iter().enumerate().filter(|(index, _)| *index != missing);
        let mut ops: Vec<_> = entered
            .map(|(_, it)| (keys.entry(round.round, tag, phase, it.node), Some(String::new())))
            .collect();
        // A node that is not a member does not replace the one that is missing.
        let stranger = NodeId(Uuid::from_u128(99));
        if case % 2 == 0 {
            ops.push((keys.entry(round.round, tag, phase, stranger), Some(String::new())));
        }
        world.write(ops);
        world.write(vec![put(&keys.released(round.round, tag), &ReleaseRecord { phase })]);
        assert_reports(&world, Rule::Barriers, "was released");
    }
}

#[test]
fn an_entry_in_another_round_is_reported() {
    for mut world in worlds() {
        let (round, keys) = (world.round(), world.etcd.keys.clone());
        let key = keys.entry(Round(round.round.0 + 1), "tag", Phase(0), round.members[0].node);
        world.write(vec![(key, Some(String::new()))]);
        assert_reports(&world, Rule::Barriers, "was written in round");
    }
}

#[test]
fn a_tag_that_cannot_be_read_is_reported() {
    for mut world in worlds() {
        let key = format!("{}x", world.etcd.keys.tags_prefix(world.round().round));
        world.write(vec![(key, Some(String::new()))]);
        assert_reports(&world, Rule::Value, "is not the key of a tag");
    }
}

#[test]
fn what_is_written_after_the_result_is_reported() {
    for seed in 1..=SEEDS {
        let mut world = ElasticWorld::new(seed);
        world.run();
        world.write(vec![(world.etcd.keys.shared_state(), Some("{}".to_owned()))]);
        assert_reports(&world, Rule::End, "after the result");
    }
}

#[test]
fn a_rendezvous_that_changes_without_the_lock_is_reported() {
    for mut world in worlds() {
        let key = world.etcd.keys.shared_state();
        world.etcd.txn(vec![(key, Some("{}".to_owned()))]);
        assert_reports(&world, Rule::Fence, "without the master's lock");
    }
}
