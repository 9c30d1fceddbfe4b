//! What the rows of tables take in each slot. Pservers are asked for it while the status is looked at.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use steadfast_common::ids::{Incarnation, Slot};
use steadfast_common::role::Role;
use steadfast_common::status::SlotTables;
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_net::{Channel, TlsIdentity};
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::{TableUsageReply, TableUsageRequest, Target};
use tokio::sync::watch;

use crate::event_loop::handle::EventLoopHandle;

/// Time between two questions to the pservers.
const ASK_EVERY: Duration = Duration::from_secs(2);

/// Timeout of an answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// How long pservers are asked after the status was last requested.
const LOOKED_AT_MAX: Duration = Duration::from_secs(60);

/// A handle to the task that asks the pservers.
#[derive(Clone, Debug)]
pub struct Tables {
    shown: watch::Receiver<Arc<Vec<SlotTables>>>,
    looked_at: watch::Sender<Option<Instant>>,
}

impl Tables {
    /// Returns the latest answers, by slot; none of a job without tables.
    pub fn latest(&self) -> Vec<SlotTables> {
        self.looked_at.send_replace(Some(Instant::now()));
        self.shown.borrow().to_vec()
    }
}

/// The task that asks the pservers.
pub(crate) struct TableWatch {
    tls: TlsIdentity,
    event_loop: EventLoopHandle,
    shown: watch::Sender<Arc<Vec<SlotTables>>>,
    looked_at: watch::Receiver<Option<Instant>>,
}

/// The pserver of a slot.
struct Holder {
    channel: Channel,
    incarnation: Incarnation,
    /// When it answered last, and how many accesses to rows it had counted.
    answered: Option<(Instant, u64)>,
}

impl TableWatch {
    pub fn new(tls: TlsIdentity, event_loop: EventLoopHandle) -> (Self, Tables) {
        let (shown, latest) = watch::channel(Arc::default());
        let (looked_at, looked_at_rx) = watch::channel(None);
        let tables = Tables { shown: latest, looked_at };
        (Self { tls, event_loop, shown, looked_at: looked_at_rx }, tables)
    }

    /// Asks pservers until the term ends or, for a job without tables, until they have answered once.
    pub async fn run(mut self) {
        let mut holders: BTreeMap<Slot, Holder> = BTreeMap::new();
        let is_recent = |at: &Option<Instant>| at.is_some_and(|at| at.elapsed() < LOOKED_AT_MAX);
        while self.looked_at.wait_for(is_recent).await.is_ok() {
            self.follow_slots(&mut holders);
            let generation = self.event_loop.snapshot.borrow().status.generation.0;
            let answers = holders.iter_mut().map(|(slot, holder)| holder.ask(*slot, generation));
            let answers: Vec<Option<SlotTables>> = join_all(answers).await;
            // The model of a job does not change, and another generation has the same tables.
            if answers.iter().flatten().any(|it| it.rows.is_empty()) {
                break;
            }
            self.shown.send_replace(Arc::new(answers.into_iter().flatten().collect()));
            sleep(ASK_EVERY).await;
        }
        std::future::pending::<()>().await;
    }

    fn follow_slots(&self, holders: &mut BTreeMap<Slot, Holder>) {
        let snapshot = self.event_loop.snapshot.borrow().clone();
        let mut before = std::mem::take(holders);
        for status in &snapshot.status.slots {
            let (Some(address), Some(incarnation)) = (&status.address, status.incarnation) else {
                continue;
            };
            let known = before.remove(&status.slot).filter(|it| it.incarnation == incarnation);
            let dialed = || {
                let channel = self.tls.dial(address, Role::Pserver).ok()?;
                Some(Holder { channel, incarnation, answered: None })
            };
            if let Some(holder) = known.or_else(dialed) {
                holders.insert(status.slot, holder);
            }
        }
    }
}

impl Holder {
    async fn ask(&mut self, slot: Slot, generation: u64) -> Option<SlotTables> {
        let target = Target { generation, slot: slot.0, incarnation: self.incarnation.0 };
        let mut client = PserverClient::new(self.channel.clone());
        let asked = client.table_usage(TableUsageRequest { target: Some(target) });
        let TableUsageReply { tables, rows_in_memory, memory_bytes, disk_bytes, hits, misses } =
            timeout(ANSWER_MAX, asked).await.ok()?.ok()?.into_inner();
        let (at, accesses) = (Instant::now(), hits.saturating_add(misses));
        let before = self.answered.replace((at, accesses));
        let per_second = before.map_or(0.0, |(before, count)| {
            accesses.saturating_sub(count) as f64 / before.elapsed().as_secs_f64().max(1e-3)
        });
        Some(SlotTables {
            slot,
            rows: tables.into_iter().map(|it| (it.name, it.rows)).collect(),
            rows_in_memory,
            memory_bytes,
            disk_bytes,
            hits,
            misses,
            accesses_per_second: per_second,
        })
    }
}
