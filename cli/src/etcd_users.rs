//! `steadfast etcd-users`: grants each role of a job the etcd permissions that it needs, and no others.

use std::process::ExitCode;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_common::records::key_table::{KEYS, Writer};
use steadfast_common::records::keys::{JOBS, Keys};
use steadfast_common::role::Role;
use steadfast_coord::{Etcd, Grant};
use steadfast_process::{EtcdArgs, Failure, TlsArgs, job_name, print_line};

/// Create etcd users for the roles of a job, and enable authentication in etcd.
///
/// A user has no password; it is the common name of a certificate, as issued by `steadfast certs`
/// (`master`, `pserver`, `trainer`, `admin`). etcd must run with `--client-cert-auth`. Run this command with
/// the certificate of `admin`, which gets all permissions. The command can be repeated, and must be for each
/// further job. It refuses an etcd that others use as well: with authentication on, etcd refuses all but its
/// users.
#[derive(Debug, Args)]
pub struct EtcdUsersArgs {
    /// Name of the job.
    #[arg(long, value_name = "NAME", value_parser = job_name)]
    job: String,
    /// Prefix of the job's keys in etcd [default: /jobs/<job>].
    #[arg(long, value_name = "KEY")]
    root: Option<String>,
    /// Enable authentication although etcd has keys that belong to no job. Programs that use them need users as well.
    #[arg(long)]
    shared_etcd: bool,
    #[command(flatten)]
    etcd: EtcdArgs,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Creates the users and their grants.
pub async fn run(args: EtcdUsersArgs) -> Result<ExitCode, Failure> {
    let keys = args.root.as_deref().map_or_else(|| Keys::of_job(&args.job), Keys::below);
    let etcd = Etcd::connect(&args.etcd.options(&args.tls)).await?;
    let was_on = etcd.enforces_grants().await?;
    if !was_on && !args.shared_etcd {
        check_unshared(&etcd, &keys).await?;
    }
    etcd.allow_all(Role::Admin.name()).await?;
    for role in [Role::Master, Role::Pserver, Role::Trainer] {
        let grant = grant(role, &args.job, &keys);
        etcd.allow(&grant).await?;
        print_line(format_args!(
            "{}: reads {}, writes {}",
            role,
            grant.reads.join(" "),
            grant.writes.join(" ")
        ));
    }
    etcd.enforce_grants().await?;
    print_line(format_args!("{}: everything", Role::Admin));
    if !was_on {
        print_line("authentication is on: etcd refuses all clients but its users");
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses an etcd with keys of others than jobs: with authentication on, their programs would be locked out.
async fn check_unshared(etcd: &Etcd, keys: &Keys) -> Result<(), Failure> {
    let of_jobs = [JOBS.to_owned(), format!("{}/", keys.root())];
    let Some(key) = etcd.key_outside(&of_jobs).await? else { return Ok(()) };
    Err(Failure::new(
        ErrorKind::Denied,
        format!(
            "others use this etcd as well: it has the key `{key}`, which belongs to no job. Authentication would lock \
             out all of its clients but the users of this job; use an etcd for jobs alone, or create users for the \
             other programs first and pass --shared-etcd"
        ),
    ))
}

/// Returns the permissions that a role needs.
fn grant(role: Role, job: &str, keys: &Keys) -> Grant {
    let all = format!("{}/", keys.root());
    let writers: &[Writer] = match role {
        Role::Pserver => &[Writer::Pserver],
        // Agents and the launcher of an elastic job have the certificate of trainers.
        Role::Trainer => &[Writer::Trainer, Writer::Agent, Writer::Launcher],
        Role::Master | Role::Admin => &[],
    };
    let written = KEYS.iter().filter(|row| row.writers.iter().any(|it| writers.contains(it)));
    let writes = match role {
        // It owns the queues and deletes the keys below them.
        Role::Master => vec![all.clone()],
        Role::Pserver | Role::Trainer | Role::Admin => {
            written.map(|row| row.prefix(keys)).collect()
        }
    };
    Grant { user: role.name().to_owned(), role: format!("{job}-{role}"), reads: vec![all], writes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_master_may_write_what_others_rely_on() {
        let keys = Keys::of_job("digits");
        let reaches = |role: Role, key: String| {
            let writes = grant(role, "digits", &keys).writes;
            writes.iter().any(|it| key == *it || it.ends_with('/') && key.starts_with(it.as_str()))
        };
        let rounds = [keys.formed_round(), keys.shared_state(), keys.result()];
        let of_training = [keys.job(), keys.queue(), keys.master_lock(), keys.checkpoint_latest()];
        for key in of_training.into_iter().chain(rounds) {
            assert!(reaches(Role::Master, key.clone()));
            assert!(!reaches(Role::Pserver, key.clone()) && !reaches(Role::Trainer, key));
        }
        assert!(!reaches(Role::Trainer, keys.ps(steadfast_common::ids::Slot(0))));
        for key in [keys.launch_lock(), keys.launch_state(), keys.launch_host("a")] {
            assert!(reaches(Role::Trainer, key.clone()) && !reaches(Role::Pserver, key));
        }
        assert_eq!(grant(Role::Pserver, "digits", &keys).reads, ["/jobs/digits/"]);
    }
}
