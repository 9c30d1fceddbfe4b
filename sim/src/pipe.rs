//! One direction of a call: frames that arrive some time after they were sent, in their order.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use tonic::Status;

/// What has arrived and was not read yet.
#[derive(Default)]
pub struct Pipe(Mutex<Arrived>);

#[derive(Default)]
struct Arrived {
    frames: VecDeque<Frame<Bytes>>,
    end: Option<Result<(), Status>>,
    reader: Option<Waker>,
}

const LOCK: &str = "one thread, and nothing panics while it holds this";

impl Pipe {
    /// Frames arrive, and the end if it came with them.
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

    /// Nothing more comes.
    pub fn cut(&self, reason: &str) {
        self.arrive(Vec::new(), Some(Err(Status::unavailable(reason))));
    }
}

/// The reader's end, which tells `gone` when it is dropped.
pub struct PipeBody<G> {
    pipe: Arc<Pipe>,
    _gone: G,
}

impl<G> PipeBody<G> {
    /// Reads what arrives in `pipe`.
    pub fn new(pipe: Arc<Pipe>, gone: G) -> Self {
        Self { pipe, _gone: gone }
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

/// What a body gives at once: its frames so far, and its end if that is there.
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

/// Waits for what a body gives next, which is something.
pub async fn next(body: &mut tonic::body::Body) -> (Vec<Frame<Bytes>>, Option<Result<(), Status>>) {
    std::future::poll_fn(|context| match at_hand(body, context) {
        (frames, None) if frames.is_empty() => Poll::Pending,
        something => Poll::Ready(something),
    })
    .await
}
