//! Shared parts of all Steadfast processes: configuration, logs, the admin port, health, shutdown and
//! exit codes.

mod address_change;
mod admin;
mod admin_lock;
mod args;
mod failure;
mod failure_detector;
mod liveness_port;
mod log_line;
mod logging;
mod page;
mod parse;
mod process_metrics;
mod readiness;
mod run;
mod security;
mod server;
mod shutdown;
mod sources;
mod stdout;
mod traces;

pub use address_change::address_changed;
pub use admin::{Admin, AdminContent, AdminServer};
pub use args::{CommonArgs, EtcdArgs, EtcdAuthArgs, LogArgs, LogFormat};
pub use args::{
    address_towards, advertised_host, endpoint, host_of, job_name, lease_ttl, own_host,
};
pub use failure::Failure;
pub use failure_detector::{is_on_this_host, until_dead};
pub use liveness_port::LivenessPort;
pub use logging::{LogIdentity, init_logging};
pub use page::{Section, Sections, tables};
pub use parse::{Refusal, parse, try_parse};
pub use readiness::{HealthTask, Readiness, Ready, health};
pub use run::{
    belongs_to_the_line_above, exit_at_once, keep_freed_memory, limit_arenas, run, run_and_exit,
    wait_after_completion,
};
pub use security::{Exposure, SecurityArgs, TlsArgs};
pub use server::bind;
pub use shutdown::Shutdown;
pub use sources::variable_of;
pub use stdout::{print, print_line, try_print};
