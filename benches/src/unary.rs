//! A gRPC service of one method, without generated code.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use prost::Message;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::{NamedService, UnaryService};
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
