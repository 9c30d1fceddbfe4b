//! A session over an embedded etcd, on a current-thread runtime as `tokio::test` provides it: the client
//! must work inside a program that has no other.

#![allow(clippy::unwrap_used)]

use std::future::{Ready, pending};
use std::sync::Arc;
use std::time::Duration;

use steadfast_common::ids::{Generation, Pass, TaskId, TrainerId, Version};
use steadfast_common::job::job_file::parse;
use steadfast_common::records::applied_records::RecordRange;
use steadfast_common::records::code::CodeRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{
    GenerationRecord, InitRecord, JobRecord, PROTOCOL, PserverRecord, TrainerRecord,
};
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_etcd::{Config, Server};
use steadfast_net::TlsIdentity;
use steadfast_training_client::{
    ClientError, ContributionName, Gradient, Identity, InitialValues, RegisterError, Registration,
    Session,
};
use tempfile::TempDir;
use tokio::time::timeout;
use uuid::Uuid;

const LEASE_TTL: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_millis(200);

/// A job of one slot in an etcd of its own, as a master and a pserver leave it that do not answer.
struct Job {
    etcd: Etcd,
    keys: Keys,
    _data: TempDir,
}

impl Job {
    async fn start() -> Self {
        let data = tempfile::tempdir().unwrap();
        let config = Config::new("127.0.0.1:0".parse().unwrap(), data.path());
        let server = Server::bind(config).await.unwrap();
        let endpoints = vec![format!("http://{}", server.local_addr())];
        tokio::spawn(server.serve(pending()));
        let etcd =
            Etcd::connect(&EtcdOptions { endpoints, ..EtcdOptions::default() }).await.unwrap();
        let this = Self { etcd, keys: Keys::of_job("digits"), _data: data };
        let spec = parse(include_str!("../../../examples/digits.toml")).unwrap();
        let record = JobRecord::new(spec, "memory:///".to_owned(), String::new());
        this.put(&this.keys.job(), &record).await;
        this
    }

    async fn put(&self, key: &str, value: &impl serde::Serialize) {
        self.etcd.put(key, &serde_json::to_vec(value).unwrap()).await.unwrap();
    }

    /// Begins a generation from a checkpoint, with a pserver at a port where nothing listens.
    async fn begin_generation(&self, number: u64) {
        let slot = self.keys.ps(steadfast_common::ids::Slot(0));
        let pserver = PserverRecord {
            id: Uuid::nil(),
            address: "127.0.0.1:1".to_owned(),
            unix: None,
            admin: String::new(),
            memory_of: None,
            followed: None,
            protocol: PROTOCOL,
        };
        self.put(&slot, &pserver).await;
        let created = self.etcd.get(&slot).await.unwrap().unwrap().create_revision;
        let record = GenerationRecord {
            generation: Generation(number),
            slots: vec![pserver.incarnation(created)],
            checkpoint: Some("1".to_owned()),
            ..GenerationRecord::default()
        };
        self.put(&self.keys.generation(), &record).await;
    }

    async fn register(&self, number: u128, numerics: &str) -> Result<Session, RegisterError> {
        self.register_with(number, numerics, params()).await
    }

    async fn register_with(
        &self,
        number: u128,
        numerics: &str,
        params: Vec<ParamSpec>,
    ) -> Result<Session, RegisterError> {
        let trainer = TrainerId(Uuid::from_u128(number));
        let identity = Identity { trainer, admin: String::new(), tls: TlsIdentity::default() };
        let begun = Registration::begin(&self.etcd, &self.keys, LEASE_TTL, identity).await?;
        begun.complete(params, numerics.to_owned()).await
    }
}

fn params() -> Vec<ParamSpec> {
    vec![ParamSpec::new("weight", &[3])]
}

/// A push that no pserver acknowledges is repeated until another generation begins.
#[tokio::test]
async fn a_session_on_one_thread_follows_generations() {
    let job = Job::start().await;
    let session = job.register(1, "a").await.unwrap();
    let key = job.keys.trainer(TrainerId(Uuid::from_u128(1)));
    let record: Option<TrainerRecord> = job.etcd.get_json(&key).await.unwrap();
    let (admin, numerics) = (String::new(), "a".to_owned());
    assert_eq!(record, Some(TrainerRecord { admin, numerics, protocol: PROTOCOL }));

    assert!(timeout(SOON, session.join_generation()).await.is_err(), "there is no generation yet");
    job.begin_generation(1).await;
    let generation = session.join_generation().await.unwrap();
    assert_eq!(generation.number(), Generation(1));
    let never =
        || -> Ready<Result<InitialValues, ClientError>> { panic!("a checkpoint has the values") };
    generation.initialize(never).await.unwrap();

    let (pass, task, version) = (Pass(0), TaskId(0), Version(0));
    let range = RecordRange { pass, task, from: 0, to: 1, last: true };
    let gradient = Gradient { records: 1, values: Arc::new(vec![1.0; 3]), ..Gradient::default() };
    let name = ContributionName::Range { range, version };
    let push = generation.pservers().push(name, gradient);
    let begin = async {
        tokio::time::sleep(SOON).await;
        job.begin_generation(2).await;
    };
    let (pushed, ()) = tokio::join!(push, begin);
    assert!(matches!(pushed, Err(ClientError::NewGeneration)), "{pushed:?}");
    assert_eq!(session.join_generation().await.unwrap().number(), Generation(2));

    session.close().await;
    session.lost().await;
    assert!(job.etcd.get(&key).await.unwrap().is_none(), "the registration ends with the session");
}

#[tokio::test]
async fn parameters_are_trained_further_with_other_code_only_if_that_is_accepted() {
    let job = Job::start().await;
    let check = async |number: u128, source: &str, accept: bool| {
        let trainer = TrainerId(Uuid::from_u128(number));
        let identity = Identity { trainer, admin: String::new(), tls: TlsIdentity::default() };
        let begun = Registration::begin(&job.etcd, &job.keys, LEASE_TTL, identity).await?;
        let modules = [("model", source), ("data", "1")];
        let modules = modules.map(|(name, sha256)| (name.to_owned(), sha256.to_owned()));
        begun.check_code(&modules.into(), accept).await
    };
    let record = async || job.etcd.get_json::<CodeRecord>(&job.keys.code()).await.unwrap().unwrap();
    check(1, "1", false).await.unwrap();
    // Nothing was computed with it yet.
    check(2, "2", false).await.unwrap();
    assert_eq!(record().await.modules["model"], "2");

    job.begin_generation(1).await;
    let trainer = TrainerId(Uuid::nil());
    let init = InitRecord { generation: Generation(1), attempt: 1, trainer, done: true };
    job.put(&job.keys.init(), &init).await;
    check(3, "2", false).await.unwrap();
    let error = check(4, "3", false).await.unwrap_err();
    assert!(matches!(&error, RegisterError::OtherCode { modules } if modules == &["model"]));
    assert!(error.to_string().contains("--accept-code-change"), "{error}");
    check(5, "3", true).await.unwrap();
    check(6, "3", false).await.unwrap();
    assert!(check(7, "2", false).await.is_err(), "the new code is that of the job");
    let changes = record().await.changes;
    assert_eq!(changes.len(), 1);
    assert_eq!(changes[0].modules, ["model"]);

    // The job begins anew, since there was no checkpoint.
    job.begin_generation(2).await;
    check(8, "2", false).await.unwrap();
    assert!(record().await.changes.is_empty());
}

#[tokio::test]
async fn trainers_that_differ_in_numerics_or_reuse_an_id_are_not_registered() {
    let job = Job::start().await;
    let first = job.register(1, "a").await.unwrap();
    let error = job.register(2, "b").await.unwrap_err();
    assert!(matches!(&error, RegisterError::OtherNumerics { own, .. } if own == "b"), "{error}");
    let error = job.register(1, "a").await.unwrap_err();
    assert!(matches!(error, RegisterError::IdTaken), "{error}");
    let twice = [params(), params()].concat();
    let error = job.register_with(3, "a", twice).await.unwrap_err();
    assert!(matches!(error, RegisterError::DuplicateParameter), "{error}");
    drop(first);
}
