//! Straight to Discord, without any scheduling: stands where the scheduler will.

use std::time::Duration;

use http::uri::{Authority, Parts, Scheme};
use http::{HeaderValue, Request, Response, Uri, header};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::time::{Instant, timeout_at};

use crate::config;
use crate::error::ProxyError;
use crate::identity::Identity;
use crate::route::Route;

/// An answer from Discord and the instant by which its body must be through.
#[derive(Debug)]
pub struct Dispatched {
    /// Discord's answer.
    pub response: Response<Incoming>,
    /// Past it, the body is aborted.
    pub deadline: Instant,
}

/// The bare way to Discord.
#[derive(Clone, Debug)]
pub struct Direct {
    client: Client<HttpConnector, Incoming>,
    authority: Authority,
    request_timeout: Duration,
}

impl Direct {
    /// Plain HTTP only.
    pub fn new(upstream: &config::Upstream) -> Self {
        Self {
            client: Client::builder(TokioExecutor::new()).build_http(),
            authority: upstream.authority.clone(),
            request_timeout: upstream.request_timeout,
        }
    }

    /// Sends the request once.
    pub async fn dispatch(
        &self,
        mut request: Request<Incoming>,
        _identity: Identity,
        _route: Route,
    ) -> Result<Dispatched, ProxyError> {
        let deadline = Instant::now() + self.request_timeout;
        let mut parts = Parts::default();
        parts.scheme = Some(Scheme::HTTP);
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = request.uri().path_and_query().cloned();
        let failed = |message: String| ProxyError::Upstream(message);
        *request.uri_mut() = Uri::from_parts(parts).map_err(|error| failed(error.to_string()))?;
        let host = HeaderValue::from_str(self.authority.as_str()).map_err(|error| failed(error.to_string()))?;
        request.headers_mut().insert(header::HOST, host);
        *request.version_mut() = http::Version::HTTP_11;
        let answer = timeout_at(deadline, self.client.request(request)).await;
        let response = answer.map_err(|_| ProxyError::UpstreamTimeout)?.map_err(|error| failed(error.to_string()))?;
        Ok(Dispatched { response, deadline })
    }
}
