//! Keeps rounds to the number of workers that a person, or the policy, has chosen.
//!
//! A node runs all of its workers, or none: a round takes in nodes in their order while the workers of all of them are
//! not more than the number, but never fewer than the fewest nodes. The others wait for a place.

use std::sync::Arc;

use steadfast_common::records::rendezvous::NodeRecord;
use steadfast_common::records::scale::{ScaleRecord, ScaleWish};

use super::state::{Fact, Rendezvous};
use super::{Refusal, Settings};

impl Rendezvous {
    /// Notes how many workers a person wants.
    ///
    /// # Errors
    /// If the job is over.
    pub fn choose_scale(&self, wish: ScaleWish) -> Result<Vec<Fact>, Refusal> {
        self.check_open()?;
        let next = ScaleRecord::chosen(self.scale.as_deref(), wish);
        Ok(next.into_iter().map(|next| Fact::Scaled(Arc::new(next))).collect())
    }

    /// Returns the record of the number of workers, if there is one.
    pub fn scale(&self) -> Option<&Arc<ScaleRecord>> {
        self.scale.as_ref()
    }

    /// Returns how many workers the rounds are to have, and who decides that.
    pub fn scale_record(&self) -> ScaleRecord {
        self.scale.as_deref().cloned().unwrap_or_default()
    }

    /// Returns the most nodes of a round of members of the last one and those that wait.
    pub(super) fn places(&self, settings: &Settings) -> usize {
        within(self.fitting.present, settings)
    }

    /// Returns the most nodes of a round for which those that are starting are waited for.
    pub(super) fn places_with_starting(&self, settings: &Settings) -> usize {
        within(self.fitting.all, settings)
    }

    /// Returns how many of these nodes, in this order, make the next round.
    pub(super) fn places_of<'r>(
        &self,
        nodes: impl Iterator<Item = &'r NodeRecord>,
        settings: &Settings,
    ) -> usize {
        within(self.fitting_of(nodes), settings)
    }

    /// Returns how many members an intact round would have with the nodes that wait.
    pub(super) fn grown(&self, settings: &Settings) -> usize {
        let (waiting, in_place) = (self.index.waiting.len(), self.index.in_place.len());
        settings.nodes.whole((in_place + waiting).min(self.places(settings)))
    }

    /// Returns how many members of an intact round have to leave it.
    pub(super) fn surplus(&self, settings: &Settings) -> usize {
        self.index.in_place.len().saturating_sub(self.places(settings))
    }

    /// Returns the numbers of workers that rounds can have, in ascending order: those of the nodes that are known now,
    /// and of nodes like the last of them that can be started.
    pub fn worker_counts(&self, settings: &Settings) -> Vec<u32> {
        let (min, max) = (settings.nodes.min() as usize, settings.nodes.max() as usize);
        let known: Vec<u32> = self.candidates(true).into_iter().map(|it| it.slots).collect();
        let startable = self.scale.as_ref().and_then(|it| it.startable).unwrap_or(0);
        let like_last = std::iter::repeat(known.last().copied().unwrap_or(0));
        let (known, more) = (known.iter().copied(), like_last.take_while(|slots| *slots != 0));
        let mut workers = 0;
        let all = known.map(|slots| (slots, true)).chain(more.map(|slots| (slots, false)));
        let sums = all.map_while(|(slots, is_known)| {
            workers += slots;
            (is_known || workers <= startable).then_some(workers)
        });
        sums.take(max).skip(min - 1).step_by(settings.nodes.unit() as usize).collect()
    }

    /// Returns how many workers the nodes that are known now can run.
    pub fn workers_there(&self) -> u32 {
        self.candidates(true).into_iter().map(|record| record.slots).sum()
    }

    /// Notes again how many nodes have no more workers than are desired.
    pub(super) fn follow_fitting(&mut self) {
        let is_limited = self.scale.as_ref().is_some_and(|record| record.workers.is_some());
        self.fitting = match is_limited {
            true => Fitting {
                present: self.fitting_of(self.candidates(false).into_iter()),
                all: self.fitting_of(self.candidates(true).into_iter()),
            },
            false => Fitting::default(),
        };
    }

    /// Returns how many of these nodes, in this order, have no more workers than are desired; `None` if there is room
    /// for more than these.
    fn fitting_of<'r>(&self, nodes: impl Iterator<Item = &'r NodeRecord>) -> Option<usize> {
        let mut left = self.scale.as_ref()?.workers?;
        let mut count = 0;
        for record in nodes {
            match left.checked_sub(record.slots) {
                Some(rest) => (left, count) = (rest, count + 1),
                None => return Some(count),
            }
        }
        (left == 0).then_some(count)
    }

    /// Returns the nodes that can be members of the next round, in the order in which they are taken in.
    fn candidates(&self, with_starting: bool) -> Vec<&NodeRecord> {
        let index = &self.index;
        let starting = index.starting.iter().filter(|_| with_starting);
        let nodes = index.in_place.iter().chain(&index.waiting).chain(starting);
        let mut found: Vec<_> =
            nodes.filter_map(|node| Some((*node, self.nodes.get(node)?))).collect();
        found.sort_by_cached_key(|(node, record)| self.precedence(*node, record));
        found.into_iter().map(|(_, record)| record).collect()
    }
}

/// Counts the nodes that have no more workers together than the rounds are to have; `None` if there is room for more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fitting {
    /// Counts those of the members of the last round and the waiting nodes.
    present: Option<usize>,
    /// Counts those of these and the nodes that are starting.
    all: Option<usize>,
}

/// Returns the number of nodes within the range of the job.
fn within(fitting: Option<usize>, settings: &Settings) -> usize {
    let (min, max) = (settings.nodes.min() as usize, settings.nodes.max() as usize);
    settings.nodes.whole(fitting.map_or(max, |fitting| fitting.clamp(min, max)))
}
