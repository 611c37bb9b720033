//! The reasons a request fails for: labels, messages, and whether an operator must act.

/// Why a request was not answered by Discord: the `reason` label of `nirn_proxy_failures_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// CONNECT, an upgrade, or a target that cannot be forwarded as it is.
    BadRequest,
    /// The credential is known to be invalid.
    InvalidToken,
    /// A reserved path.
    UnknownEndpoint,
    /// Discord is known not to know the webhook.
    UnknownWebhook,
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

impl Reason {
    /// Every reason, in the order of its declaration: `Reason::ALL[reason as usize] == reason`.
    pub const ALL: [Self; 21] = [
        Self::BadRequest,
        Self::InvalidToken,
        Self::UnknownEndpoint,
        Self::UnknownWebhook,
        Self::QueueTimeout,
        Self::RateLimitDeadline,
        Self::UpstreamError,
        Self::InFlightLimit,
        Self::QueueFull,
        Self::ClientLimit,
        Self::BucketLimit,
        Self::RetryCaptureLimit,
        Self::RetryPreparation,
        Self::InvalidRequestBudget,
        Self::PeerError,
        Self::ClusterRouting,
        Self::ClusterOverCapacity,
        Self::ShuttingDown,
        Self::UpstreamTimeout,
        Self::ResponseAborted,
        Self::ClientClosed,
    ];

    /// The value of the `reason` label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BadRequest => "bad_request",
            Self::InvalidToken => "invalid_token",
            Self::UnknownEndpoint => "unknown_endpoint",
            Self::UnknownWebhook => "unknown_webhook",
            Self::QueueTimeout => "queue_timeout",
            Self::RateLimitDeadline => "rate_limit_deadline",
            Self::UpstreamError => "upstream_error",
            Self::InFlightLimit => "in_flight_limit",
            Self::QueueFull => "queue_full",
            Self::ClientLimit => "client_limit",
            Self::BucketLimit => "bucket_limit",
            Self::RetryCaptureLimit => "retry_capture_limit",
            Self::RetryPreparation => "retry_preparation",
            Self::InvalidRequestBudget => "invalid_request_budget",
            Self::PeerError => "peer_error",
            Self::ClusterRouting => "cluster_routing",
            Self::ClusterOverCapacity => "cluster_over_capacity",
            Self::ShuttingDown => "shutting_down",
            Self::UpstreamTimeout => "upstream_timeout",
            Self::ResponseAborted => "response_aborted",
            Self::ClientClosed => "client_closed",
        }
    }

    /// Whether somebody who runs the proxy has to act: a limit of the process is reached, or a way is broken.
    ///
    /// What a client did, what Discord's limits ask for and an ordinary stop are counted and not logged.
    pub fn needs_operator(self) -> bool {
        match self {
            Self::UpstreamError
            | Self::InFlightLimit
            | Self::QueueFull
            | Self::ClientLimit
            | Self::BucketLimit
            | Self::RetryCaptureLimit
            | Self::RetryPreparation
            | Self::InvalidRequestBudget
            | Self::PeerError
            | Self::ClusterRouting
            | Self::ClusterOverCapacity
            | Self::UpstreamTimeout => true,
            Self::BadRequest
            | Self::InvalidToken
            | Self::UnknownEndpoint
            | Self::UnknownWebhook
            | Self::QueueTimeout
            | Self::RateLimitDeadline
            | Self::ShuttingDown
            | Self::ResponseAborted
            | Self::ClientClosed => false,
        }
    }

    /// What happened, and the setting that governs it.
    pub(super) fn message(self) -> &'static str {
        match self {
            Self::BadRequest => "the request cannot be forwarded as it is",
            Self::InvalidToken => "401: Unauthorized",
            Self::UnknownEndpoint => "nothing lives at this path: everything under /nirn/ is the proxy's own",
            Self::UnknownWebhook => "Unknown Webhook",
            Self::QueueTimeout => "the request's turn did not come within QUEUE_TIMEOUT",
            Self::RateLimitDeadline => {
                "You are being rate limited: the wait leaves no full REQUEST_TIMEOUT within QUEUE_TIMEOUT"
            }
            Self::UpstreamError => "DISCORD_API_URL cannot be reached or gave an unusable answer",
            Self::InFlightLimit => "the proxy is handling MAX_IN_FLIGHT_REQUESTS requests already",
            Self::QueueFull => "MAX_QUEUE_DEPTH requests wait for this rate limit already",
            Self::ClientLimit => "no room for another credential: MAX_CLIENT_STATES or MAX_BEARER_COUNT is reached",
            Self::BucketLimit => "no room for another rate limit: MAX_BUCKET_STATES is reached",
            Self::RetryCaptureLimit => "no room to keep the body for a retry: MAX_RETRY_CAPTURE_BYTES is reached",
            Self::RetryPreparation => {
                "the body could not be kept for a retry: the folder that TMPDIR names is not usable (MAX_RETRY_CAPTURE_BYTES=0 keeps none)"
            }
            Self::InvalidRequestBudget => {
                "too many requests were answered 401, 403 or 429 in the last 10 minutes: \
                 the proxy pauses before Discord bans its IP (in a cluster the budget is shared by CLUSTER_MAX_NODES)"
            }
            Self::PeerError => "the cluster node that owns this credential cannot be reached (CLUSTER_PEER_PORT)",
            Self::ClusterRouting => "the cluster's nodes do not agree on who owns this credential yet",
            Self::ClusterOverCapacity => "the cluster has more nodes than CLUSTER_MAX_NODES",
            Self::ShuttingDown => "the proxy is shutting down",
            Self::UpstreamTimeout => "Discord did not answer within REQUEST_TIMEOUT",
            Self::ResponseAborted => "the response was cut short",
            Self::ClientClosed => "the client closed the request",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_stands_at_its_place_and_has_a_label_of_its_own() {
        for (place, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, place);
            assert!(reason.as_str().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'));
        }
        let labels: std::collections::BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(labels.len(), Reason::ALL.len());
    }
}
