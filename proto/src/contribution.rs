//! Names of contributions on the wire.

use steadfast_common::ids::{Lane, Pass, TaskId, Version};
use steadfast_common::records::applied_records::RecordRange;
use steadfast_common::records::contribution::{ContributionName, LaneEnd, LaneShare, LanesName};

use crate::v1::push_header::Name;
use crate::v1::{self, LaneContribution, TaskContribution};

impl From<&ContributionName> for Name {
    fn from(name: &ContributionName) -> Self {
        match name {
            ContributionName::Lanes(LanesName { version, first, shares, reductions }) => {
                let shares = shares.iter().copied().map(v1::LaneShare::from).collect();
                let (version, lane, reductions) = (version.0, first.0, *reductions);
                Self::Lanes(LaneContribution { version, lane, shares, reductions })
            }
            ContributionName::Range { range, version } => Self::Task(TaskContribution {
                pass: range.pass.0,
                task: range.task.0,
                from: range.from,
                to: range.to,
                last: range.last,
                version: version.0,
            }),
        }
    }
}

impl From<&Name> for ContributionName {
    fn from(name: &Name) -> Self {
        match name {
            Name::Lanes(name) => Self::Lanes(LanesName {
                version: Version(name.version),
                first: Lane(name.lane),
                shares: name.shares.iter().copied().map(LaneShare::from).collect(),
                reductions: name.reductions,
            }),
            Name::Task(name) => {
                let range = RecordRange {
                    pass: Pass(name.pass),
                    task: TaskId(name.task),
                    from: name.from,
                    to: name.to,
                    last: name.last,
                };
                Self::Range { range, version: Version(name.version) }
            }
        }
    }
}

impl From<LaneShare> for v1::LaneShare {
    fn from(LaneShare { records, checksum, end, weight }: LaneShare) -> Self {
        Self { records, last: end == LaneEnd::LastOfPass, checksum, weight }
    }
}

impl From<v1::LaneShare> for LaneShare {
    fn from(v1::LaneShare { records, last, checksum, weight }: v1::LaneShare) -> Self {
        let end = if last { LaneEnd::LastOfPass } else { LaneEnd::MoreToCome };
        Self { records, checksum, end, weight }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_the_wire() {
        let share =
            |records, end, weight| LaneShare { records, checksum: u64::MAX - 1, end, weight };
        let first = share(u32::MAX, LaneEnd::MoreToCome, Some(0.0));
        let shares = [first, share(0, LaneEnd::LastOfPass, None)].into();
        let range = RecordRange { pass: Pass(1), task: TaskId(2), from: 3, to: 4, last: true };
        for name in [
            ContributionName::Lanes(LanesName {
                version: Version(5),
                first: Lane(6),
                shares,
                reductions: 2,
            }),
            ContributionName::Range { range, version: Version(7) },
        ] {
            assert_eq!(ContributionName::from(&Name::from(&name)), name);
        }
    }
}
