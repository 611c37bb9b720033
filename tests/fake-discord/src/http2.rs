//! HTTP/2, by hyper: over TLS with ALPN, or in the clear with prior knowledge.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::exchange::{Exchange, Head};
use crate::http1::Socket;
use crate::reply::{Action, Reply};
use crate::server::Shared;

/// A stream some of whose bytes were read already.
pub(crate) struct Prefixed<S> {
    first: BytesMut,
    stream: S,
}

impl<S> Prefixed<S> {
    pub(crate) fn new(first: BytesMut, stream: S) -> Self {
        Self { first, stream }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefixed<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let length = self.first.len().min(buf.remaining());
        buf.put_slice(&self.first[..length]);
        self.first.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefixed<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Serves one connection until it ends.
pub(crate) async fn serve<S: Socket>(shared: Arc<Shared>, stream: Prefixed<S>, ip: IpAddr, number: u64) {
    let service = hyper::service::service_fn(move |request| answer(Arc::clone(&shared), ip, number, request));
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .max_concurrent_streams(1000)
        .max_header_list_size(1024 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    // A connection that broke is the client's to notice.
    connection.await.ok();
}

/// A broken stream.
#[derive(Debug)]
struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("broken off as scripted")
    }
}

impl std::error::Error for Broken {}

async fn answer(
    shared: Arc<Shared>,
    ip: IpAddr,
    number: u64,
    request: http::Request<Incoming>,
) -> Result<http::Response<Answer>, Broken> {
    let (parts, mut body) = request.into_parts();
    let mut headers: Vec<(String, Vec<u8>)> = Vec::with_capacity(parts.headers.len() + 1);
    if let Some(authority) = parts.uri.authority() {
        headers.push(("host".into(), authority.as_str().into()));
    }
    headers.extend(parts.headers.iter().map(|(name, value)| (name.as_str().into(), value.as_bytes().to_vec())));
    let target = parts.uri.path_and_query().map_or(&b"/"[..], |target| target.as_str().as_bytes()).to_vec();
    let head = Head { version: "HTTP/2.0", method: parts.method.as_str().into(), target, headers };
    let mut guard = Guard(Some(Exchange::begin(&shared, ip, number, head)));
    let Some(exchange) = guard.0.as_mut() else { return Err(Broken) };
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => exchange.body_piece(frame.data_ref().map_or(&[], |data| data)),
            Err(_) => {
                exchange.broken();
                guard.0 = None;
                return Err(Broken);
            }
        }
    }
    exchange.body_end();
    let (before, after) = exchange.latency();
    pause(before).await;
    let reply = exchange.judge();
    pause(after + reply.delay).await;
    if let Some(gate) = &reply.gate {
        gate.pass().await;
    }
    if reply.action == Action::Stall {
        std::future::pending::<()>().await;
    }
    let response = respond(&reply);
    exchange.done(response.is_some(), false);
    guard.0 = None;
    response.ok_or(Broken)
}

/// Notes that the client left when the stream's task is dropped early.
struct Guard(Option<Exchange>);

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(exchange) = self.0.as_mut() {
            exchange.done(false, true);
        }
    }
}

async fn pause(length: Duration) {
    if !length.is_zero() {
        tokio::time::sleep(length).await;
    }
}

fn respond(reply: &Reply) -> Option<http::Response<Answer>> {
    let (length, end) = match reply.action {
        Action::Close | Action::CloseAtHead | Action::Reset | Action::Raw(_) => return None,
        Action::StallBody(length) => (length, End::Stall),
        Action::CutBody(length) | Action::ResetBody(length) => (length, End::Cut),
        _ => (reply.body.len(), End::Clean),
    };
    let mut response = http::Response::builder().status(reply.status);
    for (name, value) in crate::http1::all_headers(reply) {
        // Framing and connection headers have no meaning in HTTP/2.
        if !["connection", "transfer-encoding", "keep-alive"].iter().any(|own| name.eq_ignore_ascii_case(own)) {
            response = response.header(name.to_ascii_lowercase(), value.as_ref());
        }
    }
    let data = reply.body.slice(..length.min(reply.body.len()));
    response.body(Answer { data: Some(data), end }).ok()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Clean,
    Stall,
    Cut,
}

/// A body that ends as scripted.
struct Answer {
    data: Option<Bytes>,
    end: End,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match (self.data.take().filter(|data| !data.is_empty()), self.end) {
            (Some(data), _) => Poll::Ready(Some(Ok(Frame::data(data)))),
            (None, End::Clean) => Poll::Ready(None),
            (None, End::Cut) => Poll::Ready(Some(Err(Broken))),
            // Nobody wakes this up: the stream ends when the client resets it.
            (None, End::Stall) => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.end == End::Clean && self.data.as_ref().is_none_or(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.data, self.end) {
            (Some(data), End::Clean) => SizeHint::with_exact(data.len() as u64),
            _ => SizeHint::default(),
        }
    }
}
