//! A trainer's registration with a job.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Incarnation, TrainerId};
use steadfast_common::job::spec::{Mode, OptimizerSpec};
use steadfast_common::records::code::Modules;
use steadfast_common::records::discarded_records::LeftOutRecords;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{FixedRecord, JobRecord, PROTOCOL, TrainerRecord};
use steadfast_common::tensor::layout::{Layout, ParamSpec, invalid_tables};
use steadfast_coord::{self as coord, CoordError, Etcd, Op, Unchanged, wait_for_job};
use steadfast_host::time::sleep;
use steadfast_net::TlsIdentity;
use tracing::info;

use crate::{ClientError, Cluster, GenerationClient, Master, Pservers, code};

/// How a trainer presents itself to the job.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Unique to this registration: a trainer that registers again takes another id.
    pub trainer: TrainerId,
    /// `host:port` that this process listens at: the master's failure detector connects to it. Without one
    /// (empty), the death of the process is detected when its lease ends.
    pub admin: String,
    /// The identity for connections to the master and the pservers.
    pub tls: TlsIdentity,
}

/// A registration that is not complete: the trainer has a lease, and the job's record.
#[derive(Debug)]
pub struct Registration {
    etcd: Etcd,
    keys: Keys,
    identity: Identity,
    lease: coord::Session,
    job: JobRecord,
}

/// A trainer that is registered with a job.
#[derive(Debug)]
pub struct Session {
    etcd: Etcd,
    keys: Keys,
    lease: coord::Session,
    incarnation: Incarnation,
    job: JobRecord,
    layout: Arc<Layout>,
    cluster: Arc<Cluster>,
    master: Master,
}

/// The reason why a trainer cannot register.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error(transparent)]
    Coord(#[from] CoordError),
    #[error(
        "the numerics fingerprint {own} of this machine differs from that of the job, {job}; \
         use a machine of the same type"
    )]
    OtherNumerics { own: String, job: String },
    #[error(
        "the code of the model differs from that with which the job's parameters were trained, in `{}`; restore \
         it, or go on with the new code from these parameters: --accept-code-change \
         (STEADFAST_ACCEPT_CODE_CHANGE=true)",
        modules.join("`, `")
    )]
    OtherCode { modules: Vec<String> },
    #[error("another trainer has the same id")]
    IdTaken,
    #[error("the model has two parameters of the same name")]
    DuplicateParameter,
    #[error("the model has {values} values; the range is 1 to 2^32")]
    ModelSize { values: usize },
    #[error("{reason}")]
    Model { reason: String },
}

impl RegisterError {
    /// Returns the kind of the error: what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Coord(error) => error.kind(),
            Self::OtherNumerics { .. } | Self::OtherCode { .. } => ErrorKind::Denied,
            Self::IdTaken => ErrorKind::Internal,
            Self::DuplicateParameter | Self::ModelSize { .. } | Self::Model { .. } => {
                ErrorKind::Invalid
            }
        }
    }
}

impl Registration {
    /// Opens a lease, and waits until a master has accepted the job.
    ///
    /// # Errors
    /// If etcd fails with an error that is not transient.
    pub async fn begin(
        etcd: &Etcd,
        keys: &Keys,
        lease_ttl: Duration,
        identity: Identity,
    ) -> Result<Self, RegisterError> {
        // First, because this waits for an unavailable etcd.
        let lease = coord::Session::open_with_retry(etcd, lease_ttl).await?;
        let job = wait_for_job(etcd, keys).await?;
        Ok(Self { etcd: etcd.clone(), keys: keys.clone(), identity, lease, job })
    }

    pub fn job(&self) -> &JobRecord {
        &self.job
    }

    /// Checks that the model is the program that the job's parameters were trained with; `modules` are its sources.
    /// Checks nothing if there are none. With `accept`, continues with another program and records the change.
    ///
    /// # Errors
    /// [`RegisterError::OtherCode`], or if etcd fails.
    pub async fn check_code(&self, modules: &Modules, accept: bool) -> Result<(), RegisterError> {
        if modules.is_empty() {
            return Ok(());
        }
        code::check(&self.etcd, &self.keys, self.identity.trainer, modules, accept).await
    }

    /// Registers the trainer, with a model of these parameters. `numerics` is the fingerprint: the same
    /// string on all machines that compute the same bits. The first trainer of the job sets the reference.
    ///
    /// # Errors
    /// If the fingerprints differ, the parameters are invalid, or etcd fails.
    pub async fn complete(
        self,
        params: Vec<ParamSpec>,
        numerics: String,
    ) -> Result<Session, RegisterError> {
        let Self { etcd, keys, identity, lease, job } = self;
        let own = json(&numerics);
        if let Err(found) = etcd.create(&keys.numerics(), &own, 0).await?
            && found.value != own
        {
            let job = String::from_utf8_lossy(&found.value).into_owned();
            return Err(RegisterError::OtherNumerics { own: numerics, job });
        }
        let layout = Arc::new(checked_layout(&job.spec.optimizer, params)?);
        let record = TrainerRecord { admin: identity.admin, numerics, protocol: PROTOCOL };
        let key = keys.trainer(identity.trainer);
        let created = etcd.create(&key, &json(&record), lease.lease()).await?;
        let incarnation = Incarnation(created.map_err(|_| RegisterError::IdTaken)?);
        let cluster = Arc::new(Cluster::join(&etcd, keys.clone(), identity.tls).await?);
        let master = Master::new(cluster.clone(), identity.trainer);
        // A contribution is a function of its name: one that another trainer computes as well changes nothing.
        if job.spec.mode == Mode::Sync {
            lease.outlast_etcd();
        }
        Ok(Session { etcd, keys, lease, incarnation, job, layout, cluster, master })
    }
}

impl Session {
    pub fn job(&self) -> &JobRecord {
        &self.job
    }

    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns the incarnation: the create-revision of the registration.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Waits until every slot is held by the pserver that the newest generation names. The parameters may
    /// lack their initial values: see [`GenerationClient::initialize`].
    ///
    /// # Errors
    /// If the job has ended, was extended or changed, or a pserver's address is invalid.
    pub async fn join_generation(&self) -> Result<GenerationClient, ClientError> {
        let pserver_set = self.cluster.pserver_set().await?;
        // A job that was extended has another end, one that was changed has other evaluations. Either begins a
        // generation.
        if job_now(&self.etcd, &self.keys).await?.is_some_and(|job| job != self.job) {
            return Err(ClientError::Amended);
        }
        let pservers = Pservers::new(
            self.cluster.clone(),
            &pserver_set,
            self.layout.clone(),
            self.job.spec.gradients.codec(),
            self.lease.deadline(),
        )?;
        let left_out = LeftOutRecords::new(&pserver_set.record.discarded_records, &self.job.spec);
        Ok(GenerationClient::new(self.master.clone(), pservers, left_out))
    }

    /// Records the object with the tensors that the model has beside its parameters. The fingerprint covers their
    /// values, so all trainers record the same one.
    ///
    /// # Errors
    /// If etcd fails.
    pub async fn record_fixed(&self, record: &FixedRecord) -> Result<(), CoordError> {
        let key = self.keys.fixed();
        loop {
            let known = self.etcd.get(&key).await?;
            if known.as_ref().is_some_and(|it| it.value == json(record)) {
                return Ok(());
            }
            let mod_revision = known.map_or(0, |it| it.mod_revision);
            let unchanged = [Unchanged { key: key.clone(), mod_revision }];
            if self.etcd.put_if(&Op::put(&key, record), &unchanged).await?.is_some() {
                return Ok(());
            }
        }
    }

    /// Completes when the lease is lost. The work in progress is void, and the trainer must register again.
    pub async fn lost(&self) {
        self.lease.lost().await;
    }

    /// Completes when the job has ended.
    pub async fn job_ended(&self) {
        self.cluster.job_ended().await;
    }

    /// Completes when a pserver of the newest generation is lost, which ends the generation.
    pub async fn pserver_lost(&self) {
        self.cluster.pserver_lost().await;
    }

    /// Ends the registration: the master reassigns lanes and tasks at once.
    pub async fn close(&self) {
        self.lease.close(&self.etcd).await;
    }
}

/// Reads the job, and waits for etcd as long as that does not answer.
pub(crate) async fn job_now(etcd: &Etcd, keys: &Keys) -> Result<Option<JobRecord>, CoordError> {
    let mut pauses = None;
    loop {
        match etcd.get_json(&keys.job()).await {
            Err(error) if error.is_transient() => {
                let pause = pauses.get_or_insert_with(coord::backoff).next();
                sleep(pause.unwrap_or_default()).await;
            }
            read => return read,
        }
    }
}

fn json(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("records are plain data")
}

/// Returns the layout of a model with these parameters.
///
/// # Errors
/// If they are invalid.
pub(crate) fn checked_layout(
    optimizer: &OptimizerSpec,
    params: Vec<ParamSpec>,
) -> Result<Layout, RegisterError> {
    let names: BTreeSet<&str> = params.iter().map(|param| param.name.as_str()).collect();
    if names.len() != params.len() {
        return Err(RegisterError::DuplicateParameter);
    }
    let values = params.iter().fold(0_usize, |sum, param| sum.saturating_add(param.len()));
    let has_tables = params.iter().any(|param| param.table.is_some());
    if (values == 0 && !has_tables) || 1 << 32 < values {
        return Err(RegisterError::ModelSize { values });
    }
    if let Some(reason) = invalid_tables(&params) {
        return Err(RegisterError::Model { reason });
    }
    let params = optimizer.grouped(params).map_err(|reason| RegisterError::Model { reason })?;
    for group in &optimizer.groups {
        let is_in = |param: &&ParamSpec| optimizer.group_of(&param.name) == Some(group);
        let names: Vec<&str> = params.iter().filter(is_in).map(|it| it.name.as_str()).collect();
        info!(
            patterns = group.parameters.join(", "),
            parameters = names.join(", "),
            "group of parameters"
        );
    }
    Ok(Layout::new(params))
}
