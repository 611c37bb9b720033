//! The HTTP/1.1 connections to the upstream: those at rest, and new ones when there are none.
//!
//! The one used last is used first, so that a burst's surplus grows old and is closed. A connection that died at rest is
//! replaced, and a request that it gave back unsent goes out on another; nothing that was written is ever sent again.

use std::error::Error;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep};
use tower_service::Service;

use super::body::RequestBody;
use super::connect::{Connector, Wire};
use super::{BUFFER_BYTES, IDLE_TIMEOUT, MAX_IDLE_CONNECTIONS};

/// As many at rest are kept for [`IDLE_TIMEOUT`]. What a burst opened beyond them, 30 KiB each, goes after this long.
const USUAL: usize = 64;
const SURPLUS_TIMEOUT: Duration = Duration::from_secs(5);
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Why a request has no answer.
pub(super) type Failure = Box<dyn Error + Send + Sync>;

/// One connection: takes a request, and knows when it left.
struct Sender {
    requests: SendRequest<RequestBody>,
    wire: Arc<Wire>,
}

/// An answer, and when its request left, unless that had to wait for a connection.
pub(super) type Sent = Result<(Response<Incoming>, Option<Instant>), Failure>;

pin_project! {
    /// A request on its way. Not an async block: that would keep room for hyper's future twice.
    #[project = SendingProjection]
    pub(super) enum Sending<'a, F> {
        /// On a connection of the pool's.
        OnIts {
            #[pin]
            sending: F,
            pool: &'a Pool,
            lease: Option<Lease>,
        },
        /// By any other way, which is rarer.
        OnHeap { sending: BoxedSending<'a> },
    }
}

pub(super) type BoxedSending<'a> = Pin<Box<dyn Future<Output = Sent> + Send + 'a>>;

/// A connection for one request.
pub(super) struct Lease {
    sender: Sender,
    /// It was not at rest when it was wanted.
    waited: bool,
    /// It is new: nobody has closed it while it was at rest.
    opened: bool,
}

/// Connections to one upstream. Cheap to clone.
#[derive(Clone)]
pub(super) struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    connector: Connector,
    upstream: Uri,
    rest: Mutex<Rest>,
    /// Told of each connection that comes to rest.
    freed: Notify,
}

#[derive(Default)]
struct Rest {
    /// In the order in which they came to rest.
    idle: Vec<(Sender, Instant)>,
    /// Somebody looks after those that grow old.
    swept: bool,
}

impl Pool {
    /// None yet.
    pub(super) fn new(connector: Connector, upstream: Uri) -> Self {
        Self { shared: Arc::new(Shared { connector, upstream, rest: Mutex::default(), freed: Notify::new() }) }
    }

    /// Sends a request, whose target is final, once, at once if it has a connection. Dropping the future closes that, unless
    /// the answer had come.
    pub(super) fn send(
        &self,
        lease: Option<Lease>,
        request: Request<RequestBody>,
    ) -> Sending<'_, impl Future<Output = Result<Response<Incoming>, TrySendError<Request<RequestBody>>>> + use<>> {
        match lease {
            Some(mut lease) => {
                lease.sender.wire.arm();
                let sending = lease.sender.requests.try_send_request(request);
                Sending::OnIts { sending, pool: self, lease: Some(lease) }
            }
            None => Sending::OnHeap { sending: self.send_on_another(request) },
        }
    }

    /// Sends a request that has no connection, or that one which had died at rest gave back. Each round takes one that is at
    /// rest, until one is new.
    fn send_on_another(&self, request: Request<RequestBody>) -> BoxedSending<'_> {
        Box::pin(async move {
            let lease = self.lease().await?;
            self.send(Some(lease), request).await
        })
    }

    /// A connection at rest, or one that is opened.
    pub(super) async fn lease(&self) -> Result<Lease, Failure> {
        match self.at_rest() {
            Some(lease) => Ok(lease),
            None => self.open().await,
        }
    }

    /// The connection that came to rest last, if one still stands.
    pub(super) fn at_rest(&self) -> Option<Lease> {
        self.take().map(|sender| Lease { sender, waited: false, opened: false })
    }

    fn take(&self) -> Option<Sender> {
        let mut rest = self.shared.rest.lock();
        loop {
            let (sender, since) = rest.idle.pop()?;
            if sender.requests.is_ready() && since.elapsed() <= IDLE_TIMEOUT {
                return Some(sender);
            }
        }
    }

    /// A new connection, or one that comes to rest meanwhile; then the new one is kept for others.
    async fn open(&self) -> Result<Lease, Failure> {
        let (made, mut making) = oneshot::channel();
        let pool = self.clone();
        drop(tokio::spawn(async move {
            let connected = pool.connect().await;
            if let Err(Ok(unwanted)) = made.send(connected) {
                pool.rest(unwanted);
            }
        }));
        loop {
            let freed = self.shared.freed.notified();
            tokio::select! {
                biased;
                made = &mut making => {
                    let made = made.unwrap_or_else(|_| Err("connecting ended early".into()));
                    return made.map(|sender| Lease { sender, waited: true, opened: true });
                }
                () = freed => if let Some(sender) = self.take() {
                    return Ok(Lease { sender, waited: true, opened: false });
                },
            }
        }
    }

    async fn connect(&self) -> Result<Sender, Failure> {
        let mut connector = self.shared.connector.clone();
        let io = connector.call(self.shared.upstream.clone()).await?;
        let wire = io.inner().wire();
        let (mut requests, connection) = Builder::new().max_buf_size(BUFFER_BYTES).handshake(io).await?;
        // how it ends is told to the request that it ends
        drop(tokio::spawn(async move { _ = connection.await }));
        requests.ready().await?;
        Ok(Sender { requests, wire })
    }

    /// Takes back a connection whose answer has begun: at once if that is all of it.
    fn give_back(&self, mut sender: Sender) {
        if sender.requests.is_ready() {
            return self.rest(sender);
        }
        let pool = self.clone();
        drop(tokio::spawn(async move {
            if sender.requests.ready().await.is_ok() {
                pool.rest(sender);
            }
        }));
    }

    fn rest(&self, sender: Sender) {
        let mut rest = self.shared.rest.lock();
        if sender.requests.is_closed() || rest.idle.len() >= MAX_IDLE_CONNECTIONS {
            return;
        }
        rest.idle.push((sender, Instant::now()));
        let swept = std::mem::replace(&mut rest.swept, true);
        drop(rest);
        if !swept {
            drop(tokio::spawn(sweep(Arc::downgrade(&self.shared))));
        }
        self.shared.freed.notify_one();
    }
}

impl<F> Future for Sending<'_, F>
where
    F: Future<Output = Result<Response<Incoming>, TrySendError<Request<RequestBody>>>>,
{
    type Output = Sent;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Sent> {
        let (sent, pool, lease) = match self.as_mut().project() {
            SendingProjection::OnIts { sending, pool, lease } => (ready!(sending.poll(cx)), *pool, lease.take()),
            SendingProjection::OnHeap { sending } => return sending.as_mut().poll(cx),
        };
        let Some(Lease { sender, waited, opened }) = lease else { return Poll::Pending };
        match sent {
            Ok(response) => {
                let written = sender.wire.written().filter(|_| !waited);
                pool.give_back(sender);
                Poll::Ready(Ok((response, written)))
            }
            Err(mut error) => match error.take_message() {
                Some(unsent) if !opened => {
                    let mut sending = pool.send_on_another(unsent);
                    let polled = sending.as_mut().poll(cx);
                    self.set(Sending::OnHeap { sending });
                    polled
                }
                _ => Poll::Ready(Err(error.into_error().into())),
            },
        }
    }
}

impl Rest {
    /// Takes out what has died or been at rest for too long.
    fn age(&mut self, now: Instant) -> Vec<(Sender, Instant)> {
        let older = |than: Duration| self.idle.partition_point(|(_, since)| now.duration_since(*since) > than);
        let surplus = self.idle.len().saturating_sub(USUAL);
        let gone = older(IDLE_TIMEOUT).max(older(SURPLUS_TIMEOUT).min(surplus));
        let gone = self.idle.drain(..gone).collect();
        self.idle.retain(|(sender, _)| !sender.requests.is_closed());
        gone
    }
}

/// Closes what has been at rest for too long, until nothing is left.
async fn sweep(shared: Weak<Shared>) {
    loop {
        sleep(SWEEP_EVERY).await;
        let Some(shared) = shared.upgrade() else { return };
        let mut rest = shared.rest.lock();
        let gone = rest.age(Instant::now());
        let done = rest.idle.is_empty();
        rest.swept = !done;
        drop(rest);
        // Nobody waits for the lock while they are closed.
        drop(gone);
        if done {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper_util::rt::TokioIo;

    use super::*;

    #[tokio::test]
    async fn what_a_burst_opened_beyond_the_usual_is_closed_before_the_rest() {
        let (start, soon) = (Instant::now(), Duration::from_millis(1));
        let (mut rest, mut standing) = (Rest::default(), Vec::new());
        for _ in 0..USUAL + 36 {
            let (io, other) = tokio::io::duplex(64);
            let (requests, connection) = Builder::new().handshake(TokioIo::new(io)).await.unwrap();
            rest.idle.push((Sender { requests, wire: Arc::new(Wire::new()) }, start));
            standing.push((connection, other));
        }
        assert_eq!(rest.age(start + SURPLUS_TIMEOUT).len(), 0);
        assert_eq!(rest.age(start + SURPLUS_TIMEOUT + soon).len(), 36);
        assert_eq!(rest.age(start + IDLE_TIMEOUT).len(), 0);
        // The last one came to rest last, and dies.
        standing.pop();
        rest.age(start);
        assert_eq!(rest.age(start + IDLE_TIMEOUT + soon).len(), USUAL - 1);
    }
}
