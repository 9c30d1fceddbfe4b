//! What can go wrong, when, and for how long.

use std::fmt;
use std::time::Duration;

use futures::FutureExt;
use steadfast_common::records::MasterRecord;
use steadfast_proto::v1::master_client::MasterClient;
use steadfast_proto::v1::{RestoreCheckpointRequest, TakeCheckpointRequest};

use crate::cluster::{Cluster, ETCD, Member, PERSON};
use crate::etcd::EtcdServer;
use crate::net::{Machine, Net, Wire};
use crate::store::{Store, StoreWeather};
use crate::weather::Weather;
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
    /// SIGKILL; it is started again.
    Kill(Member),
    /// The machine loses power: nobody hears of it.
    Power(Member),
    /// SIGSTOP, and SIGCONT after a while.
    Stop(Member, Duration),
    /// SIGTERM; it is started again.
    Leave(Member),
    /// SIGTERM, for good.
    Remove(Member),
    /// One more.
    Add(Member),
    /// Neither reaches the other.
    Cut(End, End, Duration),
    /// The first does not reach the second.
    OneWay(End, End, Duration),
    /// Messages from the first to the second are late by that much.
    Slow(End, End, Duration, Duration),
    /// Answers of the second to the first get late by that much, and soon nothing gets through.
    Choke(End, End, Duration, Duration),
    /// All connections between them break.
    Break(End, End),
    /// Everything of the job is killed at once.
    KillAll,
    /// etcd is away that long; what it had not written is lost. A change of leaders looks the same.
    EtcdKill(Duration),
    EtcdStop(Duration),
    /// etcd drops its history but for the last so many revisions.
    Compact(i64),
    /// The store answers nobody.
    StoreAway(Duration),
    /// The store refuses, tears and forgets to answer.
    StoreTrouble(Duration),
    /// A shard in the store is not what was written.
    Rot,
    /// Calls break and come late much more often.
    Storm(Duration),
    /// Somebody writes another number of slots.
    Slots(u32),
    /// Somebody asks for a checkpoint.
    Checkpoint,
    /// Somebody sets the job back to one of its checkpoints.
    SetBack,
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
                write!(f, "keep {from} from reaching {to} for {time:.1?}")
            }
            Self::Slow(from, to, late, time) => {
                write!(f, "make {from} to {to} late by {late:.1?} for {time:.1?}")
            }
            Self::Choke(from, to, late, time) => {
                write!(f, "choke {from} to {to}: late by {late:.1?}, then cut, for {time:.1?}")
            }
            Self::Break(one, other) => write!(f, "break connections of {one} and {other}"),
            Self::KillAll => f.write_str("kill everything"),
            Self::EtcdKill(time) => write!(f, "kill etcd for {time:.1?}"),
            Self::EtcdStop(time) => write!(f, "stop etcd for {time:.1?}"),
            Self::Compact(kept) => write!(f, "compact etcd but for {kept} revisions"),
            Self::StoreAway(time) => write!(f, "store away for {time:.1?}"),
            Self::StoreTrouble(time) => write!(f, "store in trouble for {time:.1?}"),
            Self::Rot => f.write_str("damage a shard in the store"),
            Self::Storm(time) => write!(f, "storm for {time:.1?}"),
            Self::Checkpoint => f.write_str("ask for a checkpoint"),
            Self::SetBack => f.write_str("set the job back to a checkpoint"),
            Self::Slots(slots) => write!(f, "set ps_desired to {slots}"),
        }
    }
}

/// What faults work on. Cheap to clone.
#[derive(Clone)]
pub struct Scene {
    pub world: World,
    pub net: Net,
    pub store: Store,
    pub etcd: EtcdServer,
    pub cluster: Cluster,
    /// The weather when nothing special happens.
    pub weather: Weather,
    pub store_weather: StoreWeather,
}

impl Scene {
    /// Makes a fault happen now, and what ends it later.
    pub fn strike(&self, fault: &Fault) {
        tracing::info!(target: "fault", "{fault}");
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
            Fault::Leave(member) => cluster.ask_to_leave(*member, false),
            Fault::Remove(member) => cluster.ask_to_leave(*member, true),
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
            Fault::Choke(from, to, late, time) => self.choke(*from, *to, *late, *time),
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
            Fault::StoreTrouble(time) => self.disturb_store(*time, |it| {
                (it.refused, it.answer_lost, it.torn) = (0.3, 0.2, 0.2);
            }),
            Fault::Rot => self.rot(),
            Fault::Storm(time) => self.storm(*time),
            Fault::Checkpoint => self.ask(|mut master| async move {
                let reply = master.take_checkpoint(TakeCheckpointRequest {}).await;
                tracing::info!(target: "fault", ?reply, "checkpoint");
            }),
            Fault::SetBack => self.set_back(),
            Fault::Slots(slots) => {
                if let Some(server) = self.etcd.server() {
                    let key = self.cluster.keys().ps_desired();
                    server.put(key.as_bytes(), slots.to_string().as_bytes());
                }
            }
        }
    }

    /// Somebody at a machine of their own asks something of the acting master, whoever that is.
    fn ask<T: Future<Output = ()> + Send + 'static>(
        &self,
        question: impl FnOnce(MasterClient<Wire>) -> T,
    ) {
        let Some(server) = self.etcd.server() else { return };
        let entry = server.get(self.cluster.keys().master_addr().as_bytes());
        let record = entry.and_then(|it| serde_json::from_slice::<MasterRecord>(&it.value?).ok());
        let Some(MasterRecord { address, .. }) = record else { return };
        let person = self.world.begin("person".to_owned(), Clock::right());
        self.net.place(person, PERSON);
        let wire = self.net.dial(person, &address);
        self.world.spawn(person, question(MasterClient::new(wire)).boxed());
    }

    fn set_back(&self) {
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
        let checkpoint = self.world.roll(|dice| dice.one_of(&ids).clone());
        self.ask(|mut master| async move {
            let request = RestoreCheckpointRequest { checkpoint, force: true };
            let reply = master.restore_checkpoint(request).await;
            tracing::info!(target: "fault", ?reply, "set back");
        });
    }

    fn rot(&self) {
        let (store, folder) = (self.store.clone(), self.cluster.shards_folder());
        // Memory answers at once.
        let _ = store.rot(&folder).now_or_never();
    }

    fn storm(&self, time: Duration) {
        let storm = Weather {
            broken_before: 0.1,
            cut_off: 0.1,
            answer_lost: 0.1,
            ghost: 0.1,
            ghost_late: Duration::from_secs(5),
            ..self.weather.clone()
        };
        self.net.set_weather(storm);
        let (net, weather) = (self.net.clone(), self.weather.clone());
        self.world.after(time, move |_| net.set_weather(weather));
    }

    fn choke(&self, from: End, to: End, late: Duration, time: Duration) {
        self.strike(&Fault::Slow(to, from, late, time));
        let soon = self.world.roll(|dice| dice.time(late, late * 4));
        let scene = self.clone();
        self.world.after(soon, move |_| scene.strike(&Fault::Cut(from, to, time)));
    }

    fn block(&self, from: Machine, to: Machine, time: Duration) {
        self.net.block(from, to);
        let net = self.net.clone();
        self.world.after(time, move |_| net.unblock(from, to));
    }

    fn disturb_store(&self, time: Duration, change: impl FnOnce(&mut StoreWeather)) {
        self.store.change(change);
        let (store, weather) = (self.store.clone(), self.store_weather.clone());
        self.world.after(time, move |_| store.change(|it| *it = weather));
    }

    /// No more faults: everything is as it should be from now on.
    pub fn calm(&self) {
        tracing::info!(target: "fault", "no more faults");
        self.net.heal();
        self.net.set_weather(Weather::fair(self.weather.latency));
        self.store.change(|it| *it = StoreWeather::fair(self.store_weather.latency));
        self.etcd.resume();
        self.etcd.start();
        self.cluster.revive();
    }
}
