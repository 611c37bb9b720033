//! Connections: TCP, an outbound proxy's tunnel, TLS.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderValue, Uri};
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tower_service::Service;

use super::proxy::{self, Way};
use super::{failure, tls};
use crate::config;

/// A connection that is not there by then is given up, even if no attempt waits for it any more.
const LONGEST_CONNECT: Duration = Duration::from_secs(10);

/// What the kernel takes of an upload beyond what is on its way.
const UNSENT_BYTES: u32 = 128 * 1024;

/// Makes connections to the one upstream. Cheap to clone.
#[derive(Clone)]
pub(super) struct Connector {
    tcp: HttpConnector,
    plan: Arc<Plan>,
}

/// What does not change from one connection to the next.
struct Plan {
    way: Way,
    /// To the upstream, with ALPN; `None` for plain http.
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// To the proxy, when its URL says https.
    proxy_tls: Option<(TlsConnector, ServerName<'static>)>,
    timeout: Duration,
}

impl Connector {
    /// Settles the way to the upstream, and the roots it is trusted by.
    pub(super) fn new(config: &config::Upstream) -> Result<Self, String> {
        let scheme = if config.https { "https" } else { "http" };
        let upstream = Uri::builder()
            .scheme(scheme)
            .authority(config.authority.clone())
            .path_and_query("/")
            .build()
            .map_err(|_| "DISCORD_API_URL has no usable host".to_owned())?;
        let way = proxy::way(config, &upstream)?;
        let proxy_uri = match &way {
            Way::Direct => None,
            Way::Tunnel(proxy) | Way::Forward(proxy) => {
                Some(&proxy.uri).filter(|uri| uri.scheme_str() == Some("https"))
            }
        };
        let roots = if config.https || proxy_uri.is_some() { Some(tls::client(config)?) } else { None };
        let secure = |uri: &Uri, alpn: bool| -> Result<_, String> {
            let Some(mut tls) = roots.clone() else { return Ok(None) };
            if !alpn {
                tls.alpn_protocols.clear();
            }
            let name = server_name(uri)?;
            Ok(Some((TlsConnector::from(Arc::<ClientConfig>::new(tls)), name)))
        };
        let tls = if config.https { secure(&upstream, true)? } else { None };
        let proxy_tls = proxy_uri.map(|uri| secure(uri, false)).transpose()?.flatten();
        // a little more than an attempt has: what ends there is the attempt
        let timeout = config.request_timeout.min(LONGEST_CONNECT) + Duration::from_millis(100);
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_local_address(config.outbound_ip);
        // shared out among the host's addresses, so that a dead one leaves time for the next
        tcp.set_connect_timeout(Some(timeout));
        // a peer that stops reading after its answer is not waited for by any attempt: the kernel gives it up
        #[cfg(target_os = "linux")]
        tcp.set_tcp_user_timeout(Some(timeout.min(LONGEST_CONNECT)));
        tcp.set_keepalive(Some(Duration::from_secs(15)));
        Ok(Self { tcp, plan: Arc::new(Plan { way, tls, proxy_tls, timeout }) })
    }

    /// Whether a proxy is asked in absolute form.
    pub(super) fn is_forwarded(&self) -> bool {
        matches!(self.plan.way, Way::Forward(_))
    }

    /// What a request needs to pass a proxy that is asked in absolute form.
    pub(super) fn proxy_authorization(&self) -> Option<HeaderValue> {
        match &self.plan.way {
            Way::Forward(proxy) => proxy.authorization.clone(),
            Way::Direct | Way::Tunnel(_) => None,
        }
    }

    async fn connect(self, upstream: Uri) -> Result<Stream, ConnectError> {
        let plan = Arc::clone(&self.plan);
        let transport = match &plan.way {
            Way::Direct => self.transport(upstream).await?,
            Way::Forward(proxy) => self.transport(proxy.uri.clone()).await?,
            Way::Tunnel(proxy) => {
                let mut tunnel = Tunnel::new(proxy.uri.clone(), ProxyConnector(self));
                if let Some(value) = &proxy.authorization {
                    tunnel = tunnel.with_auth(value.clone());
                }
                tunnel.call(upstream).await.map_err(ConnectError::tunnel)?.into_inner()
            }
        };
        let (io, h2) = match &plan.tls {
            None => (transport, false),
            Some((tls, name)) => {
                let io = tls.connect(name.clone(), transport).await.map_err(|error| ConnectError::tls(&error))?;
                let h2 = io.get_ref().1.alpn_protocol() == Some(b"h2");
                (Box::new(io) as Transport, h2)
            }
        };
        Ok(Stream { io, h2, forwarded: matches!(plan.way, Way::Forward(_)), wire: Arc::new(Wire::new()) })
    }

    /// A connection to the first hop: the upstream itself, or the proxy.
    async fn transport(mut self, hop: Uri) -> Result<Transport, ConnectError> {
        let tcp = self.tcp.call(hop).await.map_err(|error| ConnectError::tcp(&error))?.into_inner();
        // otherwise megabytes wait in the kernel, and an upload seems to be through long before it is; a system that
        // cannot do it only measures less well
        _ = SockRef::from(&tcp).set_tcp_notsent_lowat(UNSENT_BYTES);
        match &self.plan.proxy_tls {
            None => Ok(Box::new(tcp)),
            Some((tls, name)) => {
                let io = tls.connect(name.clone(), tcp).await.map_err(|error| ConnectError::tls(&error))?;
                Ok(Box::new(io))
            }
        }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, upstream: Uri) -> Self::Future {
        let connector = self.clone();
        let timeout = self.plan.timeout;
        Box::pin(async move {
            let connecting = tokio::time::timeout(timeout, connector.connect(upstream));
            connecting.await.unwrap_or_else(|_| Err(ConnectError("connection timed out".into()))).map(TokioIo::new)
        })
    }
}

/// Connects to the proxy, for the tunnel.
#[derive(Clone)]
struct ProxyConnector(Connector);

impl Service<Uri> for ProxyConnector {
    type Response = TokioIo<Transport>;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, proxy: Uri) -> Self::Future {
        let connector = self.0.clone();
        Box::pin(async move { connector.transport(proxy).await.map(TokioIo::new) })
    }
}

fn server_name(uri: &Uri) -> Result<ServerName<'static>, String> {
    let host = uri.host().unwrap_or_default();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    ServerName::try_from(host.to_owned()).map_err(|_| "a host to be reached by https has no usable name".into())
}

/// Why there is no connection, in words that carry no client data.
#[derive(Debug)]
pub(super) struct ConnectError(String);

impl ConnectError {
    fn tcp(error: &(dyn Error + 'static)) -> Self {
        let text = error.to_string();
        let io = source::<io::Error>(error);
        if text.starts_with("dns error") {
            return Self("dns: the host name does not resolve".into());
        }
        Self(io.and_then(failure::connection).unwrap_or_else(|| "connection failed".into()))
    }

    fn tls(error: &io::Error) -> Self {
        match source::<rustls::Error>(error) {
            Some(error) => Self(format!("tls: {error}")),
            None => Self(format!("tls: {}", failure::connection(error).unwrap_or_else(|| "handshake failed".into()))),
        }
    }

    fn tunnel(error: impl Error + 'static) -> Self {
        match source::<Self>(&error) {
            Some(Self(inner)) => Self(format!("proxy: {inner}")),
            None => Self(format!("proxy: {error}")),
        }
    }
}

/// The first error of a kind in a chain, wrapped I/O errors included.
fn source<'a, E: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a E> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<E>() {
            return Some(found);
        }
        if let Some(inner) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref)
            && let Some(found) = source::<E>(inner)
        {
            return Some(found);
        }
        next = error.source();
    }
    None
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for ConnectError {}

/// Bytes both ways: a socket, or TLS over one. Behind a pointer, which costs nothing next to a system call.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection to the first hop.
type Transport = Box<dyn Duplex>;

/// A connection to the upstream, ready for HTTP.
pub(super) struct Stream {
    io: Transport,
    h2: bool,
    forwarded: bool,
    wire: Arc<Wire>,
}

/// When a connection was opened; in the extensions of every answer that came over it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opened(pub(super) Instant);

/// When a request left, which is not when it was handed over: the machine may have stood still in between.
#[derive(Debug)]
pub(super) struct Wire {
    opened: Instant,
    /// Nanoseconds from then to the first write of the request; 0 before it.
    written: AtomicU64,
}

impl Wire {
    /// Of a connection that is open now.
    pub(super) fn new() -> Self {
        Self { opened: Instant::now(), written: AtomicU64::new(0) }
    }

    /// Another request is handed over.
    pub(super) fn arm(&self) {
        self.written.store(0, Ordering::Relaxed);
    }

    /// When the request's first bytes were written.
    pub(super) fn written(&self) -> Option<Instant> {
        let written = self.written.load(Ordering::Relaxed);
        (written > 0).then(|| self.opened + Duration::from_nanos(written))
    }

    fn wrote(&self) {
        if self.written.load(Ordering::Relaxed) == 0 {
            let since = u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.written.store(since.max(1), Ordering::Relaxed);
        }
    }
}

impl Stream {
    /// What its requests' writes are told to.
    pub(super) fn wire(&self) -> Arc<Wire> {
        Arc::clone(&self.wire)
    }

    fn wrote(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(_)) = written {
            self.wire.wrote();
        }
        written
    }
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        let connected = Connected::new().proxy(self.forwarded).extra(Opened(self.wire.opened));
        if self.h2 { connected.negotiated_h2() } else { connected }
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.wrote(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.wrote(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
