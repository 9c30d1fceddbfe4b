//! One direction of a call: frames that arrive with a delay, in the order in which they were sent.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use tonic::Status;

/// Frames that have arrived and were not read yet.
#[derive(Default)]
pub struct Pipe(Mutex<Arrived>);

#[derive(Default)]
struct Arrived {
    frames: VecDeque<Frame<Bytes>>,
    end: Option<Result<(), Status>>,
    reader: Option<Waker>,
}

const LOCK: &str = "single thread; no holder panics";

impl Pipe {
    /// Adds arrived frames, and the end of the stream if it came with them.
    pub fn arrive(&self, frames: Vec<Frame<Bytes>>, end: Option<Result<(), Status>>) {
        let mut arrived = self.0.lock().expect(LOCK);
        if arrived.end.is_none() {
            arrived.frames.extend(frames);
            arrived.end = end;
        }
        let reader = arrived.reader.take();
        drop(arrived);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Ends the stream with an error.
    pub fn cut(&self, reason: &str) {
        self.arrive(Vec::new(), Some(Err(Status::unavailable(reason))));
    }
}

/// The reader's end; `on_drop` is dropped with it.
pub struct PipeBody<G> {
    pipe: Arc<Pipe>,
    _on_drop: G,
}

impl<G> PipeBody<G> {
    /// Creates a body that reads from `pipe`.
    pub fn new(pipe: Arc<Pipe>, on_drop: G) -> Self {
        Self { pipe, _on_drop: on_drop }
    }
}

impl<G: Unpin> HttpBody for PipeBody<G> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let mut arrived = self.pipe.0.lock().expect(LOCK);
        if let Some(frame) = arrived.frames.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        match &arrived.end {
            Some(Ok(())) => Poll::Ready(None),
            Some(Err(status)) => {
                let status = status.clone();
                arrived.end = Some(Ok(()));
                Poll::Ready(Some(Err(status)))
            }
            None => {
                arrived.reader = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// Returns the frames that a body has ready, and its end if it is reached.
pub fn at_hand(
    body: &mut tonic::body::Body,
    context: &mut Context<'_>,
) -> (Vec<Frame<Bytes>>, Option<Result<(), Status>>) {
    let mut frames = Vec::new();
    loop {
        match Pin::new(&mut *body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => frames.push(frame),
            Poll::Ready(Some(Err(status))) => return (frames, Some(Err(status))),
            Poll::Ready(None) => return (frames, Some(Ok(()))),
            Poll::Pending => return (frames, None),
        }
    }
}

/// Waits for the next frames of a body; returns at least one frame or the end.
pub async fn next(body: &mut tonic::body::Body) -> (Vec<Frame<Bytes>>, Option<Result<(), Status>>) {
    std::future::poll_fn(|context| match at_hand(body, context) {
        (frames, None) if frames.is_empty() => Poll::Pending,
        something => Poll::Ready(something),
    })
    .await
}
