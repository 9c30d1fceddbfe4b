//! The spec of an elastic job: it forms groups of nodes that run a user's own program, and has no model.

use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

use crate::job::dataset::hex;
use crate::job::durations;
use crate::job::spec_errors::{SpecError, name_error};
use crate::records::commits::RecordOrder;
use crate::records::rendezvous::{NODES_MAX, NodeRange};
use crate::records::{FORMAT, JobRecord, check_format};

/// The most records of a pass.
pub const RECORDS_MAX: u64 = 1 << 48;

/// Definition of an elastic job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ElasticSpec {
    /// Name of the job; the prefix of its keys is `/jobs/<name>`.
    pub name: String,
    /// The number of records of a pass. Commits then count each of them once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<u64>,
    /// Says how the records are dealt to workers: `"fixed"`, or `"dynamic"` for those of unequal speed.
    #[serde(default, skip_serializing_if = "RecordOrder::is_fixed")]
    pub order: RecordOrder,
    pub nodes: NodesSpec,
}

/// How many nodes run the program, and how long they wait for each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodesSpec {
    /// Fewest nodes of a round.
    pub min: u32,
    /// Most nodes of a round.
    pub max: u32,
    /// A round has a multiple of so many nodes.
    #[serde(default = "default_unit", skip_serializing_if = "is_default_unit")]
    pub unit: u32,
    /// How long the first round is kept open after each arrival, if no node is known to be starting.
    #[serde(default = "default_last_call", with = "durations")]
    pub last_call: Duration,
    /// How long nodes wait for those that are starting, and for members of the last round.
    #[serde(default = "default_join_timeout", with = "durations")]
    pub join_timeout: Duration,
}

fn default_unit() -> u32 {
    1
}

fn is_default_unit(unit: &u32) -> bool {
    *unit == default_unit()
}

fn default_last_call() -> Duration {
    Duration::from_secs(30)
}

fn default_join_timeout() -> Duration {
    Duration::from_secs(600)
}

impl ElasticSpec {
    /// Returns the spec with the default durations.
    pub fn new(name: &str, nodes: NodeRange) -> Self {
        let nodes = NodesSpec {
            min: nodes.min(),
            max: nodes.max(),
            unit: nodes.unit(),
            last_call: default_last_call(),
            join_timeout: default_join_timeout(),
        };
        Self { name: name.to_owned(), records: None, order: RecordOrder::Fixed, nodes }
    }

    /// Returns the range of the number of nodes; `None` if it is invalid.
    pub fn range(&self) -> Option<NodeRange> {
        NodeRange::new(self.nodes.min, self.nodes.max)?.in_units_of(self.nodes.unit)
    }

    /// Returns the SHA-256 of the spec's canonical JSON, in lower-case hexadecimal.
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(self).expect("a spec is plain data");
        hex(&Sha256::digest(json))
    }

    pub(crate) fn all_errors(&self) -> Vec<SpecError> {
        let mut errors: Vec<SpecError> = name_error(&self.name).into_iter().collect();
        let NodesSpec { min, max, unit, .. } = self.nodes;
        if max < min {
            errors.push(SpecError::new(
                &["nodes.min", "nodes.max"],
                format!("`nodes.min` is {min}, more than `nodes.max`, {max}"),
            ));
        } else if NodeRange::new(min, max).is_some_and(|it| it.in_units_of(unit).is_none()) {
            errors.push(SpecError::new(
                &["nodes.unit"],
                format!("`nodes.min` and `nodes.max` must be multiples of `nodes.unit`, {unit}"),
            ));
        } else if self.range().is_none() {
            errors.push(SpecError::new(
                &["nodes.min", "nodes.max"],
                format!("`nodes.min` and `nodes.max` must lie between 1 and {NODES_MAX}"),
            ));
        }
        if self.records.is_some_and(|records| !(1..=RECORDS_MAX).contains(&records)) {
            errors.push(SpecError::new(
                &["records"],
                format!("`records` must lie between 1 and {RECORDS_MAX}"),
            ));
        }
        if self.records.is_none() && !self.order.is_fixed() {
            errors.push(SpecError::new(
                &["order"],
                "`order` says how records are dealt; give their number, `records`, too",
            ));
        }
        if self.nodes.join_timeout.is_zero() {
            errors.push(SpecError::new(
                &["nodes.join_timeout"],
                "`nodes.join_timeout` must be longer than 0",
            ));
        }
        errors
    }
}

/// `job`: the definition of an elastic job. A record of another [`FORMAT`] is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ElasticJobRecord {
    /// [`FORMAT`]
    pub format: u64,
    pub kind: ElasticKind,
    pub spec: ElasticSpec,
    /// [`ElasticSpec::digest`] of `spec`.
    pub digest: String,
}

impl ElasticJobRecord {
    /// Creates the record of a new job in the current [`FORMAT`], with the digest of `spec`.
    pub fn new(spec: &ElasticSpec) -> Self {
        let (spec, digest) = (spec.clone(), spec.digest());
        Self { format: FORMAT, kind: ElasticKind::Elastic, spec, digest }
    }
}

/// Distinguishes the record of an elastic job from that of a training job, which has no kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElasticKind {
    Elastic,
}

/// `job`: the definition of a training job or of an elastic job.
#[derive(Clone, Debug, PartialEq)]
pub enum AnyJobRecord {
    Training(Box<JobRecord>),
    Elastic(ElasticJobRecord),
}

impl AnyJobRecord {
    /// Returns whether a job file with this digest of its spec is that of the job.
    pub fn is_of(&self, spec_digest: &str) -> bool {
        match self {
            Self::Training(record) => record.is_of(spec_digest),
            Self::Elastic(record) => record.digest == spec_digest,
        }
    }
}

impl Serialize for AnyJobRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Training(record) => Serialize::serialize(record, serializer),
            Self::Elastic(record) => record.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for AnyJobRecord {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        check_format(&value).map_err(D::Error::custom)?;
        let read = match value.get("kind").is_some() {
            true => serde_json::from_value(value).map(Self::Elastic),
            false => serde_json::from_value(value).map(|it| Self::Training(Box::new(it))),
        };
        read.map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> ElasticSpec {
        ElasticSpec::new("ddp", NodeRange::new(1, 4).unwrap())
    }

    #[test]
    fn the_record_of_a_job_says_its_kind() {
        let record = AnyJobRecord::Elastic(ElasticJobRecord::new(&spec()));
        let text = serde_json::to_string(&record).unwrap();
        assert!(text.starts_with(r#"{"format":1,"kind":"elastic","spec":{"name":"ddp""#), "{text}");
        assert_eq!(serde_json::from_str::<AnyJobRecord>(&text).unwrap(), record);
        let error = serde_json::from_str::<JobRecord>(&text).unwrap_err().to_string();
        assert!(error.contains("is elastic"), "{error}");
    }

    #[test]
    fn impossible_numbers_of_nodes_are_rejected() {
        for (min, max) in [(2, 1), (0, 1), (1, NODES_MAX + 1)] {
            let mut spec = spec();
            (spec.nodes.min, spec.nodes.max) = (min, max);
            assert_eq!(spec.all_errors().len(), 1, "{min}:{max}");
        }
        let spec_of_none = ElasticSpec { order: RecordOrder::Dynamic, ..spec() };
        assert_eq!(spec_of_none.all_errors().len(), 1);
        for records in [0, RECORDS_MAX + 1] {
            let spec = ElasticSpec { records: Some(records), ..spec() };
            assert_eq!(spec.all_errors().len(), 1, "{records}");
        }
        assert_eq!(spec().all_errors(), []);
    }
}
