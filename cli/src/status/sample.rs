//! Sample job and status for tests.

use steadfast_common::given_up::Discarded;
use steadfast_common::ids::{Generation, Incarnation, Lane, Pass, Slot, TrainerId, Version};
use steadfast_common::job_file;
use steadfast_common::records::EvaluationRecord;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_common::status::{
    JobPhase, JobStatus, MasterStatus, Queues, Saving, SlotStatus, TimeBreakdown, TrainerStatus,
};

/// A small synchronous job.
pub fn spec() -> JobSpec {
    let text = "name = 'digits'\npasses = 20\n\
                [dataset]\nsource = ['digits.parquet']\nformat = 'parquet'\n\
                features = ['pixel_*']\nlabel = 'digit'\n\
                [model]\nkind = 'softmax'\nclasses = 10\n";
    job_file::parse(text).unwrap()
}

/// Status of the job in its third pass, with one pserver missing.
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
    };
    JobStatus {
        job: "digits".to_owned(),
        mode: Mode::Sync,
        state: JobPhase::Training,
        waiting: vec!["slot 1 has no pserver".to_owned()],
        generation: Generation(1),
        pass: Pass(2),
        passes: Some(20),
        steps: None,
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
        }),
        master: MasterStatus { address: "127.0.0.1:4000".to_owned(), epoch: 9 },
        slots: vec![
            SlotStatus {
                slot: Slot(0),
                address: Some("127.0.0.1:4100".to_owned()),
                incarnation: Some(Incarnation(12)),
            },
            SlotStatus { slot: Slot(1), address: None, incarnation: None },
        ],
        ps_desired: 2,
        trainers: vec![trainer(1, &[0, 1], 0), trainer(2, &[], 1)],
        checkpoint: Some("c-1".to_owned()),
        checkpoint_error: None,
        checkpoint_failures: 0,
        saving: Saving::default(),
        warnings: Vec::new(),
        recoveries: Vec::new(),
        discarded: Discarded::default(),
        time_breakdown: TimeBreakdown::default(),
        seconds_left: Some(12.0),
        events: Vec::new(),
        points: Vec::new(),
        result: None,
    }
}
