//! The simulated etcd: the core and the services of the embedded server, on a machine that can be stopped
//! and killed, with a disk that has write latency.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures::FutureExt;
use steadfast_audit::history::{Change, Revision};
use steadfast_etcd::Simulated as Server;

use crate::cluster::ETCD;
use crate::host::{Addresses, Simulated, enter};
use crate::net::Net;
use crate::world::{Clock, ProcessId, World};

/// An etcd whose data survive its processes. Cheap to clone.
#[derive(Clone)]
pub struct EtcdServer(Arc<Shared>);

struct Shared {
    world: World,
    net: Net,
    address: SocketAddr,
    sync: (Duration, Duration),
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The log as written to disk.
    log: Vec<u8>,
    running: Option<(ProcessId, Arc<Server>)>,
    lives: u16,
    /// Written revisions that were not taken by [`EtcdServer::news`] yet.
    news: Vec<Revision>,
    /// The last written revision.
    written: i64,
}

const LOCK: &str = "single thread; no holder panics";

impl EtcdServer {
    /// Creates an empty etcd that is not running.
    pub fn new(world: &World, net: &Net, addresses: Addresses, sync: (Duration, Duration)) -> Self {
        let address = Simulated::address(addresses, ETCD, 100);
        let state = Mutex::new(State { written: 1, ..State::default() });
        Self(Arc::new(Shared { world: world.clone(), net: net.clone(), address, sync, state }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect(LOCK)
    }

    /// Returns the listen address.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// Returns the running server, if any.
    pub fn server(&self) -> Option<Arc<Server>> {
        self.state().running.as_ref().map(|(_, server)| server.clone())
    }

    /// Takes the revisions that were written since the last call.
    pub fn news(&self) -> Vec<Revision> {
        std::mem::take(&mut self.state().news)
    }

    /// Starts the server from the written log, unless it is running.
    ///
    /// # Panics
    /// If it cannot read its own log.
    pub fn start(&self) {
        let (world, net) = (&self.0.world, &self.0.net);
        let (process, life) = {
            let mut state = self.state();
            if state.running.is_some() {
                return;
            }
            state.lives += 1;
            (world.begin(format!("etcd.{}", state.lives - 1), Clock::right()), state.lives)
        };
        net.place(process, ETCD);
        let host = Arc::new(Simulated::new(world, net, process, ETCD, Addresses::ManyHosts, life));
        world.settle(process, host.clone());
        let log = self.state().log.clone();
        let server = enter(&host, || Server::start(&log, self.0.address));
        let server = Arc::new(server.expect("the server reads its own log"));
        net.listen(process, self.0.address);
        // Services read the clock when they are made.
        net.serve(self.0.address, enter(&host, || server.routes()));
        self.state().running = Some((process, server.clone()));
        let expiring = server.clone();
        world.spawn(process, async move { expiring.expire_leases().await }.boxed());
        let etcd = self.clone();
        world.spawn(process, async move { etcd.write_log(server).await }.boxed());
    }

    async fn write_log(&self, server: Arc<Server>) {
        loop {
            let unwritten = server.unwritten().await;
            let takes = self.0.world.roll(|rng| rng.time(self.0.sync.0, self.0.sync.1));
            self.0.world.sleep(takes).await;
            let bytes = {
                let mut state = self.state();
                state.log.extend_from_slice(unwritten.bytes());
                let through = unwritten.revision();
                let fresh = server.changes_after(state.written).into_iter();
                let fresh = fresh.take_while(|(revision, _)| *revision <= through);
                let fresh: Vec<Revision> = fresh.map(revision).collect();
                state.written = through;
                state.news.extend(fresh);
                state.log.len() as u64
            };
            server.written(&unwritten, bytes);
        }
    }

    /// Kills the server at once; unwritten data are lost.
    pub fn kill(&self) {
        let running = self.state().running.take();
        if let Some((process, _)) = running {
            self.0.world.kill(process);
            self.0.net.remove_process(process, false);
        }
    }

    /// Stops the server, as SIGSTOP does.
    pub fn stop(&self) {
        if let Some((process, _)) = &self.state().running {
            self.0.world.stop(*process);
        }
    }

    pub fn resume(&self) {
        if let Some((process, _)) = &self.state().running {
            self.0.world.resume(*process);
        }
    }
}

fn revision((revision, changes): (i64, Vec<steadfast_etcd::Changed>)) -> Revision {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let changes = changes.into_iter().map(|it| Change {
        key: text(it.key),
        value: it.value.map(text),
        create_revision: it.create_revision,
        version: it.version,
    });
    Revision { revision, changes: changes.collect() }
}
