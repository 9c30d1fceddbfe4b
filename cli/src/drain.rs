//! `steadfast drain`: has one process finish in good order, wherever it runs.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use steadfast_common::durations::parse;
use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;
use tokio::time::{Instant, sleep};

use crate::admin_client;
use crate::format::plain;
use crate::job_args::{Job, JobArgs};
use crate::lists::{Member, all_members};

/// Time between looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Have a process of a job finish in good order, and wait until it has left its place.
///
/// A trainer gives its work back, a pserver leaves a checkpoint behind, a master hands over. Whatever looks
/// after the process may start another one in its place.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// Who: `master`, `slot N`, or `trainer ID`, of which the beginning will do; as `steadfast members` says.
    #[arg(required = true, num_args = 1..=2, value_name = "MEMBER")]
    member: Vec<String>,
    /// How long it may take.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse)]
    wait: Duration,
    #[command(flatten)]
    job: JobArgs,
}

/// Asks, and waits.
pub async fn run(args: DrainArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_running().await?;
    let members = all_members(&job).await?;
    let member = chosen(&members, &args.member.join(" "))?;
    let title = plain(&member.title());
    let latest = job.keys.checkpoint_latest();
    let before = job.etcd.get(&latest).await?.map(|it| it.mod_revision);
    admin_client::drain(&member.admin, member.id).await?;
    eprintln!("{title} drains");
    let successor = left(&job, member, args.wait).await?;
    let successor = match (successor, member.role) {
        (_, "trainer") => "others go on with its work".to_owned(),
        (Some(it), _) => plain(&format!("{} is in its place", it.address.unwrap_or(it.admin))),
        (None, _) => "nobody is in its place yet".to_owned(),
    };
    println!("{title} has left; {successor}");
    let after = job.etcd.get(&latest).await?.map(|it| it.mod_revision);
    if member.role == "pserver" && before == after {
        eprintln!("no checkpoint was taken meanwhile: the job goes on from the latest one");
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until the member's place is free, or another's, whom it returns.
async fn left(job: &Job, member: &Member, wait: Duration) -> Result<Option<Member>, Failure> {
    let started = Instant::now();
    while started.elapsed() < wait {
        let mut present = all_members(job).await?.into_iter();
        let is_same_place = |it: &Member| match member.role {
            "master" => it.role == "master",
            role => it.role == role && it.name == member.name,
        };
        match present.find(is_same_place) {
            Some(it) if it.since == member.since => sleep(LOOK_EVERY).await,
            other => return Ok(other),
        }
    }
    let title = member.title();
    Err(Failure::unavailable(format!("{title} was asked and is still there after {wait:?}")))
}

/// The one member that is meant.
fn chosen<'a>(members: &'a [Member], name: &str) -> Result<&'a Member, Failure> {
    let is_meant = |member: &&Member| {
        let title = member.title();
        title == name || (member.role == "trainer" && title.starts_with(name))
    };
    let all: Vec<&Member> = members.iter().filter(is_meant).collect();
    match all.as_slice() {
        [member] => Ok(member),
        [] => {
            let known: Vec<String> = members.iter().map(Member::title).collect();
            let message = format!("there is no `{name}`; there are: {}", known.join(", "));
            Err(Failure::new(ErrorKind::NotFound, plain(&message)))
        }
        several => Err(Failure::invalid(format!("`{name}` could be any of {}", several.len()))),
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
    fn a_name_means_one_member_or_nobody() {
        let members =
            [member("master", "9f"), member("pserver", "slot 1"), member("pserver", "slot 10")];
        let trainers = [member("trainer", "ab1"), member("trainer", "ab2")];
        let members = [&members[..], &trainers[..]].concat();
        let name = |asked| chosen(&members, asked).map(|it| it.name.clone());
        assert_eq!(name("master").unwrap(), "9f");
        assert_eq!(name("slot 1").unwrap(), "slot 1");
        assert_eq!(name("trainer ab2").unwrap(), "ab2");
        assert_eq!(name("trainer ab").unwrap_err().kind, ErrorKind::Invalid);
        let unknown = name("slot 7").unwrap_err();
        assert_eq!(unknown.kind, ErrorKind::NotFound);
        assert!(unknown.message.contains("slot 10"), "{}", unknown.message);
    }
}
