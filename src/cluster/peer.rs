//! The way to the owner of a credential: HTTP/2 over TLS 1.3, certificates checked on both sides.
//!
//! Requests and answers are streamed with each stream's own small window, so that neither node keeps more of a body than
//! that, and no slow one holds the others of the connection up. Proxies of the environment never apply here. The state
//! that moves with ownership travels on connections of its own, told apart by ALPN; this protocol is [`super::tls::HOP`].
//!
//! Both ends speak `h2` itself. What hyper puts on top of it, a channel, two tasks and two wake-ups for each request, is
//! what a client of many servers needs: with it a hop added 1.5 times as much to the median as one of nginx, without it
//! 1.3 (`cargo bench --bench cluster`). And hyper takes a body that was cut off by CANCEL for a whole one, see
//! [`crate::inbound`].

use std::error::Error;
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http::header::TRANSFER_ENCODING;
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, Version};
use http_body::Body;
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use self::links::{Links, Refusal};
use super::tls;
use crate::error::{ProxyError, Reason};
use crate::inbound::Inbound;
use crate::scheduler::Dispatched;

pub use self::listener::serve;

mod gather;
mod handover;
mod links;
mod listener;
mod stream;

/// Marks a request that has made its hop, the how manyeth: it makes another only while its credential moves.
pub const HOP_HEADER: HeaderName = HeaderName::from_static("x-nirn-hop");

/// How many hops a request has made, as the peer says that sent it.
pub fn hops(headers: &HeaderMap) -> u8 {
    let said = headers.get(HOP_HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
    said.unwrap_or(1).max(1)
}

/// For a connection to be made, the handshake included: peers are near.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
/// How often a connection is asked whether it is alive, and how long it has to answer.
const PING_INTERVAL: Duration = Duration::from_secs(2);
const PING_PATIENCE: Duration = Duration::from_secs(3);
/// What one stream may send ahead in either direction.
const STREAM_WINDOW: u32 = 64 * 1024;
/// What all streams of a connection may: no slow one must ever use it up.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Header blocks: what the front takes, and what HTTP/2 counts for each field on top.
const MAX_HEADERS: u32 = 96 * 1024;
/// At most one warning in this time about peers that cannot be reached.
const WARNING_PAUSE: Duration = Duration::from_secs(30);

/// Why a request has no answer.
enum Failure<E> {
    /// The peer cannot be reached, or does not go along.
    Peer(Refusal),
    /// The request's body broke off.
    Body(E),
}

impl<E, R: Into<Refusal>> From<R> for Failure<E> {
    fn from(refusal: R) -> Self {
        Self::Peer(refusal.into())
    }
}

/// The client to all peers. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct Peers {
    links: Arc<Links>,
    teller: Connector,
    bound: Duration,
    warned: Arc<Mutex<Option<Instant>>>,
}

impl Peers {
    /// A client that dials from `local`, so that peers see the address they know, and gives a hop `bound`:
    /// QUEUE_TIMEOUT and REQUEST_TIMEOUT together.
    pub fn new(tls: Arc<ClientConfig>, local: Option<IpAddr>, bound: Duration) -> Self {
        let mut telling = (*tls).clone();
        telling.alpn_protocols = vec![tls::HANDOVER.to_vec()];
        let teller = Connector { tls: TlsConnector::from(Arc::new(telling)), local };
        let links = Links::new(Connector { tls: TlsConnector::from(tls), local });
        Self { links, teller, bound, warned: Arc::default() }
    }

    /// Sends a request on to its owner, as its `hop`th, and gives the owner's answer. Dropping the future, or later the answer's body,
    /// ends the request at the owner too.
    ///
    /// # Errors
    ///
    /// 503 when the owner cannot be reached, refuses this node, breaks off, or does not answer in time; the body's own error
    /// when it breaks off before there is an answer.
    pub async fn forward<B>(&self, to: SocketAddr, request: Request<B>, hop: u8) -> Result<Dispatched, ProxyError>
    where
        B: Body<Data = Bytes, Error: Into<ProxyError> + Send> + Send + 'static,
    {
        let deadline = Instant::now() + self.bound;
        match timeout_at(deadline, self.exchange(to, request, hop)).await {
            Ok(Ok(response)) => {
                let (parts, stream) = response.into_parts();
                let body = Inbound::from_peer(&parts.headers, stream);
                Ok(Dispatched { response: Response::from_parts(parts, body.into()), deadline })
            }
            Ok(Err(Failure::Peer(refusal))) => {
                self.warn(to, refusal.error());
                Err(ProxyError::Unavailable(Reason::PeerError))
            }
            Ok(Err(Failure::Body(error))) => Err(error.into()),
            Err(_) => Err(ProxyError::Unavailable(Reason::PeerError)),
        }
    }

    async fn exchange<B>(
        &self,
        to: SocketAddr,
        request: Request<B>,
        hop: u8,
    ) -> Result<Response<RecvStream>, Failure<B::Error>>
    where
        B: Body<Data = Bytes, Error: Send> + Send + 'static,
    {
        let mut requests = self.links.to(to).await?;
        let (mut parts, body) = request.into_parts();
        address(&mut parts)?;
        // How HTTP/1.1 would frame the body; the owner says it anew.
        parts.headers.remove(TRANSFER_ENCODING);
        parts.headers.insert(HOP_HEADER, HeaderValue::from(u16::from(hop)));
        let ends = body.is_end_stream();
        let (mut answer, stream) = requests.send_request(Request::from_parts(parts, ()), ends)?;
        if ends {
            return Ok(answer.await?);
        }
        let mut upload = Box::pin(stream::send(body, stream));
        let answered = tokio::select! {
            biased;
            sent = &mut upload => {
                sent.map_err(Failure::Body)?;
                None
            }
            answered = &mut answer => Some(answered),
        };
        match answered {
            None => Ok(answer.await?),
            Some(answered) => {
                // An answer that came early: the upload goes on for as long as the owner reads it.
                tokio::spawn(upload);
                Ok(answered?)
            }
        }
    }

    /// Hands a message over to a peer, on a connection of its own.
    ///
    /// # Errors
    ///
    /// When it cannot be reached, does not speak of such things, or is not done in time.
    pub async fn tell(&self, to: SocketAddr, message: &[u8]) -> io::Result<()> {
        handover::tell(self.teller.dial(to).await?, message).await
    }

    /// Errors of the connection carry nothing of a request.
    fn warn(&self, to: SocketAddr, error: &dyn Error) {
        let now = Instant::now();
        let mut warned = self.warned.lock();
        if warned.is_none_or(|last| now - last >= WARNING_PAUSE) {
            *warned = Some(now);
            tracing::warn!(peer = %to, error = chain(error), "cannot reach a peer");
        }
    }
}

/// HTTP/2 wants an authority: it says no more than that this is a hop.
fn address(parts: &mut Parts) -> Result<(), http::uri::InvalidUriParts> {
    let mut uri = std::mem::take(&mut parts.uri).into_parts();
    uri.scheme = Some(Scheme::HTTPS);
    uri.authority = Some(Authority::from_static("peer"));
    uri.path_and_query.get_or_insert_with(|| PathAndQuery::from_static("/"));
    parts.uri = Uri::from_parts(uri)?;
    parts.version = Version::HTTP_2;
    Ok(())
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Writing to a string cannot fail.
        write!(text, ": {error}").ok();
        cause = error.source();
    }
    text
}

/// Dials peers.
#[derive(Clone)]
struct Connector {
    tls: TlsConnector,
    local: Option<IpAddr>,
}

impl Connector {
    async fn dial(&self, to: SocketAddr) -> io::Result<TlsStream<TcpStream>> {
        let dialled = async {
            let socket = if to.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            if let Some(local) = self.local.filter(|local| local.is_ipv4() == to.is_ipv4()) {
                socket.bind(SocketAddr::new(local, 0))?;
            }
            let stream = socket.connect(to).await?;
            stream.set_nodelay(true)?;
            self.tls.connect(ServerName::IpAddress(to.ip().into()), stream).await
        };
        timeout(CONNECT_PATIENCE, dialled).await.map_err(|_| io::ErrorKind::TimedOut)?
    }
}

#[cfg(test)]
mod tests;
