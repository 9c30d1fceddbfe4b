//! The admin port of a launcher: health, metrics and status.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use serde_json::json;
use steadfast_common::role::Role;
use steadfast_common::status::LauncherStatus;
use steadfast_process::{Admin, AdminContent, AdminServer, Failure, Readiness, Shutdown};
use tokio::sync::watch;
use uuid::Uuid;

use crate::LaunchArgs;

/// What the admin port shows of a launcher; its driver publishes it.
#[derive(Debug)]
pub(crate) struct LauncherView {
    pub status: watch::Sender<LauncherStatus>,
    pub readiness: Readiness,
}

impl LauncherView {
    pub fn new() -> Self {
        let status = watch::Sender::new(LauncherStatus::default());
        Self { status, readiness: Readiness::new("acquires the lock of the job") }
    }
}

/// Serves the admin port until this is dropped.
pub(crate) async fn serve(
    args: &LaunchArgs,
    id: Uuid,
    view: &LauncherView,
    shutdown: &Shutdown,
) -> Result<AdminServer, Failure> {
    let exposure = args.security.exposure(Role::Trainer)?;
    let admin = Admin::bind(args.admin_listen, exposure).await?;
    let mut metrics = Registry::default();
    metrics.register_collector(Box::new(Metrics(view.status.subscribe())));
    let status = view.status.subscribe();
    Ok(admin.serve(AdminContent {
        role: "launcher",
        job: args.rdzv_id.clone(),
        id: Box::new(move || id),
        readiness: view.readiness.clone(),
        metrics,
        token: args.security.admin_token()?,
        shutdown: Some(shutdown.clone()),
        status: Box::new(move || json!(*status.borrow())),
        page: None,
    }))
}

#[derive(Debug)]
struct Metrics(watch::Receiver<LauncherStatus>);

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let status = self.0.borrow().clone();
        for (name, help, value) in [
            ("steadfast_launcher_launches", "Agents that were started", status.launches),
            ("steadfast_launcher_resets", "Changes of the set of agents", u64::from(status.resets)),
        ] {
            let counter = ConstCounter::new(value);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        let agents = status.hosts.iter().filter(|host| host.record.agent.is_some()).count();
        for (name, help, value) in [
            ("steadfast_launcher_agents", "Hosts that run an agent", agents),
            (
                "steadfast_launcher_blacklisted_hosts",
                "Hosts on the blacklist",
                status.blacklist().count(),
            ),
        ] {
            let gauge = ConstGauge::new(value as i64);
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        Ok(())
    }
}
