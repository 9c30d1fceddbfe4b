//! `steadfast doctor`: checks what a job depends on and reports problems.

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde::Serialize;
use steadfast_common::ids::Slot;
use steadfast_common::records::rendezvous::AgentRecord;
use steadfast_common::records::{
    JobRecord, MasterRecord, PserverRecord, TrainerRecord, WaitsRecord,
};
use steadfast_coord::EtcdOptions;
use steadfast_host::random;
use steadfast_net::{Probe, TlsIdentity, probe};
use steadfast_process::{Failure, print_line};
use steadfast_store::{Created, StoreError};
use tokio::time::{Instant, sleep};

use crate::admin_client;
use crate::etcd_version::{self, Version};
use crate::job_args::{Job, JobArgs};
use crate::output::{FormArgs, Output};
use steadfast_common::status::format::plain;

/// A certificate that expires sooner is reported.
const SOON_DAYS: i64 = 30;
const DAY_SECONDS: i64 = 24 * 3600;

/// Clock skew above this is reported: it makes logs hard to correlate. Nothing else depends on clocks.
const SKEW_MAX: Duration = Duration::from_secs(2);

/// Time for a spare to take a slot that became free, and the polling interval.
const SLOT_TAKEN_WITHIN: Duration = Duration::from_secs(3);
const POLL_EVERY: Duration = Duration::from_millis(200);

/// The oldest etcd version tested.
const ETCD_MIN: Version = Version { major: 3, minor: 4, patch: 0 };

/// The oldest etcd version that confines users to their grants.
const ETCD_STRICT: Version = Version { major: 3, minor: 6, patch: 14 };

/// Check what a job depends on: etcd, members' addresses, the store, certificates.
///
/// Exits with 1 if a check fails.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// Result of one check.
#[derive(Debug, PartialEq, Serialize)]
struct Finding {
    what: String,
    verdict: Health,
    message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Health {
    Ok,
    /// Works, with a restriction or for a limited time.
    Warning,
    Error,
}

impl Finding {
    fn new(what: impl Into<String>, verdict: Health, message: impl Into<String>) -> Self {
        Self { what: what.into(), verdict, message: message.into() }
    }
}

/// Runs all checks and prints what they find. The exit code is 1 if there is an error; warnings do not count.
pub async fn run(args: DoctorArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_running().await?;
    let mut found: Vec<Finding> = certificate(&job.tls).into_iter().collect();
    found.extend(etcd(&args.job.etcd_options()?, &job.tls).await);
    found.extend(members(&job).await?);
    found.extend(store(&job).await?);
    match args.form.output() {
        Output::Json => print_line(serde_json::json!(found)),
        Output::Text => {
            for Finding { what, verdict, message } in &found {
                let mark = match verdict {
                    Health::Ok => "  ",
                    Health::Warning => "? ",
                    Health::Error => "! ",
                };
                print_line(plain(&format!("{mark}{what}: {message}")));
            }
        }
    }
    let has_error = found.iter().any(|it| it.verdict == Health::Error);
    Ok(if has_error { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn certificate(tls: &TlsIdentity) -> Option<Finding> {
    let not_after = tls.credentials()?.not_after;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
    let days = (not_after - now).div_euclid(DAY_SECONDS);
    let verdict = if days < SOON_DAYS { Health::Warning } else { Health::Ok };
    Some(Finding::new("certificate", verdict, format!("expires in {days} days")))
}

async fn etcd(options: &EtcdOptions, tls: &TlsIdentity) -> Vec<Finding> {
    let mut found = Vec::new();
    for endpoint in &options.endpoints {
        let what = format!("etcd {endpoint}");
        found.push(match etcd_version::ask(endpoint, options).await {
            Err(reason) => Finding::new(what, Health::Error, reason),
            Ok(answer) if answer.version < ETCD_MIN => {
                let message = format!("version {} is older than {ETCD_MIN}; upgrade it", answer.version);
                Finding::new(what, Health::Warning, message)
            }
            Ok(answer) if tls.credentials().is_some() && answer.version < ETCD_STRICT => {
                let message = format!(
                    "version {} lets users exceed their grants; upgrade it to {ETCD_STRICT} or newer",
                    answer.version
                );
                Finding::new(what, Health::Warning, message)
            }
            Ok(answer) => match answer.skew.filter(|skew| SKEW_MAX < *skew) {
                None => Finding::new(what, Health::Ok, format!("version {}", answer.version)),
                Some(skew) => {
                    let message = format!("its clock differs from this machine's by {} s", skew.as_secs());
                    Finding::new(what, Health::Warning, message)
                }
            },
        });
    }
    found
}

/// Checks that the members registered in etcd can be reached at their addresses.
async fn members(job: &Job) -> Result<Vec<Finding>, Failure> {
    let mut found = Vec::new();
    if job.etcd.get(&job.keys.result()).await?.is_some() {
        found.push(Finding::new("job", Health::Ok, "has ended; no process is needed"));
        return Ok(found);
    }
    let master: Option<MasterRecord> = job.etcd.get_json(&job.keys.master_addr()).await?;
    match master {
        None => found.push(match job.etcd.get_json(&job.keys.master_waits()).await? {
            Some(WaitsRecord { waits_for }) => {
                Finding::new("master", Health::Ok, format!("waits for {waits_for}"))
            }
            None => Finding::new("master", Health::Error, "none is acting; start one"),
        }),
        Some(it) => {
            found.push(member("master".to_owned(), Some(&it.address), &it.admin, &job.tls).await)
        }
    }
    found.extend(free_slots(job).await?);
    let desired: Option<u32> = job.etcd.get_json(&job.keys.ps_desired()).await?;
    for (key, entry) in job.etcd.list(&job.keys.ps_prefix()).await?.entries {
        let slot = job.keys.slot_of(&key);
        let what = slot.map_or(key, |slot| format!("slot {slot}"));
        let is_surplus = slot.zip(desired).is_some_and(|(slot, desired)| desired <= slot.0);
        found.push(match entry.json::<PserverRecord>() {
            Ok(_) if is_surplus => {
                let message = "is held, although the job has fewer slots; its pserver should have released it";
                Finding::new(what, Health::Error, message)
            }
            Ok(it) => member(what, Some(&it.address), &it.admin, &job.tls).await,
            Err(error) => Finding::new(what, Health::Error, error.to_string()),
        });
    }
    for (key, entry) in job.etcd.list(&job.keys.trainers_prefix()).await?.entries {
        let what = job.keys.trainer_of(&key).map_or(key, |id| format!("trainer {id}"));
        found.push(match entry.json::<TrainerRecord>() {
            Ok(it) => member(what, None, &it.admin, &job.tls).await,
            Err(error) => Finding::new(what, Health::Error, error.to_string()),
        });
    }
    for (key, entry) in job.etcd.list(&job.keys.agents_prefix()).await?.entries {
        let what = job.keys.agent_of(&key).map_or(key, |id| format!("agent {id}"));
        found.push(match entry.json::<AgentRecord>() {
            Ok(it) if it.admin.is_empty() => Finding::new(
                what,
                Health::Ok,
                format!("calls the master itself, as {}", it.address),
            ),
            Ok(it) => member(what, None, &it.admin, &job.tls).await,
            Err(error) => Finding::new(what, Health::Error, error.to_string()),
        });
    }
    Ok(found)
}

/// Finds slots that stay free for longer than a spare needs to take them.
async fn free_slots(job: &Job) -> Result<Vec<Finding>, Failure> {
    let started = Instant::now();
    loop {
        let desired: Option<u32> = job.etcd.get_json(&job.keys.ps_desired()).await?;
        let held = job.etcd.list(&job.keys.ps_prefix()).await?.entries;
        let slots = (0..desired.unwrap_or(0)).map(Slot);
        let free: Vec<Slot> = slots.filter(|it| !held.contains_key(&job.keys.ps(*it))).collect();
        if free.is_empty() || SLOT_TAKEN_WITHIN <= started.elapsed() {
            let message = "is free, and no pserver takes it: there is no spare; start another pserver, or \
                        set fewer slots with `steadfast scale`";
            let finding = |slot| Finding::new(format!("slot {slot}"), Health::Error, message);
            return Ok(free.into_iter().map(finding).collect());
        }
        sleep(POLL_EVERY).await;
    }
}

async fn member(what: String, address: Option<&str>, admin: &str, tls: &TlsIdentity) -> Finding {
    if let Some(address) = address {
        let error = match probe(address).await {
            Probe::Open(_) => None,
            Probe::Refused => Some("refuses connections"),
            Probe::Silent => Some("does not answer"),
        };
        if let Some(error) = error {
            return Finding::new(what, Health::Error, format!("{address} {error}"));
        }
    }
    match admin_client::ask(admin, "/readyz", tls).await {
        Ok((code, _)) if code.is_success() => {
            let at = address.unwrap_or(admin);
            Finding::new(what, Health::Ok, format!("is ready at {at}"))
        }
        Ok((_, text)) => Finding::new(what, Health::Warning, text.trim_end()),
        // An admin port on loopback can only be reached on its own machine.
        Err(failure) if steadfast_process::is_on_this_host(admin) => {
            Finding::new(what, Health::Warning, failure.message)
        }
        Err(failure) => Finding::new(what, Health::Error, failure.message),
    }
}

/// Checks that the store creates an object and refuses to create it again. An elastic job has none.
async fn store(job: &Job) -> Result<Option<Finding>, Failure> {
    if job.is_elastic().await? {
        return Ok(None);
    }
    let Some(record) = job.etcd.get_json::<JobRecord>(&job.keys.job()).await? else {
        return Ok(Some(Finding::new(
            "job",
            Health::Error,
            "etcd has no such job; name another one with --job",
        )));
    };
    let what = format!("store {}", record.store);
    let (verdict, message) = match try_store(&record.store).await {
        Err(error) => (Health::Error, error.to_string()),
        Ok(Created::Already) => {
            (Health::Ok, "creates objects and does not overwrite them".to_owned())
        }
        Ok(Created::Now) => {
            let message = "overwrites an existing object on a conditional create; only `checkpoint export` \
                        without --force relies on it";
            (Health::Warning, message.to_owned())
        }
    };
    Ok(Some(Finding::new(what, verdict, message)))
}

async fn try_store(url: &str) -> Result<Created, StoreError> {
    let place = steadfast_store::open(url)?.child(&format!("doctor/{}", random::uuid()))?;
    place.create("a probe").await?;
    let again = place.create("a probe").await;
    place.delete().await?;
    again
}
