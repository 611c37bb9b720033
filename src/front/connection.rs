//! One client connection from its first byte to its close: which HTTP it speaks, its requests, and the ways it ends.

use std::io;
use std::net::Shutdown;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::admission::Phase;
use super::body::Body;
use super::framing::Framing;
use super::handler::{Gone, Handler, Origin};
use super::headers::MAX_HEAD_BYTES;
use super::link::{End, Link};
use super::socket::{Patience, Socket};
use super::unread;
use crate::inbound::Inbound;

/// How HTTP/2 with prior knowledge begins (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// HTTP/2 requests of one connection at a time.
const MAX_STREAMS: u32 = 256;
/// What a stream may send ahead. Requests wait with their bodies unread, so the connection's window holds as much for
/// every stream: no waiting upload takes the room of another stream.
const STREAM_WINDOW: u32 = 64 * 1024;
/// How often an HTTP/2 connection is asked whether it is alive, and how long it has to answer.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// How far past a response's deadline an HTTP/2 client may withhold its window before the connection is closed.
const WINDOW_GRACE: Duration = Duration::from_secs(2);
/// In how many steps an HTTP/2 connection's idleness is measured: looking now and then costs its requests nothing.
const QUARTERS: u32 = 4;
/// A connection that has said nothing when the drain begins, or is made during it, may have its first request on the way.
const FIRST_WORDS: Duration = Duration::from_secs(1);
/// For the last bytes of answers when the drain's time is up.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long, and for how many bytes, a closed connection is still read, so that what the client is sending does not
/// reset it before it has read its answer (RFC 9112, 9.6).
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 1024 * 1024;

/// Serves a connection until it is closed, by either side.
pub async fn serve(stream: TcpStream, handler: Arc<Handler>, patience: Patience, phase: watch::Receiver<Phase>) {
    // A socket that refuses the option is about to fail anyway.
    _ = stream.set_nodelay(true);
    let (mut reader, writer) = stream.into_split();
    let writer = Arc::new(writer);
    let mut sniffed = Vec::new();
    let sniffing = timeout(patience.head, sniff(&mut reader, &mut sniffed));
    let mut following = phase.clone();
    let unheard = async {
        // Its sender lives as long as the handler.
        _ = following.wait_for(|phase| *phase > Phase::Serving).await;
        sleep(FIRST_WORDS).await;
    };
    let http2 = tokio::select! {
        biased;
        sniffed = sniffing => match sniffed {
            Ok(Ok(http2)) => http2,
            // Silent for too long, or gone.
            Ok(Err(_)) | Err(_) => return,
        },
        () = unheard => return,
    };
    let link = Arc::new(Link::default());
    let client = Client { writer: Arc::clone(&writer), link: Arc::clone(&link), handler, phase };
    let framing = (!http2).then(Framing::default);
    let socket = Socket::new(reader, writer, link, sniffed, framing, patience);
    if http2 {
        // On the heap, because it is larger and rarer than the other.
        Box::pin(client.serve_http2(socket, patience)).await;
    } else {
        client.serve_http1(socket).await;
    }
}

/// Reads until it is clear whether the connection begins with HTTP/2's preface.
async fn sniff(reader: &mut OwnedReadHalf, sniffed: &mut Vec<u8>) -> io::Result<bool> {
    loop {
        let mut piece = [0; PREFACE.len()];
        let read = reader.read(&mut piece[..PREFACE.len() - sniffed.len()]).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        sniffed.extend_from_slice(&piece[..read]);
        if !PREFACE.starts_with(sniffed) {
            return Ok(false);
        }
        if sniffed.len() == PREFACE.len() {
            return Ok(true);
        }
    }
}

struct Client {
    writer: Arc<OwnedWriteHalf>,
    link: Arc<Link>,
    handler: Arc<Handler>,
    phase: watch::Receiver<Phase>,
}

impl Client {
    fn service(
        &self,
    ) -> impl Service<Request<Incoming>, Response = Response<Body>, Error = Gone, Future: Send> + use<> {
        let (handler, link) = (Arc::clone(&self.handler), Arc::clone(&self.link));
        service_fn(move |request| Arc::clone(&handler).handle(Inbound::request(request), &link, Origin::Public))
    }

    fn serve_http1(mut self, socket: Socket) -> impl Future<Output = ()> {
        let phase = *self.phase.borrow_and_update();
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(None)
            // Of header lines hyper takes 100, as Apache's server does; more would cost every request two allocations.
            .max_header_size(MAX_HEAD_BYTES)
            // Whether a half-closed connection still has a client is decided in one place: below.
            .half_close(true)
            .keep_alive(phase == Phase::Serving)
            .serve_connection(TokioIo::new(socket), self.service());
        // On the heap: moved from future to future, it would take its room in each of them.
        let mut connection = Box::pin(connection);
        async move {
            let (mut gone, mut late) = (false, false);
            {
                let mut closed = pin!(self.writer.ready(Interest::PRIORITY));
                let mut last_words = pin!(sleep_until(Instant::now()));
                let mut stopping = phase == Phase::Stopping;
                loop {
                    tokio::select! {
                        biased;
                        // Ready when the client closes, or closes its sending half, whether anybody reads or not: a request
                        // that waits with its body unread notices too.
                        _ = &mut closed, if !gone => {
                            gone = true;
                            self.link.end(End::ClientGone);
                        }
                        served = &mut connection => {
                            if let Err(error) = served && error.is_parse() {
                                self.handler.report.failed(&unread::error(error.is_parse_too_large()));
                            }
                            break;
                        }
                        // After the connection, which closes at once if it has not been asked to read yet.
                        Ok(()) = self.phase.changed() => {
                            connection.as_mut().graceful_shutdown();
                            if *self.phase.borrow_and_update() == Phase::Stopping {
                                self.link.end(End::Stopped);
                                last_words.as_mut().reset(Instant::now() + LAST_WORDS);
                                stopping = true;
                            }
                        }
                        () = &mut last_words, if stopping => {
                            late = true;
                            break;
                        }
                    }
                }
            }
            drop(connection);
            if self.link.must_reset() {
                reset(self.writer);
            } else if !gone && !late {
                linger(&self.writer).await;
            }
        }
    }

    async fn serve_http2(mut self, socket: Socket, patience: Patience) {
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            // What is a little too large gets the proxy's own answer, from the handler; the rest a bare 431.
            .max_header_list_size(2 * MAX_HEAD_BYTES as u32)
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(STREAM_WINDOW * MAX_STREAMS)
            .serve_connection(TokioIo::new(socket), self.service());
        let mut connection = pin!(connection);
        let mut alarm = pin!(sleep_until(Instant::now() + patience.idle / QUARTERS));
        let mut quiet = 0;
        let mut seen = self.link.requests();
        // Once no new requests are taken: when those that are left must have ended.
        let mut last = None;
        if *self.phase.borrow() > Phase::Serving {
            // News to a connection that is made now: what it asks for first is answered, and then it is closed.
            self.phase.mark_changed();
        }
        loop {
            tokio::select! {
                biased;
                Ok(()) = self.phase.changed() => {
                    connection.as_mut().graceful_shutdown();
                    if *self.phase.borrow_and_update() == Phase::Stopping {
                        self.link.end(End::Stopped);
                        let now = Instant::now();
                        alarm.as_mut().reset(now + LAST_WORDS);
                        last = Some(now);
                    }
                }
                _ = &mut connection => break,
                () = &mut alarm => {
                    let now = Instant::now();
                    let overdue = self.link.next_deadline().is_some_and(|deadline| deadline + WINDOW_GRACE < now);
                    let requests = self.link.requests();
                    quiet = if self.link.is_idle() && requests == seen { quiet + 1 } else { 0 };
                    seen = requests;
                    if overdue || quiet >= QUARTERS || last.is_some() {
                        connection.as_mut().graceful_shutdown();
                        // The others' requests go on: none of them can outlast its own deadline by more.
                        let last = *last.get_or_insert_with(|| self.handler.scheduler.deadline() + WINDOW_GRACE);
                        let done = now.checked_sub(WINDOW_GRACE).is_none_or(|then| self.link.is_overdue_since(then));
                        // An idle one that was just told so may have a request on its way.
                        if last <= now || (done && quiet != QUARTERS) {
                            break;
                        }
                    }
                    let next = if quiet >= QUARTERS { patience.head } else { patience.idle / QUARTERS };
                    alarm.as_mut().reset(now + next);
                }
            }
        }
        // Streams that outlive the connection, if any, have nobody to answer.
        self.link.end(End::ClientGone);
    }
}

/// Ends a connection, which nothing else holds, with a reset.
fn reset(writer: Arc<OwnedWriteHalf>) {
    let Some(writer) = Arc::into_inner(writer) else { return };
    // A socket that does not linger is reset when it is closed.
    _ = SockRef::from(<OwnedWriteHalf as AsRef<TcpStream>>::as_ref(&writer)).set_linger(Some(Duration::ZERO));
    // Dropped as usual it would first say that all has been sent.
    writer.forget();
}

/// Reads what a client still sends after its connection was closed from here.
async fn linger(writer: &OwnedWriteHalf) {
    let stream: &TcpStream = writer.as_ref();
    // An answer that was cut off ends here for its client, and not when the reading does. Whole ones are through already.
    _ = SockRef::from(stream).shutdown(Shutdown::Write);
    let drained = async {
        let mut left = LINGER_BYTES;
        while left > 0 && stream.readable().await.is_ok() {
            // Made anew for each read: what lives across an await takes its room in every connection.
            let read = stream.try_read(&mut [0; 4096]);
            match read {
                Ok(0) => return,
                Ok(read) => left = left.saturating_sub(read),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    };
    // Out of patience or not, the connection is over.
    _ = timeout(LINGER, drained).await;
}
