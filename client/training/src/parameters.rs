//! The parameters of a job, for processes that are no trainers of it: a program with a coordinator, and its workers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::try_join_all;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Pass, TaskId, Version};
use steadfast_common::records::JobRecord;
use steadfast_common::records::applied_records::{RecordRange, TaskRanges, checksum};
use steadfast_common::records::contribution::ContributionName;
use steadfast_common::records::keys::Keys;
use steadfast_common::tensor::layout::{Layout, ParamSpec};
use steadfast_coord::{Deadline, Etcd, wait_for_job};
use steadfast_host::time::sleep;
use steadfast_net::TlsIdentity;
use steadfast_proto::v1::master_client::MasterClient;
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::{
    AppliedReply, AppliedRequest, DrainRequest, Param, TakeCheckpointReply, TakeCheckpointRequest,
    TaskRange,
};
use tracing::warn;

use crate::clip::clip;
use crate::master::not_called;
use crate::pservers::with_timeout;
use crate::session::{checked_layout, job_now};
use crate::{ClientError, Cluster, Gradient, Pservers, RegisterError};

/// The maximum time that the master may take for a checkpoint until it is asked again.
const CHECKPOINT_WAIT: Duration = Duration::from_secs(300);

/// The pause after a checkpoint that was not taken.
const CHECKPOINT_POLL: Duration = Duration::from_secs(1);

/// Time between requests to end the job.
const DRAIN_POLL: Duration = Duration::from_millis(200);

/// A client of the parameter servers that pulls, and pushes under numbers. Each call follows the job from generation to
/// generation until it succeeds.
#[derive(Debug)]
pub struct ParameterClient {
    etcd: Etcd,
    keys: Keys,
    cluster: Arc<Cluster>,
    job: JobRecord,
    layout: Arc<Layout>,
    /// Never passes: the caller has no lease.
    deadline: Arc<Deadline>,
    /// The job and its pservers in the last generation that a call was made in.
    present: Mutex<Option<(Arc<JobRecord>, Pservers)>>,
}

impl ParameterClient {
    /// Waits for the job, and follows its members. `params` are all parameters, in order.
    ///
    /// # Errors
    /// If the parameters are invalid, or etcd fails.
    pub async fn join(
        etcd: &Etcd,
        keys: &Keys,
        tls: TlsIdentity,
        params: Vec<ParamSpec>,
    ) -> Result<Self, RegisterError> {
        let job = wait_for_job(etcd, keys).await?;
        let layout = Arc::new(checked_layout(&job.spec.optimizer, params)?);
        let cluster = Arc::new(Cluster::join(etcd, keys.clone(), tls).await?);
        let (deadline, present) = (Arc::new(Deadline::none()), Mutex::default());
        let (etcd, keys) = (etcd.clone(), keys.clone());
        Ok(Self { etcd, keys, cluster, job, layout, deadline, present })
    }

    /// Returns the job as it was when this client joined it.
    pub fn job(&self) -> &JobRecord {
        &self.job
    }

    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns the members of the job.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Waits until the newest generation is complete and has values; returns its pservers.
    async fn present(&self) -> Result<(Arc<JobRecord>, Pservers), ClientError> {
        loop {
            let set = self.cluster.pserver_set().await?;
            let generation = set.record.generation;
            let present = self.present.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(present) =
                present.filter(|(_, pservers)| pservers.generation() == generation)
            {
                return Ok(present);
            }
            let changed = self.cluster.init_changed();
            if !self.cluster.is_initialized(generation) {
                tokio::select! {
                    biased;
                    () = changed => {}
                    () = self.cluster.generation_after(generation) => {}
                    () = self.cluster.job_ended() => return Err(ClientError::JobEnded),
                }
                continue;
            }
            // A change of the job's settings begins a generation.
            let job = job_now(&self.etcd, &self.keys).await?;
            let job = job.ok_or(ClientError::JobEnded)?;
            let pservers = Pservers::new(
                self.cluster.clone(),
                &set,
                self.layout.clone(),
                job.spec.gradients.codec(),
                self.deadline.clone(),
            )?;
            let present = (Arc::new(job), pservers);
            *self.present.lock().unwrap_or_else(PoisonError::into_inner) = Some(present.clone());
            return Ok(present);
        }
    }

    /// Pulls the newest values of all parameters, flat.
    ///
    /// # Errors
    /// A rejection, or the end of the job.
    pub async fn pull(&self) -> Result<Vec<f32>, ClientError> {
        let mut values = vec![0.0; self.layout.len()];
        loop {
            let (_, pservers) = self.present().await?;
            match pservers.pull(&mut values).await {
                Err(ClientError::NewGeneration) => {}
                pulled => return pulled.map(|_| values),
            }
        }
    }

    /// Pushes a mean gradient to all slots, each of which applies a number once; returns the generation in which all
    /// of them have it.
    ///
    /// # Errors
    /// A rejection, or the end of the job; some slots may have applied it.
    pub async fn push(&self, number: u32, gradient: Vec<f32>) -> Result<Generation, ClientError> {
        let gradient = Arc::new(gradient);
        let (pass, task) = (Pass(0), TaskId(number));
        loop {
            let (job, pservers) = self.present().await?;
            let settings = job.spec.settings();
            let mut values = Vec::clone(&gradient);
            clip(&mut values, &mut [], &self.layout, 1.0, &settings);
            let push = Gradient {
                records: 1,
                checksum: checksum(pass, task, 0..1),
                values: Arc::new(values),
                ..Gradient::default()
            };
            let range = RecordRange { pass, task, from: 0, to: 1, last: true };
            // It tells the staleness of a gradient, which has no meaning here.
            let version = Version(0);
            match pservers.push(ContributionName::Range { range, version }, push).await {
                Err(ClientError::NewGeneration) => {}
                pushed => return pushed.map(|_| pservers.generation()),
            }
        }
    }

    /// Waits until a checkpoint is taken that was begun after this call.
    ///
    /// # Errors
    /// The rejection of the master, or [`ClientError::JobEnded`].
    pub async fn take_checkpoint(&self) -> Result<(), ClientError> {
        loop {
            let take = |channel| async {
                MasterClient::new(channel).take_checkpoint(TakeCheckpointRequest {}).await
            };
            let taken = self.cluster.acting().call(CHECKPOINT_WAIT, take).await;
            let TakeCheckpointReply { error, .. } = taken.map_err(not_called)?;
            if error.is_empty() {
                return Ok(());
            }
            warn!(error, "no checkpoint was taken; trying again");
            sleep(CHECKPOINT_POLL).await;
        }
    }

    /// Ends the job after what was pushed, as `steadfast drain` does; returns when the master has decided so. Only
    /// administrators may.
    ///
    /// # Errors
    /// The rejection of the master, or [`ClientError::JobEnded`].
    pub async fn drain(&self) -> Result<(), ClientError> {
        loop {
            let drain = |channel| async { MasterClient::new(channel).drain(DrainRequest {}).await };
            let drained = self.cluster.acting().call(Duration::ZERO, drain).await;
            if drained.map_err(not_called)?.ended {
                return Ok(());
            }
            sleep(DRAIN_POLL).await;
        }
    }

    /// Returns the numbers whose pushes count on every slot, and the generation in which they do.
    ///
    /// # Errors
    /// A rejection, or the end of the job.
    pub async fn counted(&self) -> Result<(Generation, TaskRanges), ClientError> {
        loop {
            let (_, pservers) = self.present().await?;
            match pservers.applied_tasks().await {
                Err(ClientError::NewGeneration) => {}
                counted => return counted.map(|numbers| (pservers.generation(), numbers)),
            }
        }
    }
}

impl Pservers {
    /// Returns the tasks of the current pass that the blocks of all slots reflect.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn applied_tasks(&self) -> Result<TaskRanges, ClientError> {
        let asked = self.slots.iter().map(async |slot| {
            let mut retries = self.retries();
            loop {
                let mut client = PserverClient::new(slot.channel.clone());
                let request = AppliedRequest { target: Some(slot.target) };
                if let Some(reply) = retries.attempt(with_timeout(client.applied(request))).await? {
                    let AppliedReply { tasks, params } = reply.into_inner();
                    self.check_params(params)?;
                    let tasks = tasks.into_iter();
                    let ranges: Vec<(u32, u32)> =
                        tasks.map(|TaskRange { first, last }| (first, last)).collect();
                    return Ok::<_, ClientError>(TaskRanges::from(ranges));
                }
            }
        });
        let mut all = try_join_all(asked).await?.into_iter();
        let first = all.next().unwrap_or_default();
        Ok(all.fold(first, |common, tasks| common.intersection(&tasks)))
    }

    /// Checks that the slots have the parameters of the caller.
    fn check_params(&self, params: Vec<Param>) -> Result<(), ClientError> {
        let found: Vec<ParamSpec> = params.into_iter().map(ParamSpec::from).collect();
        let (found, own) = (shapes(&found), shapes(self.layout.params()));
        if found == own {
            return Ok(());
        }
        let (peer, kind) = ("the job", ErrorKind::Conflict);
        let message = format!(
            "it has trained {found}, and this program has {own}; give a job with other parameters another name"
        );
        Err(ClientError::Rejected { peer, kind, message })
    }
}

/// Lists parameters for a message, such as `weight [10, 64], bias [10]`.
fn shapes(params: &[ParamSpec]) -> String {
    let shown = params.iter().map(|param| format!("{} {:?}", param.name, param.shape));
    shown.collect::<Vec<_>>().join(", ")
}
