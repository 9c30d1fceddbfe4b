//! `steadfast status`: shows the status of a job, from its master or else from etcd.

#[cfg(test)]
pub mod sample;
mod stored;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use steadfast_common::status::{Document, ElasticStatus, JobPhase, JobStatus, StoredStatus, text};
use steadfast_host::time::unix_ms;
use steadfast_master::stored_elastic_status;
use steadfast_process::{Failure, print, print_line};

use crate::job_args::{Job, JobArgs};
use crate::job_master::JobMaster;
use crate::output::{FormArgs, Output};

/// Polling interval with `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Moves the cursor of a terminal to the upper left corner and clears the screen below it.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Show the status of a job.
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
    /// Refresh the status every second until the job has ended.
    #[arg(long)]
    watch: bool,
}

/// Status of a job from the best available source.
#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum AnyStatus {
    Live(Box<JobStatus>),
    /// Status read from etcd because no master answers.
    Stored(Box<StoredStatus>),
    /// Status of an elastic job; read from etcd if the job has no master.
    Elastic(Box<ElasticStatus>),
}

/// Shows the status once, or with `--watch` until the job has ended.
pub async fn run(args: StatusArgs) -> Result<ExitCode, Failure> {
    let job = match args.watch {
        // A copy of an ended run's etcd would never show the next run.
        true => args.job.find_running().await?,
        false => args.job.find().await?,
    };
    let mut master = job.master();
    let mut last = None;
    loop {
        let status = read(&job, &mut master).await?;
        let ended = status.has_ended();
        if last.as_ref() != Some(&status) {
            show(&status, &args);
        }
        if !args.watch || ended {
            return Ok(ExitCode::SUCCESS);
        }
        last = Some(status);
        tokio::time::sleep(WATCH_EVERY).await;
    }
}

/// Returns the status from the acting master, or else what etcd holds.
///
/// # Errors
/// If etcd does not answer or holds a value that cannot be parsed, or no master has accepted the job yet.
pub async fn read(job: &Job, master: &mut JobMaster) -> Result<AnyStatus, Failure> {
    if job.is_elastic().await? {
        let Job { etcd, keys, .. } = job;
        let status = match master.elastic_status().await {
            Ok(status) => Some(status),
            Err(failure) => stored_elastic_status(etcd, keys, failure.message).await?,
        };
        if let Some(status) = status {
            return Ok(AnyStatus::Elastic(Box::new(status)));
        }
    }
    match master.status().await {
        Ok(status) => Ok(AnyStatus::Live(Box::new(status))),
        Err(failure) => Ok(AnyStatus::Stored(Box::new(stored::read(job, failure.message).await?))),
    }
}

fn show(status: &AnyStatus, args: &StatusArgs) {
    match args.form.output() {
        Output::Json => print_line(serde_json::json!(status)),
        Output::Text => {
            let text = text(&status.document(), unix_ms());
            match (args.watch, std::io::stdout().is_terminal()) {
                (true, true) => print(format_args!("{CLEAR}{text}")),
                (true, false) => print_line(text),
                (false, _) => print(text),
            }
        }
    }
}

impl AnyStatus {
    /// Describes the status.
    pub fn document(&self) -> Document {
        match self {
            Self::Live(status) => status.document(),
            Self::Stored(status) => status.document(),
            Self::Elastic(status) => status.document(),
        }
    }

    fn has_ended(&self) -> bool {
        match self {
            Self::Live(status) => match status.state {
                JobPhase::Finished | JobPhase::Failed => true,
                JobPhase::Waiting
                | JobPhase::Starting
                | JobPhase::Training
                | JobPhase::Evaluating
                | JobPhase::Saving => false,
            },
            Self::Stored(status) => status.result.is_some(),
            Self::Elastic(status) => status.result.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use steadfast_common::ids::{Pass, TaskId};
    use steadfast_common::job::spec::Mode;
    use steadfast_common::records::given_up::{Discarded, DiscardedTask, GivenUpRecord};
    use steadfast_common::records::stream::LeftOut;
    use steadfast_common::records::{JobOutcome, ResultRecord};
    use steadfast_common::status::NodeReport;

    use super::*;

    #[test]
    fn watching_ends_with_the_job() {
        let live = |state| {
            AnyStatus::Live(Box::new(JobStatus { state, ..sample::training() })).has_ended()
        };
        assert!(!live(JobPhase::Training));
        assert!(!live(JobPhase::Saving));
        assert!(live(JobPhase::Failed));
    }
    #[test]
    fn a_running_job_shows_queues_members_and_what_it_waits_for() {
        let expected = "\
job digits: training (synchronous)
  waiting     slot 1 has no pserver
  pass        3 of 20
  step        180
  tasks       76 todo, 2 pending, 12 done, 0 discarded
  examples    3000 of 28740, 5.2k a second
  left        12s
  loss        0.1235
  accuracy    0.9710 (loss 0.1000) on 359 held-out records after 1 pass (step 120)
  generation  1
  checkpoint  c-1
  master      127.0.0.1:4000 (epoch 9)
  pservers    1 of 2 slots
              slot  pserver         incarnation
              0     127.0.0.1:4100  12
              1     free            –
  trainers    2
              trainer                               admin port      works on   time  moved
              00000000-0000-0000-0000-000000000001  127.0.0.1:4201  lanes 0-1  –     0.0 MB/s
              00000000-0000-0000-0000-000000000002  127.0.0.1:4202  1 task     –     0.0 MB/s
";
        assert_eq!(text(&sample::training().document(), 0), expected);
    }

    #[test]
    fn a_truncated_list_shows_how_much_is_missing() {
        let record = GivenUpRecord::default().and(Pass(0), "bad record");
        let discarded = |task| DiscardedTask {
            task: TaskId(task),
            held_out: false,
            passes: record.passes.clone(),
            times: 1,
            reason: record.reason.clone(),
            records: Vec::new(),
        };
        let listed = (0..25).map(discarded).collect();
        let discarded = Discarded { tasks: 25, times: 25, listed, list: None };
        let status = JobStatus { discarded, ..sample::training() };
        let text = text(&status.document(), 0);
        assert!(text.contains("\n              19    in pass 1  bad record\n"), "{text}");
        assert!(text.ends_with("\n              and 5 more\n"), "{text}");
    }

    /// S002-11: a node is named as slow if its workers compute longer than twice as long as those of the median node.
    #[test]
    fn a_node_that_computes_longer_than_others_is_named_with_figures() {
        let shown = |times: [u64; 3]| {
            let mut status = sample::elastic();
            for (node, busy_us) in status.nodes.iter_mut().zip(times) {
                node.report = Some(NodeReport { busy_us, ..NodeReport::default() });
            }
            text(&status.document(), 0)
        };
        let text = shown([20_000, 54_400, 24_000]);
        let row =
            "slow        10.0.0.2:4002 computes 54.4 ms for an update, the median node 24.0 ms\n";
        assert!(text.contains(row) && text.matches("slow ").count() == 1, "{text}");
        assert!(!shown([20_000, 40_000, 24_000]).contains("slow "));
        assert!(!shown([0, 40_000, 0]).contains("slow "), "no other is known");
    }

    fn without_master(result: Option<ResultRecord>) -> StoredStatus {
        StoredStatus {
            warnings: Vec::new(),
            job: "digits".to_owned(),
            mode: Some(Mode::Sync),
            master: None,
            error: "the job has no acting master".to_owned(),
            waits_for: None,
            generation: None,
            ps_desired: Some(2),
            warm_spares: 0,
            slots: sample::training().slots[..1].to_vec(),
            trainers: Vec::new(),
            checkpoint: None,
            evaluation: None,
            result,
        }
    }

    #[test]
    fn without_a_master_status_shows_the_contents_of_etcd_and_a_notice() {
        let shown = |status: StoredStatus| text(&status.document(), 0);
        let text = shown(without_master(None));
        assert!(text.starts_with("job digits: no master answers (synchronous)\n"), "{text}");
        assert!(text.contains("why         the job has no acting master\n"), "{text}");
        assert!(text.contains("pservers    1 of 2 slots\n"), "{text}");
        assert!(text.contains("trainers    0\n"), "{text}");

        let error = "the master waits for the first file".to_owned();
        let waits_for = Some("the first file".to_owned());
        let text = shown(StoredStatus { error, waits_for, ..without_master(None) });
        assert!(text.starts_with("job digits: waiting (synchronous)\n"), "{text}");
        assert!(text.contains("why         the master waits for the first file\n"), "{text}");
    }

    #[test]
    fn a_job_that_has_ended_shows_its_result() {
        let result = ResultRecord {
            state: JobOutcome::Failed,
            reason: Some("all tasks were discarded".to_owned()),
            passes: 0,
            steps: 1,
            examples: 16,
            loss: None,
            metric: None,
            metric_name: None,
            further_metrics: BTreeMap::new(),
            parameters_sha256: None,
            model: None,
            checkpoint: None,
            discarded: Discarded::default(),
            left_out: LeftOut::default(),
            ended_unix_ms: None,
            best: None,
        };
        let text = text(&without_master(Some(result)).document(), 0);
        let expected = "job digits: failed (synchronous)\n  reason      all tasks were discarded\n  \
                        result      0 passes, 1 step, 16 examples\n  checkpoint  none\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn an_elastic_job_shows_its_nodes_by_rank_and_what_they_wait_for() {
        let text = text(&sample::elastic().document(), 20_000);
        let expected = "\
job ddp: gathering (elastic)
  waiting     10.0.0.1:4001 waits for 10.0.0.2:4002
  round       3, 4 workers
  restarts    1 after failures; 2 rounds after the first
  failure     10.0.0.1:4001: round 3: the worker of rank 1 ended with exit code 7 (2s ago)
  launcher    5 agents started, 1 change of the set
  master      127.0.0.1:4000 (epoch 9)
  nodes       1 member; 1 to 4 are allowed
              rank  address        state     workers    ranks   member for  restarts  changes  host  node
              0     10.0.0.1:4001  waiting   2          0 to 1  –           1 of 3    2        a     \
00000000-0000-0000-0000-000000000001
              1     10.0.0.2:4002  member    2 running  2 to 3  12s         –         –        –     \
00000000-0000-0000-0000-000000000002
              –     10.0.0.3:4003  starting  1          –       –           –         –        –     \
00000000-0000-0000-0000-000000000003
  blacklist   1 host
              host  failures  time
              c     2         4s left
";
        assert_eq!(text, expected);
    }

    #[test]
    fn without_a_master_an_elastic_job_shows_the_contents_of_etcd_and_a_notice() {
        let mut status = sample::elastic();
        status.master = None;
        status.error = Some("the job has no acting master".to_owned());
        for host in status.launcher.iter_mut().flat_map(|it| &mut it.hosts) {
            host.blacklisted_until_unix_ms = None;
        }
        let text = text(&status.document(), 20_000);
        assert!(text.starts_with("job ddp: no master answers (elastic)\n"), "{text}");
        assert!(text.contains("why         the job has no acting master\n"), "{text}");
        assert!(text.contains("at most 8s left\n"), "{text}");
    }
}
