//! The body of every response: a local answer's bytes, or Discord's stream with its deadline and its guards.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use tokio::time::{Instant, sleep_until};

use super::guard::Guard;
use super::link::End;
use crate::error::Reason;
use crate::scheduler::answer::AnswerBody;

/// A response's body.
#[derive(Debug)]
pub struct Body(Kind);

#[derive(Debug)]
enum Kind {
    Full(Option<Bytes>),
    Stream(Box<Stream>),
}

/// Discord's body on its way to the client.
struct Stream {
    incoming: AnswerBody,
    deadline: Instant,
    /// Given back with the stream, and not with its last piece: that may have to wait for its client.
    guard: Guard,
    /// It has come to its end, or to one before it.
    over: bool,
    /// What may end the stream while Discord sends nothing; made when it first does, so that an answer that is there
    /// at once costs no timer.
    interrupt: Option<Pin<Box<dyn Future<Output = Reason> + Send + Sync>>>,
    /// Discord's connection broke, which the next look tells.
    broken: bool,
}

/// The stream was cut: hyper closes the connection or resets the stream, so that it never looks complete.
#[derive(Debug)]
pub struct Aborted;

impl std::fmt::Display for Aborted {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("response aborted")
    }
}

impl std::error::Error for Aborted {}

impl std::fmt::Debug for Stream {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Stream").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

impl Body {
    /// Bytes made here. What answers a HEAD has none, whatever its length says.
    pub fn local(bytes: Bytes, head: bool) -> Self {
        Self(Kind::Full((!head && !bytes.is_empty()).then_some(bytes)))
    }

    /// Discord's body, aborted past `deadline`, when its connection breaks and when the client's does.
    pub fn stream(incoming: AnswerBody, deadline: Instant, guard: Guard) -> Self {
        if incoming.is_end_stream() {
            let mut guard = guard;
            guard.settle();
            return Self(Kind::Full(None));
        }
        guard.link().expect_by(deadline);
        Self(Kind::Stream(Box::new(Stream { incoming, deadline, guard, over: false, interrupt: None, broken: false })))
    }
}

impl Stream {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Aborted>>> {
        if self.over {
            return Poll::Ready(None);
        }
        if self.broken {
            return self.abort(Reason::ResponseAborted);
        }
        match Pin::new(&mut self.incoming).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                if self.incoming.is_end_stream() {
                    self.finish();
                } else if Instant::now() >= self.deadline {
                    return self.abort(Reason::ResponseAborted);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(None) => {
                self.finish();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(_))) => {
                // hyper closes the connection on an error at once, with the head and what came of the body still in its
                // buffer; it writes them when it must wait.
                self.broken = true;
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Pending => {
                let interrupt = self.interrupt.get_or_insert_with(|| {
                    let (link, deadline) = (Arc::clone(self.guard.link()), self.deadline);
                    Box::pin(async move {
                        tokio::select! {
                            () = sleep_until(deadline) => Reason::ResponseAborted,
                            end = link.ended() => reason_of(end),
                        }
                    })
                });
                match interrupt.as_mut().poll(cx) {
                    Poll::Ready(reason) => self.abort(reason),
                    Poll::Pending => Poll::Pending,
                }
            }
        }
    }

    fn finish(&mut self) {
        self.over = true;
        self.guard.settle();
    }

    fn abort(&mut self, reason: Reason) -> Poll<Option<Result<Frame<Bytes>, Aborted>>> {
        self.over = true;
        self.guard.fail(reason);
        self.guard.link().cut();
        Poll::Ready(Some(Err(Aborted)))
    }
}

impl Drop for Stream {
    /// Dropped before its end: the client went away, or took no more bytes until the deadline.
    fn drop(&mut self) {
        if !self.over {
            let reason = match self.guard.link().has_ended() {
                _ if Instant::now() >= self.deadline => Reason::ResponseAborted,
                Some(end) => reason_of(end),
                None => Reason::ClientClosed,
            };
            _ = self.abort(reason);
        }
        self.guard.link().through(self.deadline);
    }
}

fn reason_of(end: End) -> Reason {
    match end {
        End::ClientGone => Reason::ClientClosed,
        End::Stopped => Reason::ResponseAborted,
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Aborted;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Aborted>>> {
        match &mut self.0 {
            Kind::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Kind::Stream(stream) => stream.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Full(bytes) => bytes.is_none(),
            Kind::Stream(stream) => stream.over || stream.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Kind::Stream(stream) => stream.incoming.size_hint(),
        }
    }
}
