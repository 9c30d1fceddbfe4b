//! A call: its parts in flight, its handler and its caller.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use http_body::Frame;
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tower::{BoxError, Service};

use super::{CONNECT_MAX, LOCK, Machine, Net, RESEND, SILENCE, machine_of};
use crate::network_model::{CallOutcome, EARLY_CALLS};
use crate::pipe::{Pipe, PipeBody, at_hand, next};
use crate::world::{ProcessId, TaskId};

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// A call in flight.
pub(super) struct Call {
    pub(super) number: u64,
    pub(super) from: (ProcessId, Machine),
    pub(super) to: Machine,
    pub(super) path: String,
    pub(super) request: Arc<Pipe>,
    pub(super) response: Arc<Pipe>,
    pub(super) progress: Mutex<Progress>,
}

#[derive(Default)]
pub(super) struct Progress {
    /// The frames of the request, for the observer.
    sent: Vec<Frame<Bytes>>,
    /// The process and the task that handle the call.
    pub(super) handler: Option<(ProcessId, TaskId)>,
    /// The task that sends the rest of the request.
    sender: Option<TaskId>,
    answer: Option<Result<http::response::Parts, Status>>,
    is_answered: bool,
    caller: Option<Waker>,
    /// Parts in flight in each direction, in the order in which they were sent; a connection keeps it.
    under_way: [Lane; 2],
    is_over: bool,
}

/// One direction of a call.
#[derive(Default)]
struct Lane {
    parts: VecDeque<Part>,
    /// Arrival of the last part; the next one arrives later.
    last: Duration,
}

/// Distinguishes the numbers of calls within a machine.
const LOCAL: u64 = 1 << 63;

/// Probability that a request arrives in two parts.
const IN_TWO: f64 = 0.2;

/// Data that arrive together.
struct Part {
    head: Head,
    frames: Vec<Frame<Bytes>>,
    end: Option<Result<(), Status>>,
}

enum Head {
    Request { to: SocketAddr, parts: Box<http::request::Parts>, outcome: CallOutcome },
    Response(Box<http::response::Parts>),
    None,
}

/// To the handler or back to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    There = 0,
    Back = 1,
}

impl Net {
    /// Fails a call on a silent connection after a timeout, unless the link heals.
    pub(super) fn give_up_later(&self, call: &Arc<Call>) {
        let silence = self.world().roll(|rng| rng.time(SILENCE.0, SILENCE.1));
        let (net, call) = (self.clone(), call.clone());
        self.world().after(silence, move |world| {
            let (from, to) = (call.from.1, call.to);
            let handler = call.progress.lock().expect(LOCK).handler;
            let is_dead = handler.is_some_and(|(process, _)| !world.lives(process));
            if is_dead || net.is_blocked(from, to) || net.is_blocked(to, from) {
                net.fail(&call, "the connection went silent");
                net.abandon(&call);
            }
        });
    }

    /// Sends a part of a call, behind the parts sent before, with the extra delay `late`.
    fn send(&self, call: &Arc<Call>, direction: Direction, part: Part, late: Duration) {
        let (from, to) = call.ends(direction);
        let now = self.world().now();
        let at = {
            let latency = self.latency(from, to) + late;
            let mut progress = call.progress.lock().expect(LOCK);
            let lane = &mut progress.under_way[direction as usize];
            lane.parts.push_back(part);
            lane.last = (now + latency).max(lane.last + Duration::from_nanos(1));
            lane.last
        };
        let (net, call) = (self.clone(), call.clone());
        self.world().after(at.saturating_sub(now), move |_| {
            let (broken, failing) = (call.clone(), net.clone());
            let passing = net.clone();
            net.arrive(
                from,
                to,
                if direction == Direction::There { CONNECT_MAX } else { SILENCE.1 },
                move || passing.pass(&call, direction),
                move || {
                    failing.fail(&broken, "the connection broke");
                    failing.abandon(&broken);
                },
            );
        });
    }

    /// Delivers the first part in flight.
    fn pass(&self, call: &Arc<Call>, direction: Direction) {
        let part =
            call.progress.lock().expect(LOCK).under_way[direction as usize].parts.pop_front();
        let Some(Part { head, frames, end }) = part else { return };
        match direction {
            Direction::There => call.request.arrive(frames, end),
            Direction::Back => call.response.arrive(frames, end),
        }
        match head {
            Head::Request { to, parts, outcome } => self.deliver(call, to, *parts, outcome),
            Head::Response(parts) => call.answer(Ok(*parts)),
            Head::None => {}
        }
    }

    /// Fails the call at the caller, unless it has its response.
    pub(super) fn fail(&self, call: &Arc<Call>, reason: &str) {
        tracing::trace!(target: "net", call = call.number, path = call.path, reason, "failed");
        call.response.cut(reason);
        call.answer(Err(Status::unavailable(reason)));
    }

    /// Notifies the handler, after the latency, that its caller hung up.
    pub(super) fn leave(&self, call: &Arc<Call>) {
        let (net, it) = (self.clone(), call.clone());
        let abandon = move || net.abandon(&it);
        let (from, to) = (call.from.1, call.to);
        self.carry(from, to, None, abandon.clone(), abandon);
    }

    /// Ends both sides of a call.
    pub(super) fn abandon(&self, call: &Arc<Call>) {
        tracing::trace!(target: "net", call = call.number, path = call.path, "abandoned");
        let (handler, sender) = {
            let mut progress = call.progress.lock().expect(LOCK);
            progress.is_over = true;
            (progress.handler.take(), progress.sender.take())
        };
        self.state().calls.remove(&call.number);
        call.request.cut("the caller hung up");
        for task in handler.map(|(_, task)| task).into_iter().chain(sender) {
            self.world().abort(task);
        }
    }

    /// Returns a channel from a process to an address.
    pub fn dial(&self, from: ProcessId, address: &str) -> Channel {
        let address = address.strip_prefix("http://").unwrap_or(address);
        Channel { net: self.clone(), from, to: address.parse().ok() }
    }

    /// Returns the number and the outcome of a call of a process to a method on another machine.
    fn remote_call(&self, from: ProcessId, path: &str) -> (u64, CallOutcome) {
        let mut state = self.state();
        state.made += 1;
        let made_of = state.made_of.entry((from, path.to_owned())).or_default();
        *made_of += 1;
        let is_early = *made_of <= EARLY_CALLS;
        if state.made.is_multiple_of(256) {
            state.calls.retain(|_, call| call.strong_count() != 0);
        }
        let network_model = state.network_model.clone();
        let number = state.made;
        let decided = state.outcomes.get(&number).copied();
        drop(state);
        let drawn = self.world().roll(|rng| network_model.outcome(rng, is_early));
        (number, decided.unwrap_or(drawn))
    }

    /// Returns the number and the outcome of a call within a machine, which no link can break. Deviations do not count
    /// it.
    fn local_call(&self) -> (u64, CallOutcome) {
        let mut state = self.state();
        state.made_locally += 1;
        (LOCAL | state.made_locally, CallOutcome::Whole)
    }

    fn call(&self, from: ProcessId, to: Option<SocketAddr>, request: Request) -> Calling {
        let machine = self.state().machines[&from];
        let target = to.map_or(machine, |to| machine_of(&to));
        let (parts, mut body) = request.into_parts();
        let (number, outcome) = match to.is_some() && machine == target {
            true => self.local_call(),
            false => self.remote_call(from, parts.uri.path()),
        };
        let call = Arc::new(Call {
            number,
            from: (from, machine),
            to: target,
            path: parts.uri.path().to_owned(),
            request: Arc::default(),
            response: Arc::default(),
            progress: Mutex::default(),
        });
        self.state().calls.insert(number, Arc::downgrade(&call));
        let Some(to) = to else {
            self.fail(&call, "no such address");
            return Calling { net: self.clone(), call };
        };
        let waker = Waker::noop();
        let (frames, end) = at_hand(&mut body, &mut Context::from_waker(waker));
        let is_whole = end.is_some();
        self.dispatch(&call, to, parts, frames, end, outcome);
        if !is_whole {
            let (net, it) = (self.clone(), call.clone());
            let sender = async move {
                loop {
                    let (frames, end) = next(&mut body).await;
                    let is_last = end.is_some();
                    let part = Part { head: Head::None, frames, end };
                    net.send(&it, Direction::There, part, Duration::ZERO);
                    if is_last {
                        break;
                    }
                }
            };
            let task = self.world().spawn(from, sender.boxed());
            call.progress.lock().expect(LOCK).sender = Some(task);
        }
        Calling { net: self.clone(), call }
    }

    /// Sends the head of a call with the part of its body that is ready.
    fn dispatch(
        &self,
        call: &Arc<Call>,
        to: SocketAddr,
        parts: http::request::Parts,
        frames: Vec<Frame<Bytes>>,
        end: Option<Result<(), Status>>,
        outcome: CallOutcome,
    ) {
        if outcome == CallOutcome::BrokenBefore {
            let (net, it) = (self.clone(), call.clone());
            let broken = move || net.fail(&it, "the connection was reset");
            return self.carry(call.from.1, call.from.1, None, broken.clone(), broken);
        }
        call.progress.lock().expect(LOCK).sent = copied(&frames);
        tracing::trace!(target: "net", call = call.number, path = call.path, %to, ?outcome, "call");
        let latency = self.latency(call.from.1, call.to);
        let late = match outcome {
            CallOutcome::DelayedDuplicate(late) => {
                let (net, it) = (self.clone(), call.clone());
                // The caller sees a broken connection, but its request arrives later.
                self.world().after(latency, move |_| net.fail(&it, "the connection was reset"));
                late
            }
            CallOutcome::CutOff(_) => {
                let (net, it) = (self.clone(), call.clone());
                self.world().after(latency, move |_| net.fail(&it, "the connection was reset"));
                Duration::ZERO
            }
            CallOutcome::Whole | CallOutcome::BrokenBefore | CallOutcome::AnswerLost => {
                Duration::ZERO
            }
        };
        let cut = match outcome {
            CallOutcome::CutOff(thousandths) => Some(thousandths),
            _ => self.world().roll(|rng| rng.happens(IN_TWO).then(|| rng.below(1000))),
        };
        let (frames, rest) = cut_at(cut.unwrap_or(1000), frames);
        let head = Head::Request { to, parts: Box::new(parts), outcome };
        if cut.is_none() {
            return self.send(call, Direction::There, Part { head, frames, end }, late);
        }
        self.send(call, Direction::There, Part { head, frames, end: None }, late);
        let rest = match outcome {
            CallOutcome::CutOff(_) => {
                let reset = Status::unavailable("the connection was reset");
                Part { head: Head::None, frames: Vec::new(), end: Some(Err(reset)) }
            }
            _ => Part { head: Head::None, frames: rest, end },
        };
        self.send(call, Direction::There, rest, Duration::ZERO);
    }

    /// Delivers a call to its target.
    fn deliver(
        &self,
        call: &Arc<Call>,
        to: SocketAddr,
        parts: http::request::Parts,
        outcome: CallOutcome,
    ) {
        if call.progress.lock().expect(LOCK).is_over {
            return;
        }
        tracing::trace!(target: "net", call = call.number, path = call.path, %to, "arrived");
        let port = {
            let state = self.state();
            state.ports.get(&to).map(|port| (port.process, port.routes.clone()))
        };
        let port = port.filter(|(process, _)| self.world().lives(*process));
        let Some((process, routes)) = port else {
            let (net, it) = (self.clone(), call.clone());
            let refused = move || net.fail(&it, "the connection was refused");
            return self.carry(call.to, call.from.1, None, refused.clone(), refused);
        };
        // Callers of a port that is open but not served yet wait.
        let Some(routes) = routes else {
            let (net, it) = (self.clone(), call.clone());
            return self.world().after(RESEND, move |_| net.deliver(&it, to, parts, outcome));
        };
        let body = Body::new(PipeBody::new(call.request.clone(), ()));
        let request = http::Request::from_parts(parts, body);
        let task = self
            .world()
            .spawn(process, handle(self.clone(), call.clone(), routes, request, outcome).boxed());
        let mut progress = call.progress.lock().expect(LOCK);
        progress.handler = Some((process, task));
    }
}

/// Returns whether the frames end a response with an error.
fn is_error(frames: &[Frame<Bytes>]) -> bool {
    let mut trailers = frames.iter().filter_map(Frame::trailers_ref);
    trailers.any(|it| it.get("grpc-status").is_some_and(|status| status != "0"))
}

/// Copies the data frames.
fn copied(frames: &[Frame<Bytes>]) -> Vec<Frame<Bytes>> {
    frames.iter().filter_map(|it| it.data_ref().cloned()).map(Frame::data).collect()
}

/// Splits frames after this many thousandths of their bytes.
fn cut_at(thousandths: u64, frames: Vec<Frame<Bytes>>) -> (Vec<Frame<Bytes>>, Vec<Frame<Bytes>>) {
    let len = |frame: &Frame<Bytes>| frame.data_ref().map_or(0, Bytes::len);
    let all: usize = frames.iter().map(len).sum();
    let mut left = all * thousandths as usize / 1000;
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    for frame in frames {
        let some = left.min(len(&frame));
        left -= some;
        match frame.into_data() {
            Ok(mut data) => {
                let tail = data.split_off(some);
                first.extend((!data.is_empty()).then(|| Frame::data(data)));
                rest.extend((!tail.is_empty()).then(|| Frame::data(tail)));
            }
            Err(trailers) => rest.push(trailers),
        }
    }
    (first, rest)
}

/// Executes a call at its target.
async fn handle(
    net: Net,
    call: Arc<Call>,
    mut routes: Routes,
    request: Request,
    outcome: CallOutcome,
) {
    let Ok(response) = routes.call(request).await;
    let (parts, mut body) = response.into_parts();
    let (frames, end) =
        std::future::poll_fn(|context| Poll::Ready(at_hand(&mut body, context))).await;
    let (mut answered, mut is_refused) = (copied(&frames), is_error(&frames));
    let observe = |answered: &[Frame<Bytes>]| {
        let mut observer = net.0.observer.lock().expect(LOCK);
        let progress = call.progress.lock().expect(LOCK);
        if let (Some(observer), Some((process, _))) = (observer.as_mut(), progress.handler) {
            observer(process, &call.path, &progress.sent, answered);
        }
    };
    if end.is_some() && !is_refused {
        observe(&answered);
    }
    tracing::trace!(target: "net", call = call.number, path = call.path, "answered");
    if outcome == CallOutcome::AnswerLost {
        net.fail(&call, "the connection was reset");
        net.state().calls.remove(&call.number);
        return;
    }
    let is_whole = end.is_some();
    let part = Part { head: Head::Response(Box::new(parts)), frames, end };
    net.send(&call, Direction::Back, part, Duration::ZERO);
    if !is_whole {
        loop {
            let (frames, end) = next(&mut body).await;
            let is_last = end.is_some();
            answered.extend(copied(&frames));
            is_refused |= is_error(&frames);
            if is_last && !is_refused {
                observe(&answered);
            }
            net.send(
                &call,
                Direction::Back,
                Part { head: Head::None, frames, end },
                Duration::ZERO,
            );
            if is_last {
                break;
            }
        }
    }
    let mut progress = call.progress.lock().expect(LOCK);
    progress.handler = None;
    if is_whole {
        drop(progress);
        net.state().calls.remove(&call.number);
    }
}

impl Call {
    /// Returns the source and the destination of a part.
    fn ends(&self, direction: Direction) -> (Machine, Machine) {
        match direction {
            Direction::There => (self.from.1, self.to),
            Direction::Back => (self.to, self.from.1),
        }
    }

    fn answer(&self, answer: Result<http::response::Parts, Status>) {
        let mut progress = self.progress.lock().expect(LOCK);
        if progress.answer.is_none() && !progress.is_answered {
            progress.answer = Some(answer);
            if let Some(caller) = progress.caller.take() {
                drop(progress);
                caller.wake();
            }
        }
    }
}

/// A channel from a process to an address.
#[derive(Clone)]
pub struct Channel {
    net: Net,
    from: ProcessId,
    to: Option<SocketAddr>,
}

impl Service<Request> for Channel {
    type Response = Response;
    type Error = BoxError;
    type Future = Calling;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Calling {
        self.net.call(self.from, self.to, request)
    }
}

/// A call that waits for its response. Dropping it cancels the call.
pub struct Calling {
    net: Net,
    call: Arc<Call>,
}

impl Future for Calling {
    type Output = Result<Response, BoxError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut progress = self.call.progress.lock().expect(LOCK);
        match progress.answer.take() {
            Some(Ok(parts)) => {
                progress.is_answered = true;
                drop(progress);
                let hang_up = HangUp { net: self.net.clone(), call: self.call.clone() };
                let body = PipeBody::new(self.call.response.clone(), hang_up);
                Poll::Ready(Ok(http::Response::from_parts(parts, Body::new(body))))
            }
            Some(Err(status)) => {
                progress.is_answered = true;
                Poll::Ready(Err(Box::new(status)))
            }
            None => {
                progress.caller = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        let is_answered = self.call.progress.lock().expect(LOCK).is_answered;
        // The calls of a process that dies are closed by `Net::remove_process`.
        if !is_answered && self.net.world().lives(self.call.from.0) {
            self.net.leave(&self.call);
        }
    }
}

/// Cancels a call whose response is no longer read.
struct HangUp {
    net: Net,
    call: Arc<Call>,
}

impl Drop for HangUp {
    fn drop(&mut self) {
        let is_open = self.call.progress.lock().expect(LOCK).handler.is_some();
        if is_open && self.net.world().lives(self.call.from.0) {
            self.net.leave(&self.call);
        }
    }
}
