//! Client channels to other processes.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::{fmt, io};

use futures::FutureExt;
use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use steadfast_common::role::Role;
use tonic::body::Body;
use tonic::transport::{self, Endpoint};
use tower::{BoxError, Service};

use crate::simulated::{SimulatedChannel, simulated};
use crate::tls::TlsIdentity;
use crate::{
    CONNECT_MAX, CONNECTION_WINDOW_BYTES, FRAME_BYTES, PING_EVERY, PING_TIMEOUT,
    STREAM_WINDOW_BYTES, connect, traces,
};

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// A channel to another process, for generated clients. Connects on first use and reconnects when
/// needed. Cheap to clone.
#[derive(Clone)]
pub struct Channel(Kind);

#[derive(Clone)]
enum Kind {
    Http2(transport::Channel),
    Simulated(SimulatedChannel),
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Channel")
    }
}

impl Service<Request> for Channel {
    type Response = Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match &mut self.0 {
            Kind::Http2(channel) => channel.poll_ready(context).map_err(BoxError::from),
            Kind::Simulated(channel) => channel.poll_ready(context),
        }
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        match &mut self.0 {
            Kind::Http2(channel) => {
                traces::send(request.headers_mut());
                channel.call(request).map(|it| it.map_err(BoxError::from)).boxed()
            }
            Kind::Simulated(channel) => Pin::from(Box::new(channel.call(request))),
        }
    }
}

impl TlsIdentity {
    /// Returns a channel to the process of `role` at `host:port`, with windows for large tensors and pings
    /// that detect a dead peer. With credentials, the peer must present a certificate of that role.
    ///
    /// # Errors
    /// A message, if the address is invalid.
    pub fn dial(&self, address: &str, role: Role) -> Result<Channel, String> {
        if let Some(channel) = simulated(address) {
            return Ok(Channel(Kind::Simulated(channel)));
        }
        let endpoint = endpoint(address)?;
        let (address, identity) = (address.to_owned(), self.clone());
        let connector = tower::service_fn(move |_: http::Uri| {
            let (address, identity) = (address.clone(), identity.clone());
            async move { connect::tcp_or_tls(&address, role, &identity).await.map(TokioIo::new) }
        });
        Ok(Channel(Kind::Http2(endpoint.connect_with_connector_lazy(connector))))
    }

    /// Returns a channel as [`TlsIdentity::dial`] does, over the Unix socket `name` if a process of this
    /// machine and user listens there (the kernel verifies the user), and to `host:port` otherwise.
    ///
    /// # Errors
    /// Returns the errors of [`TlsIdentity::dial`].
    pub fn dial_unix_or_tcp(
        &self,
        address: &str,
        name: &str,
        role: Role,
    ) -> Result<Channel, String> {
        if let Some(channel) = simulated(address) {
            return Ok(Channel(Kind::Simulated(channel)));
        }
        let endpoint = endpoint(address)?;
        let (address, name, identity) = (address.to_owned(), name.to_owned(), self.clone());
        let connector = tower::service_fn(move |_: http::Uri| {
            let (address, name, identity) = (address.clone(), name.clone(), identity.clone());
            async move { connect::unix_or_tcp(&name, &address, role, &identity).await.map(TokioIo::new) }
        });
        Ok(Channel(Kind::Http2(endpoint.connect_with_connector_lazy(connector))))
    }
}

/// Opens the connection of `endpoint`, to its host and port. The channel does not reconnect: once the connection
/// has ended, calls fail with a [`tonic::ConnectError`], so that the caller can connect elsewhere or with other
/// credentials.
///
/// # Errors
/// If there is no connection.
pub async fn connect_once(endpoint: &Endpoint) -> Result<transport::Channel, transport::Error> {
    let mut is_first = true;
    let connector = tower::service_fn(move |url: http::Uri| {
        let opens = std::mem::take(&mut is_first);
        async move {
            match opens {
                true => connect::tcp(&host_and_port(&url)).await.map(TokioIo::new),
                false => {
                    Err(io::Error::new(io::ErrorKind::NotConnected, "the connection has ended"))
                }
            }
        }
    });
    endpoint.connect_with_connector(connector).await
}

fn host_and_port(url: &http::Uri) -> String {
    let host = url.host().unwrap_or_default();
    let default = if url.scheme_str() == Some("https") { 443 } else { 80 };
    format!("{host}:{}", url.port_u16().unwrap_or(default))
}

fn endpoint(address: &str) -> Result<Endpoint, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| format!("`{address}`: {error}"))?
        .connect_timeout(CONNECT_MAX)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT);
    Ok(endpoint)
}
