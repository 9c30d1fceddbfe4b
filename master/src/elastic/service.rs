//! The gRPC service of an elastic job's master. A standby rejects calls, and callers look for the acting
//! master.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Incarnation, Millis, NodeId, Phase, Round};
use steadfast_common::records::JobOutcome;
use steadfast_common::records::commits::RecordOrder;
use steadfast_common::records::ranges::NUMBER_MAX;
use steadfast_common::records::rendezvous::RoundRecord;
use steadfast_common::status::{ElasticStatus, NodeReport};
use steadfast_host::time::{Instant, timeout};
use steadfast_master_core::rendezvous::{
    BarrierId, Caller, DealTerms, Directive, Held, JoinTerms, describe_wait,
};
use steadfast_proto::status;
use steadfast_proto::v1;
use steadfast_proto::v1::elastic_server::Elastic;
use steadfast_proto::v1::{
    AnnounceReply, AnnounceRequest, BarrierReply, BarrierRequest, DealReply, DealRequest,
    ElasticMember, ElasticRound, ElasticStatusReply, ElasticStatusRequest, EnterReply,
    EnterRequest, Entries, GetClusterSpecReply, GetClusterSpecRequest, GetWaitingNodesReply,
    GetWaitingNodesRequest, GiveUpReply, GiveUpRequest, JoinReply, JoinRequest, Node, ScaleReply,
    ScaleRequest, ShareStateReply, ShareStateRequest, ShutDownReply, ShutDownRequest,
    SynchronizeReply, SynchronizeRequest, WatchReply, WatchRequest, enter_reply, join_reply,
};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::agentless::{self, AgentlessNodes};
use super::handle::{Change, ElasticError, ElasticHandle, Event, Passage, Reply, ShutDown};
use super::timings::RoundTimes;
use crate::scaling::{scale_reply, scale_wish};

/// Maximum time that a call may block. Callers repeat it.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Maximum length of texts that callers send.
const TEXT_BYTES_MAX: usize = 1000;

/// What this master serves.
#[derive(Clone, Debug, Default)]
pub(crate) enum Serving {
    /// The master does not act, or runs a training job.
    #[default]
    Nothing,
    Job(Box<AgentlessNodes>),
    /// The job is over.
    Over,
}

impl Serving {
    /// Returns the status of the job, if this master acts for one.
    pub fn status(&self) -> Option<Arc<ElasticStatus>> {
        match self {
            Self::Job(nodes) => Some(nodes.handle.status.borrow().clone()),
            Self::Nothing | Self::Over => None,
        }
    }
}

/// Serves calls while this master acts, and rejects them otherwise.
pub(crate) struct Service {
    serving: watch::Receiver<Serving>,
    rounds: EncodedOnce<RoundRecord>,
    entries: EncodedOnce<Data>,
}

/// What the members of a round have passed to a barrier.
type Data = BTreeMap<NodeId, Arc<[u8]>>;

/// The encoded form of the value that was last asked for. All members of a round ask for the same one.
struct EncodedOnce<T>(Mutex<Option<(Arc<T>, Bytes)>>);

impl<T> EncodedOnce<T> {
    fn get(&self, value: &Arc<T>, encode: impl FnOnce(&T) -> Vec<u8>) -> Bytes {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((known, encoded)) if Arc::ptr_eq(known, value) => encoded.clone(),
            Some(_) | None => {
                let encoded = Bytes::from(encode(value));
                *last = Some((Arc::clone(value), encoded.clone()));
                encoded
            }
        }
    }
}

impl Service {
    pub fn new(serving: watch::Receiver<Serving>) -> Self {
        let (rounds, entries) = (EncodedOnce(Mutex::default()), EncodedOnce(Mutex::default()));
        Self { serving, rounds, entries }
    }

    fn nodes(&self) -> Result<Box<AgentlessNodes>, Status> {
        match &*self.serving.borrow() {
            Serving::Job(nodes) => Ok(nodes.clone()),
            Serving::Nothing => Err(reject(&ElasticError::NotActing)),
            Serving::Over => {
                Err(status(ErrorKind::Conflict, "Server has shutdown: the job is over"))
            }
        }
    }

    fn handle(&self) -> Result<ElasticHandle, Status> {
        Ok(self.nodes()?.handle)
    }
}

pub(super) fn reject(error: &ElasticError) -> Status {
    status(error.kind(), error.to_string())
}

fn invalid(message: &str) -> Status {
    status(ErrorKind::Invalid, message)
}

fn caller(node: Option<Node>) -> Result<Caller, Status> {
    let node = node.ok_or_else(|| invalid("the call lacks its node"))?;
    let id = node.id.parse().map_err(|_| invalid("the node id is not a UUID"))?;
    Ok(Caller { node: NodeId(id), incarnation: Incarnation(node.incarnation) })
}

fn text(mut text: String) -> String {
    while TEXT_BYTES_MAX < text.len() {
        text.pop();
    }
    text
}

fn node_report(round: Round, report: v1::NodeReport) -> NodeReport {
    NodeReport {
        round,
        restarts: report.restarts,
        restarts_max: report.restarts_max,
        changes: report.changes,
        state: text(report.state),
        last_exit: text(report.last_exit),
        busy_us: report.busy_us,
    }
}

fn round_times(times: RoundTimes) -> v1::RoundTimes {
    let seconds = |time: Millis| Duration::from_millis(time.0).as_secs_f64();
    v1::RoundTimes {
        round: times.round.0,
        rendezvous_seconds: seconds(times.rendezvous),
        running_seconds: seconds(times.running),
    }
}

fn wait(ms: u32) -> Instant {
    Instant::now() + Duration::from_millis(ms.into()).min(WAIT_MAX)
}

/// Asks until an answer is final, or the deadline has passed. Asks again whenever `changes` says so.
pub(super) async fn ask_until<T, E>(
    handle: &ElasticHandle,
    mut changes: watch::Receiver<u64>,
    deadline: Instant,
    mut event: E,
    is_final: impl Fn(&T) -> bool,
) -> Result<T, ElasticError>
where
    E: FnMut(Reply<T>) -> Event,
{
    loop {
        changes.mark_unchanged();
        let answer = handle.ask(&mut event).await?;
        if is_final(&answer) || deadline <= Instant::now() {
            return Ok(answer);
        }
        match timeout(deadline.remaining(), changes.changed()).await {
            Ok(Ok(())) | Err(_) => {}
            // The loop has ended.
            Ok(Err(_)) => return Err(ElasticError::NotActing),
        }
    }
}

/// Waits until a caller is a member of a round that it does not know, or has given up.
pub(super) async fn join(
    handle: &ElasticHandle,
    caller: Caller,
    terms: JoinTerms,
    deadline: Instant,
) -> Result<Directive, ElasticError> {
    let join = |reply| Event::Join { caller, terms, reply };
    let is_final = |directive: &Directive| match directive {
        Directive::Wait { .. } | Directive::WaitForPlace { .. } => false,
        Directive::Continue { .. }
        | Directive::Start(_)
        | Directive::Join { .. }
        | Directive::TooFew { .. } => true,
    };
    ask_until(handle, handle.rounds.clone(), deadline, join, is_final).await
}

/// Enters a barrier, and waits until it is released or has ended.
pub(super) async fn enter(
    handle: &ElasticHandle,
    caller: Caller,
    barrier: &BarrierId,
    data: Arc<[u8]>,
    deadline: Instant,
) -> Result<Passage, ElasticError> {
    let mut data = Some(data);
    let enter = |reply| {
        let barrier = barrier.clone();
        match data.take() {
            Some(data) => Event::Enter { caller, barrier, data, reply },
            None => Event::Look { caller, barrier, reply },
        }
    };
    let is_final = |passage: &Passage| match passage {
        Passage::Waiting { .. } => false,
        Passage::Released(_) | Passage::Ended { .. } => true,
    };
    ask_until(handle, handle.barriers.clone(), deadline, enter, is_final).await
}

fn encoded_entries(data: &Data) -> Vec<u8> {
    let data = data.iter().map(|(node, data)| (node.to_string(), Bytes::copy_from_slice(data)));
    Entries { data: data.collect() }.encode_to_vec()
}

fn encoded_round(record: &RoundRecord) -> Vec<u8> {
    let members = record.members.iter().map(|member| ElasticMember {
        node: member.node.to_string(),
        address: member.address.clone(),
        slots: member.slots,
        first_rank: member.first_rank,
        incarnation: member.incarnation.0,
    });
    ElasticRound {
        round: record.round.0,
        world_size: record.world_size,
        members: members.collect(),
        data: record.data.map(|data| v1::RoundData {
            records: data.records,
            is_dynamic: data.order == RecordOrder::Dynamic,
            commit: data.commit.map(|id| v1::CommitId { round: id.round.0, phase: id.phase.0 }),
        }),
    }
    .encode_to_vec()
}

/// Returns what a node does next.
fn next(directive: &Directive, rounds: &EncodedOnce<RoundRecord>) -> join_reply::Next {
    match directive {
        Directive::Start(record) => join_reply::Next::Start(rounds.get(record, encoded_round)),
        Directive::Wait { awaited, missing, .. } => {
            join_reply::Next::Wait(describe_wait(awaited, *missing))
        }
        Directive::WaitForPlace { round, limit } => {
            join_reply::Next::Wait(format!("waits for a place: round {round} {limit}"))
        }
        Directive::TooFew { awaited, waiting, nodes_min } => {
            let others = if awaited.count == 0 {
                String::new()
            } else {
                format!("; {awaited} did not join")
            };
            join_reply::Next::TooFew(format!(
                "{waiting} of at least {nodes_min} nodes joined within the join timeout{others}"
            ))
        }
        Directive::Continue { .. } | Directive::Join { .. } => {
            join_reply::Next::Wait("waits for the next round".to_owned())
        }
    }
}

#[tonic::async_trait]
impl Elastic for Service {
    async fn get_cluster_spec(
        &self,
        request: Request<GetClusterSpecRequest>,
    ) -> Result<Response<GetClusterSpecReply>, Status> {
        let GetClusterSpecRequest { address, min_nodes, max_nodes, .. } = request.into_inner();
        let nodes = self.nodes()?;
        let record = nodes.cluster(&address, min_nodes, max_nodes).await?;
        let rank = record.members.iter().position(|member| member.address == address);
        Ok(Response::new(GetClusterSpecReply {
            cluster_spec: record.cluster_spec(),
            round: record.round.0,
            rank: rank.unwrap_or(0) as u32,
        }))
    }

    async fn get_waiting_nodes(
        &self,
        request: Request<GetWaitingNodesRequest>,
    ) -> Result<Response<GetWaitingNodesReply>, Status> {
        let address = request.into_inner().address;
        let waiting_nodes = self.nodes()?.waiting_nodes(&address).await?;
        Ok(Response::new(GetWaitingNodesReply { waiting_nodes }))
    }

    async fn barrier(
        &self,
        request: Request<BarrierRequest>,
    ) -> Result<Response<BarrierReply>, Status> {
        let BarrierRequest { address, tag, timeout_seconds, phase } = request.into_inner();
        let nodes = self.nodes()?;
        let limit = agentless::limit(timeout_seconds);
        let outcome = nodes.pass(&address, tag, phase.map(Phase), Arc::default(), limit).await?;
        let error = outcome.err().unwrap_or_default();
        Ok(Response::new(BarrierReply { success: error.is_empty(), error }))
    }

    async fn synchronize(
        &self,
        request: Request<SynchronizeRequest>,
    ) -> Result<Response<SynchronizeReply>, Status> {
        let SynchronizeRequest { address, tag, data, timeout_seconds, phase } =
            request.into_inner();
        let nodes = self.nodes()?;
        let limit = agentless::limit(timeout_seconds);
        let data = data.as_ref().into();
        let outcome = nodes.pass(&address, tag, phase.map(Phase), data, limit).await?;
        let (data, error) = match outcome {
            Ok(data) => (data, String::new()),
            Err(error) => (Default::default(), error),
        };
        Ok(Response::new(SynchronizeReply { success: error.is_empty(), error, data }))
    }

    async fn shut_down(
        &self,
        request: Request<ShutDownRequest>,
    ) -> Result<Response<ShutDownReply>, Status> {
        let ShutDownRequest { reason, success } = request.into_inner();
        let (outcome, reason) = match (success, text(reason)) {
            (true, reason) => (JobOutcome::Finished, reason),
            (false, reason) if reason.is_empty() => {
                (JobOutcome::Failed, "shut down on request".to_owned())
            }
            (false, reason) => (JobOutcome::Failed, reason),
        };
        let event = |reply| Event::ShutDown { outcome, reason, reply };
        let ShutDown { last, times } =
            self.handle()?.ask(event).await.map_err(|error| reject(&error))?;
        let times = times.into_iter().map(round_times).collect();
        Ok(Response::new(ShutDownReply { rounds: last.0, times }))
    }

    async fn announce(
        &self,
        request: Request<AnnounceRequest>,
    ) -> Result<Response<AnnounceReply>, Status> {
        let caller = caller(request.into_inner().node)?;
        let event = |reply| Event::Announce { caller, reply };
        self.handle()?.ask(event).await.map_err(|error| reject(&error))?;
        Ok(Response::new(AnnounceReply {}))
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let JoinRequest { node, after, nodes_min, nodes_max, wait_ms } = request.into_inner();
        let terms = JoinTerms { after: Round(after), nodes_min, nodes_max };
        let joined = join(&self.handle()?, caller(node)?, terms, wait(wait_ms)).await;
        let directive = joined.map_err(|error| reject(&error))?;
        Ok(Response::new(JoinReply { next: Some(next(&directive, &self.rounds)) }))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<WatchReply>, Status> {
        let WatchRequest { node, round, wait_ms, known_change, report } = request.into_inner();
        let (caller, known, handle) = (caller(node)?, Round(round), self.handle()?);
        let failed = Round(report.as_ref().map_or(0, |report| report.failed_round));
        let mut report = report.map(|report| node_report(known, report));
        let event = |reply| Event::Watch { caller, known, report: report.take(), failed, reply };
        let is_final = |change: &Change| change.nodes != known_change || !change.failed.is_empty();
        let rounds = handle.rounds.clone();
        let change = ask_until(&handle, rounds, wait(wait_ms), event, is_final).await;
        let change = change.map_err(|error| reject(&error))?;
        let Change { nodes, surplus, lost, revision, failed } = change;
        Ok(Response::new(WatchReply { change: nodes, surplus, lost, revision, failed }))
    }

    async fn give_up(
        &self,
        request: Request<GiveUpRequest>,
    ) -> Result<Response<GiveUpReply>, Status> {
        let GiveUpRequest { node, reason, report } = request.into_inner();
        let caller = caller(node)?;
        let report = report.map(|report| node_report(Round(0), report));
        let event = |reply| Event::GiveUp { caller, reason: text(reason), report, reply };
        self.handle()?.ask(event).await.map_err(|error| reject(&error))?;
        Ok(Response::new(GiveUpReply {}))
    }

    async fn enter(&self, request: Request<EnterRequest>) -> Result<Response<EnterReply>, Status> {
        let EnterRequest { node, round, tag, phase, data, wait_ms } = request.into_inner();
        let barrier = BarrierId { round: Round(round), tag, phase: Phase(phase) };
        let (caller, handle) = (caller(node)?, self.handle()?);
        let entered = enter(&handle, caller, &barrier, data.as_ref().into(), wait(wait_ms)).await;
        let (outcome, entries, reason) = match entered.map_err(|error| reject(&error))? {
            Passage::Released(data) => {
                let entries = self.entries.get(&data, encoded_entries);
                (enter_reply::Outcome::Released, entries, String::new())
            }
            Passage::Ended { reason } => (enter_reply::Outcome::Ended, Bytes::new(), reason),
            Passage::Waiting { reason } => (enter_reply::Outcome::Waiting, Bytes::new(), reason),
        };
        Ok(Response::new(EnterReply { outcome: outcome.into(), entries, reason }))
    }

    async fn deal(&self, request: Request<DealRequest>) -> Result<Response<DealReply>, Status> {
        let DealRequest { node, round, total, wanted, least, end } = request.into_inner();
        let end = if end == 0 { NUMBER_MAX } else { end };
        let terms = DealTerms { round: Round(round), total, wanted, least, end };
        let caller = caller(node)?;
        let event = |reply| Event::Deal { caller, terms, reply };
        let Held { total, ranges, is_end } =
            self.handle()?.ask(event).await.map_err(|error| reject(&error))?;
        let range = |range: &Range<u64>| v1::RecordRange { start: range.start, end: range.end };
        let ranges = ranges.iter().map(range).collect();
        Ok(Response::new(DealReply { total, ranges, is_end }))
    }

    async fn share_state(
        &self,
        request: Request<ShareStateRequest>,
    ) -> Result<Response<ShareStateReply>, Status> {
        let ShareStateRequest { state, token } = request.into_inner();
        let state = state.map(|state| state.to_vec());
        let event = |reply| Event::Share { token, state, reply };
        let shared = self.handle()?.ask(event).await.map_err(|error| reject(&error))?;
        Ok(Response::new(ShareStateReply {
            token: shared.record.as_ref().map_or(0, |record| record.token),
            state: shared.record.map(|record| record.state.clone().into()),
            accepted: shared.accepted,
        }))
    }

    async fn scale(&self, request: Request<ScaleRequest>) -> Result<Response<ScaleReply>, Status> {
        let wish = scale_wish(request.get_ref())?;
        let event = |reply| Event::Scale { wish, reply };
        let record = self.handle()?.ask(event).await.map_err(|error| reject(&error))?;
        Ok(Response::new(scale_reply(&record)?))
    }

    async fn elastic_status(
        &self,
        _: Request<ElasticStatusRequest>,
    ) -> Result<Response<ElasticStatusReply>, Status> {
        let shown = self.handle()?.status.borrow().clone();
        let json = serde_json::to_vec(&*shown)
            .map_err(|error| status(ErrorKind::Internal, error.to_string()))?;
        Ok(Response::new(ElasticStatusReply { json: json.into() }))
    }
}
