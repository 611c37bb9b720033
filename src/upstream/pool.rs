//! The HTTP/1.1 connections to the upstream: those at rest, and new ones when there are none.
//!
//! The one used last is used first, so that a burst's surplus grows old and is closed. A connection that died at rest is
//! replaced, and a request that it gave back unsent goes out on another; nothing that was written is ever sent again.

use std::error::Error;
use std::sync::{Arc, Weak};

use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep};
use tower_service::Service;

use super::body::RequestBody;
use super::connect::Connector;
use super::{BUFFER_BYTES, IDLE_TIMEOUT, MAX_IDLE_CONNECTIONS};

/// Why a request has no answer.
pub(super) type Failure = Box<dyn Error + Send + Sync>;

type Sender = SendRequest<RequestBody>;

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

    /// Sends a request, whose target is final, once; and says whether its connection was opened for it. Dropping the
    /// future closes the connection, unless the answer had come.
    pub(super) async fn send(&self, mut request: Request<RequestBody>) -> Result<(Response<Incoming>, bool), Failure> {
        loop {
            let (mut sender, opened) = match self.take() {
                Some(sender) => (sender, false),
                // boxed, so that the usual way takes no room for it
                None => Box::pin(self.open()).await?,
            };
            match sender.try_send_request(request).await {
                Ok(response) => {
                    self.give_back(sender);
                    return Ok((response, opened));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if !opened => request = unsent,
                    _ => return Err(error.into_error().into()),
                },
            }
        }
    }

    /// The connection that came to rest last, if it still stands.
    fn take(&self) -> Option<Sender> {
        let mut rest = self.shared.rest.lock();
        loop {
            let (sender, since) = rest.idle.pop()?;
            if sender.is_ready() && since.elapsed() <= IDLE_TIMEOUT {
                return Some(sender);
            }
        }
    }

    /// A new connection, or one that comes to rest meanwhile; then the new one is kept for others.
    async fn open(&self) -> Result<(Sender, bool), Failure> {
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
                    return made.map(|sender| (sender, true));
                }
                () = freed => if let Some(sender) = self.take() {
                    return Ok((sender, false));
                },
            }
        }
    }

    async fn connect(&self) -> Result<Sender, Failure> {
        let mut connector = self.shared.connector.clone();
        let io = connector.call(self.shared.upstream.clone()).await?;
        let (mut sender, connection) = Builder::new().max_buf_size(BUFFER_BYTES).handshake(io).await?;
        // how it ends is told to the request that it ends
        drop(tokio::spawn(async move { _ = connection.await }));
        sender.ready().await?;
        Ok(sender)
    }

    /// Takes back a connection whose answer has begun: at once if that is all of it.
    fn give_back(&self, mut sender: Sender) {
        if sender.is_ready() {
            return self.rest(sender);
        }
        let pool = self.clone();
        drop(tokio::spawn(async move {
            if sender.ready().await.is_ok() {
                pool.rest(sender);
            }
        }));
    }

    fn rest(&self, sender: Sender) {
        let mut rest = self.shared.rest.lock();
        if sender.is_closed() || rest.idle.len() >= MAX_IDLE_CONNECTIONS {
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

/// Closes what has been at rest for too long, until nothing is left.
async fn sweep(shared: Weak<Shared>) {
    loop {
        sleep(IDLE_TIMEOUT).await;
        let Some(shared) = shared.upgrade() else { return };
        let mut rest = shared.rest.lock();
        rest.idle.retain(|(sender, since)| !sender.is_closed() && since.elapsed() <= IDLE_TIMEOUT);
        if rest.idle.is_empty() {
            rest.swept = false;
            return;
        }
    }
}
