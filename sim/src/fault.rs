//! Injected faults, and the scene on which they act.

use std::fmt;
use std::time::Duration;

use futures::FutureExt;
use steadfast_common::records::MasterRecord;
use steadfast_proto::v1::elastic_client::ElasticClient;
use steadfast_proto::v1::master_client::MasterClient;
use steadfast_proto::v1::{
    AmendJobRequest, DrainRequest, RestoreCheckpointRequest, ScaleRequest, StatusRequest,
    TakeCheckpointRequest, amend_job_request, scale_request,
};

use crate::cluster::{Cluster, ETCD, Member, PERSON};
use crate::etcd::EtcdServer;
use crate::net::{Channel, Machine, Net};
use crate::network_model::NetworkModel;
use crate::store::{Store, StoreModel};
use crate::world::{Clock, World};

/// One end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Member(Member),
    Etcd,
}

impl End {
    fn machine(self) -> Machine {
        match self {
            Self::Member(member) => member.machine(),
            Self::Etcd => ETCD,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Member(member) => member.fmt(f),
            Self::Etcd => f.write_str("etcd"),
        }
    }
}

/// A fault.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// SIGKILL; the process is restarted.
    Kill(Member),
    /// Power failure: the process dies and its connections stay silent.
    Power(Member),
    /// SIGSTOP, followed by SIGCONT after this time.
    Stop(Member, Duration),
    /// SIGTERM; the process is restarted.
    Leave(Member),
    /// SIGTERM; the process is not restarted.
    Remove(Member),
    /// A new member is started.
    Add(Member),
    /// Messages between the two ends are blocked in both directions.
    Cut(End, End, Duration),
    /// Messages from the first to the second are blocked.
    OneWay(End, End, Duration),
    /// Messages from the first to the second are delayed; delay and duration.
    Slow(End, End, Duration, Duration),
    /// Replies of the second to the first are delayed, and soon after the link is cut; delay and
    /// duration.
    Congest(End, End, Duration, Duration),
    /// All connections between the two ends break.
    Break(End, End),
    /// All processes of the job are killed at once.
    KillAll,
    /// etcd is down for this time; unwritten data are lost. A leader change looks the same.
    EtcdKill(Duration),
    EtcdStop(Duration),
    /// etcd compacts all but this many revisions.
    Compact(i64),
    /// The store is unavailable.
    StoreAway(Duration),
    /// The store refuses requests, truncates uploads and loses replies.
    StoreErrors(Duration),
    /// A shard in the store is corrupted.
    Rot,
    /// Calls break and are delayed much more often.
    Storm(Duration),
    /// An operator changes the number of slots.
    Slots(u32),
    /// An operator requests a checkpoint.
    Checkpoint,
    /// An operator rolls the job back to one of its checkpoints.
    RollBack,
    /// An operator changes how many checkpoints are kept.
    Change(u32),
    /// An operator chooses the most workers of a round, or none, or lets the master choose.
    Workers(Option<u32>, bool),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill(member) => write!(f, "kill {member}"),
            Self::Power(member) => write!(f, "power off {member}"),
            Self::Stop(member, time) => write!(f, "stop {member} for {time:.1?}"),
            Self::Leave(member) => write!(f, "terminate {member}"),
            Self::Remove(member) => write!(f, "remove {member}"),
            Self::Add(member) => write!(f, "add {member}"),
            Self::Cut(one, other, time) => write!(f, "cut {one} from {other} for {time:.1?}"),
            Self::OneWay(from, to, time) => {
                write!(f, "block {from} to {to} for {time:.1?}")
            }
            Self::Slow(from, to, late, time) => {
                write!(f, "delay {from} to {to} by {late:.1?} for {time:.1?}")
            }
            Self::Congest(from, to, late, time) => {
                write!(f, "congest {from} to {to}: delay {late:.1?}, then cut, for {time:.1?}")
            }
            Self::Break(one, other) => write!(f, "break connections between {one} and {other}"),
            Self::KillAll => f.write_str("kill all processes"),
            Self::EtcdKill(time) => write!(f, "kill etcd for {time:.1?}"),
            Self::EtcdStop(time) => write!(f, "stop etcd for {time:.1?}"),
            Self::Compact(kept) => write!(f, "compact etcd, keep {kept} revisions"),
            Self::StoreAway(time) => write!(f, "store unavailable for {time:.1?}"),
            Self::StoreErrors(time) => write!(f, "store errors for {time:.1?}"),
            Self::Rot => f.write_str("corrupt a shard in the store"),
            Self::Storm(time) => write!(f, "storm of call failures for {time:.1?}"),
            Self::Checkpoint => f.write_str("request a checkpoint"),
            Self::RollBack => f.write_str("roll the job back to a checkpoint"),
            Self::Change(keep) => write!(f, "change the job, keep {keep} checkpoints"),
            Self::Workers(None, _) => f.write_str("desire as many workers as there are"),
            Self::Workers(Some(workers), false) => write!(f, "desire {workers} workers"),
            Self::Workers(Some(workers), true) => write!(f, "begin with {workers} workers"),
            Self::Slots(slots) => write!(f, "set ps_desired to {slots}"),
        }
    }
}

/// The system on which faults act. Cheap to clone.
#[derive(Clone)]
pub struct Scene {
    pub world: World,
    pub net: Net,
    pub store: Store,
    pub etcd: EtcdServer,
    pub cluster: Cluster,
    /// The network model outside of storms.
    pub network_model: NetworkModel,
    pub store_model: StoreModel,
}

impl Scene {
    /// Injects a fault now and schedules its end.
    pub fn strike(&self, fault: &Fault) {
        tracing::info!(target: "fault", %fault, "injected");
        let cluster = &self.cluster;
        match fault {
            Fault::Kill(member) => cluster.kill(*member, false),
            Fault::Power(member) => cluster.kill(*member, true),
            Fault::Stop(member, time) => {
                cluster.stop(*member);
                let (stopped, world) = (cluster.process(*member), self.world.clone());
                self.world.after(*time, move |_| {
                    if let Some(process) = stopped {
                        world.resume(process);
                    }
                });
            }
            Fault::Leave(member) => cluster.terminate(*member, false),
            Fault::Remove(member) => cluster.terminate(*member, true),
            Fault::Add(member) => cluster.start(*member),
            Fault::Cut(one, other, time) => {
                self.block(one.machine(), other.machine(), *time);
                self.block(other.machine(), one.machine(), *time);
            }
            Fault::OneWay(from, to, time) => self.block(from.machine(), to.machine(), *time),
            Fault::Slow(from, to, late, time) => {
                let (from, to, net) = (from.machine(), to.machine(), self.net.clone());
                self.net.slow(from, to, *late);
                self.world.after(*time, move |_| net.slow(from, to, Duration::ZERO));
            }
            Fault::Congest(from, to, late, time) => self.congest(*from, *to, *late, *time),
            Fault::Break(one, other) => self.net.break_between(one.machine(), other.machine()),
            Fault::KillAll => {
                cluster.members().into_iter().for_each(|member| cluster.kill(member, false));
            }
            Fault::EtcdKill(time) => {
                self.etcd.kill();
                let etcd = self.etcd.clone();
                self.world.after(*time, move |_| etcd.start());
            }
            Fault::EtcdStop(time) => {
                self.etcd.stop();
                let etcd = self.etcd.clone();
                self.world.after(*time, move |_| etcd.resume());
            }
            Fault::Compact(kept) => {
                if let Some(server) = self.etcd.server() {
                    server.compact(server.revision() - kept);
                }
            }
            Fault::StoreAway(time) => self.disturb_store(*time, |it| it.is_away = true),
            Fault::StoreErrors(time) => self.disturb_store(*time, |it| {
                (it.refused, it.answer_lost, it.torn) = (0.3, 0.2, 0.2);
            }),
            Fault::Rot => self.rot(),
            Fault::Change(keep) => self.change(*keep),
            Fault::Storm(time) => self.storm(*time),
            Fault::Checkpoint => self.ask(|mut master| async move {
                let reply = master.take_checkpoint(TakeCheckpointRequest {}).await;
                tracing::info!(target: "fault", ?reply, "checkpoint");
            }),
            Fault::RollBack => self.roll_back(),
            Fault::Workers(workers, is_auto) => self.scale(*workers, *is_auto),
            Fault::Slots(slots) => {
                if let Some(server) = self.etcd.server() {
                    let key = self.cluster.keys().ps_desired();
                    server.put(key.as_bytes(), slots.to_string().as_bytes());
                }
            }
        }
    }

    /// Sends a request to the acting master from the machine of the operator.
    fn ask<T: Future<Output = ()> + Send + 'static>(
        &self,
        question: impl FnOnce(MasterClient<Channel>) -> T,
    ) {
        self.call(|channel| question(MasterClient::new(channel)));
    }

    /// Calls the acting master from the machine of the operator.
    fn call<T: Future<Output = ()> + Send + 'static>(&self, call: impl FnOnce(Channel) -> T) {
        let Some(server) = self.etcd.server() else { return };
        let entry = server.get(self.cluster.keys().master_addr().as_bytes());
        let record = entry.and_then(|it| serde_json::from_slice::<MasterRecord>(&it.value?).ok());
        let Some(MasterRecord { address, .. }) = record else { return };
        let person = self.world.begin("person".to_owned(), Clock::right());
        self.net.place(person, PERSON);
        let channel = self.net.dial(person, &address);
        self.world.spawn(person, call(channel).boxed());
    }

    /// Requests the status from the acting master; the observer checks the reply in transit.
    pub fn poll_status(&self) {
        self.ask(|mut master| async move {
            let _ = master.status(StatusRequest {}).await;
        });
    }

    /// Drains the job, whose dataset is a stream.
    pub fn drain(&self) {
        self.ask(|mut master| async move {
            let _ = master.drain(DrainRequest {}).await;
        });
    }

    fn roll_back(&self) {
        let Some(server) = self.etcd.server() else { return };
        let prefix = self.cluster.keys().checkpoints_prefix();
        let ids = server.keys(prefix.as_bytes()).into_iter().filter_map(|key| {
            let key = String::from_utf8(key).ok()?;
            key.strip_prefix(&prefix).filter(|id| *id != "latest").map(str::to_owned)
        });
        let ids: Vec<String> = ids.collect();
        if ids.is_empty() {
            return;
        }
        let checkpoint = self.world.roll(|rng| rng.one_of(&ids).clone());
        self.ask(|mut master| async move {
            let request = RestoreCheckpointRequest { checkpoint, force: true };
            let reply = master.restore_checkpoint(request).await;
            tracing::info!(target: "fault", ?reply, "rolled back");
        });
    }

    fn scale(&self, workers: Option<u32>, is_auto: bool) {
        let mode = if is_auto { scale_request::Mode::Auto } else { scale_request::Mode::Kept };
        // Workers use random numbers of records in a step, and the others wait: a second one adds about half of its share.
        let (workers, worth_percent) = (Some(workers.unwrap_or(0)), is_auto.then_some(30));
        let request = ScaleRequest { mode: mode.into(), workers, worth_percent, startable: None };
        let is_elastic = self.cluster.is_elastic();
        self.call(move |channel| async move {
            let reply = match is_elastic {
                true => ElasticClient::new(channel).scale(request).await,
                false => MasterClient::new(channel).scale_trainers(request).await,
            };
            tracing::info!(target: "fault", ?reply, "scaled");
        });
    }

    fn change(&self, keep: u32) {
        let Some(job_file) = self.cluster.job_file(keep) else { return };
        self.ask(|mut master| async move {
            let amendment = Some(amend_job_request::Amendment::JobFile(job_file));
            let reply = master.amend_job(AmendJobRequest { amendment }).await;
            tracing::info!(target: "fault", ?reply, "changed");
        });
    }

    fn rot(&self) {
        let Some(directory) = self.cluster.shards_directory() else { return };
        let store = self.store.clone();
        // The in-memory store never waits.
        let _ = store.rot(&directory).now_or_never();
    }

    fn storm(&self, time: Duration) {
        let storm = NetworkModel {
            broken_before: 0.1,
            cut_off: 0.1,
            answer_lost: 0.1,
            delayed_duplicate: 0.1,
            delay_max: Duration::from_secs(5),
            ..self.network_model.clone()
        };
        self.net.set_network_model(storm);
        let (net, network_model) = (self.net.clone(), self.network_model.clone());
        self.world.after(time, move |_| net.set_network_model(network_model));
    }

    fn congest(&self, from: End, to: End, late: Duration, time: Duration) {
        self.strike(&Fault::Slow(to, from, late, time));
        let soon = self.world.roll(|rng| rng.time(late, late * 4));
        let scene = self.clone();
        self.world.after(soon, move |_| scene.strike(&Fault::Cut(from, to, time)));
    }

    fn block(&self, from: Machine, to: Machine, time: Duration) {
        self.net.block(from, to);
        let net = self.net.clone();
        self.world.after(time, move |_| net.unblock(from, to));
    }

    fn disturb_store(&self, time: Duration, change: impl FnOnce(&mut StoreModel)) {
        self.store.change(change);
        let (store, store_model) = (self.store.clone(), self.store_model.clone());
        self.world.after(time, move |_| store.change(|it| *it = store_model));
    }

    /// Ends all faults: heals links, restores the models, and starts etcd and all members.
    pub fn calm(&self) {
        tracing::info!(target: "fault", "no more faults");
        self.net.heal();
        self.net.set_network_model(NetworkModel::fair(self.network_model.latency));
        self.store.change(|it| *it = StoreModel::fair(self.store_model.latency));
        self.etcd.resume();
        self.etcd.start();
        self.cluster.revive();
    }
}
