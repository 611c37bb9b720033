//! The one client to Discord: hyper-util's pooled client over a connector of our own, and the clock of an attempt.
//!
//! Owns connections, TLS, outbound proxies and REQUEST_TIMEOUT. Knows nothing of buckets, credentials or retries: a
//! request handed in is sent once. Only a pooled connection that turned out dead before anything was written is
//! replaced by another (hyper-util hands such a request back unsent); nothing that was written is ever sent again.
//!
//! The target's path and query go on the wire byte for byte. Nothing is added but `Proxy-Authorization`, when
//! Discord is reached in plain http through a proxy that wants it.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{HOST, PROXY_AUTHORIZATION};
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderValue, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::Instant;

use crate::config;

pub use self::body::{BodyError, RequestBody};
use self::connect::Connector;

mod attempt;
mod body;
mod connect;
mod failure;
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
    client: Client<Connector, RequestBody>,
    target: Arc<Target>,
}

/// What every request has in common.
struct Target {
    scheme: Scheme,
    authority: http::uri::Authority,
    http2: bool,
    proxy_authorization: Option<HeaderValue>,
    request_timeout: Duration,
}

/// Discord's answer.
#[derive(Debug)]
pub struct Answer {
    /// Its head, and its body still to be read.
    pub response: Response<Incoming>,
    /// When REQUEST_TIMEOUT ends for the body. Far away if the answer came before the upload's end: then the upload is
    /// bounded by its progress, and the whole by the caller's own deadline.
    pub body_deadline: Instant,
    /// Whether its connection was opened for it, so that it went out later than it was handed over.
    pub connected: bool,
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
            proxy_authorization: connector.proxy_authorization(),
            request_timeout: config.request_timeout,
        };
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(MAX_IDLE_CONNECTIONS)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .retry_canceled_requests(true)
            // HTTP/2 has `:authority` in its place, so there it is only added when ALPN chose HTTP/1.1 after all
            .set_host(config.http2)
            .http1_max_buf_size(BUFFER_BYTES)
            .http2_adaptive_window(true)
            .http2_keep_alive_interval(PING_INTERVAL)
            .http2_keep_alive_timeout(PING_INTERVAL)
            .build(connector);
        Ok(Self { client, target: Arc::new(target) })
    }

    /// Makes one attempt. Dropping the future closes the connection it used, unless the answer had come.
    pub async fn send(&self, mut request: Request<RequestBody>) -> Result<Answer, SendError> {
        self.target.address(&mut request)?;
        let started = Instant::now();
        let clock = attempt::Clock::start(self.target.request_timeout, request.body_mut());
        let (sent, clock) = clock.bound(self.client.request(request)).await?;
        let response = sent.map_err(|error| clock.explain(&error))?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Err(SendError::Failed { message: "the answer switches protocols without being asked to".into() });
        }
        let body_deadline = clock.answered();
        let connected = response.extensions().get::<connect::Opened>().is_some_and(|opened| opened.0 >= started);
        Ok(Answer { response, body_deadline, connected })
    }
}

impl Target {
    /// Gives a request with an origin-form target the scheme and authority that hyper-util's client needs to find a
    /// connection. On the wire it is origin-form again, or absolute-form towards a plain http proxy.
    fn address(&self, request: &mut Request<RequestBody>) -> Result<(), SendError> {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        let path = request.uri().path_and_query().cloned();
        parts.path_and_query = Some(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
        *request.uri_mut() =
            Uri::from_parts(parts).map_err(|_| SendError::Failed { message: "the target cannot be sent".into() })?;
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
}

/// The beginning of a response's body.
#[derive(Debug)]
pub struct Collected {
    /// What was read.
    pub bytes: Bytes,
    /// Whether that is the whole body; its connection can then be used again.
    pub complete: bool,
    /// What is left, to be passed on after `bytes`; dropping it closes the connection. `None` too if the body broke off.
    pub rest: Option<Incoming>,
}

/// Reads a body until its end, until at least `limit` bytes are there, until it fails or until the deadline.
pub async fn read_limited(mut body: Incoming, limit: usize, deadline: Instant) -> Collected {
    let mut bytes = BytesMut::new();
    loop {
        if bytes.len() >= limit && !hyper::body::Body::is_end_stream(&body) {
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
