//! Warnings about a plan: too few tasks leave trainers idle, small ones cost time, and steps without a learning rate
//! change nothing.

use std::collections::BTreeSet;

use steadfast_common::ids::Pass;
use steadfast_common::job::dataset::Manifest;
use steadfast_common::job::learning_rate::learning_rate;
use steadfast_common::job::schedule::LaneSchedule;
use steadfast_common::job::spec::{JobSpec, Mode};

use crate::job::Job;

/// Minimum tasks for each lane or trainer, and mini-batches in each task; below it there is a warning.
const ENOUGH: u64 = 4;

/// The part of a job's steps, one in so many, that may have a learning rate of 0 without a warning.
const IDLE_PART: u64 = 50;

pub(crate) fn of_plan(spec: &JobSpec, manifest: &Manifest) -> Vec<String> {
    let tasks = manifest.training_tasks().len() as u64;
    let all = manifest.training_records();
    let mut warnings = Vec::new();
    if spec.mode == Mode::Sync {
        warnings.extend(too_few(spec, tasks, all, u64::from(spec.sync.lanes)));
    }
    if spec.mode == Mode::Async {
        warnings.extend(too_small(spec, tasks, all));
    }
    let fraction = spec.evaluation.fraction;
    if 0.0 < fraction && manifest.held_out.is_empty() {
        warnings.push(format!(
            "no task is held out, since {fraction} of {tasks} tasks is less than one; the job has no \
             evaluation; lower dataset.records_per_task, or raise evaluation.fraction"
        ));
    }
    warnings.extend(left_out(spec, manifest));
    warnings.extend(no_rate(spec, manifest));
    warnings
}

/// Says how many records a pass leaves out.
fn left_out(spec: &JobSpec, manifest: &Manifest) -> Option<String> {
    if spec.mode == Mode::Async || !spec.sync.drop_last {
        return None;
    }
    let (all, schedule) = (manifest.training_records(), LaneSchedule::of(spec, manifest, Pass(0)));
    let left_out = schedule.records_left_out();
    (0 < left_out).then(|| {
        format!(
            "sync.drop_last leaves out {left_out} of {all} records of the first pass, and about as many others of \
             each later one; smaller tasks (dataset.records_per_task) leave out fewer"
        )
    })
}

/// Checks that the learning rate is not 0 long before a synchronous job ends: its steps would change nothing.
fn no_rate(spec: &JobSpec, manifest: &Manifest) -> Option<String> {
    if spec.mode == Mode::Async {
        return None;
    }
    let of_pass = || LaneSchedule::of(spec, manifest, Pass(0)).steps(&BTreeSet::new());
    let steps = match (spec.steps, spec.passes) {
        (Some(steps), _) => steps,
        (None, passes) => u64::from(passes?).saturating_mul(of_pass()),
    };
    let is_zero = |step: u64| learning_rate(&spec.learning_rate, step) == 0.0;
    let (mut last, mut zero) = (0, steps.checked_sub(1).filter(|step| is_zero(*step))?);
    while last + 1 < zero {
        let middle = last.midpoint(zero);
        *(if is_zero(middle) { &mut zero } else { &mut last }) = middle;
    }
    let idle = steps - zero;
    (steps < IDLE_PART * idle).then(|| {
        format!(
            "the learning rate is 0 from step {zero} on, and the last {idle} of {steps} steps change nothing; raise \
             learning_rate.decay_steps, or set learning_rate.end"
        )
    })
}

/// Returns the warning that the tasks are too few for this number of trainers. Only an asynchronous job has it: how
/// many trainers a synchronous job keeps busy is known from its lanes.
pub(crate) fn of_trainers(job: &Job, trainers: usize) -> Option<String> {
    let spec = &job.record.spec;
    match spec.mode {
        // A pass of a stream is as large as the files that came.
        Mode::Async if spec.dataset.follow => None,
        Mode::Async => too_few(spec, job.tasks.into(), job.records, trainers as u64),
        Mode::Sync => None,
    }
}

/// Checks that `sharers`, lanes or trainers, have several tasks each.
fn too_few(spec: &JobSpec, tasks: u64, records: u64, sharers: u64) -> Option<String> {
    let (names, others) = match spec.mode {
        Mode::Sync => ("lanes", "lower sync.lanes"),
        Mode::Async => ("trainers", "use fewer trainers"),
    };
    let way_out = match is_enough(records, sharers, batch(spec)) {
        true => "lower dataset.records_per_task",
        false => others,
    };
    (tasks < ENOUGH * sharers).then(|| {
        format!(
            "{tasks} tasks are too few for {sharers} {names}, which need {} to be busy all the time; {way_out}",
            ENOUGH * sharers
        )
    })
}

/// Checks that a task of an asynchronous job has several mini-batches. The micro-batches of a synchronous job go on in
/// the next task of their lane, so a task of any size will do.
fn too_small(spec: &JobSpec, tasks: u64, all: u64) -> Option<String> {
    let (batch, records) = (batch(spec), all / tasks.max(1));
    let way_out = match is_enough(all, 1, batch) {
        true => "raise dataset.records_per_task",
        false => "lower async.batch",
    };
    (records < ENOUGH * batch).then(|| {
        format!("tasks of {records} records are too small for mini-batches of {batch}; {way_out}")
    })
}

fn batch(spec: &JobSpec) -> u64 {
    u64::from(match spec.mode {
        Mode::Sync => spec.sync.micro_batch,
        Mode::Async => spec.asynchronous.batch,
    })
}

/// Returns whether the records are enough for [`ENOUGH`] tasks of [`ENOUGH`] mini-batches each for each of the sharers.
fn is_enough(records: u64, sharers: u64, batch: u64) -> bool {
    ENOUGH * sharers * ENOUGH * batch <= records
}

#[cfg(test)]
mod tests {
    use steadfast_common::job::dataset::Chunk;
    use steadfast_common::job::job_file;
    use steadfast_common::records::JobRecord;

    use super::*;

    fn spec(top: &str, dataset: &str, rest: &str) -> JobSpec {
        let text = format!(
            "name = 'x'\npasses = 1\n{top}\n[dataset]\nsource = ['x']\nformat = 'csv'\nfeatures = ['x']\n\
             label = 'y'\n{dataset}\n[model]\nkind = 'linear'\n{rest}"
        );
        job_file::parse(&text).unwrap()
    }

    fn manifest(tasks: u32, records: u32) -> Manifest {
        let chunk = Chunk { file: 0, start: 0, end: 0, first_record: 0, records };
        Manifest {
            chunks: vec![chunk; tasks as usize],
            task_ends: (1..=tasks).collect(),
            ..Manifest::default()
        }
    }

    fn job(spec: JobSpec, manifest: Manifest) -> Job {
        Job::new(JobRecord::new(spec, "memory:///x".to_owned(), manifest.digest()), manifest)
    }

    /// S004-4
    #[test]
    fn fewer_than_four_tasks_for_each_lane_or_trainer_are_a_warning() {
        let sync = spec("", "", "[sync]\nlanes = 8\nmicro_batch = 4");
        assert_eq!(of_plan(&sync, &manifest(32, 100)), [""; 0]);
        let few = "31 tasks are too few for 8 lanes, which need 32 to be busy all the time; ";
        let found = of_plan(&sync, &manifest(31, 100));
        assert_eq!(found, [format!("{few}lower dataset.records_per_task")]);
        // Smaller tasks would be too small.
        assert_eq!(of_plan(&sync, &manifest(31, 10)), [format!("{few}lower sync.lanes")]);
        // Of an asynchronous job, the trainers are known when they have come.
        let asynchronous = spec("mode = 'async'", "", "[async]\nbatch = 4");
        assert_eq!(of_plan(&asynchronous, &manifest(31, 100)), [""; 0]);
        let job = job(asynchronous, manifest(31, 100));
        assert_eq!(of_trainers(&job, 7), None);
        let few = "31 tasks are too few for 8 trainers, which need 32 to be busy all the time; ";
        assert_eq!(of_trainers(&job, 8), Some(format!("{few}lower dataset.records_per_task")));
        assert_eq!(
            of_trainers(&job, 1000).map(|it| it.ends_with("; use fewer trainers")),
            Some(true)
        );
    }

    #[test]
    fn records_that_a_pass_leaves_out_are_counted() {
        let with = |drop_last: &str| {
            let sync = spec("", "", &format!("[sync]\nlanes = 2\nmicro_batch = 3\n{drop_last}"));
            of_plan(&sync, &manifest(8, 4))
        };
        assert_eq!((with(""), with("drop_last = false")), (vec![], vec![]));
        let found = with("drop_last = true");
        assert_eq!(found.len(), 1);
        let counted = "sync.drop_last leaves out 2 of 32 records of the first pass, and ";
        assert!(found[0].starts_with(counted), "{found:?}");
    }

    /// S004-4
    #[test]
    fn fewer_than_four_mini_batches_in_a_task_are_a_warning() {
        let asynchronous = spec("mode = 'async'", "", "[async]\nbatch = 16");
        assert_eq!(of_plan(&asynchronous, &manifest(100, 64)), [""; 0]);
        let small = "tasks of 63 records are too small for mini-batches of 16; ";
        let found = of_plan(&asynchronous, &manifest(100, 63));
        assert_eq!(found, [format!("{small}raise dataset.records_per_task")]);
        assert_eq!(of_plan(&asynchronous, &manifest(1, 63)), [format!("{small}lower async.batch")]);
        // Micro-batches go on in the next task.
        let sync = spec("", "records_per_task = 32", "[sync]\nlanes = 2\nmicro_batch = 16");
        assert_eq!(of_plan(&sync, &manifest(100, 32)), [""; 0]);
    }

    /// A schedule that ends long before the job leaves steps that change nothing.
    #[test]
    fn steps_without_a_learning_rate_are_a_warning() {
        let rate = |rate: &str| {
            spec(
                "seed = 1",
                "",
                &format!("[sync]\nlanes = 8\nmicro_batch = 4\n[learning_rate]\n{rate}"),
            )
        };
        // 32 tasks of 100 records: 8 lanes of 400, and so 100 steps.
        let manifest = manifest(32, 100);
        for (rate_of, idle) in [
            ("schedule = 'cosine'\ndecay_steps = 100", None),
            ("schedule = 'cosine'\ndecay_steps = 20\nend = 0.001", None),
            ("schedule = 'linear'\ndecay_steps = 99", None),
            (
                "schedule = 'linear'\ndecay_steps = 20\nwarmup_steps = 10",
                Some("30 on, and the last 70"),
            ),
            ("schedule = 'cosine'\ndecay_steps = 20", Some("20 on, and the last 80")),
        ] {
            let found = of_plan(&rate(&format!("base = 0.1\n{rate_of}")), &manifest);
            assert_eq!(found.len(), idle.iter().len(), "{rate_of}: {found:?}");
            let text =
                idle.map_or_else(String::new, |idle| format!("from step {idle} of 100 steps"));
            assert!(found.concat().contains(&text), "{rate_of}: {found:?}");
        }
    }
}
