//! A gRPC service of one method, without generated code, in a process of its own.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::process::Stdio;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use prost::Message;
use steadfast_common::role::Role;
use steadfast_net::{Channel, Port, TlsIdentity};
use steadfast_tests::{Process, Scene, within};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::{NamedService, UnaryService};
use tonic::service::Routes;
use tonic_prost::ProstCodec;

/// Answers calls with request type `R`, whatever the method name.
pub struct Unary<S, R> {
    method: S,
    request: PhantomData<fn(R)>,
}

impl<S, R> Unary<S, R> {
    /// Creates a service that answers with `method`.
    pub fn new(method: S) -> Self {
        Self { method, request: PhantomData }
    }
}

impl<S: Clone, R> Clone for Unary<S, R> {
    fn clone(&self) -> Self {
        Self::new(self.method.clone())
    }
}

impl<S, R> NamedService for Unary<S, R> {
    const NAME: &'static str = "steadfast.bench.Unary";
}

impl<S, R> tower::Service<http::Request<Body>> for Unary<S, R>
where
    S: UnaryService<R, Response: Message + 'static, Future: Send> + Clone + Send + 'static,
    R: Message + Default + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = self.method.clone();
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(ProstCodec::<S::Response, R>::default())
                .max_decoding_message_size(usize::MAX);
            Ok(grpc.unary(method, request).await)
        })
    }
}

/// Serves until the process is killed. Prints its address first.
///
/// # Errors
/// If the port cannot be opened or served.
pub async fn serve<S, R>(method: S) -> std::io::Result<()>
where
    S: UnaryService<R, Response: Message + 'static, Future: Send> + Clone + Send + Sync + 'static,
    R: Message + Default + 'static,
{
    let port = Port::bind("127.0.0.1:0".parse().expect("an address")).await?;
    println!("{}", port.local_addr()?);
    let routes = Routes::new(Unary::new(method));
    let served = port.serve(routes, |_| &[], &TlsIdentity::default(), CancellationToken::new());
    served.await.map_err(std::io::Error::other)?.map_err(std::io::Error::other)
}

/// Starts this program with a command that calls [`serve`], and connects to it.
pub fn start(scene: &Scene, command: &str) -> (Process, Channel) {
    let own = std::env::current_exe().expect("we run");
    let mut line = scene.command(&own);
    line.arg(command).stdin(Stdio::null());
    let process = Process::start(scene.directory(), command, &mut line);
    let address: SocketAddr =
        within(Duration::from_secs(10), "it listens", || process.stdout().trim().parse().ok());
    let channel = TlsIdentity::default().dial(&address.to_string(), Role::Pserver);
    (process, channel.expect("an address"))
}
