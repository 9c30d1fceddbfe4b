//! The order in which the lanes of a step are summed: a fixed tree.
//!
//! Floating-point addition is not associative, so the order of additions affects the result. The tree is
//! that of RFC 6962, section 2.1: the left child of a node with more than one lane has as many lanes as the
//! largest power of two below their number. Two nodes are disjoint, or one contains the other. A trainer
//! with all lanes of a node can therefore send one sum, and others can send lane by lane, with the same
//! bits: the sum of a node depends only on its name.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::Lane;

/// A node of the tree: the lanes from `first` up to but excluding `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Node {
    first: u32,
    end: u32,
}

impl Node {
    /// Returns the lanes of the node, ascending.
    pub fn lanes(self) -> impl Iterator<Item = Lane> {
        (self.first..self.end).map(Lane)
    }

    pub fn first(self) -> Lane {
        Lane(self.first)
    }

    /// Returns whether the node contains all lanes of `other`.
    pub fn holds(self, other: Self) -> bool {
        self.first <= other.first && other.end <= self.end
    }

    /// Returns the two children of the node; `None` for a single lane.
    pub fn halves(self) -> Option<(Self, Self)> {
        let len = self.end - self.first;
        if len < 2 {
            return None;
        }
        let middle = self.first + (1 << (len - 1).ilog2());
        Some((Self { end: middle, ..self }, Self { first: middle, ..self }))
    }
}

/// The tree over the lanes of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneTree {
    lanes: u32,
}

impl LaneTree {
    pub fn new(lanes: u32) -> Self {
        Self { lanes }
    }

    /// Returns the node of all lanes.
    pub fn root(self) -> Node {
        Node { first: 0, end: self.lanes }
    }

    /// Returns the node of one lane.
    pub fn leaf(self, lane: Lane) -> Node {
        Node { first: lane.0, end: lane.0 + 1 }
    }

    /// Returns the node of `count` lanes from `first` on, if there is one.
    pub fn node(self, first: Lane, count: u32) -> Option<Node> {
        let node = Node { first: first.0, end: first.0.checked_add(count)? };
        (0 < count && (node == self.root() || self.parent(node).is_some())).then_some(node)
    }

    /// Returns the smallest set of nodes that contain exactly these lanes, ascending.
    pub fn cover(self, lanes: &BTreeSet<Lane>) -> Vec<Node> {
        let mut cover = Vec::new();
        let mut open = vec![self.root()];
        while let Some(node) = open.pop() {
            if node.lanes().all(|lane| lanes.contains(&lane)) {
                cover.push(node);
            } else if let Some((left, right)) = node.halves() {
                open.extend([right, left]);
            }
        }
        cover
    }

    /// Returns the parent of a node with its two children; `None` for the root, and for lanes that are not
    /// a node.
    fn parent(self, node: Node) -> Option<(Node, (Node, Node))> {
        let mut above = self.root();
        while let Some((left, right)) = above.halves() {
            if left == node || right == node {
                return Some((above, (left, right)));
            }
            above = if left.holds(node) { left } else { right };
        }
        None
    }
}

/// Partial sums of lanes; siblings are added as soon as both are present.
///
/// The nodes present are disjoint, and no two of them are siblings.
#[derive(Clone, Debug, Default)]
pub struct LaneSums<T> {
    tree: LaneTree,
    /// The sum of each node that is present; `None` for a node without a record.
    held: BTreeMap<Node, Option<T>>,
}

impl<T> LaneSums<T> {
    /// Creates partial sums without any lane.
    pub fn new(tree: LaneTree) -> Self {
        Self { tree, held: BTreeMap::new() }
    }

    /// Returns whether all lanes of a node are present.
    pub fn has(&self, node: Node) -> bool {
        let until = Node { first: node.first, end: u32::MAX };
        self.held.range(..=until).next_back().is_some_and(|(held, _)| held.holds(node))
    }

    /// Adds the sum of a node that is not present; it replaces partial sums of its lanes, which it includes.
    /// `add` adds the right sum to the left one.
    pub fn put(&mut self, node: Node, sum: Option<T>, mut add: impl FnMut(&mut T, T)) {
        let (mut node, mut sum) = (node, sum);
        self.held.retain(|held, _| !node.holds(*held));
        while let Some((parent, (left, right))) = self.tree.parent(node) {
            let other = if node == left { right } else { left };
            let Some(of_other) = self.held.remove(&other) else { break };
            let (of_left, of_right) = if node == left { (sum, of_other) } else { (of_other, sum) };
            sum = match (of_left, of_right) {
                (Some(mut left), Some(right)) => {
                    add(&mut left, right);
                    Some(left)
                }
                (one, other) => one.or(other),
            };
            node = parent;
        }
        self.held.insert(node, sum);
    }

    /// Returns the sum of all lanes once all are present; the inner option is `None` if no lane had a
    /// record.
    pub fn whole(&self) -> Option<&Option<T>> {
        self.held.get(&self.tree.root())
    }

    /// Takes the sum of all lanes once all are present. The lanes stay present, without a sum.
    pub fn take_whole(&mut self) -> Option<T> {
        self.held.get_mut(&self.tree.root())?.take()
    }

    /// Returns the nodes present with their sums, ascending.
    pub fn into_held(self) -> impl Iterator<Item = (Node, Option<T>)> {
        self.held.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(tree: LaneTree) -> Vec<Node> {
        let all = (0..tree.lanes).flat_map(|first| (1..=tree.lanes).map(move |it| (first, it)));
        all.filter_map(|(first, count)| tree.node(Lane(first), count)).collect()
    }

    /// Returns the sum of a node as an expression.
    fn written(node: Node, without: &[u32]) -> Option<String> {
        let Some((left, right)) = node.halves() else {
            return (!without.contains(&node.first)).then(|| node.first.to_string());
        };
        match (written(left, without), written(right, without)) {
            (Some(left), Some(right)) => Some(format!("({left}+{right})")),
            (one, other) => one.or(other),
        }
    }

    fn add(left: &mut String, right: String) {
        *left = format!("({left}+{right})");
    }

    #[test]
    fn a_tree_has_one_node_less_than_twice_its_lanes_and_they_are_nested() {
        for lanes in 1..=19 {
            let all = nodes(LaneTree::new(lanes));
            assert_eq!(all.len() as u32, 2 * lanes - 1);
            for (one, other) in all.iter().flat_map(|one| all.iter().map(move |it| (*one, *it))) {
                let apart = one.end <= other.first || other.end <= one.first;
                assert!(apart || one.holds(other) || other.holds(one), "{one:?} {other:?}");
            }
        }
        assert_eq!(LaneTree::new(4).node(Lane(1), 2), None);
        assert_eq!(LaneTree::new(4).node(Lane(u32::MAX), 2), None);
        assert_eq!(LaneTree::new(4).node(Lane(0), 0), None);
        assert_eq!(LaneTree::new(4).node(Lane(2), 4), None);
    }

    /// A cover contains each lane once and has the fewest nodes.
    #[test]
    fn a_cover_holds_each_lane_once_in_the_largest_nodes() {
        let tree = LaneTree::new(7);
        for chosen in 0_u32..1 << 7 {
            let lanes: BTreeSet<Lane> =
                tree.root().lanes().filter(|it| chosen >> it.0 & 1 == 1).collect();
            let cover = tree.cover(&lanes);
            let covered: Vec<Lane> = cover.iter().flat_map(|it| it.lanes()).collect();
            assert_eq!(covered, Vec::from_iter(lanes));
            for (node, (left, right)) in cover.iter().filter_map(|it| tree.parent(*it)) {
                assert!(!(cover.contains(&left) && cover.contains(&right)), "{node:?} is whole");
            }
        }
        assert_eq!(tree.cover(&tree.root().lanes().collect()), [tree.root()]);
    }

    /// I7: the expression of the sum is the same for any nodes in any order, including overlapping nodes and
    /// lanes without a record.
    #[test]
    fn the_sum_does_not_depend_on_order_or_grouping() {
        let tree = LaneTree::new(5);
        let all = nodes(tree);
        for without in [&[][..], &[0], &[3, 4], &[0, 1, 2, 3, 4]] {
            let wanted = written(tree.root(), without);
            let mut open = vec![LaneSums::new(tree)];
            let (mut seen, mut whole) = (BTreeSet::new(), 0);
            while let Some(sums) = open.pop() {
                if let Some(sum) = sums.whole() {
                    assert_eq!(*sum, wanted);
                    whole += 1;
                    continue;
                }
                for node in all.iter().filter(|it| !sums.has(**it)) {
                    let mut next = sums.clone();
                    next.put(*node, written(*node, without), add);
                    if seen.insert(format!("{:?}", next.held)) {
                        open.push(next);
                    }
                }
            }
            assert_eq!(whole, 1, "all orders give one sum");
            assert!(20 < seen.len(), "{}", seen.len());
        }
    }
}
