//! A client's socket as hyper sees it: reads and writes with the patience the front has for a client.
//!
//! hyper's own head timer also runs while a keep-alive connection is idle, so it cannot allow 10 s for a head and 60 s
//! of idleness. Here one timer, moved only when it fires or comes too late, serves both, so that a request that arrives
//! whole costs no timer work. hyper does not poll a body while its connection takes no bytes: the deadline of a response
//! that its client does not read is kept here too.

use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::framing::Framing;
use super::link::Link;
use super::unread;

/// A client that takes no byte for this long is given up, unless a response's deadline says when.
const WRITE_STALL: Duration = Duration::from_secs(60);

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For a head, once it has begun; also for a new connection's first byte.
    pub head: Duration,
    /// Between requests.
    pub idle: Duration,
}

/// What a pending read waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Nothing,
    /// The request after this many, or the rest of its head.
    Request(u64),
    Head(u64),
}

/// One client socket, HTTP/1.1 watched by [`Framing`], HTTP/2 not.
pub struct Socket {
    reader: OwnedReadHalf,
    writer: Arc<OwnedWriteHalf>,
    link: Arc<Link>,
    /// Bytes read while the protocol was found out.
    sniffed: Vec<u8>,
    framing: Option<Framing>,
    patience: Patience,
    awaited: Awaited,
    read_by: Instant,
    read_timer: Option<Pin<Box<Sleep>>>,
    write_timer: Option<Pin<Box<Sleep>>>,
    /// What is left of an answer that goes out in place of hyper's.
    in_place: Bytes,
}

impl Socket {
    /// Takes over a connection whose first bytes were `sniffed`.
    pub fn new(
        reader: OwnedReadHalf,
        writer: Arc<OwnedWriteHalf>,
        link: Arc<Link>,
        sniffed: Vec<u8>,
        framing: Option<Framing>,
        patience: Patience,
    ) -> Self {
        Self {
            reader,
            writer,
            link,
            sniffed,
            framing,
            patience,
            awaited: Awaited::Nothing,
            read_by: Instant::now(),
            read_timer: None,
            write_timer: None,
            in_place: Bytes::new(),
        }
    }

    fn watch(&mut self, bytes: &[u8]) {
        let Some(framing) = &mut self.framing else { return };
        framing.feed(bytes);
        if let Some(fault) = framing.fault() {
            self.link.faulty(fault);
        }
    }

    /// Ready when the client took too long: an end of file between requests, an error within a head.
    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(framing) = &self.framing else { return Poll::Pending };
        let awaited = match framing {
            framing if framing.in_head() => Awaited::Head(framing.heads()),
            // Whatever its bytes look like: with no request to answer it is idle.
            framing if framing.is_idle() || self.link.is_idle() => Awaited::Request(framing.heads()),
            _ => Awaited::Nothing,
        };
        if awaited != self.awaited {
            self.awaited = awaited;
            let patience = match awaited {
                Awaited::Nothing => return Poll::Pending,
                Awaited::Head(_) | Awaited::Request(0) => self.patience.head,
                Awaited::Request(_) => self.patience.idle,
            };
            self.read_by = Instant::now() + patience;
        }
        if awaited == Awaited::Nothing {
            return Poll::Pending;
        }
        let timer = self.read_timer.get_or_insert_with(|| Box::pin(sleep_until(self.read_by)));
        if timer.deadline() > self.read_by {
            timer.as_mut().reset(self.read_by);
        }
        while timer.as_mut().poll(cx).is_ready() {
            if timer.deadline() >= self.read_by {
                return Poll::Ready(match awaited {
                    Awaited::Head(_) => Err(io::ErrorKind::TimedOut.into()),
                    _ => Ok(()),
                });
            }
            timer.as_mut().reset(self.read_by);
        }
        Poll::Pending
    }

    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        write: impl Fn(&OwnedWriteHalf) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            let stream: &tokio::net::TcpStream = (*self.writer).as_ref();
            match stream.poll_write_ready(cx) {
                Poll::Pending => {
                    ready!(self.poll_stall(cx));
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
                Poll::Ready(readiness) => readiness?,
            }
            match write(&self.writer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => {
                    self.write_timer = None;
                    return Poll::Ready(result);
                }
            }
        }
    }

    /// Writes `own` in place of an answer of hyper's that has `length` bytes. Called with the same again until it is done.
    fn poll_write_in_place(&mut self, cx: &mut Context<'_>, length: usize, own: Vec<u8>) -> Poll<io::Result<usize>> {
        if self.in_place.is_empty() {
            self.in_place = own.into();
        }
        while !self.in_place.is_empty() {
            let left = self.in_place.clone();
            let written = ready!(self.poll_write_with(cx, |writer| writer.try_write(&left)))?;
            self.in_place.advance(written);
        }
        Poll::Ready(Ok(length))
    }

    /// Ready when a response that the client does not take must be given up.
    fn poll_stall(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.write_timer.get_or_insert_with(|| {
            Box::pin(sleep_until(self.link.next_deadline().unwrap_or_else(|| Instant::now() + WRITE_STALL)))
        });
        timer.as_mut().poll(cx)
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        if !this.sniffed.is_empty() {
            let take = this.sniffed.len().min(buffer.remaining());
            buffer.put_slice(&this.sniffed[..take]);
            this.sniffed.drain(..take);
        }
        // What came with the sniffed bytes is read with them: hyper doubles the buffer of a head that comes in two pieces.
        if this.sniffed.is_empty() {
            match Pin::new(&mut this.reader).poll_read(cx, buffer) {
                Poll::Ready(result) => result?,
                Poll::Pending if buffer.filled().len() == before => return this.poll_patience(cx),
                Poll::Pending => {}
            }
        }
        this.watch(&buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |writer| writer.try_write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [only] = slices
            && let Some(own) = unread::in_place_of(only)
        {
            return self.poll_write_in_place(cx, only.len(), own);
        }
        self.poll_write_with(cx, |writer| writer.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let stream: &tokio::net::TcpStream = (*self.writer).as_ref();
        Poll::Ready(SockRef::from(stream).shutdown(Shutdown::Write))
    }
}
