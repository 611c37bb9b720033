//! Discord's body on its way back: a stream, or a 429's that was read for its `retry_after` and then passed on.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::inbound::{BrokenOff, Inbound};
use crate::upstream::Collected;

/// An answer's body.
#[derive(Debug)]
pub struct AnswerBody {
    read: Bytes,
    rest: Option<Inbound>,
    broken: bool,
}

impl From<Inbound> for AnswerBody {
    fn from(rest: Inbound) -> Self {
        Self { read: Bytes::new(), rest: Some(rest), broken: false }
    }
}

impl From<Collected> for AnswerBody {
    fn from(collected: Collected) -> Self {
        let broken = !collected.complete && collected.rest.is_none();
        Self { read: collected.bytes, rest: collected.rest, broken }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        if !self.read.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.read)))));
        }
        if self.broken {
            return Poll::Ready(Some(Err(BrokenOff)));
        }
        match &mut self.rest {
            Some(rest) => Pin::new(rest).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && !self.broken && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let read = self.read.len() as u64;
        match &self.rest {
            _ if self.broken => SizeHint::new(),
            None => SizeHint::with_exact(read),
            Some(rest) => {
                let inner = rest.size_hint();
                let mut hint = SizeHint::new();
                hint.set_lower(inner.lower() + read);
                if let Some(upper) = inner.upper() {
                    hint.set_upper(upper + read);
                }
                hint
            }
        }
    }
}
