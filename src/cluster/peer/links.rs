//! One HTTP/2 connection to each peer: dialled when a request needs it, shared by all of them, and given up when the peer
//! no longer answers on it.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ahash::RandomState;
use bytes::Bytes;
use h2::client::{self, Connection, SendRequest};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::client::TlsStream;

use super::gather::Gather;
use super::{CONNECTION_WINDOW, Connector, MAX_HEADERS, STREAM_WINDOW, stream};

/// Before a peer has said how many streams it takes.
const FIRST_STREAMS: usize = 100;

type Wire = Gather<TlsStream<TcpStream>>;

/// The connections to all peers. Their drop ends every one.
pub(super) struct Links {
    connector: Connector,
    links: Mutex<HashMap<SocketAddr, Link, RandomState>>,
    /// Gone when this is.
    alive: watch::Sender<()>,
}

/// What becomes of a connection that is being made.
type Outcome = Option<Result<SendRequest<Bytes>, Refusal>>;

enum Link {
    Dialling(watch::Receiver<Outcome>),
    Open(SendRequest<Bytes>),
}

/// Why there is no connection, or no answer on it. It carries nothing of a request.
#[derive(Clone, Debug)]
pub(super) struct Refusal(Arc<dyn std::error::Error + Send + Sync>);

impl Links {
    pub(super) fn new(connector: Connector) -> Arc<Self> {
        Arc::new(Self { connector, links: Mutex::default(), alive: watch::Sender::default() })
    }

    /// The connection to a peer, which is made if there is none.
    pub(super) async fn to(self: &Arc<Self>, peer: SocketAddr) -> Result<SendRequest<Bytes>, Refusal> {
        let mut dialled = match self.look_up(peer) {
            Link::Open(requests) => return Ok(requests),
            Link::Dialling(dialled) => dialled,
        };
        let outcome = dialled.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone());
        outcome.unwrap_or_else(|| Err(io::Error::from(io::ErrorKind::ConnectionAborted).into()))
    }

    fn look_up(self: &Arc<Self>, peer: SocketAddr) -> Link {
        let mut links = self.links.lock();
        if let Some(link) = links.get(&peer).and_then(Link::usable) {
            return link;
        }
        // Also what other peers have left behind.
        links.retain(|_, link| link.usable().is_some());
        let dialled = self.dial(peer);
        links.insert(peer, Link::Dialling(dialled.clone()));
        Link::Dialling(dialled)
    }

    /// In a task of its own, so that a client which leaves does not leave the others without a connection.
    fn dial(self: &Arc<Self>, peer: SocketAddr) -> watch::Receiver<Outcome> {
        let (told, dialled) = watch::channel(None);
        let (links, connector, mut alive) = (Arc::downgrade(self), self.connector.clone(), self.alive.subscribe());
        tokio::spawn(async move {
            let mut connection = match open(&connector, peer).await {
                Ok((requests, connection)) => {
                    let Some(links) = links.upgrade() else { return };
                    links.links.lock().insert(peer, Link::Open(requests.clone()));
                    told.send_replace(Some(Ok(requests)));
                    connection
                }
                Err(error) => {
                    told.send_replace(Some(Err(error)));
                    return;
                }
            };
            let pings = connection.ping_pong();
            tokio::select! {
                biased;
                // How it ended, its requests are told.
                _ = connection => {}
                () = stream::silence(pings) => {}
                _ = alive.changed() => {}
            }
        });
        dialled
    }
}

/// A connection, and what sends requests on it.
async fn open(connector: &Connector, peer: SocketAddr) -> Result<(SendRequest<Bytes>, Connection<Wire>), Refusal> {
    let wire = Gather::new(connector.dial(peer).await?);
    let opened = client::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buffer_size(STREAM_WINDOW as usize)
        .max_header_list_size(MAX_HEADERS)
        .max_local_error_reset_streams(None)
        .initial_max_send_streams(FIRST_STREAMS)
        .enable_push(false)
        .handshake(wire)
        .await?;
    Ok(opened)
}

impl Link {
    /// Itself, unless it broke, the peer closes it, or nobody dials any more: who asks after a failure dials anew.
    fn usable(&self) -> Option<Self> {
        match self {
            Self::Open(requests) => {
                let mut requests = requests.clone();
                // Nobody has to be woken: a clone that has asked for nothing yet is ready, or its connection is broken.
                let ready = requests.poll_ready(&mut Context::from_waker(Waker::noop()));
                matches!(ready, Poll::Ready(Ok(()))).then_some(Self::Open(requests))
            }
            Self::Dialling(dialled) => {
                matches!(dialled.has_changed(), Ok(false)).then(|| Self::Dialling(dialled.clone()))
            }
        }
    }
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self(Arc::new(error))
    }
}

impl Refusal {
    pub(super) fn error(&self) -> &(dyn std::error::Error + 'static) {
        &*self.0
    }
}

#[cfg(test)]
mod tests;
