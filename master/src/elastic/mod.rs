//! The event loop of the acting master of an elastic job.
//!
//! The machine decides requests and changes in etcd; the driver of the term commits its facts, and then the requests
//! are answered from its state.

pub(crate) mod agentless;
mod agents;
mod answers;
mod failed;
pub(crate) mod handle;
mod host;
mod launch;
mod machine;
mod scaling;
pub(crate) mod service;
mod status;
mod stored;
mod timings;

use std::sync::Arc;

use steadfast_common::job::elastic::ElasticSpec;
use steadfast_common::records::ResultRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::status::MasterStatus;
use steadfast_coord::term::{Committer, End, Term, moment};
use steadfast_coord::{CoordError, Etcd, Leadership};
use steadfast_master_core::rendezvous::{Settings, Timers};
use steadfast_process::Failure;

use self::agents::Agents;
use self::handle::ElasticHandle;
use self::host::ElasticHost;
use self::machine::ElasticJob;
use self::status::Timeline;
pub use self::stored::stored_elastic_status;

/// The event loop and the state that it owns.
pub(crate) struct ElasticLoop {
    term: Term<ElasticJob>,
    host: ElasticHost,
}

impl ElasticLoop {
    /// Recovers everything from etcd and prepares the loop.
    ///
    /// # Errors
    /// If etcd does not answer, or holds a value that cannot be parsed.
    pub async fn open(
        etcd: &Etcd,
        keys: &Keys,
        spec: &ElasticSpec,
        leadership: Leadership,
        own_address: &str,
    ) -> Result<(Self, ElasticHandle), Failure> {
        let settings = settings(spec, keys)?;
        let state = stored::read(etcd, keys).await?;
        let epoch = leadership.epoch();
        let master = MasterStatus { address: own_address.to_owned(), epoch };
        let first = status::of(&spec.name, &settings, &state, &Timers::default());
        let mut host = ElasticHost::open(etcd, keys, master, first).await?;
        let agents = Agents::of(keys, &host.view());
        let moment = moment(0);
        let timeline = Timeline::begin(epoch, moment.unix_ms);
        let job = ElasticJob::new(spec.name.clone(), settings, state, agents, timeline, moment);
        host.show(&job);
        let (term, requests) = Term::new(job, Committer::new(etcd.clone(), leadership));
        let handle = ElasticHandle {
            requests,
            rounds: host.rounds.subscribe(),
            barriers: host.barriers.subscribe(),
            status: host.status.subscribe(),
        };
        Ok((Self { term, host }, handle))
    }

    /// Acts until the job is over or `leave` completes; returns the result if the job is over.
    ///
    /// # Errors
    /// When the term is lost, or etcd is unreachable for too long.
    pub async fn run(
        mut self,
        leave: impl Future<Output = ()>,
    ) -> Result<Option<Arc<ResultRecord>>, CoordError> {
        match self.term.run(&mut self.host, leave).await? {
            End::Over(job) => {
                self.host.show(&job);
                Ok(job.state.result().cloned())
            }
            End::Left(_) => Ok(None),
        }
    }
}

fn settings(spec: &ElasticSpec, keys: &Keys) -> Result<Settings, Failure> {
    let nodes = spec.range().ok_or_else(|| {
        Failure::invalid(format!("{}: the numbers of nodes are invalid", keys.job()))
    })?;
    Ok(Settings {
        nodes,
        last_call_ms: spec.nodes.last_call.as_millis() as u64,
        join_timeout_ms: spec.nodes.join_timeout.as_millis() as u64,
        records: spec.records,
        order: spec.order,
    })
}
