//! Straight to Discord, without any scheduling: stands where the scheduler will.

use http::{Request, Response, header};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use crate::config::Scheduling;
use crate::error::{ProxyError, Reason};
use crate::identity::Identity;
use crate::route::Route;
use crate::scheduler::replay::Vault;
use crate::upstream::{SendError, Upstream};

/// An answer from Discord and the instant by which its body must be through.
#[derive(Debug)]
pub struct Dispatched {
    /// Discord's answer.
    pub response: Response<Incoming>,
    /// Past it, the body is aborted.
    pub deadline: Instant,
}

/// The bare way to Discord.
pub struct Direct {
    upstream: Upstream,
    vault: Vault,
    scheduling: Scheduling,
}

impl Direct {
    /// One attempt for each request.
    pub fn new(scheduling: &Scheduling, upstream: Upstream) -> Self {
        let vault = Vault::new(scheduling.max_retry_body_bytes, scheduling.max_retry_capture_bytes);
        Self { upstream, vault, scheduling: scheduling.clone() }
    }

    /// Sends the request once.
    pub async fn dispatch(
        &self,
        request: Request<Incoming>,
        _identity: Identity,
        _route: Route,
    ) -> Result<Dispatched, ProxyError> {
        let deadline = Instant::now() + self.scheduling.queue_timeout;
        let (parts, body) = request.into_parts();
        let length = parts.headers.get(header::CONTENT_LENGTH);
        let declared = length.and_then(|length| length.to_str().ok()?.parse().ok());
        let mut kept = self.vault.keep(body, declared).await?;
        let body = kept.attempt().ok_or(ProxyError::Unavailable(Reason::RetryPreparation))?;
        let sent = self.upstream.send(Request::from_parts(parts, body));
        let answer = timeout_at(deadline, sent).await.map_err(|_| ProxyError::QueueTimeout)?;
        let answer = answer.map_err(|error| match error {
            SendError::Timeout => ProxyError::UpstreamTimeout,
            SendError::Failed { message } => ProxyError::Upstream(message),
        })?;
        Ok(Dispatched { response: answer.response, deadline: deadline.min(answer.body_deadline) })
    }
}
