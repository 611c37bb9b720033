//! Every way a request can fail here, and the answer each one gets.

use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};

/// Why a request was not answered by Discord: the `reason` label of `nirn_proxy_failures_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// CONNECT, an upgrade, or a target that cannot be forwarded as it is.
    BadRequest,
    /// The credential is known to be invalid.
    InvalidToken,
    /// A reserved path.
    UnknownEndpoint,
    /// QUEUE_TIMEOUT passed.
    QueueTimeout,
    /// A known cooldown cannot fit before the deadline.
    RateLimitDeadline,
    /// Discord unreachable, or an unusable answer.
    UpstreamError,
    /// MAX_IN_FLIGHT_REQUESTS reached.
    InFlightLimit,
    /// MAX_QUEUE_DEPTH reached.
    QueueFull,
    /// MAX_BEARER_COUNT or MAX_CLIENT_STATES reached.
    ClientLimit,
    /// MAX_BUCKET_STATES reached.
    BucketLimit,
    /// MAX_RETRY_CAPTURE_BYTES reached.
    RetryCaptureLimit,
    /// A body could not be kept.
    RetryPreparation,
    /// The invalid-request budget is spent.
    InvalidRequestBudget,
    /// The owning peer is unavailable.
    PeerError,
    /// Routing in the cluster did not converge.
    ClusterRouting,
    /// More members than CLUSTER_MAX_NODES.
    ClusterOverCapacity,
    /// The node is draining.
    ShuttingDown,
    /// REQUEST_TIMEOUT passed.
    UpstreamTimeout,
    /// A response was aborted after its headers.
    ResponseAborted,
    /// The client left.
    ClientClosed,
}

/// A cooldown that a request cannot wait out, told to the client as Discord would.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cooldown {
    /// What is left of it.
    pub retry_after: Duration,
    /// Whose limit it is.
    pub scope: Scope,
}

/// Discord's `X-RateLimit-Scope`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Per bot or user.
    User,
    /// Per bot or user, over all routes.
    Global,
    /// Per resource.
    Shared,
}

/// A failed request. Carries nothing a client sent.
#[derive(Clone, Debug, PartialEq)]
pub enum ProxyError {
    /// 400, with what cannot be done.
    BadRequest(&'static str),
    /// 401: Discord refused this credential before.
    InvalidToken,
    /// 404: nothing lives at this path under `/nirn/`.
    UnknownEndpoint,
    /// 408: QUEUE_TIMEOUT passed.
    QueueTimeout,
    /// 429: a known cooldown does not fit.
    RateLimited(Cooldown),
    /// 502, with what went wrong in words that carry no client data.
    Upstream(String),
    /// 504: REQUEST_TIMEOUT passed.
    UpstreamTimeout,
    /// 503 for the given reason (any of the 503 rows of the table).
    Unavailable(Reason),
    /// The client is gone: nobody reads the answer.
    ClientClosed,
}

impl ProxyError {
    /// The status of the local answer.
    pub fn status(&self) -> StatusCode {
        todo!()
    }

    /// The failure's label.
    pub fn reason(&self) -> Reason {
        todo!()
    }

    /// The whole local answer: status, headers, JSON body.
    pub fn response(&self) -> Response<Bytes> {
        todo!()
    }
}
