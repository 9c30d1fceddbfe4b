//! Calls without a client library: any message, valid or not, and the complete reply.

use prost::Message;
use std::net::SocketAddr;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

#[derive(Clone)]
pub struct Raw {
    channel: Channel,
}

impl Raw {
    pub async fn connect(address: SocketAddr) -> Self {
        let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
        Raw { channel: endpoint.connect().await.unwrap() }
    }

    /// Calls a method by its path under `etcdserverpb`.
    pub async fn call<Q, R>(&self, method: &'static str, request: Q) -> Result<R, Status>
    where
        Q: Message + Send + Sync + 'static,
        R: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(64 << 20);
        grpc.ready().await.unwrap();
        let path = PathAndQuery::from_maybe_shared(format!("/etcdserverpb.{method}")).unwrap();
        let codec = ProstCodec::<Q, R>::default();
        Ok(grpc.unary(Request::new(request), path, codec).await?.into_inner())
    }
}
