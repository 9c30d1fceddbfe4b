//! The conditions of a transaction.

use super::fact::Revision;
use super::history::History;
use super::span::Span;
use etcd_client::proto::{PbCompare, PbKeyValue, PbTargetUnion};
use std::cmp::Ordering;

const TARGET_VERSION: i32 = 0;
const TARGET_CREATE: i32 = 1;
const TARGET_MOD: i32 = 2;
const TARGET_VALUE: i32 = 3;
const TARGET_LEASE: i32 = 4;

const EQUAL: i32 = 0;
const GREATER: i32 = 1;
const LESS: i32 = 2;
const NOT_EQUAL: i32 = 3;

/// Returns whether a condition holds for every pair of its span. An empty span compares as one pair
/// of zeros, except for values: "missing" and "empty" would be equal, so the comparison fails.
pub fn holds(history: &History, compare: &PbCompare) -> bool {
    let span = Span::new(&compare.key, &compare.range_end);
    let mut pairs = history.scan(span, Revision::MAX).peekable();
    if pairs.peek().is_some() {
        return pairs.all(|kv| holds_for(kv, compare));
    }
    compare.target != TARGET_VALUE && holds_for(&PbKeyValue::default(), compare)
}

/// Returns whether a condition holds for one pair. The target selects the compared field; an operand of another kind
/// counts as zero. As in real etcd, an unknown target compares as equal, and an unknown relation holds.
fn holds_for(kv: &PbKeyValue, compare: &PbCompare) -> bool {
    use PbTargetUnion::{CreateRevision, Lease, ModRevision, Value, Version};
    let operand = compare.target_union.as_ref();
    let ordering = match (compare.target, operand) {
        (TARGET_VERSION, Some(Version(version))) => kv.version.cmp(version),
        (TARGET_VERSION, _) => kv.version.cmp(&0),
        (TARGET_CREATE, Some(CreateRevision(revision))) => kv.create_revision.cmp(revision),
        (TARGET_CREATE, _) => kv.create_revision.cmp(&0),
        (TARGET_MOD, Some(ModRevision(revision))) => kv.mod_revision.cmp(revision),
        (TARGET_MOD, _) => kv.mod_revision.cmp(&0),
        (TARGET_VALUE, Some(Value(value))) => kv.value.cmp(value),
        (TARGET_VALUE, _) => kv.value.as_slice().cmp(&[]),
        (TARGET_LEASE, Some(Lease(lease))) => kv.lease.cmp(lease),
        (TARGET_LEASE, _) => kv.lease.cmp(&0),
        _ => Ordering::Equal,
    };
    match compare.result {
        EQUAL => ordering == Ordering::Equal,
        GREATER => ordering == Ordering::Greater,
        LESS => ordering == Ordering::Less,
        NOT_EQUAL => ordering != Ordering::Equal,
        _ => true,
    }
}
