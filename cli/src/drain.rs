//! `steadfast drain`: drains one process of a job, on any machine, or a job whose dataset is a stream.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_common::job::durations::parse;
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_process::{Failure, print_line};
use tokio::time::{Instant, sleep};

use crate::admin_client;
use crate::job_args::{Job, JobArgs};
use crate::lists::{Member, all_members};
use crate::output::notice;
use steadfast_common::status::format::{plain, plural};

/// How long a process that did not answer may take to leave.
const REPLY_LOST_MAX: Duration = Duration::from_secs(2);

/// How long a member may take to leave, by default.
const LEAVE_MAX: Duration = Duration::from_secs(60);

/// Polling interval.
const POLL_EVERY: Duration = Duration::from_millis(100);

/// Drain one process of a job and wait until it has left, or a whole job.
///
/// A trainer returns its work, a pserver leaves a checkpoint, a master hands over, an agent stops its workers and
/// leaves its round. The process manager may start a replacement.
///
/// Without MEMBER, a job with `dataset.follow = true` is drained: it trains on the files that are there, writes the
/// model, and ends. Name the job with --job or --data-dir.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// The process, as listed by `steadfast members`: `master`, `slot N`, `trainer ID` or `agent ID` (a unique
    /// prefix of the id is enough).
    #[arg(num_args = 1..=2, value_name = "MEMBER")]
    member: Vec<String>,
    /// Maximum time to wait [default: 60s for a member; no limit for a job].
    #[arg(long, value_name = "TIME", value_parser = parse)]
    wait: Option<Duration>,
    #[command(flatten)]
    job: JobArgs,
}

/// Requests the drain and waits for it to complete.
pub async fn run(args: DrainArgs) -> Result<ExitCode, Failure> {
    if args.member.is_empty() && !args.job.is_named() {
        return Err(Failure::invalid(
            "name the process to drain, as `steadfast members` lists it, or a job with --job or --data-dir",
        ));
    }
    let job = args.job.find_running().await?;
    if args.member.is_empty() {
        return drain_job(job, &args.job, args.wait).await;
    }
    let wait = args.wait.unwrap_or(LEAVE_MAX);
    let members = all_members(&job).await?;
    let member = chosen(&members, &args.member.join(" "))?;
    let title = plain(&member.title());
    if member.admin.is_empty() {
        let message = format!("{title} has no admin port: it takes part by calls; end its program");
        return Err(Failure::invalid(message));
    }
    let latest = job.keys.checkpoint_latest();
    let before = job.etcd.get(&latest).await?.map(|it| it.mod_revision);
    let requested = admin_client::drain(&member.admin, member.id, &job.tls).await;
    let successor = match requested {
        // A process that has nothing to finish may exit before its reply is sent.
        Err(failure) if failure.kind == ErrorKind::Unavailable => {
            left(&job, member, wait.min(REPLY_LOST_MAX)).await.map_err(|_| failure)?
        }
        requested => {
            requested?;
            notice(format_args!("draining {title}"));
            left(&job, member, wait).await?
        }
    };
    let successor = match (successor, member.role) {
        (_, "trainer") => "other trainers continue its work".to_owned(),
        (_, "agent") => "the others form a round without it".to_owned(),
        (Some(it), _) => plain(&format!("{} has taken over", it.address.unwrap_or(it.admin))),
        (None, _) => "no other process has taken over yet".to_owned(),
    };
    print_line(format_args!("{title} has left; {successor}"));
    let after = job.etcd.get(&latest).await?.map(|it| it.mod_revision);
    if member.role == "pserver" && before == after {
        notice(format_args!(
            "no checkpoint was taken during the drain; the job continues from the latest one"
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Ends a stream after the files that are there, and waits for the model.
async fn drain_job(
    mut job: Job,
    job_args: &JobArgs,
    wait: Option<Duration>,
) -> Result<ExitCode, Failure> {
    job.must_train("its program decides when it ends").await?;
    let (started, mut master, mut shown) = (Instant::now(), job.master(), String::new());
    let mut ended = false;
    loop {
        let waits_for = match job.etcd.get_json::<ResultRecord>(&job.keys.result()).await {
            Ok(Some(result)) => return finished(&job, &result),
            Ok(None) if ended => {
                "the records that are not trained on yet, and the model".to_owned()
            }
            Ok(None) => match master.drain().await {
                Ok(None) => {
                    ended = true;
                    continue;
                }
                Ok(Some(waits_for)) => waits_for,
                Err(failure)
                    if matches!(failure.kind, ErrorKind::Unavailable | ErrorKind::NotYet) =>
                {
                    failure.message
                }
                Err(failure) => return Err(failure),
            },
            Err(error) if error.is_transient() => {
                // The etcd of a local run ends with the job; what it stored does not.
                if let Ok(found) = job_args.find().await {
                    (master, job) = (found.master(), found);
                }
                error.to_string()
            }
            Err(error) => return Err(error.into()),
        };
        if shown != waits_for {
            notice(format_args!("draining job {}; waiting: {}", job.name, plain(&waits_for)));
            shown = waits_for;
        }
        if wait.is_some_and(|wait| wait < started.elapsed()) {
            return Err(Failure::unavailable(format!(
                "job {} is not over; waiting: {shown}",
                job.name
            )));
        }
        sleep(POLL_EVERY).await;
    }
}

fn finished(job: &Job, result: &ResultRecord) -> Result<ExitCode, Failure> {
    if result.state == JobOutcome::Failed {
        let reason = result.reason.as_deref().unwrap_or("no reason is stored");
        return Err(Failure::invalid(format!("job {} has failed: {}", job.name, plain(reason))));
    }
    print_line(format_args!("job {} is over: {} records", job.name, result.examples));
    if !result.left_out.is_empty() {
        let files = plural(result.left_out.files as usize, "file");
        notice(format_args!("{files} could not be read; `steadfast status` lists them"));
    }
    for (name, value) in [("model", &result.model), ("sha256", &result.parameters_sha256)] {
        if let Some(value) = value {
            print_line(format_args!("{name} {}", plain(value)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until the member has left its place; returns its successor, if there is one already.
async fn left(job: &Job, member: &Member, wait: Duration) -> Result<Option<Member>, Failure> {
    let started = Instant::now();
    while started.elapsed() < wait {
        let mut present = all_members(job).await?.into_iter();
        let is_same_place = |it: &Member| match member.role {
            "master" => it.role == "master",
            role => it.role == role && it.name == member.name,
        };
        match present.find(is_same_place) {
            Some(it) if it.since == member.since => sleep(POLL_EVERY).await,
            other => return Ok(other),
        }
    }
    let title = member.title();
    Err(Failure::unavailable(format!(
        "{title} has not left within {wait:?}; see its log, or wait longer with --wait"
    )))
}

/// Selects the one member that `name` denotes.
fn chosen<'a>(members: &'a [Member], name: &str) -> Result<&'a Member, Failure> {
    let is_match = |member: &&Member| {
        let title = member.title();
        let has_id = matches!(member.role, "trainer" | "agent");
        title == name || (has_id && title.starts_with(name))
    };
    let all: Vec<&Member> = members.iter().filter(is_match).collect();
    match all.as_slice() {
        [member] => Ok(member),
        [] => {
            let known: Vec<String> = members.iter().map(Member::title).collect();
            let message =
                format!("the job has no member `{name}`; its members: {}", known.join(", "));
            Err(Failure::new(ErrorKind::NotFound, plain(&message)))
        }
        several => Err(Failure::invalid(format!(
            "`{name}` matches {} members; give more of the id",
            several.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn member(role: &'static str, name: &str) -> Member {
        let (name, id, admin) = (name.to_owned(), Uuid::nil(), String::new());
        Member { role, name, id, address: None, admin, since: 1 }
    }

    #[test]
    fn a_member_is_selected_by_a_unique_name() {
        let members =
            [member("master", "9f"), member("pserver", "slot 1"), member("pserver", "slot 10")];
        let trainers = [member("trainer", "ab1"), member("trainer", "ab2")];
        let members = [&members[..], &trainers[..]].concat();
        let name = |name| chosen(&members, name).map(|it| it.name.clone());
        assert_eq!(name("master").unwrap(), "9f");
        assert_eq!(name("slot 1").unwrap(), "slot 1");
        assert_eq!(name("trainer ab2").unwrap(), "ab2");
        assert_eq!(name("trainer ab").unwrap_err().kind, ErrorKind::Invalid);
        let unknown = name("slot 7").unwrap_err();
        assert_eq!(unknown.kind, ErrorKind::NotFound);
        assert!(unknown.message.contains("slot 10"), "{}", unknown.message);
    }
}
