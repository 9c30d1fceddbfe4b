//! Requests for values at a version, and the answers of slots.

use std::time::Duration;

use steadfast_common::ids::Version;
use steadfast_common::records::position::Position;

use crate::v1::{PullHeader, PullRequest, Target};

/// Says which versions satisfy a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionMatch {
    AtLeast(Version),
    Exactly(Version),
}

impl VersionMatch {
    /// Returns the version that a slot must have reached.
    pub fn version(self) -> Version {
        match self {
            Self::AtLeast(version) | Self::Exactly(version) => version,
        }
    }
}

/// Says which values of the blocks are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullValues {
    Parameters,
    /// Their moving averages.
    Averages,
}

/// Answers a pull. `T` is what the slot has at the version: a position on the wire, and its values as well in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullAnswer<T> {
    Ready(T),
    /// The slot did not reach the version in time.
    NotYet {
        present: Version,
    },
    /// The slot has left the version behind, and no other one was accepted.
    Past {
        present: Version,
    },
}

impl PullRequest {
    /// Builds a request that waits up to `wait` for its version.
    pub fn new(target: Target, versions: VersionMatch, wait: Duration) -> Self {
        Self {
            target: Some(target),
            version: versions.version().0,
            wait_ms: wait.as_millis() as u64,
            exact: matches!(versions, VersionMatch::Exactly(_)),
            averages: false,
        }
    }

    /// Returns the request for other values.
    #[must_use]
    pub fn of(self, values: PullValues) -> Self {
        Self { averages: values == PullValues::Averages, ..self }
    }

    /// Returns which values are requested.
    pub fn values(&self) -> PullValues {
        if self.averages { PullValues::Averages } else { PullValues::Parameters }
    }

    /// Returns the versions that satisfy the request.
    pub fn versions(&self) -> VersionMatch {
        let version = Version(self.version);
        if self.exact { VersionMatch::Exactly(version) } else { VersionMatch::AtLeast(version) }
    }
}

impl PullHeader {
    /// Builds the header of an answer with values at `position`.
    pub fn at(position: Position) -> Self {
        Self { ready: true, position: Some(position.into()) }
    }

    /// Builds the header of an answer without values, of a slot at version `present`.
    pub fn without_values(present: Version) -> Self {
        let position = Position { version: present, ..Position::default() };
        Self { ready: false, position: Some(position.into()) }
    }

    /// Returns the answer to a pull of `versions`.
    pub fn answer(self, versions: VersionMatch) -> PullAnswer<Position> {
        let position = Position::from(self.position.unwrap_or_default());
        let present = position.version;
        match versions {
            _ if self.ready => PullAnswer::Ready(position),
            VersionMatch::Exactly(version) if version < present => PullAnswer::Past { present },
            VersionMatch::Exactly(_) | VersionMatch::AtLeast(_) => PullAnswer::NotYet { present },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Target = Target { generation: 1, slot: 2, incarnation: 3 };

    #[test]
    fn the_versions_of_a_pull_survive_the_wire() {
        for versions in [VersionMatch::AtLeast(Version(4)), VersionMatch::Exactly(Version(5))] {
            assert_eq!(PullRequest::new(TARGET, versions, Duration::ZERO).versions(), versions);
        }
    }

    /// A slot that is past a version can never give it: a trainer must ask for another one.
    #[test]
    fn only_an_exact_version_can_be_past() {
        let (wanted, position) =
            (Version(7), Position { version: Version(7), ..Default::default() });
        let (exactly, at_least) = (VersionMatch::Exactly(wanted), VersionMatch::AtLeast(wanted));
        for versions in [exactly, at_least] {
            assert_eq!(PullHeader::at(position).answer(versions), PullAnswer::Ready(position));
        }
        let of = |present: Version, versions| PullHeader::without_values(present).answer(versions);
        for present in [6, 7].map(Version) {
            assert_eq!(of(present, exactly), PullAnswer::NotYet { present });
        }
        let present = Version(8);
        assert_eq!(of(present, exactly), PullAnswer::Past { present });
        assert_eq!(of(present, at_least), PullAnswer::NotYet { present });
    }
}
