//! Task dispatch: the master with a real etcd that syncs every commit to disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use steadfast_common::ids::{TrainerId, Version};
use steadfast_common::status::TimeBreakdown;
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_coord::{Leadership, OPS_MAX, Op, Session};
use steadfast_tests::{EtcdServer, Job, Scene, examples};
use steadfast_training_client::{HeldTasks, NextTask, TaskOutcome};
use uuid::Uuid;

use crate::rig::{Rig, Via, connect};
use crate::sample::Sample;
use crate::watch::Watch;

/// Number of tasks in the job.
const TASKS: usize = 1_000_000;

/// Tasks dispatched per sample.
const DISPATCHED: usize = 40_000;

/// Number of concurrent trainers.
pub const TRAINERS: usize = 64;

/// Keys changed by one dispatch: the previous task and the next one.
pub const KEYS_OF_ONE: usize = 2;

async fn rig() -> Rig {
    let scene = Scene::new();
    let data = scene.write("tasks.csv", format!("x0,y\n{}", "1,2\n".repeat(TASKS)));
    let example = format!("{}/data/linear.csv", examples().display());
    let job = Job::example("linear")
        .with(&example, &data.display().to_string())
        .with("records_per_task = 50", "records_per_task = 1")
        .with("mode = \"sync\"", "mode = \"async\"")
        .with("[sync]\nlanes = 4\nmicro_batch = 25", "[async]\nbatch = 1")
        .with("fraction = 0.2", "fraction = 0.0");
    let etcd = EtcdServer::durable(&scene);
    Rig::start(scene, etcd, &job, 1, vec![ParamSpec::new("w", &[1])], Via::Tcp).await
}

/// A client that makes one request after the other.
pub trait RequestLoop: Send + 'static {
    /// Makes one request and waits for the reply.
    fn turn(&mut self) -> impl Future<Output = ()> + Send;
}

/// A trainer that takes tasks and reports them as finished.
struct Worker {
    tasks: HeldTasks,
}

impl Worker {
    async fn new(rig: &Rig) -> Self {
        let generation = rig.generation_of(TrainerId(Uuid::new_v4())).await;
        Self { tasks: generation.tasks() }
    }
}

impl RequestLoop for Worker {
    /// Reports the previous task and takes another.
    async fn turn(&mut self) {
        let spent = TimeBreakdown::default();
        let next = if self.tasks.is_empty() {
            self.tasks.take(spent).await
        } else {
            let (records, loss_sum, version) = (1, 0.5, Version(0));
            self.tasks.report(TaskOutcome::Finished { records, loss_sum, version }, spent).await
        };
        let next = next.expect("the master answers");
        assert!(matches!(next, NextTask::Taken(_)), "there are tasks: {next:?}");
    }
}

/// Dispatches [`DISPATCHED`] of [`TASKS`] tasks to [`TRAINERS`] trainers.
pub async fn dispatch() -> Sample {
    let rig = rig().await;
    let mut workers = Vec::new();
    for _ in 0..TRAINERS {
        let mut worker = Worker::new(&rig).await;
        worker.turn().await;
        workers.push(worker);
    }
    all_at_once(workers, rig.pids()).await
}

/// Measures [`DISPATCHED`] turns of all `askers` together, and the processes that serve them.
pub async fn all_at_once(askers: Vec<impl RequestLoop>, pids: Vec<i32>) -> Sample {
    let given = Arc::new(AtomicUsize::new(0));
    let watch = Watch::start(pids);
    let runs = askers.into_iter().map(|mut asker| {
        let given = given.clone();
        tokio::spawn(async move {
            let mut waits = Vec::new();
            while given.fetch_add(1, Ordering::Relaxed) < DISPATCHED {
                let started = Instant::now();
                asker.turn().await;
                waits.push(started.elapsed().as_secs_f64());
            }
            waits
        })
    });
    let waits = join_all(runs).await.into_iter().map(|it| it.expect("no asker panics"));
    let sample = watch.stop(DISPATCHED as f64);
    sample.with_waits(waits.flatten().collect())
}

/// Returns the changes of `count` dispatches starting at `first`, including the key they share.
pub fn changes(first: usize, count: usize) -> Vec<Op> {
    let value = serde_json::json!({ "a": "0".repeat(150) });
    let ops = (first..first + count).flat_map(|number| {
        let key = |number: usize| format!("/bench/tasks/{number:07}");
        [Op::put(&key(number), &value), Op::delete(&key(number.wrapping_sub(count)))]
    });
    ops.chain([Op::put("/bench/head", &value)]).collect()
}

/// Measures one writer of transactions with the changes of as many dispatches as fit into one.
pub async fn write() -> Sample {
    let scene = Scene::new();
    let etcd = EtcdServer::durable(&scene);
    let client = connect(&etcd.url()).await;
    let session = Session::open(&client, Duration::from_secs(30)).await.expect("a lease");
    let leadership = Leadership::acquire(&client, &session, "/bench/lock", b"bench").await;
    let mut leadership = leadership.expect("etcd answers").expect("the lock is free");
    let in_one = (OPS_MAX - 1) / KEYS_OF_ONE;
    let watch = Watch::start(vec![etcd.pid().as_raw()]);
    let mut next = 0;
    while next < DISPATCHED {
        leadership.commit(&client, &changes(next, in_one)).await.expect("etcd answers");
        next += in_one;
    }
    watch.stop(next as f64)
}

/// Measures from the death of a master to the first task dispatched by another.
pub async fn take_over() -> Sample {
    let mut rig = rig().await;
    let mut worker = Worker::new(&rig).await;
    worker.turn().await;
    let standby = rig.start_standby();
    let watch = Watch::start(vec![standby]);
    rig.kill_master();
    worker.turn().await;
    watch.stop(1.0)
}
