//! Shared code of the tests of whole clusters: the built programs, a scene per test that cleans up all
//! processes, job files, runs of `steadfast local`, a real etcd, and worlds that run a job under a fault
//! schedule.

mod audit;
mod certificates;
mod clicks;
mod cluster;
mod containers;
mod etcd;
mod etcd_cluster;
pub mod faults;
mod history;
mod http;
mod job;
mod netns;
mod preloaded;
mod process;
pub mod promtool;
mod proxy;
mod python;
mod run;
mod s3;
mod scene;
mod turn;
mod wait;

pub use audit::{audit, run_audit};
pub use certificates::Certificates;
pub use cluster::{Cluster, Member, TOKEN};
pub use containers::{Agents, Container, Deployment, docker};
pub use etcd::{EtcdServer, PASSWORD, etcdctl, free_address};
pub use etcd_cluster::{EtcdCluster, Quota};
pub use history::{Recorder, history};
pub use http::{HttpReply, get, send_garbage};
pub use job::{Job, examples};
pub use netns::{Network, enter_router};
pub use preloaded::Preloaded;
pub use process::{Ended, FoundProcess, Process, memory_of, program, sha256sum};
pub use proxy::Proxy;
pub use python::python;
pub use run::Run;
pub use s3::S3Server;
pub use scene::{Scene, assert_refused};
pub use wait::{eventually, within};

pub use nix::sys::signal::Signal;
