//! The workers of a coordinator: each has an index, and a connection that is followed.

use std::sync::{Arc, Mutex, PoisonError};

use steadfast_common::error::ErrorKind;
use steadfast_common::role::Role;
use steadfast_coordinator_core::{Input, WorkerIndex};
use steadfast_host::task::{Task, spawn};
use steadfast_net::TlsIdentity;
use steadfast_process::Failure;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::driver::send;
use crate::link::{Attended, Link};
use crate::table::{Shared, WorkerState};

/// The workers, by index in the table of the coordinator.
#[derive(Debug)]
pub(crate) struct WorkerSet {
    pub attended: Arc<Attended>,
    pub tls: TlsIdentity,
    /// Absent in a simulation.
    pub runtime: Option<Handle>,
    pub shared: Arc<Shared>,
    pub outbox: mpsc::UnboundedSender<Input>,
    pub links: Mutex<Vec<Task<()>>>,
}

impl WorkerSet {
    /// Adds the worker at `host:port`, or lets it take closures again under the index that it had.
    ///
    /// # Errors
    /// `Invalid` if the address is none; why the coordinator has ended.
    pub fn add(&self, address: &str) -> Result<WorkerIndex, Failure> {
        if let Some(failure) = self.shared.lock().ended() {
            return Err(failure.clone());
        }
        let is_address = address.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty()
                && !address.contains("://")
                && port.parse::<u16>().is_ok_and(|it| it != 0)
        });
        if !is_address {
            let message = format!("`{address}` is not the address of a worker: use `host:port`");
            return Err(Failure::invalid(message));
        }
        let known = self.index_of(address);
        if let Some(worker) = known {
            self.shared.change(|table| {
                if let Some(row) = table.workers.get_mut(&worker) {
                    (row.is_stopped, row.is_at_rest) = (false, false);
                }
            });
            send(&self.outbox, Input::Started(worker));
            return Ok(worker);
        }
        let _guard = self.runtime.as_ref().map(Handle::enter);
        let channel = self.tls.dial(address, Role::Trainer).map_err(Failure::invalid)?;
        let worker = self.shared.change(|table| {
            let last = table.workers.last_key_value().map(|(index, _)| index.0);
            let index = WorkerIndex(last.map_or(0, |it| it + 1));
            table.workers.insert(
                index,
                WorkerState {
                    address: address.to_owned(),
                    is_stopped: false,
                    is_at_rest: false,
                    threads: None,
                    leaves: false,
                    reason: "it has not answered yet".to_owned(),
                    running: 0,
                    finished: 0,
                    channel: channel.clone(),
                },
            );
            index
        });
        send(&self.outbox, Input::Started(worker));
        let (shared, outbox) = (self.shared.clone(), self.outbox.clone());
        let attended = self.attended.clone();
        let link = Link { attended, worker, channel, shared, outbox };
        let link = spawn(link.follow());
        self.links.lock().unwrap_or_else(PoisonError::into_inner).push(link);
        Ok(worker)
    }

    /// Stops a worker: it ends what it runs, and takes no more closures until it is added again.
    ///
    /// # Errors
    /// `NotFound` if no worker with this address was added.
    pub fn remove(&self, address: &str) -> Result<WorkerIndex, Failure> {
        let worker = self.index_of(address).ok_or_else(|| {
            let known: Vec<String> =
                self.shared.lock().workers().values().map(|it| it.address.clone()).collect();
            let message =
                format!("no worker `{address}` was added; there are: {}", known.join(", "));
            Failure::new(ErrorKind::NotFound, message)
        })?;
        self.shared.change(|table| {
            if let Some(row) = table.workers.get_mut(&worker) {
                row.is_stopped = true;
            }
        });
        send(&self.outbox, Input::Stopped(worker));
        Ok(worker)
    }

    fn index_of(&self, address: &str) -> Option<WorkerIndex> {
        let table = self.shared.lock();
        let found = table.workers().iter().find(|(_, it)| it.address == address);
        found.map(|(&index, _)| index)
    }

    /// Ends all connections.
    pub fn end(&self) {
        for link in self.links.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            link.abort();
        }
    }
}
