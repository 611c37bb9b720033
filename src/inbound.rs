//! The body of a message that comes in: from a client, from Discord or from a peer.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Request, Response, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use crate::error::ProxyError;

/// A body as it comes in. One that breaks off says so, whatever the protocol.
#[derive(Debug)]
pub struct Inbound(Kind);

#[derive(Debug)]
enum Kind {
    Http1(Incoming),
    /// On the heap, so that the other, which is common and larger than what is left, keeps no room to tell them apart.
    Http2(Box<Incoming>),
    /// A stream of a connection between peers, and what is left of the length that its head says.
    Peer(RecvStream, Option<u64>),
}

/// It ended before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BrokenOff;

impl fmt::Display for BrokenOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body broke off")
    }
}

impl std::error::Error for BrokenOff {}

impl BrokenOff {
    /// What its client is told.
    pub const OF_REQUEST: &str = "the request's body broke off, or its chunks are malformed";
}

impl From<BrokenOff> for ProxyError {
    fn from(_: BrokenOff) -> Self {
        Self::BadRequest(BrokenOff::OF_REQUEST)
    }
}

impl Inbound {
    /// A client's request.
    pub fn request(request: Request<Incoming>) -> Request<Self> {
        let version = request.version();
        request.map(|body| Self::new(version, body))
    }

    /// Discord's answer.
    pub fn response(response: Response<Incoming>) -> Response<Self> {
        let version = response.version();
        response.map(|body| Self::new(version, body))
    }

    fn new(version: Version, body: Incoming) -> Self {
        Self(if version == Version::HTTP_2 { Kind::Http2(Box::new(body)) } else { Kind::Http1(body) })
    }

    /// What follows these headers from a peer.
    pub fn from_peer(headers: &HeaderMap, stream: RecvStream) -> Self {
        // h2 resets a stream whose length is none, or not that of its data.
        let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        Self(Kind::Peer(stream, length))
    }
}

impl Body for Inbound {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        Poll::Ready(match &mut self.0 {
            Kind::Http1(body) => ready!(Pin::new(body).poll_frame(cx)).map(|frame| frame.map_err(|_| BrokenOff)),
            Kind::Http2(body) => match ready!(Pin::new(&mut **body).poll_frame(cx)) {
                // hyper takes a stream that was reset for one that has ended, if the reason is CANCEL or NO_ERROR. An
                // end that came before the reset stays one: so a server ends an upload that it does not need (RFC 9113,
                // section 8.1).
                None if !body.is_end_stream() => Some(Err(BrokenOff)),
                frame => frame.map(|frame| frame.map_err(|_| BrokenOff)),
            },
            Kind::Peer(stream, left) => match ready!(stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    *left = left.map(|left| left.saturating_sub(data.len() as u64));
                    // The stream is over if it has none.
                    stream.flow_control().release_capacity(data.len()).ok();
                    Some(Ok(Frame::data(data)))
                }
                Some(Err(_)) => Some(Err(BrokenOff)),
                None => None,
            },
        })
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Http1(body) => body.is_end_stream(),
            Kind::Http2(body) => body.is_end_stream(),
            Kind::Peer(stream, _) => stream.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Http1(body) => body.size_hint(),
            Kind::Http2(body) => body.size_hint(),
            Kind::Peer(stream, _) if stream.is_end_stream() => SizeHint::with_exact(0),
            Kind::Peer(_, left) => left.map_or_else(SizeHint::new, SizeHint::with_exact),
        }
    }
}
