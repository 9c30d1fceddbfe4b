//! gRPC calls whose bodies are segments of messages, over HTTP/2 or any service for its requests.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::ready;
use futures::stream::{BoxStream, Stream, StreamExt};
use http::HeaderMap;
use http_body::{Body as _, Frame, SizeHint};
use prost::Message;
use steadfast_common::error::ErrorKind;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::Service;

use crate::framing::PREFIX;
use crate::{TensorMethod, status};

/// The longest message that [`read_one`] accepts.
const MESSAGE_MAX: usize = 64 << 10;

const GRPC: http::HeaderValue = http::HeaderValue::from_static("application/grpc");

/// Reads a body that consists of one short message.
///
/// # Errors
/// The status of the peer, or an error of the message.
pub async fn read_one<M: Message + Default>(body: &mut Body) -> Result<M, Status> {
    let mut text = BytesMut::new();
    while let Some(bytes) = next(body).await? {
        if PREFIX + MESSAGE_MAX < text.len() + bytes.len() {
            return Err(status(ErrorKind::TooLarge, "the message is too long"));
        }
        text.put(bytes);
    }
    if text.len() < PREFIX {
        return Err(invalid("the call has no message"));
    }
    let (compressed, len) = (text.get_u8(), text.get_u32() as usize);
    match (compressed, len == text.len()) {
        (0, true) => M::decode(text.freeze()).map_err(|error| invalid(error.to_string())),
        (0, false) => Err(invalid("the call does not have exactly one message")),
        _ => Err(Status::unimplemented("compressed messages are not supported")),
    }
}

/// Returns the next bytes of a body; `None` at its end.
///
/// # Errors
/// The status of the peer, also from trailers.
pub async fn next(body: &mut Body) -> Result<Option<Bytes>, Status> {
    loop {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        let Some(frame) = frame.transpose()? else { return Ok(None) };
        let trailers = match frame.into_data() {
            Ok(data) => return Ok(Some(data)),
            Err(frame) => frame.into_trailers().unwrap_or_default(),
        };
        check_status(&trailers)?;
    }
}

/// Calls a method with segments of messages; returns the body of the response.
///
/// # Errors
/// The status of the peer, or an error of the transport.
pub async fn call<C>(
    channel: &mut C,
    method: TensorMethod,
    segments: Vec<Bytes>,
) -> Result<Body, Status>
where
    C: Service<http::Request<Body>, Response = http::Response<Body>>,
    C::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let broken = |error: C::Error| Status::from_error(error.into());
    std::future::poll_fn(|context| channel.poll_ready(context)).await.map_err(broken)?;
    let body = Body::new(TensorBody::request(segments));
    let request = http::Request::post(method.path())
        .version(http::Version::HTTP_2)
        .header(http::header::CONTENT_TYPE, GRPC)
        .header(http::header::TE, "trailers")
        .body(body)
        .map_err(|error| Status::internal(error.to_string()))?;
    let response = channel.call(request).await.map_err(broken)?;
    check_status(response.headers())?;
    match response.status() {
        http::StatusCode::OK => Ok(response.into_body()),
        other => Err(Status::unknown(format!("the response has the HTTP status {other}"))),
    }
}

/// Builds the response of a method.
pub fn answer(answer: Result<Vec<Bytes>, Status>) -> http::Response<Body> {
    let segments = match answer {
        Ok(segments) => segments,
        Err(status) => return status.into_http(),
    };
    let mut response = http::Response::new(Body::new(TensorBody::answer(segments)));
    response.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
    response
}

/// Builds a streamed response; an error in the stream is sent in the trailers.
pub fn answer_as_it_comes(
    segments: impl Stream<Item = Result<Bytes, Status>> + Send + 'static,
) -> http::Response<Body> {
    let mut response = http::Response::new(Body::new(StreamBody(Some(segments.boxed()))));
    response.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
    response
}

fn check_status(headers: &HeaderMap) -> Result<(), Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != Code::Ok => Err(status),
        Some(_) | None => Ok(()),
    }
}

/// An HTTP body of segments, with trailers if it is a response.
pub struct TensorBody {
    segments: std::vec::IntoIter<Bytes>,
    trailers: Option<HeaderMap>,
}

impl TensorBody {
    /// Creates the body of a request.
    pub fn request(segments: Vec<Bytes>) -> Self {
        Self { segments: segments.into_iter(), trailers: None }
    }

    /// Creates the body of a successful response.
    pub fn answer(segments: Vec<Bytes>) -> Self {
        Self { segments: segments.into_iter(), trailers: Some(ok_trailers()) }
    }
}

impl http_body::Body for TensorBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let segment = self.segments.next().map(Frame::data);
        let frame = segment.or_else(|| self.trailers.take().map(Frame::trailers));
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.segments.len() == 0 && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.segments.as_slice().iter().map(|it| it.len() as u64).sum())
    }
}

/// A streamed response body, with trailers.
struct StreamBody(Option<BoxStream<'static, Result<Bytes, Status>>>);

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(segments) = &mut self.0 else { return Poll::Ready(None) };
        let trailers = match ready!(segments.poll_next_unpin(context)) {
            Some(Ok(segment)) => return Poll::Ready(Some(Ok(Frame::data(segment)))),
            Some(Err(status)) => {
                let mut trailers = HeaderMap::new();
                status.add_header(&mut trailers)?;
                trailers
            }
            None => ok_trailers(),
        };
        self.0 = None;
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

/// Returns the trailers of a successful response.
fn ok_trailers() -> HeaderMap {
    HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        http::HeaderValue::from_static("0"),
    )])
}

fn invalid(message: impl Into<String>) -> Status {
    status(ErrorKind::Invalid, message)
}
