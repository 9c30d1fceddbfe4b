//! A call: its parts on their way, who carries it out, and who waits for its answer.

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
use crate::pipe::{Pipe, PipeBody, at_hand, next};
use crate::weather::Fate;
use crate::world::{ProcessId, TaskId};

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// A call on its way.
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
    /// What the request's frames were, for the observer.
    sent: Vec<Frame<Bytes>>,
    /// Who handles it.
    pub(super) handler: Option<(ProcessId, TaskId)>,
    /// Who sends the rest of the request.
    sender: Option<TaskId>,
    answer: Option<Result<http::response::Parts, Status>>,
    is_answered: bool,
    caller: Option<Waker>,
    /// What is under way there and back, in its order: a connection never changes that.
    under_way: [Lane; 2],
    is_over: bool,
}

/// One direction of a call.
#[derive(Default)]
struct Lane {
    parts: VecDeque<Part>,
    /// No earlier than this does the next part arrive.
    last: Duration,
}

/// How often a request arrives in two parts.
const IN_TWO: f64 = 0.2;

/// What arrives together.
struct Part {
    head: Head,
    frames: Vec<Frame<Bytes>>,
    end: Option<Result<(), Status>>,
}

enum Head {
    Request { to: SocketAddr, parts: Box<http::request::Parts>, fate: Fate },
    Response(Box<http::response::Parts>),
    None,
}

/// There or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    There = 0,
    Back = 1,
}

impl Net {
    /// A call whose connection has gone silent ends some time later, unless the link heals.
    pub(super) fn give_up_later(&self, call: &Arc<Call>) {
        let silence = self.world().roll(|dice| dice.time(SILENCE.0, SILENCE.1));
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

    /// Sends a part of a call, after those that were sent before; `late` by more than usual.
    fn send(&self, call: &Arc<Call>, way: Way, part: Part, late: Duration) {
        let (from, to) = call.ends(way);
        let now = self.world().now();
        let at = {
            let latency = self.latency(from, to) + late;
            let mut progress = call.progress.lock().expect(LOCK);
            let lane = &mut progress.under_way[way as usize];
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
                if way == Way::There { CONNECT_MAX } else { SILENCE.1 },
                move || passing.pass(&call, way),
                move || {
                    failing.fail(&broken, "the connection broke");
                    failing.abandon(&broken);
                },
            );
        });
    }

    /// The foremost of what is under way arrives.
    fn pass(&self, call: &Arc<Call>, way: Way) {
        let part = call.progress.lock().expect(LOCK).under_way[way as usize].parts.pop_front();
        let Some(Part { head, frames, end }) = part else { return };
        match way {
            Way::There => call.request.arrive(frames, end),
            Way::Back => call.response.arrive(frames, end),
        }
        match head {
            Head::Request { to, parts, fate } => self.deliver(call, to, *parts, fate),
            Head::Response(parts) => call.answer(Ok(*parts)),
            Head::None => {}
        }
    }

    /// The caller hears that its call failed, unless it has its answer.
    pub(super) fn fail(&self, call: &Arc<Call>, reason: &str) {
        tracing::trace!(target: "net", call = call.number, path = call.path, reason, "fails");
        call.response.cut(reason);
        call.answer(Err(Status::unavailable(reason)));
    }

    /// The handler hears that its caller is gone, after a while.
    pub(super) fn leave(&self, call: &Arc<Call>) {
        let (net, it) = (self.clone(), call.clone());
        let told = move || net.abandon(&it);
        let (from, to) = (call.from.1, call.to);
        self.carry(from, to, None, told.clone(), told);
    }

    /// Ends both sides of a call.
    pub(super) fn abandon(&self, call: &Arc<Call>) {
        tracing::trace!(target: "net", call = call.number, path = call.path, "hung up");
        let (handler, sender) = {
            let mut progress = call.progress.lock().expect(LOCK);
            progress.is_over = true;
            (progress.handler.take(), progress.sender.take())
        };
        self.state().calls.remove(&call.number);
        call.request.cut("the caller is gone");
        for task in handler.map(|(_, task)| task).into_iter().chain(sender) {
            self.world().abort(task);
        }
    }

    /// A connection of a process to an address.
    pub fn dial(&self, from: ProcessId, address: &str) -> Wire {
        let address = address.strip_prefix("http://").unwrap_or(address);
        Wire { net: self.clone(), from, to: address.parse().ok() }
    }

    fn call(&self, from: ProcessId, to: Option<SocketAddr>, request: Request) -> Calling {
        let (number, machine, target, fate) = {
            let mut state = self.state();
            state.made += 1;
            if state.made.is_multiple_of(256) {
                state.calls.retain(|_, call| call.strong_count() != 0);
            }
            let machine = state.machines[&from];
            let target = to.map_or(machine, |to| machine_of(&to));
            let weather = state.weather.clone();
            let number = state.made;
            let decided = state.fates.get(&number).copied();
            drop(state);
            let drawn = self.world().roll(|dice| weather.fate(dice));
            (number, machine, target, decided.unwrap_or(drawn))
        };
        let (parts, mut body) = request.into_parts();
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
        self.dispatch(&call, to, parts, frames, end, fate);
        if !is_whole {
            let (net, it) = (self.clone(), call.clone());
            let sender = async move {
                loop {
                    let (frames, end) = next(&mut body).await;
                    let is_last = end.is_some();
                    let part = Part { head: Head::None, frames, end };
                    net.send(&it, Way::There, part, Duration::ZERO);
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

    /// Sends the head of a call with what is at hand of its body.
    fn dispatch(
        &self,
        call: &Arc<Call>,
        to: SocketAddr,
        parts: http::request::Parts,
        frames: Vec<Frame<Bytes>>,
        end: Option<Result<(), Status>>,
        fate: Fate,
    ) {
        if fate == Fate::BrokenBefore {
            let (net, it) = (self.clone(), call.clone());
            let broken = move || net.fail(&it, "the connection was reset");
            return self.carry(call.from.1, call.from.1, None, broken.clone(), broken);
        }
        call.progress.lock().expect(LOCK).sent = copied(&frames);
        tracing::trace!(target: "net", call = call.number, path = call.path, %to, ?fate, "call");
        let latency = self.latency(call.from.1, call.to);
        let late = match fate {
            Fate::Ghost(late) => {
                let (net, it) = (self.clone(), call.clone());
                // The caller is told of a break, and its request arrives all the same.
                self.world().after(latency, move |_| net.fail(&it, "the connection was reset"));
                late
            }
            Fate::CutOff(_) => {
                let (net, it) = (self.clone(), call.clone());
                self.world().after(latency, move |_| net.fail(&it, "the connection was reset"));
                Duration::ZERO
            }
            Fate::Whole | Fate::BrokenBefore | Fate::AnswerLost => Duration::ZERO,
        };
        let cut = match fate {
            Fate::CutOff(thousandths) => Some(thousandths),
            _ => self.world().roll(|dice| dice.happens(IN_TWO).then(|| dice.below(1000))),
        };
        let (frames, rest) = cut_at(cut.unwrap_or(1000), frames);
        let head = Head::Request { to, parts: Box::new(parts), fate };
        if cut.is_none() {
            return self.send(call, Way::There, Part { head, frames, end }, late);
        }
        self.send(call, Way::There, Part { head, frames, end: None }, late);
        let rest = match fate {
            Fate::CutOff(_) => {
                let reset = Status::unavailable("the connection was reset");
                Part { head: Head::None, frames: Vec::new(), end: Some(Err(reset)) }
            }
            _ => Part { head: Head::None, frames: rest, end },
        };
        self.send(call, Way::There, rest, Duration::ZERO);
    }

    /// A call has come to its target.
    fn deliver(&self, call: &Arc<Call>, to: SocketAddr, parts: http::request::Parts, fate: Fate) {
        if call.progress.lock().expect(LOCK).is_over {
            return;
        }
        tracing::trace!(target: "net", call = call.number, path = call.path, %to, "arrives");
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
        // A port that is open and not served yet lets its callers wait.
        let Some(routes) = routes else {
            let (net, it) = (self.clone(), call.clone());
            return self.world().after(RESEND, move |_| net.deliver(&it, to, parts, fate));
        };
        let body = Body::new(PipeBody::new(call.request.clone(), ()));
        let request = http::Request::from_parts(parts, body);
        let task = self
            .world()
            .spawn(process, handle(self.clone(), call.clone(), routes, request, fate).boxed());
        let mut progress = call.progress.lock().expect(LOCK);
        progress.handler = Some((process, task));
    }
}

/// Whether frames end an answer with an error.
fn is_refusal(frames: &[Frame<Bytes>]) -> bool {
    let mut trailers = frames.iter().filter_map(Frame::trailers_ref);
    trailers.any(|it| it.get("grpc-status").is_some_and(|status| status != "0"))
}

/// The data of frames.
fn copied(frames: &[Frame<Bytes>]) -> Vec<Frame<Bytes>> {
    frames.iter().filter_map(|it| it.data_ref().cloned()).map(Frame::data).collect()
}

/// Frames up to so many thousandths of their bytes, and the rest.
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

/// Carries a call out at its target.
async fn handle(net: Net, call: Arc<Call>, mut routes: Routes, request: Request, fate: Fate) {
    let Ok(response) = routes.call(request).await;
    let (parts, mut body) = response.into_parts();
    let (frames, end) =
        std::future::poll_fn(|context| Poll::Ready(at_hand(&mut body, context))).await;
    let (mut answered, mut is_refused) = (copied(&frames), is_refusal(&frames));
    let observe = |answered: &[Frame<Bytes>]| {
        let mut observer = net.0.observer.lock().expect(LOCK);
        if let Some(observer) = observer.as_mut() {
            observer(&call.path, &call.progress.lock().expect(LOCK).sent, answered);
        }
    };
    if end.is_some() && !is_refused {
        observe(&answered);
    }
    tracing::trace!(target: "net", call = call.number, path = call.path, "answered");
    if fate == Fate::AnswerLost {
        net.fail(&call, "the connection was reset");
        net.state().calls.remove(&call.number);
        return;
    }
    let is_whole = end.is_some();
    let part = Part { head: Head::Response(Box::new(parts)), frames, end };
    net.send(&call, Way::Back, part, Duration::ZERO);
    if !is_whole {
        loop {
            let (frames, end) = next(&mut body).await;
            let is_last = end.is_some();
            answered.extend(copied(&frames));
            is_refused |= is_refusal(&frames);
            if is_last && !is_refused {
                observe(&answered);
            }
            net.send(&call, Way::Back, Part { head: Head::None, frames, end }, Duration::ZERO);
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
    /// From where to where a part goes.
    fn ends(&self, way: Way) -> (Machine, Machine) {
        match way {
            Way::There => (self.from.1, self.to),
            Way::Back => (self.to, self.from.1),
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

/// A way from a process to an address.
#[derive(Clone)]
pub struct Wire {
    net: Net,
    from: ProcessId,
    to: Option<SocketAddr>,
}

impl Service<Request> for Wire {
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

/// A call that waits for its answer. To drop it is to hang up.
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
                let gone = HangUp { net: self.net.clone(), call: self.call.clone() };
                let body = PipeBody::new(self.call.response.clone(), gone);
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
        // What a process leaves that dies is its machine's to say.
        if !is_answered && self.net.world().lives(self.call.from.0) {
            self.net.leave(&self.call);
        }
    }
}

/// Ends a call whose answer nobody reads any more.
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
