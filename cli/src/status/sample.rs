//! Sample jobs and statuses for tests.

use steadfast_common::ids::{
    Generation, Incarnation, Lane, NodeId, Pass, Round, Slot, TrainerId, Version,
};
use steadfast_common::job::elastic::ElasticKind;
use steadfast_common::job::job_file;
use steadfast_common::job::spec::{JobSpec, Mode};
use steadfast_common::records::EvaluationRecord;
use steadfast_common::records::launch::HostRecord;
use steadfast_common::status::{
    ElasticPhase, ElasticStatus, HostStatus, JobPhase, JobStatus, LauncherStatus, MasterStatus,
    NodePhase, NodeReport, NodeStatus, Queues, SlotStatus, TimeBreakdown, TimelineEvent,
    TimelineKind, TrainerStatus, Wait, WorkersPhase,
};
use uuid::Uuid;

/// Returns the spec of a small synchronous job.
pub fn spec() -> JobSpec {
    let text = "name = 'digits'\npasses = 20\n\
                [dataset]\nsource = ['digits.parquet']\nformat = 'parquet'\n\
                features = ['pixel_*']\nlabel = 'digit'\n\
                [model]\nkind = 'softmax'\nclasses = 10\n";
    job_file::parse(text).unwrap()
}

/// Returns the status of the job in its third pass, with one pserver missing.
pub fn training() -> JobStatus {
    let trainer = |id: u128, lanes: &[u32], tasks| TrainerStatus {
        id: serde_json::from_value(serde_json::json!(format!("00000000-0000-0000-0000-{id:012}")))
            .map(TrainerId)
            .unwrap(),
        admin: format!("127.0.0.1:420{id}"),
        lanes: lanes.iter().copied().map(Lane).collect(),
        tasks,
        time_breakdown: TimeBreakdown::default(),
        lead: None,
        is_surplus: false,
    };
    JobStatus {
        job: "digits".to_owned(),
        mode: Mode::Sync,
        state: JobPhase::Training,
        waiting: vec!["slot 1 has no pserver".to_owned()],
        waits: vec![Wait::of_job("slot 1", "slot 1 has no pserver")],
        generation: Generation(1),
        pass: Pass(2),
        passes: Some(20),
        version: Version(180),
        queues: Queues { todo: 76, pending: 2, done: 12, discarded: 0 },
        examples: 3_000,
        examples_total: Some(28_740),
        examples_per_second: 5_210.0,
        loss: Some(0.12345),
        evaluation: Some(EvaluationRecord {
            pass: Pass(1),
            version: Version(120),
            records: 359,
            loss: 0.1,
            metric: 0.971,
            metric_name: "accuracy".to_owned(),
            further_metrics: Default::default(),
            course: None,
            model: None,
        }),
        master: MasterStatus { address: "127.0.0.1:4000".to_owned(), epoch: 9 },
        slots: vec![
            SlotStatus {
                slot: Slot(0),
                address: Some("127.0.0.1:4100".to_owned()),
                incarnation: Some(Incarnation(12)),
                follower: None,
            },
            SlotStatus { slot: Slot(1), address: None, incarnation: None, follower: None },
        ],
        ps_desired: 2,
        trainers: vec![trainer(1, &[0, 1], 0), trainer(2, &[], 1)],
        checkpoint: Some("c-1".to_owned()),
        seconds_left: Some(12.0),
        ..JobStatus::default()
    }
}

/// Returns the status of an elastic job in which a node waits for another, at second 20.
pub fn elastic() -> ElasticStatus {
    let node = |id: u32, rank: Option<u32>, state, slots| NodeStatus {
        node: NodeId(Uuid::from_u128(u128::from(id))),
        incarnation: Incarnation(i64::from(id)),
        address: format!("10.0.0.{id}:400{id}"),
        host: None,
        admin: Some(format!("127.0.0.1:410{id}")),
        slots,
        state,
        workers: None,
        records_per_second: None,
        member_since_unix_ms: None,
        rank,
        first_rank: rank.map(|rank| 2 * rank),
        report: None,
    };
    let exit = "10.0.0.1:4001: round 3: the worker of rank 1 ended with exit code 7".to_owned();
    let report = NodeReport {
        round: Round(3),
        restarts: 1,
        restarts_max: 3,
        changes: 2,
        state: "running".to_owned(),
        last_exit: exit.clone(),
        busy_us: 0,
    };
    let host = |host: &str, record| HostStatus {
        host: host.to_owned(),
        record,
        blacklisted_until_unix_ms: Some(24_000),
    };
    let failed = HostRecord { failures: 2, cooldown_ms: Some(8_000), agent: None };
    let waiting = vec!["10.0.0.1:4001 waits for 10.0.0.2:4002".to_owned()];
    let awaited = vec![NodeId(Uuid::from_u128(2))];
    let event = |unix_ms, kind, what| TimelineEvent { unix_ms, what, kind };
    ElasticStatus {
        kind: ElasticKind::Elastic,
        job: "ddp".to_owned(),
        state: ElasticPhase::Gathering,
        waits: ElasticStatus::waits_of(&waiting, &awaited),
        waiting,
        awaited,
        nodes_min: 1,
        nodes_max: 4,
        round: Round(3),
        world_size: 4,
        data: None,
        scale: None,
        nodes: vec![
            NodeStatus {
                host: Some("a".to_owned()),
                report: Some(report),
                ..node(1, Some(0), NodePhase::Waiting, 2)
            },
            NodeStatus {
                workers: Some(WorkersPhase::Running),
                member_since_unix_ms: Some(8_000),
                ..node(2, Some(1), NodePhase::Member, 2)
            },
            node(3, None, NodePhase::Starting, 1),
        ],
        launcher: Some(LauncherStatus {
            launches: 5,
            resets: 1,
            outcome: None,
            hosts: vec![host("c", failed)],
        }),
        master: Some(MasterStatus { address: "127.0.0.1:4000".to_owned(), epoch: 9 }),
        error: None,
        restarts_of_gone: 0,
        exits: vec![event(18_000, TimelineKind::Failure, exit)],
        events: vec![event(15_000, TimelineKind::Generation, "round 3 formed".to_owned())],
        result: None,
    }
}
