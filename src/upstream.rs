//! The one client to Discord: connections over a connector of our own, and the clock of an attempt.
//!
//! HTTP/1.1, the default, has a pool of ours: hyper-util's client hashes the upstream's name, copies the target and its own
//! settings, and builds a connection's future for every request, which a proxy with one upstream pays for nothing. Where
//! HTTP/2 may be chosen it does the work all the same.
//!
//! Owns connections, TLS, outbound proxies and REQUEST_TIMEOUT. Knows nothing of buckets, credentials or retries: a
//! request handed in is sent once. Only a pooled connection that turned out dead before anything was written is
//! replaced by another (hyper hands such a request back unsent); nothing that was written is ever sent again.
//!
//! The target's path and query go on the wire byte for byte. Nothing is added but `Proxy-Authorization`, when
//! Discord is reached in plain http through a proxy that wants it.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{HOST, PROXY_AUTHORIZATION};
use http::request::Parts;
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderValue, Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::{Instant, timeout, timeout_at};

use crate::config;
use crate::inbound::Inbound;

pub use self::body::{BodyError, RequestBody};
use self::connect::Connector;
use self::pool::Pool;

mod attempt;
mod body;
mod connect;
mod failure;
mod pool;
mod proxy;
mod tls;

/// Idle connections kept; what is beyond it is closed as it comes back.
const MAX_IDLE_CONNECTIONS: usize = 1024;
/// How long a connection stays idle. Shorter than what Discord's edge and the usual middle boxes allow, so that most
/// are closed from this side.
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);
/// What hyper buffers of a connection at most, in each direction. Small, so that an upload's progress is close to what
/// the kernel took; large enough for any response head.
const BUFFER_BYTES: usize = 128 * 1024;
/// How often a busy HTTP/2 connection is asked whether it is alive, and how long it has for the answer.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// The way to Discord. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct Upstream {
    shared: Arc<Shared>,
}

struct Shared {
    connections: Connections,
    target: Target,
}

/// Connections by what may be spoken on them.
enum Connections {
    Http1(Pool),
    /// What ALPN chooses.
    Any(Box<Client<Connector, RequestBody>>),
}

/// A connection for one request; none where hyper-util's client finds one by itself.
pub struct Lease(Option<pool::Lease>);

/// What every request has in common.
struct Target {
    scheme: Scheme,
    authority: http::uri::Authority,
    http2: bool,
    /// A proxy wants to see the target in absolute form.
    absolute: bool,
    proxy_authorization: Option<HeaderValue>,
    request_timeout: Duration,
}

/// Discord's answer.
#[derive(Debug)]
pub struct Answer {
    /// Its head, and its body still to be read.
    pub response: Response<Inbound>,
    /// When REQUEST_TIMEOUT ends for the body. Far away if the answer came before the upload's end: then the upload is
    /// bounded by its progress, and the whole by the caller's own deadline.
    pub body_deadline: Instant,
    /// When its request left; unknown if that had to wait for a connection.
    pub written: Option<Instant>,
}

/// Why an attempt had no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendError {
    /// REQUEST_TIMEOUT passed before the headers came: a 504.
    Timeout,
    /// The request's body could not be sent to its end.
    Body(BodyError),
    /// Discord could not be reached, or its answer could not be used: a 502.
    Failed {
        /// What happened, in words that carry no client data.
        message: String,
        /// Whether Discord may have seen any of the request.
        sent: bool,
    },
}

impl Upstream {
    /// Sets the client up; no connection is made yet. Fails on settings that cannot work, naming the variable.
    pub fn new(config: &config::Upstream) -> Result<Self, String> {
        let connector = Connector::new(config)?;
        let target = Target {
            scheme: if config.https { Scheme::HTTPS } else { Scheme::HTTP },
            authority: config.authority.clone(),
            http2: config.http2,
            absolute: connector.is_forwarded(),
            proxy_authorization: connector.proxy_authorization(),
            request_timeout: config.request_timeout,
        };
        let connections = if config.http2 {
            any(connector)
        } else {
            Connections::Http1(Pool::new(connector, target.uri(PathAndQuery::from_static("/"))?))
        };
        Ok(Self { shared: Arc::new(Shared { connections, target }) })
    }

    /// A connection, if one is at rest.
    pub fn at_rest(&self) -> Option<Lease> {
        match &self.shared.connections {
            Connections::Http1(pool) => pool.at_rest().map(|lease| Lease(Some(lease))),
            Connections::Any(_) => Some(Lease(None)),
        }
    }

    /// A connection: at rest, or made within REQUEST_TIMEOUT. Dropping the future leaves it to others.
    pub async fn connect(&self) -> Result<Lease, SendError> {
        let Shared { connections: Connections::Http1(pool), target } = &*self.shared else { return Ok(Lease(None)) };
        match timeout(target.request_timeout, pool.lease()).await {
            Ok(Ok(lease)) => Ok(Lease(Some(lease))),
            Ok(Err(error)) => Err(failure::of(&*error)),
            Err(_) => Err(SendError::Timeout),
        }
    }

    /// Makes one attempt, whose clock runs since it `started`. What is sent is `parts`, and a copy takes their place: a
    /// header map that came from a client has grown to the size that the answer will need in it. Dropping the future closes
    /// the connection it used, unless the answer had come.
    pub async fn send(
        &self,
        lease: Lease,
        parts: &mut Parts,
        mut body: RequestBody,
        started: Instant,
    ) -> Result<Answer, SendError> {
        let Shared { connections, target } = &*self.shared;
        let clock = attempt::Clock::start(target.request_timeout, &mut body, started);
        let copy = parts.clone();
        let mut request = Request::from_parts(std::mem::replace(parts, copy), body);
        target.address(&mut request)?;
        let sent = match connections {
            // An attempt without a body has one deadline. The others are rarer: on the heap it keeps no room for them.
            Connections::Http1(pool) if !clock.follows_upload() => {
                let sent = timeout_at(clock.deadline(), pool.send(lease.0, request)).await;
                sent.map_err(|_| SendError::Timeout)?
            }
            Connections::Http1(pool) => Box::pin(clock.bound(pool.send(lease.0, request))).await?,
            Connections::Any(client) => Box::pin(clock.bound(send_by(client, request, started))).await?,
        };
        let (response, written) = sent.map_err(|error| clock.explain(&*error))?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let message = "the answer switches protocols without being asked to".into();
            return Err(SendError::Failed { message, sent: true });
        }
        let response = Inbound::response(response);
        let body_deadline = clock.answered();
        Ok(Answer { response, body_deadline, written })
    }
}

/// hyper-util's client, which handles both protocols.
fn any(connector: Connector) -> Connections {
    let client = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(MAX_IDLE_CONNECTIONS)
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_timer(TokioTimer::new())
        .timer(TokioTimer::new())
        .retry_canceled_requests(true)
        // HTTP/2 has `:authority` in its place, so there it is only added when ALPN chose HTTP/1.1 after all
        .set_host(true)
        .http1_max_buf_size(BUFFER_BYTES)
        .http2_adaptive_window(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .http2_keep_alive_timeout(PING_INTERVAL)
        .build(connector);
    Connections::Any(Box::new(client))
}

/// Sends a request whose attempt `started` then. What is on an open connection leaves in the order in which it was handed
/// over, so that is as good as when it was written, unless it had to wait for a connection.
async fn send_by(
    client: &Client<Connector, RequestBody>,
    request: Request<RequestBody>,
    started: Instant,
) -> pool::Sent {
    let mut sending = client.request(request);
    let mut handed = None;
    let response = poll_fn(|cx| {
        let polled = Pin::new(&mut sending).poll(cx);
        handed.get_or_insert_with(Instant::now);
        polled
    });
    let response = response.await?;
    let opened = response.extensions().get::<connect::Opened>();
    let waited = opened.is_some_and(|opened| opened.0 >= started);
    Ok((response, handed.filter(|_| !waited)))
}

impl Target {
    /// Makes a request with an origin-form target what its connection takes. hyper-util's client finds a connection by
    /// the scheme and the authority, and makes the target origin-form again.
    fn address(&self, request: &mut Request<RequestBody>) -> Result<(), SendError> {
        if self.http2 || self.absolute {
            let path = request.uri().path_and_query().cloned();
            let uri = self.uri(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
            *request.uri_mut() = uri.map_err(|message| SendError::Failed { message, sent: false })?;
        }
        // the version a client spoke to this side is no concern of the other: the connection decides
        *request.version_mut() = Version::HTTP_11;
        if self.http2 {
            request.headers_mut().remove(HOST);
        }
        if let Some(value) = &self.proxy_authorization {
            request.headers_mut().insert(PROXY_AUTHORIZATION, value.clone());
        }
        Ok(())
    }

    /// A target with the upstream's scheme and authority.
    fn uri(&self, target: PathAndQuery) -> Result<Uri, String> {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(target);
        Uri::from_parts(parts).map_err(|_| "the target cannot be sent".to_owned())
    }
}

/// The beginning of a response's body.
#[derive(Debug)]
pub struct Collected {
    /// What was read.
    pub bytes: Bytes,
    /// Whether that is the whole body; its connection can then be used again.
    pub complete: bool,
    /// What is left, to be passed on after `bytes`; dropping it closes the connection. `None` too if the body broke off.
    pub rest: Option<Inbound>,
}

/// Reads a body until its end, until at least `limit` bytes are there, until it fails or until the deadline.
pub async fn read_limited(mut body: Inbound, limit: usize, deadline: Instant) -> Collected {
    let mut bytes = BytesMut::new();
    loop {
        if bytes.len() >= limit && !body.is_end_stream() {
            return Collected { bytes: bytes.freeze(), complete: false, rest: Some(body) };
        }
        match tokio::time::timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    bytes.extend_from_slice(&data);
                }
            }
            Ok(None) => return Collected { bytes: bytes.freeze(), complete: true, rest: None },
            Ok(Some(Err(_))) => return Collected { bytes: bytes.freeze(), complete: false, rest: None },
            Err(_) => return Collected { bytes: bytes.freeze(), complete: false, rest: Some(body) },
        }
    }
}
