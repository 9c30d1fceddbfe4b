//! What must hold, looked at while it happens: every pull that a pserver answers shows what it has
//! applied.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use bytes::{Buf, Bytes};
use http_body::Frame;
use prost::Message;
use steadfast_common::ids::{Incarnation, Slot};
use steadfast_common::keys::Keys;
use steadfast_common::records::PserverRecord;
use steadfast_common::spec::Mode;
use steadfast_proto::v1::{
    AdvanceReply, PullReply, PullRequest, PushRequest, SnapshotRequest, Target,
};

use crate::etcd::EtcdServer;
use crate::job::Job;
use crate::net::Observer;

/// What the undisturbed run was like.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    /// Hash of each block at each version.
    pub blocks: BTreeMap<(u64, u32), u64>,
    pub parameters_sha256: String,
    pub examples: u64,
}

/// What was seen in one run.
#[derive(Debug, Default)]
pub struct Seen {
    pub blocks: BTreeMap<(u64, u32), u64>,
    /// What must not be.
    pub broken: Vec<String>,
    /// Answers that were looked at.
    pub pulls: u64,
}

/// Blocks of the counting model that hold counts.
const COUNTS: [u32; 2] = [1, 3];

/// Looks at every answer; `reference` is what a synchronous job is compared with.
pub fn observer(
    job: &Job,
    reference: Option<Arc<Reference>>,
    etcd: &EtcdServer,
    seen: Arc<Mutex<Seen>>,
) -> Observer {
    let (job, etcd) = (job.clone(), etcd.clone());
    let keys = Keys::of_job(&job.spec.name);
    Box::new(move |path, request, response| {
        let mut seen = seen.lock().expect("one thread");
        // A refusal has no message.
        let is_refusal = response.iter().all(|frame| !frame.is_data());
        let target = if is_refusal { None } else { target(path, request) };
        if let Some(target) = target {
            seen.broken.extend(is_not_its_own(&etcd, &keys, target));
        }
        match path {
            "/steadfast.v1.Pserver/Pull" => {
                let messages: Vec<PullReply> = messages(response);
                seen.pulls += 1;
                seen.pull(&job, reference.as_deref(), &messages);
            }
            "/steadfast.v1.Master/Advance" => {
                for AdvanceReply { go, ahead } in messages(response) {
                    let bound = job.spec.asynchronous.max_staleness.map_or(u64::MAX, u64::from);
                    if go && bound < ahead {
                        seen.broken.push(format!(
                            "I8: a trainer may go on {ahead} pushes ahead; {bound} is the bound"
                        ));
                    }
                }
            }
            _ => {}
        }
    })
}

/// The life of a slot that a call means.
fn target(path: &str, request: &[Frame<Bytes>]) -> Option<Target> {
    match path {
        "/steadfast.v1.Pserver/Pull" => messages::<PullRequest>(request).first()?.target,
        "/steadfast.v1.Pserver/Push" => {
            messages::<PushRequest>(request).first()?.header.as_ref()?.target
        }
        "/steadfast.v1.Pserver/Snapshot" => messages::<SnapshotRequest>(request).first()?.target,
        _ => None,
    }
}

/// Whether a pserver has just answered for a slot that is not its own any more.
fn is_not_its_own(etcd: &EtcdServer, keys: &Keys, target: Target) -> Option<String> {
    let server = etcd.server()?;
    let slot = Slot(target.slot);
    let held = server.get(keys.ps(slot).as_bytes()).and_then(|entry| {
        let record: PserverRecord = serde_json::from_slice(&entry.value?).ok()?;
        Some(record.incarnation(entry.create_revision))
    });
    (held != Some(Incarnation(target.incarnation))).then(|| {
        format!("I5: slot {slot} was answered for by {}, and {held:?} holds it", target.incarnation)
    })
}

/// The messages in the frames of a gRPC body.
fn messages<M: Message + Default>(frames: &[Frame<Bytes>]) -> Vec<M> {
    const PREFIX: usize = 5;
    let mut bytes: Vec<u8> = Vec::new();
    frames.iter().filter_map(Frame::data_ref).for_each(|data| bytes.extend_from_slice(data));
    let (mut rest, mut found) = (&bytes[..], Vec::new());
    while PREFIX <= rest.len() {
        rest.advance(1);
        let len = rest.get_u32() as usize;
        let Some(message) = rest.get(..len) else { break };
        found.extend(M::decode(message));
        rest.advance(len);
    }
    found
}

impl Seen {
    fn pull(&mut self, job: &Job, reference: Option<&Reference>, messages: &[PullReply]) {
        let Some(header) = messages.iter().find_map(|it| it.header.as_ref()) else { return };
        if !header.ready {
            return;
        }
        for block in messages.iter().flat_map(|message| &message.blocks) {
            match job.spec.mode {
                Mode::Sync => {
                    let key = (header.version, block.block);
                    let mut hasher = DefaultHasher::new();
                    block.data.hash(&mut hasher);
                    let hash = hasher.finish();
                    let known = match reference {
                        Some(reference) => reference.blocks.get(&key).copied(),
                        None => self.blocks.insert(key, hash),
                    };
                    if known.map_or(reference.is_some(), |known| known != hash) {
                        self.broken.push(format!(
                            "I7: block {} at version {} has other bits than without faults",
                            block.block, header.version
                        ));
                    }
                }
                Mode::Async if COUNTS.contains(&block.block) && !job.diverges => {
                    let floats = block.data.chunks_exact(4);
                    let values: Vec<f32> = floats
                        .map(|it| f32::from_le_bytes(it.try_into().expect("four bytes")))
                        .collect();
                    self.broken.extend(miscounted(job, &values));
                }
                Mode::Async => {}
            }
        }
    }
}

/// Whether a record counted oftener than there are passes, or by half.
fn miscounted(job: &Job, values: &[f32]) -> Option<String> {
    let passes = job.spec.passes.unwrap_or(1);
    values.iter().enumerate().find_map(|(record, value)| {
        let count = -value / job.one;
        let is_sound = count.fract() == 0.0 && 0.0 <= count && count <= passes as f32;
        (!is_sound).then(|| format!("I6: record {record} counted {count} times in {passes} passes"))
    })
}

/// Whether each record counted once a pass in the final parameters, but for passes in which its task
/// was given up. `due` has the least and the most for each record.
pub fn miscounted_at_the_end(job: &Job, due: &[(u32, u32)], values: &[f32]) -> Option<String> {
    values.iter().zip(due).enumerate().find_map(|(record, (value, (least, most)))| {
        let count = -value / job.one;
        let is_due = *least as f32 <= count && count <= *most as f32;
        (!is_due)
            .then(|| format!("record {record} counted {count} times; {least} to {most} were due"))
    })
}
