//! What tests over whole clusters share: the built programs, a scene for each test that takes
//! everything down with it, job files, runs of `steadfast local`, and a real etcd.

mod cluster;
mod etcd;
mod history;
mod http;
mod job;
mod process;
mod proxy;
mod run;
mod scene;
mod turn;
mod wait;

pub use cluster::{Cluster, Member};
pub use etcd::{EtcdServer, etcdctl, free_address};
pub use history::{Change, history};
pub use http::{Answer, get, send_garbage};
pub use job::{Job, examples};
pub use process::{Ended, Process, Seen, program};
pub use proxy::Proxy;
pub use run::Run;
pub use scene::Scene;
pub use wait::{eventually, within};

pub use nix::sys::signal::Signal;
