//! `steadfast doctor`: looks at everything that a job rests on, and says what is not as it should be.

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde::Serialize;
use steadfast_common::records::{JobRecord, MasterRecord, PserverRecord, TrainerRecord};
use steadfast_coord::EtcdOptions;
use steadfast_host::net::{Knock, knock};
use steadfast_host::{chance, tls};
use steadfast_process::Failure;
use steadfast_store::{Created, StoreError};

use crate::admin_client;
use crate::etcd_version::{self, Version};
use crate::format::plain;
use crate::job_args::{Job, JobArgs};
use crate::output::{FormArgs, Output};

/// A certificate that ends sooner deserves a word.
const SOON_DAYS: i64 = 30;
const DAY_SECONDS: i64 = 24 * 3600;

/// Clocks that differ by more make logs hard to read. Nothing else depends on them.
const SKEW_MAX: Duration = Duration::from_secs(2);

/// The oldest etcd that this was tried with.
const ETCD_MIN: Version = Version { major: 3, minor: 4, patch: 0 };

/// The oldest whose users can do no more than they were granted.
const ETCD_STRICT: Version = Version { major: 3, minor: 6, patch: 14 };

/// Check what a job rests on: etcd, its members' addresses, the store, certificates.
///
/// Ends with 1 if something is wrong.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// One thing that was looked at.
#[derive(Debug, PartialEq, Serialize)]
struct Finding {
    what: String,
    verdict: Verdict,
    said: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Well,
    /// Works, and will not for ever, or not well.
    Odd,
    Wrong,
}

impl Finding {
    fn new(what: impl Into<String>, verdict: Verdict, said: impl Into<String>) -> Self {
        Self { what: what.into(), verdict, said: said.into() }
    }
}

/// Looks at everything.
pub async fn run(args: DoctorArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_running().await?;
    let mut found: Vec<Finding> = certificate().into_iter().collect();
    found.extend(etcd(&args.job.etcd_options()?).await);
    found.extend(members(&job).await?);
    found.extend(store(&job).await?);
    match args.form.output() {
        Output::Json => println!("{}", serde_json::json!(found)),
        Output::Text => {
            for Finding { what, verdict, said } in &found {
                let mark = match verdict {
                    Verdict::Well => "  ",
                    Verdict::Odd => "? ",
                    Verdict::Wrong => "! ",
                };
                println!("{}", plain(&format!("{mark}{what}: {said}")));
            }
        }
    }
    let is_wrong = found.iter().any(|it| it.verdict == Verdict::Wrong);
    Ok(if is_wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn certificate() -> Option<Finding> {
    let not_after = tls::credentials()?.current().not_after;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
    let days = (not_after - now).div_euclid(DAY_SECONDS);
    let verdict = if days < SOON_DAYS { Verdict::Odd } else { Verdict::Well };
    Some(Finding::new("our certificate", verdict, format!("ends in {days} days")))
}

async fn etcd(options: &EtcdOptions) -> Vec<Finding> {
    let mut found = Vec::new();
    for endpoint in &options.endpoints {
        let what = format!("etcd {endpoint}");
        found.push(match etcd_version::ask(endpoint, options).await {
            Err(reason) => Finding::new(what, Verdict::Wrong, reason),
            Ok(answer) if answer.version < ETCD_MIN => {
                let said = format!("version {} is older than {ETCD_MIN}", answer.version);
                Finding::new(what, Verdict::Odd, said)
            }
            Ok(answer) if tls::credentials().is_some() && answer.version < ETCD_STRICT => {
                let said = format!(
                    "version {}; only from {ETCD_STRICT} on can its users do no more than they may",
                    answer.version
                );
                Finding::new(what, Verdict::Odd, said)
            }
            Ok(answer) => match answer.skew.filter(|skew| SKEW_MAX < *skew) {
                None => Finding::new(what, Verdict::Well, format!("version {}", answer.version)),
                Some(skew) => {
                    let said = format!("its clock and ours differ by {} s", skew.as_secs());
                    Finding::new(what, Verdict::Odd, said)
                }
            },
        });
    }
    found
}

/// Whether those who say where they are can be reached there.
async fn members(job: &Job) -> Result<Vec<Finding>, Failure> {
    let mut found = Vec::new();
    if job.etcd.get(&job.keys.result()).await?.is_some() {
        found.push(Finding::new("job", Verdict::Well, "is over; nobody needs to be there"));
        return Ok(found);
    }
    let master: Option<MasterRecord> = job.etcd.get_json(&job.keys.master_addr()).await?;
    match master {
        None => found.push(Finding::new("master", Verdict::Wrong, "none acts")),
        Some(it) => found.push(member("master".to_owned(), Some(&it.address), &it.admin).await),
    }
    for (key, entry) in job.etcd.list(&job.keys.ps_prefix()).await?.entries {
        let what = job.keys.slot_of(&key).map_or(key, |slot| format!("slot {slot}"));
        found.push(match entry.json::<PserverRecord>() {
            Ok(it) => member(what, Some(&it.address), &it.admin).await,
            Err(error) => Finding::new(what, Verdict::Wrong, error.to_string()),
        });
    }
    for (key, entry) in job.etcd.list(&job.keys.trainers_prefix()).await?.entries {
        let what = job.keys.trainer_of(&key).map_or(key, |id| format!("trainer {id}"));
        found.push(match entry.json::<TrainerRecord>() {
            Ok(it) => member(what, None, &it.admin).await,
            Err(error) => Finding::new(what, Verdict::Wrong, error.to_string()),
        });
    }
    Ok(found)
}

async fn member(what: String, address: Option<&str>, admin: &str) -> Finding {
    if let Some(address) = address {
        let trouble = match knock(address).await {
            Knock::Open(_) => None,
            Knock::Refused => Some("refuses connections"),
            Knock::Silent => Some("does not answer"),
        };
        if let Some(trouble) = trouble {
            return Finding::new(what, Verdict::Wrong, format!("{address} {trouble}"));
        }
    }
    match admin_client::ask(admin, "/readyz").await {
        Ok((code, _)) if code.is_success() => {
            let at = address.unwrap_or(admin);
            Finding::new(what, Verdict::Well, format!("is ready at {at}"))
        }
        Ok((_, text)) => Finding::new(what, Verdict::Odd, text.trim_end()),
        // A port on loopback is meant for its own machine.
        Err(failure) if steadfast_process::is_on_this_host(admin) => {
            Finding::new(what, Verdict::Odd, failure.message)
        }
        Err(failure) => Finding::new(what, Verdict::Wrong, failure.message),
    }
}

/// Whether the store takes an object, and refuses it where there is one.
async fn store(job: &Job) -> Result<Option<Finding>, Failure> {
    let Some(record) = job.etcd.get_json::<JobRecord>(&job.keys.job()).await? else {
        return Ok(Some(Finding::new("job", Verdict::Wrong, "etcd has no such job")));
    };
    let what = format!("store {}", record.store);
    let (verdict, said) = match try_store(&record.store).await {
        Err(error) => (Verdict::Wrong, error.to_string()),
        Ok(Created::Already) => (Verdict::Well, "takes objects, and replaces none".to_owned()),
        Ok(Created::Now) => {
            let said = "replaces an object that it is asked to create; nothing of ours relies on that \
                        but `checkpoint export` without --force";
            (Verdict::Odd, said.to_owned())
        }
    };
    Ok(Some(Finding::new(what, verdict, said)))
}

async fn try_store(url: &str) -> Result<Created, StoreError> {
    let place = steadfast_store::open(url)?.child(&format!("doctor/{}", chance::uuid()))?;
    place.create("a probe").await?;
    let again = place.create("a probe").await;
    place.delete().await?;
    again
}
