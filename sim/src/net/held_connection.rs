//! Probes: connections that are held open to detect whether the peer is alive.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_net::Probe;

use super::{CONNECT_MAX, LOCK, Machine, Net, machine_of};
use crate::world::ProcessId;

/// A connection that is held open to detect whether the peer is alive.
pub(super) struct HeldConnection {
    pub(super) at: (ProcessId, Machine),
    pub(super) client: Machine,
    closed: Mutex<(bool, Option<Waker>)>,
}

impl Net {
    /// Opens a connection that detects whether the peer is alive.
    pub fn probe(&self, from: ProcessId, address: &str) -> BoxFuture<'static, Probe> {
        let (net, to) = (self.clone(), address.parse::<SocketAddr>().ok());
        async move {
            let Some(to) = to else { return Probe::Silent };
            let machine = net.state().machines[&from];
            let target = machine_of(&to);
            let trip = net.latency(machine, target) + net.latency(target, machine);
            net.world().sleep(trip).await;
            if net.is_blocked(machine, target) || net.is_blocked(target, machine) {
                net.world().sleep(CONNECT_MAX).await;
                return Probe::Silent;
            }
            let process = net.state().ports.get(&to).map(|port| port.process);
            let Some(process) = process.filter(|it| net.world().lives(*it)) else {
                return Probe::Refused;
            };
            let connection = Arc::new(HeldConnection {
                at: (process, target),
                client: machine,
                closed: Mutex::default(),
            });
            let mut state = net.state();
            state.held_connections.retain(|it| it.strong_count() != 0);
            state.held_connections.push(Arc::downgrade(&connection));
            drop(state);
            Probe::Open(UntilClosed(connection).boxed())
        }
        .boxed()
    }
}

impl HeldConnection {
    pub(super) fn close(&self) {
        let mut closed = self.closed.lock().expect(LOCK);
        closed.0 = true;
        if let Some(waker) = closed.1.take() {
            drop(closed);
            waker.wake();
        }
    }
}

struct UntilClosed(Arc<HeldConnection>);

impl Future for UntilClosed {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut closed = self.0.closed.lock().expect(LOCK);
        if closed.0 {
            return Poll::Ready(());
        }
        closed.1 = Some(context.waker().clone());
        Poll::Pending
    }
}
