//! Gradients out, parameters in: to all pservers of a generation at once.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Lane, Pass, Version};
use steadfast_common::layout::Layout;
use steadfast_common::tally::TaskPiece;
use steadfast_coord::{CoordError, Deadline, pauses};
use steadfast_host::net::{Wire, dial};
use steadfast_host::time::{sleep, timeout};
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::push_header;
use steadfast_proto::v1::{
    BlockData, InitHeader, InitRequest, LaneContribution, Param, PullHeader, PullRequest,
    PushHeader, PushRequest, Target, TaskContribution,
};
use steadfast_proto::{
    MESSAGE_BYTES_MAX,
    tensor::{copy_into, in_chunks, shared_bytes},
};
use tonic::Status;
use tracing::debug;

use crate::cluster::Crew;
use crate::{ClientError, Cluster};

/// Longest wait for an answer, beyond what the call itself asks the pserver to wait.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How long one pull waits at a pserver before it asks again.
const PULL_WAIT: Duration = Duration::from_secs(10);

/// The pservers of one generation.
#[derive(Clone, Debug)]
pub struct Pservers {
    cluster: Arc<Cluster>,
    /// The end of our own lease: whoever is past it says nothing any more.
    deadline: Arc<Deadline>,
    generation: Generation,
    layout: Arc<Layout>,
    slots: Arc<Vec<SlotClient>>,
}

#[derive(Clone, Debug)]
struct SlotClient {
    target: Target,
    client: PserverClient<Wire>,
    /// Numbers of the blocks that the slot holds.
    blocks: Vec<u32>,
}

/// What a contribution is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    Lane { version: Version, lane: Lane, last: bool },
    Piece { piece: TaskPiece, version: Version },
}

/// The sum of some records' gradients, flat; empty when there was no record.
#[derive(Clone, Debug)]
pub struct Gradient {
    pub records: u64,
    pub loss_sum: f64,
    /// Sum of the records' checksums.
    pub checksum: u64,
    pub values: Arc<Vec<f32>>,
}

/// How far the parameters are that a pull brought.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pulled {
    pub version: Version,
    pub pass: Pass,
    pub pass_start: Version,
    pub examples: u64,
    pub loss: Option<f64>,
}

impl Pservers {
    /// Clients of a crew's members; connects when first used.
    ///
    /// # Errors
    /// If an address is none.
    pub fn new(
        cluster: Arc<Cluster>,
        crew: &Crew,
        layout: Arc<Layout>,
        deadline: Arc<Deadline>,
    ) -> Result<Self, ClientError> {
        let placed = layout.place(crew.addresses.len() as u32);
        let members = crew.addresses.iter().zip(&crew.record.slots).zip(placed).enumerate();
        let slots = members.map(|(slot, ((address, incarnation), blocks))| {
            let target = Target {
                generation: crew.record.generation.0,
                slot: slot as u32,
                incarnation: incarnation.0,
            };
            Ok(SlotClient { target, client: connect(address)?, blocks })
        });
        let slots: Result<Vec<SlotClient>, ClientError> = slots.collect();
        let generation = crew.record.generation;
        Ok(Self { cluster, deadline, generation, layout, slots: Arc::new(slots?) })
    }

    /// The generation that these pservers are of.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Gives every block its first value.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job.
    pub async fn init(&self, attempt: u64, values: Arc<Vec<f32>>) -> Result<(), ClientError> {
        let bytes = shared_bytes(values);
        let sent = self.slots.iter().map(|slot| {
            let header = InitHeader {
                target: Some(slot.target),
                attempt,
                params: self.layout.params().iter().map(param).collect(),
            };
            let mut header = Some(header);
            let messages: Vec<InitRequest> = self
                .chunks(slot, &bytes)
                .into_iter()
                .map(|blocks| InitRequest { header: header.take(), blocks })
                .collect();
            self.until_answered(move || {
                let (mut client, messages) = (slot.client.clone(), messages.clone());
                async move { client.init(tokio_stream::iter(messages)).await.map(|_| ()) }
            })
        });
        try_join_all(sent).await.map(|_| ())
    }

    /// Sends a contribution to every slot; returns when all have it.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job.
    pub async fn push(&self, name: Name, gradient: Gradient) -> Result<(), ClientError> {
        let bytes = shared_bytes(gradient.values.clone());
        let sent = self.slots.iter().map(|slot| {
            let header = PushHeader {
                target: Some(slot.target),
                records: gradient.records,
                loss_sum: gradient.loss_sum,
                checksum: gradient.checksum,
                name: Some(wire_name(name)),
            };
            let chunks =
                if bytes.is_empty() { vec![Vec::new()] } else { self.chunks(slot, &bytes) };
            let mut header = Some(header);
            let messages: Vec<PushRequest> = chunks
                .into_iter()
                .map(|blocks| PushRequest { header: header.take(), blocks })
                .collect();
            self.until_answered(move || {
                let (mut client, messages) = (slot.client.clone(), messages.clone());
                async move { client.push(tokio_stream::iter(messages)).await.map(|_| ()) }
            })
        });
        try_join_all(sent).await.map(|_| ())
    }

    /// Asynchronous mode: writes the present blocks of every slot into `values`, which is as long as
    /// the layout. Slots may be at different versions; the smallest one, which all reflect, is told.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job.
    pub async fn pull(&self, values: &mut [f32]) -> Result<Pulled, ClientError> {
        let answers = self.pull_all(Version(0), Which::AtLeast).await?;
        self.adopt(answers, values)
    }

    /// Synchronous mode: waits for `version` of every slot, or the first later one that all of them
    /// have, and writes all blocks into `values`. All of them reflect the version that is told: values
    /// of two steps would make for a gradient that nobody else computes.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job.
    pub async fn pull_step(
        &self,
        version: Version,
        values: &mut [f32],
    ) -> Result<Pulled, ClientError> {
        let mut wanted = version;
        loop {
            let answers = self.pull_all(wanted, Which::Exactly).await?;
            let past = answers.iter().filter(|it| !it.0.ready).map(|it| it.0.version);
            let past: Vec<u64> = past.collect();
            let Some(most) = past.iter().max() else { return self.adopt(answers, values) };
            // A slot is at most one step ahead of another, and then it keeps the step before.
            let all_there = past.len() == answers.len() && past.iter().all(|it| it == most);
            wanted = Version(if all_there { *most } else { most.saturating_sub(1) });
        }
    }

    async fn pull_all(&self, version: Version, which: Which) -> Result<Vec<Answer>, ClientError> {
        let pulls = self.slots.iter().map(|slot| {
            self.until_answered(move || {
                let (mut client, target) = (slot.client.clone(), slot.target);
                async move { pull_one(&mut client, target, version, which).await }
            })
        });
        try_join_all(pulls).await
    }

    fn adopt(&self, answers: Vec<Answer>, values: &mut [f32]) -> Result<Pulled, ClientError> {
        let mut pulled: Option<Pulled> = None;
        for (position, blocks) in answers {
            for block in &blocks {
                self.write(block, values)?;
            }
            if pulled.is_none_or(|least| position.version < least.version.0) {
                pulled = Some(Pulled {
                    version: Version(position.version),
                    pass: Pass(position.pass),
                    pass_start: Version(position.pass_start),
                    examples: position.examples,
                    loss: position.loss,
                });
            }
        }
        Ok(pulled.unwrap_or_default())
    }

    fn write(&self, block: &BlockData, values: &mut [f32]) -> Result<(), ClientError> {
        let range = self.layout.blocks().get(block.block as usize).map(|it| it.range());
        let place = range.and_then(|range| values.get_mut(range));
        if place.is_some_and(|place| copy_into(place, &block.data)) {
            return Ok(());
        }
        Err(ClientError::Refused {
            what: "a pserver",
            kind: ErrorKind::Internal,
            message: format!("block {} does not fit the model's layout", block.block),
        })
    }

    fn chunks(&self, slot: &SlotClient, bytes: &Bytes) -> Vec<Vec<BlockData>> {
        let blocks = slot.blocks.iter().map(|number| {
            let range = self.layout.blocks()[*number as usize].range();
            let data = bytes.slice(range.start * size_of::<f32>()..range.end * size_of::<f32>());
            BlockData { block: *number, data }
        });
        in_chunks(blocks)
    }

    /// Repeats a call until the pserver answers or the generation is over.
    async fn until_answered<T, F>(&self, attempt: impl Fn() -> F) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let mut pauses = pauses();
        let work = async {
            loop {
                if !self.deadline.is_ahead() {
                    return Err(CoordError::LeaseLost.into());
                }
                match timeout(TIMEOUT, attempt()).await {
                    Ok(Ok(answer)) => return Ok(answer),
                    Ok(Err(status)) => judge(&status)?,
                    Err(_) => debug!("a pserver does not answer"),
                }
                sleep(pauses.next().unwrap_or(TIMEOUT)).await;
            }
        };
        tokio::select! {
            biased;
            answer = work => answer,
            () = self.cluster.generation_after(self.generation) => Err(ClientError::NewGeneration),
            () = self.cluster.over() => Err(ClientError::JobOver),
        }
    }
}

/// Whether the call is worth repeating: a pserver that is stale or gone is replaced by another
/// generation, which ends the repetition.
fn judge(status: &Status) -> Result<(), ClientError> {
    let kind = steadfast_proto::kind(status);
    match kind {
        ErrorKind::Unavailable | ErrorKind::NotYet | ErrorKind::Stale => {
            debug!(message = status.message(), "a pserver is not ready");
            Ok(())
        }
        ErrorKind::Invalid
        | ErrorKind::NotFound
        | ErrorKind::Conflict
        | ErrorKind::TooLarge
        | ErrorKind::Denied
        | ErrorKind::Internal => Err(ClientError::Refused {
            what: "a pserver",
            kind,
            message: status.message().to_owned(),
        }),
    }
}

/// What a slot says to a pull.
type Answer = (PullHeader, Vec<BlockData>);

/// Which versions will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    AtLeast,
    Exactly,
}

/// Asks one slot until it has the version, or is past it.
async fn pull_one(
    client: &mut PserverClient<Wire>,
    target: Target,
    version: Version,
    which: Which,
) -> Result<Answer, Status> {
    loop {
        let request = PullRequest {
            target: Some(target),
            version: version.0,
            wait_ms: PULL_WAIT.as_millis() as u64,
            exact: which == Which::Exactly,
        };
        let mut messages = client.pull(request).await?.into_inner();
        let mut header = None;
        let mut blocks = Vec::new();
        while let Some(message) = messages.message().await? {
            header = header.or(message.header);
            blocks.extend(message.blocks);
        }
        let header = header.ok_or_else(|| Status::unavailable("the answer was cut off"))?;
        if header.ready || version.0 < header.version {
            return Ok((header, blocks));
        }
    }
}

fn wire_name(name: Name) -> push_header::Name {
    match name {
        Name::Lane { version, lane, last } => {
            push_header::Name::Lane(LaneContribution { version: version.0, lane: lane.0, last })
        }
        Name::Piece { piece, version } => push_header::Name::Task(TaskContribution {
            pass: piece.pass.0,
            task: piece.task.0,
            from: piece.from,
            to: piece.to,
            last: piece.last,
            version: version.0,
        }),
    }
}

fn param(spec: &steadfast_common::layout::ParamSpec) -> Param {
    Param { name: spec.name.clone(), shape: spec.shape.iter().map(|side| *side as u64).collect() }
}

fn connect(address: &str) -> Result<PserverClient<Wire>, ClientError> {
    let wire = dial(address).map_err(|message| ClientError::Refused {
        what: "a pserver's address",
        kind: ErrorKind::Invalid,
        message,
    })?;
    Ok(PserverClient::new(wire)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX))
}
