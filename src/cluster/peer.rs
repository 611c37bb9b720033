//! The way to the owner of a credential: HTTP/2 over TLS 1.3, certificates checked on both sides.
//!
//! Requests and answers are streamed with each stream's own small window, so that neither node keeps more of a body than
//! that, and no slow one holds the others of the connection up. Proxies of the environment never apply here. The state
//! that moves with ownership travels on connections of its own, told apart by ALPN; this protocol is [`super::tls::HOP`].

use std::error::Error;
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::TRANSFER_ENCODING;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri, Version};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use self::gather::Gather;
use super::tls;
use crate::error::{ProxyError, Reason};
use crate::scheduler::Dispatched;
use crate::upstream::RequestBody;

pub use self::listener::serve;

mod gather;
mod handover;
mod listener;

/// Marks a request that has made its hop, the how manyeth: it makes another only while its credential moves.
pub const HOP_HEADER: HeaderName = HeaderName::from_static("x-nirn-hop");

/// How many hops a request has made, as the peer says that sent it.
pub fn hops(headers: &HeaderMap) -> u8 {
    let said = headers.get(HOP_HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
    said.unwrap_or(1).max(1)
}

/// For a connection to be made, the handshake included: peers are near.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
/// How often a connection in use is asked whether it is alive, and how long it has to answer.
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

/// The client to all peers. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct Peers {
    client: Client<Connector, Passed>,
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
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http2_only(true)
            .http2_initial_stream_window_size(STREAM_WINDOW)
            .http2_initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_send_buf_size(STREAM_WINDOW as usize)
            .http2_max_header_list_size(MAX_HEADERS)
            .http2_keep_alive_interval(PING_INTERVAL)
            .http2_keep_alive_timeout(PING_PATIENCE)
            .build(Connector { tls: TlsConnector::from(tls), local });
        Self { client, teller, bound, warned: Arc::default() }
    }

    /// Sends a request on to its owner, as its `hop`th, and gives the owner's answer. Dropping the future, or later the answer's body,
    /// ends the request at the owner too.
    ///
    /// # Errors
    ///
    /// 503 when the owner cannot be reached, refuses this node, breaks off, or does not answer in time.
    pub async fn forward<B>(&self, to: SocketAddr, mut request: Request<B>, hop: u8) -> Result<Dispatched, ProxyError>
    where
        B: Into<Passed>,
    {
        let unavailable = ProxyError::Unavailable(Reason::PeerError);
        let path = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        *request.uri_mut() = address(to, path).ok_or_else(|| unavailable.clone())?;
        *request.version_mut() = Version::HTTP_2;
        // How HTTP/1.1 would frame the body; the owner says it anew.
        request.headers_mut().remove(TRANSFER_ENCODING);
        request.headers_mut().insert(HOP_HEADER, HeaderValue::from(u16::from(hop)));
        let deadline = Instant::now() + self.bound;
        match timeout_at(deadline, self.client.request(request.map(Into::into))).await {
            Ok(Ok(response)) => Ok(Dispatched { response: response.map(Into::into), deadline }),
            Ok(Err(error)) => {
                self.warn(to, &error);
                Err(unavailable)
            }
            Err(_) => Err(unavailable),
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

/// A request's body that keeps its length to itself: what the client said of it is in the headers, and hyper would add
/// a length of 0 to requests that had none.
pub enum Passed {
    /// As it comes in.
    Incoming(Incoming),
    /// After it has waited here.
    Kept(RequestBody),
}

impl From<Incoming> for Passed {
    fn from(body: Incoming) -> Self {
        Self::Incoming(body)
    }
}

impl From<RequestBody> for Passed {
    fn from(body: RequestBody) -> Self {
        Self::Kept(body)
    }
}

impl Body for Passed {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut *self {
            Self::Incoming(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
            Self::Kept(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Incoming(body) => body.is_end_stream(),
            Self::Kept(body) => body.is_end_stream(),
        }
    }
}

fn address(to: SocketAddr, path: PathAndQuery) -> Option<Uri> {
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(Scheme::HTTPS);
    parts.authority = Authority::try_from(to.to_string()).ok();
    parts.path_and_query = Some(path);
    Uri::from_parts(parts).ok()
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

/// A connection to a peer.
type Wire = TokioIo<Gather<TlsStream<TcpStream>>>;

/// Dials peers.
#[derive(Clone)]
struct Connector {
    tls: TlsConnector,
    local: Option<IpAddr>,
}

impl Connector {
    async fn connect(self, uri: Uri) -> io::Result<Wire> {
        let to: SocketAddr =
            uri.authority().and_then(|authority| authority.as_str().parse().ok()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(TokioIo::new(Gather::new(self.dial(to).await?)))
    }

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

impl tower_service::Service<Uri> for Connector {
    type Response = Wire;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Wire>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

impl<S> Connection for Gather<S> {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

#[cfg(test)]
mod tests;
