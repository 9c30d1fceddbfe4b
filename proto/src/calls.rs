//! Calls whose bodies are pieces of messages, over HTTP/2 or whatever carries its requests.

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
use crate::status;

/// The longest message that is read whole.
const MESSAGE_MAX: usize = 64 << 10;

const GRPC: http::HeaderValue = http::HeaderValue::from_static("application/grpc");

/// Reads a body that is one short message.
///
/// # Errors
/// The other side's, or that it is none.
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
        (0, false) => Err(invalid("there is more or less than one message")),
        _ => Err(Status::unimplemented("messages are not compressed")),
    }
}

/// The next bytes of a body; nothing at its end.
///
/// # Errors
/// The other side's, also in trailers.
pub async fn next(body: &mut Body) -> Result<Option<Bytes>, Status> {
    loop {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        let Some(frame) = frame.transpose()? else { return Ok(None) };
        let trailers = match frame.into_data() {
            Ok(data) => return Ok(Some(data)),
            Err(frame) => frame.into_trailers().unwrap_or_default(),
        };
        refusal(&trailers)?;
    }
}

/// Calls a method with pieces of messages; gives back the body of the answer.
///
/// # Errors
/// The other side's, or of the way to it.
pub async fn call<W>(wire: &mut W, path: &'static str, pieces: Vec<Bytes>) -> Result<Body, Status>
where
    W: Service<http::Request<Body>, Response = http::Response<Body>>,
    W::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let broken = |error: W::Error| Status::from_error(error.into());
    std::future::poll_fn(|context| wire.poll_ready(context)).await.map_err(broken)?;
    let body = Body::new(TensorBody::request(pieces));
    let request = http::Request::post(path)
        .version(http::Version::HTTP_2)
        .header(http::header::CONTENT_TYPE, GRPC)
        .header(http::header::TE, "trailers")
        .body(body)
        .map_err(|error| Status::internal(error.to_string()))?;
    let response = wire.call(request).await.map_err(broken)?;
    refusal(response.headers())?;
    match response.status() {
        http::StatusCode::OK => Ok(response.into_body()),
        other => Err(Status::unknown(format!("the answer is HTTP {other}"))),
    }
}

/// What a method answers.
pub fn answer(answer: Result<Vec<Bytes>, Status>) -> http::Response<Body> {
    let pieces = match answer {
        Ok(pieces) => pieces,
        Err(status) => return status.into_http(),
    };
    let mut response = http::Response::new(Body::new(TensorBody::answer(pieces)));
    response.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
    response
}

/// What a method answers whose beginning is known to be no refusal; a later one comes in trailers.
pub fn answer_as_it_comes(
    pieces: impl Stream<Item = Result<Bytes, Status>> + Send + 'static,
) -> http::Response<Body> {
    let mut response = http::Response::new(Body::new(ComingBody(Some(pieces.boxed()))));
    response.headers_mut().insert(http::header::CONTENT_TYPE, GRPC);
    response
}

fn refusal(headers: &HeaderMap) -> Result<(), Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != Code::Ok => Err(status),
        Some(_) | None => Ok(()),
    }
}

/// An HTTP body of pieces, and of trailers if it is an answer.
pub struct TensorBody {
    pieces: std::vec::IntoIter<Bytes>,
    trailers: Option<HeaderMap>,
}

impl TensorBody {
    /// What a request sends.
    pub fn request(pieces: Vec<Bytes>) -> Self {
        Self { pieces: pieces.into_iter(), trailers: None }
    }

    /// What an answer without error sends.
    pub fn answer(pieces: Vec<Bytes>) -> Self {
        Self { pieces: pieces.into_iter(), trailers: Some(well()) }
    }
}

impl http_body::Body for TensorBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let piece = self.pieces.next().map(Frame::data);
        let frame = piece.or_else(|| self.trailers.take().map(Frame::trailers));
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.len() == 0 && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.pieces.as_slice().iter().map(|it| it.len() as u64).sum())
    }
}

/// Pieces of an answer that are not all there yet, and then trailers.
struct ComingBody(Option<BoxStream<'static, Result<Bytes, Status>>>);

impl http_body::Body for ComingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(pieces) = &mut self.0 else { return Poll::Ready(None) };
        let trailers = match ready!(pieces.poll_next_unpin(context)) {
            Some(Ok(piece)) => return Poll::Ready(Some(Ok(Frame::data(piece)))),
            Some(Err(status)) => {
                let mut trailers = HeaderMap::new();
                status.add_header(&mut trailers)?;
                trailers
            }
            None => well(),
        };
        self.0 = None;
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

/// The trailers of an answer without error.
fn well() -> HeaderMap {
    HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        http::HeaderValue::from_static("0"),
    )])
}

fn invalid(message: impl Into<String>) -> Status {
    status(ErrorKind::Invalid, message)
}
