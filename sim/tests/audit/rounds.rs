//! Histories of elastic jobs with one wrong commit: the check reports the broken rule at the right revision.

use steadfast_audit::history::Rule;
use steadfast_common::ids::{Incarnation, NodeId, Phase, Round};
use steadfast_common::records::commits::CommitRecord;
use steadfast_common::records::rendezvous::{
    EXIT_TAG, MemberRecord, NodeRecord, NodeState, ReleaseRecord, RoundData, RoundRecord,
};
use steadfast_common::records::scale::ScaleRecord;
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_sim::Workload;
use uuid::Uuid;

use crate::recorded::{ELASTIC, History, Op, cuts, put};

/// Returns histories in which all members of the last round, two or more, are in place, and none has succeeded.
fn intact() -> Vec<History> {
    cuts(&ELASTIC, |history| {
        let keys = &history.run.keys;
        let Some(round) = history.value::<RoundRecord>(&keys.formed_round()) else { return false };
        let is_in_place = |member: &MemberRecord| {
            let node: Option<NodeRecord> = history.value(&keys.node(member.node));
            node.is_some_and(|it| {
                let is_member =
                    matches!(it.state, NodeState::Asked { after } if after < round.round);
                it.incarnation == member.incarnation && is_member
            })
        };
        let exits = keys.entries_prefix(round.round, EXIT_TAG, Phase(0));
        2 <= round.members.len()
            && round.members.iter().all(is_in_place)
            && history.keys_below(&exits).is_empty()
            && history.value::<ResultRecord>(&keys.result()).is_none()
    })
}

/// Returns the round that was formed last.
fn round(history: &History) -> RoundRecord {
    history.value(&history.run.keys.formed_round()).expect("a round was formed")
}

/// Returns the same members with what a round that is formed now begins with.
fn formed_again(history: &History) -> RoundRecord {
    let formed = round(history);
    let commit: Option<CommitRecord> = history.value(&history.run.keys.commit());
    let commit = commit.map(|commit| commit.id);
    let data = formed.data.map(|data| RoundData { commit, ..data });
    RoundRecord { data, ..formed }
}

/// The record of a member as a node.
fn node(member: &MemberRecord, state: NodeState) -> NodeRecord {
    let MemberRecord { incarnation, ref address, slots, .. } = *member;
    NodeRecord { incarnation, address: address.clone(), slots, order: None, state }
}

/// The acting master writes the record of a node, or deletes it.
fn commit_node(history: &mut History, id: NodeId, record: Option<&NodeRecord>) {
    let key = history.run.keys.node(id);
    history.commit(vec![record.map_or((key.clone(), None), |record| put(key, record))]);
}

fn form(history: &mut History, formed: &RoundRecord) {
    history.commit(vec![put(history.run.keys.formed_round(), formed)]);
}

/// Writes a round, and asserts that it breaks a rule of rounds, and no other.
fn assert_wrong_round(mut history: History, formed: &RoundRecord, text: &str) {
    form(&mut history, formed);
    history.assert_reports(Rule::Rounds, text);
    let report = history.check();
    assert!(report.broken.iter().all(|it| it.rule == Rule::Rounds), "{report}");
}

/// All other nodes leave, and all members ask for the next round; returns it as the master would form it.
fn next_round(history: &mut History) -> RoundRecord {
    let mut formed = formed_again(history);
    let known = history.keys_below(&history.run.keys.nodes_prefix());
    for id in known.iter().filter_map(|key| history.run.keys.node_of(key)) {
        if formed.members.iter().all(|member| member.node != id) {
            commit_node(history, id, None);
        }
    }
    for member in &formed.members {
        let asked = node(member, NodeState::Asked { after: formed.round });
        commit_node(history, member.node, Some(&asked));
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

/// The first `count` members of the round succeed.
fn succeed(history: &mut History, count: usize) {
    let formed = round(history);
    for member in &formed.members[..count] {
        let key = history.run.keys.entry(formed.round, EXIT_TAG, Phase(0), member.node);
        history.commit(vec![(key, Some(String::new()))]);
    }
}

/// Returns the success with which the job of a history ended, with a reason or without.
fn success(history: &History, reason: Option<&str>) -> Op {
    let key = history.run.keys.result();
    let mut changes = history.rest().iter().flat_map(|it| &it.changes);
    let result = changes.find(|it| it.key == key).and_then(|it| it.value.as_deref());
    let result = serde_json::from_str(result.expect("the job ended")).expect("it is valid");
    let reason = reason.map(str::to_owned);
    put(key, &ResultRecord { state: JobOutcome::Finished, reason, ..result })
}

#[test]
fn the_next_round_of_all_members_is_clean() {
    for mut history in intact() {
        let formed = next_round(&mut history);
        form(&mut history, &formed);
        history.assert_clean();
    }
}

#[test]
fn rounds_that_do_not_grow_by_one_are_reported() {
    for (case, mut history) in intact().into_iter().enumerate() {
        let mut formed = next_round(&mut history);
        let next = formed.round.0;
        formed.round = Round([next - 1, next + 1, 0, u64::MAX][case % 4]);
        assert_wrong_round(history, &formed, &format!("follows round {}", next - 1));
    }
}

#[test]
fn a_deleted_round_is_reported() {
    for mut history in intact() {
        history.commit(vec![(history.run.keys.formed_round(), None)]);
        history.assert_reports(Rule::Rounds, "deleted");
    }
}

#[test]
fn ranks_with_a_gap_are_reported() {
    for (case, mut history) in intact().into_iter().enumerate() {
        let mut formed = next_round(&mut history);
        let index = case / 2 % formed.members.len();
        match case % 2 {
            0 => formed.members[index].first_rank += 1,
            _ => formed.world_size += 1,
        }
        assert_wrong_round(history, &formed, "ranks");
    }
}

#[test]
fn a_member_that_is_in_a_round_twice_is_reported() {
    for mut history in intact() {
        let mut formed = next_round(&mut history);
        formed.members.extend(formed.members.last().cloned());
        renumber(&mut formed);
        assert_wrong_round(history, &formed, "is the next one");
    }
}

#[test]
fn more_or_fewer_members_than_allowed_are_reported() {
    for (case, mut history) in intact().into_iter().enumerate() {
        let Workload::Elastic(job) = &history.run.job else { panic!("the job is elastic") };
        let (min, max) = (job.nodes.min(), job.nodes.max());
        let mut formed = next_round(&mut history);
        match case % 2 {
            0 => {
                for member in formed.members.split_off(min as usize - 1) {
                    commit_node(&mut history, member.node, None);
                }
            }
            _ => {
                let mut member = formed.members[0].clone();
                while formed.members.len() <= max as usize {
                    let number = formed.members.len();
                    member.node = NodeId(Uuid::from_u128(100 + number as u128));
                    member.incarnation = Incarnation(1_000_000 + number as i64);
                    let asked =
                        node(&member, NodeState::Asked { after: Round(formed.round.0 - 1) });
                    commit_node(&mut history, member.node, Some(&asked));
                    formed.members.push(member.clone());
                }
            }
        }
        renumber(&mut formed);
        assert_wrong_round(history, &formed, &format!("{min} to {max} are allowed"));
    }
}

#[test]
fn survivors_that_change_their_order_are_reported() {
    for (case, mut history) in intact().into_iter().enumerate() {
        let mut formed = next_round(&mut history);
        let first = case % (formed.members.len() - 1);
        formed.members.swap(first, first + 1);
        renumber(&mut formed);
        assert_wrong_round(history, &formed, "order");
    }
}

#[test]
fn a_member_that_has_not_asked_is_reported() {
    for (case, mut history) in intact().into_iter().enumerate() {
        let last = round(&history).round;
        let mut formed = next_round(&mut history);
        let index = case / 5 % formed.members.len();
        let member = formed.members[index].clone();
        let mut is_now =
            |state| commit_node(&mut history, member.node, Some(&node(&member, state)));
        match case % 5 {
            0 => commit_node(&mut history, member.node, None),
            1 => is_now(NodeState::Starting),
            2 => is_now(NodeState::Late),
            // It asked for the round that it is in.
            3 => is_now(NodeState::Asked { after: Round(last.0 - 1) }),
            // Another incarnation of it asked.
            _ => formed.members[index].incarnation = Incarnation(member.incarnation.0 - 1),
        }
        form(&mut history, &formed);
        history.assert_reports(Rule::Asked, "has not asked");
    }
}

#[test]
fn a_node_that_asked_and_is_left_out_is_reported() {
    for (case, mut history) in intact().into_iter().enumerate() {
        let mut formed = next_round(&mut history);
        formed.members.remove(case % formed.members.len());
        renumber(&mut formed);
        form(&mut history, &formed);
        history.assert_reports(Rule::Asked, "has room");
    }
}

#[test]
fn a_round_after_the_success_of_all_members_is_reported() {
    for mut history in intact() {
        let members = round(&history).members.len();
        succeed(&mut history, members);
        let formed = next_round(&mut history);
        form(&mut history, &formed);
        history.assert_reports(Rule::End, "had succeeded");
    }
}

/// S003-25: a member that failed after another had succeeded brings both into the next round.
#[test]
fn a_round_after_a_success_and_a_failure_is_clean() {
    for mut history in intact() {
        succeed(&mut history, 1);
        let formed = next_round(&mut history);
        form(&mut history, &formed);
        history.assert_clean();
    }
}

/// S003-25: the success of a job in which a member has not succeeded.
#[test]
fn a_success_of_a_job_without_that_of_each_member_is_reported() {
    for (case, mut history) in intact().into_iter().enumerate() {
        let members = round(&history).members.len();
        succeed(&mut history, case % members);
        // A result with a reason was asked for.
        history.commit(vec![success(&history, None)]);
        history.assert_reports(Rule::End, "the job succeeded, and node");
    }
}

#[test]
fn a_job_that_a_node_shut_down_is_clean() {
    for mut history in intact() {
        history.commit(vec![success(&history, Some("a node shut it down"))]);
        history.assert_clean();
    }
}

#[test]
fn a_phase_that_is_released_without_all_members_is_reported() {
    for (case, mut history) in intact().into_iter().enumerate() {
        let (round, keys) = (round(&history), &history.run.keys);
        let (tag, phase) = ("other", Phase(0));
        let missing = case / 2 % round.members.len();
        let mut entered: Vec<NodeId> = round.members.iter().map(|it| it.node).collect();
        entered.remove(missing);
        // A node that is not a member does not replace the one that is missing.
        entered.extend((case % 2 == 0).then_some(NodeId(Uuid::from_u128(99))));
        let entry = |node| (keys.entry(round.round, tag, phase, node), Some(String::new()));
        history.commit(entered.into_iter().map(entry).collect());
        history.commit(vec![put(keys.released(round.round, tag), &ReleaseRecord { phase })]);
        history.assert_reports(Rule::Barriers, "was released");
    }
}

#[test]
fn an_entry_in_another_round_is_reported() {
    for mut history in intact() {
        let round = round(&history);
        let (next, node) = (Round(round.round.0 + 1), round.members[0].node);
        let key = history.run.keys.entry(next, "tag", Phase(0), node);
        history.commit(vec![(key, Some(String::new()))]);
        history.assert_reports(Rule::Barriers, "was written in round");
    }
}

#[test]
fn a_tag_that_cannot_be_read_is_reported() {
    for mut history in intact() {
        let key = format!("{}x", history.run.keys.tags_prefix(round(&history).round));
        history.commit(vec![(key, Some(String::new()))]);
        history.assert_reports(Rule::Value, "is not the key of a tag");
    }
}

#[test]
fn what_is_written_after_the_result_is_reported() {
    for mut history in intact() {
        history.commit(vec![success(&history, Some("a node shut it down"))]);
        history.commit(vec![(history.run.keys.shared_state(), Some("{}".to_owned()))]);
        history.assert_reports(Rule::End, "after the result");
    }
}

#[test]
fn a_rendezvous_that_changes_without_the_lock_is_reported() {
    for mut history in intact() {
        history.txn(vec![(history.run.keys.shared_state(), Some("{}".to_owned()))]);
        history.assert_reports(Rule::Fence, "without the master's lock");
    }
}

/// S002-10: a round has no more workers than are desired, unless it has the fewest nodes.
#[test]
fn a_round_with_more_workers_than_desired_is_reported() {
    let scaled = |history: &mut History, workers: Option<u32>| {
        let record = ScaleRecord { workers, ..ScaleRecord::default() };
        let key = history.run.keys.workers_desired();
        history.commit(vec![put(key, &record)]);
    };
    let least = |history: &History| match &history.run.job {
        Workload::Elastic(job) => job.nodes.min() as usize,
        Workload::Training(_) => usize::MAX,
    };
    let mut histories = intact().into_iter().filter(|it| least(it) < round(it).members.len());
    let mut history = histories.next().expect("a round has more nodes than the fewest");
    let (formed, mut enough) = (next_round(&mut history), history.clone());
    scaled(&mut enough, Some(formed.world_size));
    form(&mut enough, &formed);
    enough.assert_clean();
    scaled(&mut history, Some(formed.world_size - 1));
    assert_wrong_round(history, &formed, "more than were desired");
}
