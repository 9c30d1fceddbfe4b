//! Authorizes calls by the role of the caller.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::{Either, Ready, ready};
use http::{Request, Response};
use steadfast_common::role::Role;
use tonic::Status;
use tonic::body::Body;
use tower::{Layer, Service};

use crate::refusals::{Refusal, refused};

/// Returns the roles that may call a method, given its path (`/steadfast.v1.Master/Status`). Unknown
/// methods are denied.
pub type Access = fn(&str) -> &'static [Role];

/// The peer of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Not authenticated: this process serves without TLS.
    Anonymous,
    /// The roles in its certificate; none without a certificate.
    Authenticated(Arc<[Role]>),
}

impl Peer {
    /// Creates a peer with exactly this role.
    pub fn of(role: Role) -> Self {
        Self::Authenticated(Arc::from([role]))
    }
}

/// Puts a [`Gate`] before a service.
#[derive(Clone, Copy, Debug)]
pub struct GateLayer(pub Access);

impl<S> Layer<S> for GateLayer {
    type Service = Gate<S>;

    fn layer(&self, inner: S) -> Gate<S> {
        Gate { access: self.0, inner }
    }
}

/// A service behind access rules.
#[derive(Clone, Debug)]
pub struct Gate<S> {
    access: Access,
    inner: S,
}

impl<S> Gate<S> {
    fn authorize(&self, request: &Request<Body>) -> Result<(), Status> {
        let path = request.uri().path();
        let roles = match request.extensions().get::<Peer>() {
            Some(Peer::Anonymous) => return Ok(()),
            Some(Peer::Authenticated(roles)) => &**roles,
            // Without a recorded peer there is no role.
            None => &[],
        };
        if (self.access)(path).iter().any(|role| roles.contains(role)) {
            return Ok(());
        }
        let caller = match roles {
            [] => "a caller without a role".to_owned(),
            roles => roles.iter().map(Role::to_string).collect::<Vec<_>>().join(", "),
        };
        let message = format!("{path} is not permitted for {caller}");
        refused(&Refusal::Call { path: path.to_owned(), caller });
        Err(Status::permission_denied(message))
    }
}

impl<S> Service<Request<Body>> for Gate<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, Ready<Result<Response<Body>, Infallible>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match self.authorize(&request) {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(status) => Either::Right(ready(Ok(status.into_http()))),
        }
    }
}
