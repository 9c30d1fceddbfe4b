//! The client side of a training job: everything that a trainer process does besides reading data and computing.
//!
//! A [`Registration`] opens a lease, reads the job's record and checks the numerics fingerprint; it becomes
//! a [`Session`] when the trainer is registered. [`Session::join_generation`] returns a
//! [`GenerationClient`]: it initializes the parameters if this trainer is elected to, pulls and pushes
//! ([`Pservers`]), follows lanes ([`LaneFollower`]) or takes tasks ([`HeldTasks`]), and takes part in the
//! election of the saver ([`SaverElection`]). Calls are idempotent and are repeated until they succeed; they
//! end with [`ClientError::NewGeneration`] when the job was rolled back, and the program joins the next
//! generation.
//!
//! The library uses nothing that is global to a process: no logging set-up, signals, ports or metrics. It
//! spawns tasks on the caller's runtime, of either kind. The lease is renewed by one of them, so a program
//! that computes for long on a current-thread runtime gives it a thread of its own.
//!
//! # A program with its own loop
//!
//! This program trains the asynchronous job `digits`. All trainers of the job must have the same numerics
//! fingerprint, and name and shape their parameters alike.
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use steadfast_training_client::{
//!     ClientError, ContributionName, Gradient, Identity, NextTask, Registration, SavedModel, Session,
//!     TaskOutcome,
//! };
//! use steadfast_common::records::applied_records::{RecordRange, checksum};
//! use steadfast_common::ids::{Pass, TrainerId};
//! use steadfast_common::records::keys::Keys;
//! use steadfast_common::tensor::layout::ParamSpec;
//! use steadfast_common::records::position::Position;
//! use steadfast_common::records::DispatchRecord;
//! use steadfast_common::status::TimeBreakdown;
//! use steadfast_coord::{Etcd, EtcdOptions};
//! use steadfast_host::random;
//! use steadfast_host::time::sleep;
//! use steadfast_net::TlsIdentity;
//!
//! async fn run() -> Result<(), Box<dyn std::error::Error>> {
//!     let etcd = Etcd::connect(&EtcdOptions::default()).await?;
//!     let identity = Identity {
//!         trainer: TrainerId(random::uuid()),
//!         admin: String::new(),
//!         tls: TlsIdentity::default(),
//!     };
//!     let (keys, lease_ttl) = (Keys::of_job("digits"), Duration::from_secs(10));
//!     let registration = Registration::begin(&etcd, &keys, lease_ttl, identity).await?;
//!     let numerics = "my library 1.0 on x86-64".to_owned();
//!     let session = registration.complete(vec![ParamSpec::new("weight", &[10, 64])], numerics).await?;
//!     loop {
//!         match train(&session).await {
//!             Err(ClientError::NewGeneration) => {}
//!             Ok(()) | Err(ClientError::JobEnded) => break,
//!             Err(error) => return Err(error.into()),
//!         }
//!     }
//!     session.close().await;
//!     Ok(())
//! }
//!
//! async fn train(session: &Session) -> Result<(), ClientError> {
//!     let generation = session.join_generation().await?;
//!     let zeros = async || Ok::<_, ClientError>(vec![0.0; session.layout().len()].into());
//!     generation.initialize(zeros).await?;
//!     let pservers = generation.pservers();
//!     let mut parameters = vec![0.0; session.layout().len()];
//!     let (mut tasks, spent) = (generation.tasks(), TimeBreakdown::default());
//!     let mut next = tasks.take(spent).await?;
//!     loop {
//!         let version = pservers.pull(&mut parameters).await?.position.version;
//!         next = match next {
//!             NextTask::Taken(DispatchRecord { pass, task, .. }) => {
//!                 // The sums over all records of the task.
//!                 let (records, loss_sum, values) = compute(&parameters, pass, task);
//!                 let range = RecordRange { pass, task, from: 0, to: records, last: true };
//!                 let checksum = checksum(pass, task, 0..records);
//!                 let (records, values) = (records.into(), Arc::new(values));
//!                 // The model has no tables.
//!                 let gradient = Gradient { records, loss_sum, checksum, values, rows: vec![], weight: None };
//!                 pservers.push(ContributionName::Range { range, version }, gradient).await?;
//!                 tasks.report(TaskOutcome::Finished { records, loss_sum, version }, spent).await?
//!             }
//!             NextTask::Later(pause) => {
//!                 sleep(pause).await;
//!                 tasks.take(spent).await?
//!             }
//!             NextTask::AllDone => break,
//!         };
//!     }
//!     let pulled = pservers.pull(&mut parameters).await?;
//!     let pass = Pass(session.job().spec.passes.unwrap_or(0));
//!     let mut election = generation.saver_election(Position { pass, ..pulled.position });
//!     while election.is_elected().await? {
//!         if election.may_write().await? {
//!             let (url, parameters_sha256) = write(&parameters);
//!             election.finish(SavedModel { url, parameters_sha256, evaluation: None }).await?;
//!         }
//!     }
//!     Ok(())
//! }
//! # use steadfast_common::ids::TaskId;
//! # fn compute(_: &[f32], _: Pass, _: TaskId) -> (u32, f64, Vec<f32>) { unimplemented!() }
//! # fn write(_: &[f32]) -> (String, String) { unimplemented!() }
//! ```

mod clip;
mod cluster;
mod code;
mod error;
mod generation;
mod held_tasks;
mod lanes;
mod master;
mod parameters;
mod pservers;
mod pulls;
mod rows;
mod saver;
mod session;

pub use clip::clip;
pub use cluster::{Cluster, PserverSet};
pub use error::ClientError;
pub use generation::{FailedTask, FailureCause, FailureDecision, GenerationClient};
pub use held_tasks::{HeldTasks, NextTask, TaskOutcome};
pub use lanes::{Assignment, LaneFollower};
pub use master::Master;
pub use parameters::ParameterClient;
pub use pservers::{Gradient, InitialState, InitialValues, Pservers, Pulled};
pub use rows::PulledRows;
pub use saver::{SavedModel, SaverElection};
pub use session::{Identity, RegisterError, Registration, Session};
pub use steadfast_common::records::contribution::{
    ContributionName, LaneEnd, LaneShare, LanesName,
};
