//! A worker keeps here what it knows of the changes in its round.

use steadfast_proto::v1::{ChangesReply, MemberChange};

/// Keeps the newest answer of an agent to the call `Changes`.
///
/// An answer may arrive when the worker is in the next round already, whose members it does not concern.
#[derive(Debug, Default)]
pub struct SeenChanges {
    newest: ChangesReply,
}

impl SeenChanges {
    /// Keeps an answer in the place of the one before.
    pub fn keep(&mut self, answer: ChangesReply) {
        self.newest = answer;
    }

    /// Returns all changes in a round after the revision `since` as one, with the newest revision of the members.
    pub fn after(&self, since: i64, round: u64) -> MemberChange {
        let ChangesReply { revision, changes, round: answered } = &self.newest;
        let none = MemberChange { revision: *revision, removed: false, added: false };
        let is_late = *answered < round;
        let newer = changes.iter().filter(|it| !is_late && since < it.revision);
        newer.fold(none, |all, it| MemberChange {
            removed: all.removed || it.removed,
            added: all.added || it.added,
            ..all
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(round: u64, revision: i64) -> ChangesReply {
        let changes = vec![MemberChange { revision, removed: true, added: false }];
        ChangesReply { revision, changes, round }
    }

    /// S003-52: a worker was told in the new round of the loss that had ended the one before, and left it.
    #[test]
    fn an_answer_that_arrives_in_the_next_round_does_not_end_it() {
        let mut seen = SeenChanges::default();
        seen.keep(answer(7, 30));
        assert!(seen.after(0, 7).removed);
        assert_eq!(seen.after(0, 8), MemberChange { revision: 30, removed: false, added: false });
        seen.keep(answer(8, 31));
        assert!(seen.after(0, 8).removed);
    }

    /// S003-52: the worker learns its place in a round after the agent has answered.
    #[test]
    fn a_change_that_is_known_before_the_round_begins_ends_it() {
        let mut seen = SeenChanges::default();
        seen.keep(answer(8, 31));
        assert!(seen.after(30, 8).removed);
        assert!(!seen.after(31, 8).removed, "all ranks have seen it");
    }
}
