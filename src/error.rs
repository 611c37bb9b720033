//! Every way a request can fail here, and the answer each one gets.

mod reason;
mod throttle;

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, VIA};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

pub use reason::Reason;
pub use throttle::Throttle;

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

impl Scope {
    /// The header's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Global => "global",
            Self::Shared => "shared",
        }
    }
}

/// A failed request. Carries nothing a client sent.
#[derive(Clone, Debug, PartialEq)]
pub enum ProxyError {
    /// 400, with what cannot be done.
    BadRequest(&'static str),
    /// 431: more than 64 KiB of header block, or more than 100 lines.
    HeadTooLarge,
    /// 401: Discord refused this credential before.
    InvalidToken,
    /// 404: nothing lives at this path under `/nirn/`.
    UnknownEndpoint,
    /// 404: Discord did not know this webhook before.
    UnknownWebhook,
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

const GENERATED_BY_PROXY: HeaderName = HeaderName::from_static("generated-by-proxy");
const X_NIRN_PROXY_ERROR: HeaderName = HeaderName::from_static("x-nirn-proxy-error");
const X_RATELIMIT_GLOBAL: HeaderName = HeaderName::from_static("x-ratelimit-global");
const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RATELIMIT_RESET_AFTER: HeaderName = HeaderName::from_static("x-ratelimit-reset-after");
const X_RATELIMIT_SCOPE: HeaderName = HeaderName::from_static("x-ratelimit-scope");

impl ProxyError {
    /// The status of the local answer.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::InvalidToken => StatusCode::UNAUTHORIZED,
            Self::UnknownEndpoint | Self::UnknownWebhook => StatusCode::NOT_FOUND,
            Self::QueueTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::RateLimited(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Upstream(_) => StatusCode::BAD_GATEWAY,
            Self::UpstreamTimeout => StatusCode::GATEWAY_TIMEOUT,
            // Nobody reads the answer to a client that left; it only has to be some answer.
            Self::Unavailable(_) | Self::ClientClosed => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// The failure's label.
    pub fn reason(&self) -> Reason {
        match self {
            Self::BadRequest(_) | Self::HeadTooLarge => Reason::BadRequest,
            Self::InvalidToken => Reason::InvalidToken,
            Self::UnknownEndpoint => Reason::UnknownEndpoint,
            Self::UnknownWebhook => Reason::UnknownWebhook,
            Self::QueueTimeout => Reason::QueueTimeout,
            Self::RateLimited(_) => Reason::RateLimitDeadline,
            Self::Upstream(_) => Reason::UpstreamError,
            Self::UpstreamTimeout => Reason::UpstreamTimeout,
            Self::Unavailable(reason) => *reason,
            Self::ClientClosed => Reason::ClientClosed,
        }
    }

    /// When the client may ask again, if that can be said.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited(cooldown) => Some(cooldown.retry_after),
            Self::Unavailable(_) | Self::ClientClosed => Some(Duration::from_secs(1)),
            Self::BadRequest(_)
            | Self::HeadTooLarge
            | Self::InvalidToken
            | Self::UnknownEndpoint
            | Self::UnknownWebhook
            | Self::QueueTimeout
            | Self::Upstream(_)
            | Self::UpstreamTimeout => None,
        }
    }

    /// What happened and which setting governs it: the `message` of the answer, and of the log.
    pub fn message(&self) -> String {
        match self {
            Self::BadRequest(what) => (*what).to_owned(),
            Self::HeadTooLarge => "the header block is larger than 64 KiB or has more than 100 lines".to_owned(),
            Self::Upstream(what) => format!("{}: {what}", Reason::UpstreamError.message()),
            Self::InvalidToken
            | Self::UnknownEndpoint
            | Self::UnknownWebhook
            | Self::QueueTimeout
            | Self::RateLimited(_)
            | Self::UpstreamTimeout
            | Self::Unavailable(_)
            | Self::ClientClosed => self.reason().message().to_owned(),
        }
    }

    /// The whole local answer: status, headers, JSON body.
    pub fn response(&self) -> Response<Bytes> {
        let body = self.body();
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        headers.insert(VIA, HeaderValue::from_static("1.1 nirn-proxy"));
        headers.insert(GENERATED_BY_PROXY, HeaderValue::from_static("true"));
        // Libraries take a 401 and a 429 for Discord's own, so those two say nothing of the proxy's trouble.
        if !matches!(self, Self::InvalidToken | Self::RateLimited(_)) {
            headers.insert(X_NIRN_PROXY_ERROR, HeaderValue::from_static("true"));
        }
        if let Some(wait) = self.retry_after() {
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(wait)));
        }
        if let Self::RateLimited(cooldown) = self {
            cooldown.write_headers(headers);
        }
        *response.body_mut() = body;
        response
    }

    fn body(&self) -> Bytes {
        let text = match self {
            Self::InvalidToken => return Bytes::from_static(br#"{"message": "401: Unauthorized", "code": 0}"#),
            Self::UnknownWebhook => return Bytes::from_static(br#"{"message": "Unknown Webhook", "code": 10015}"#),
            Self::RateLimited(cooldown) => serde_json::json!({
                "message": self.message(),
                "retry_after": cooldown.retry_after.as_secs_f64(),
                "global": cooldown.scope == Scope::Global,
                "code": 0,
            }),
            _ => serde_json::json!({ "message": self.message(), "code": 0 }),
        };
        Bytes::from(text.to_string())
    }
}

impl Cooldown {
    /// The headers by which Discord's own 429 tells whose limit it is.
    fn write_headers(&self, headers: &mut HeaderMap) {
        headers.insert(X_RATELIMIT_SCOPE, HeaderValue::from_static(self.scope.as_str()));
        match self.scope {
            Scope::Global => {
                headers.insert(X_RATELIMIT_GLOBAL, HeaderValue::from_static("true"));
            }
            Scope::User | Scope::Shared => {
                headers.insert(X_RATELIMIT_REMAINING, HeaderValue::from_static("0"));
                // Milliseconds, as Discord writes it; rounded up, since an early retry would be refused.
                let milliseconds = self.retry_after.as_nanos().div_ceil(1_000_000);
                let text = format!("{}.{:03}", milliseconds / 1000, milliseconds % 1000);
                if let Ok(value) = HeaderValue::try_from(text) {
                    headers.insert(X_RATELIMIT_RESET_AFTER, value);
                }
            }
        }
    }
}

/// Whole seconds, rounded up and at least one: an early retry would be refused.
fn whole_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_error() -> Vec<ProxyError> {
        let cooldown = Cooldown { retry_after: Duration::from_millis(1500), scope: Scope::User };
        let mut errors = vec![
            ProxyError::BadRequest("protocol upgrades are not proxied"),
            ProxyError::HeadTooLarge,
            ProxyError::InvalidToken,
            ProxyError::UnknownEndpoint,
            ProxyError::UnknownWebhook,
            ProxyError::QueueTimeout,
            ProxyError::RateLimited(cooldown),
            ProxyError::Upstream("connection refused".into()),
            ProxyError::UpstreamTimeout,
            ProxyError::ClientClosed,
        ];
        let named: Vec<Reason> = errors.iter().map(ProxyError::reason).collect();
        errors.extend(Reason::ALL.into_iter().filter(|reason| !named.contains(reason)).map(ProxyError::Unavailable));
        errors
    }

    fn header<'a>(response: &'a Response<Bytes>, name: &str) -> Option<&'a str> {
        response.headers().get(name).map(|value| value.to_str().unwrap())
    }

    #[test]
    fn every_answer_says_the_proxy_made_it_and_carries_a_json_message() {
        for error in every_error() {
            let response = error.response();
            assert_eq!(response.status(), error.status());
            assert_eq!(header(&response, "generated-by-proxy"), Some("true"));
            assert_eq!(header(&response, "via"), Some("1.1 nirn-proxy"));
            assert_eq!(header(&response, "content-type"), Some("application/json"));
            assert_eq!(header(&response, "content-length"), Some(response.body().len().to_string().as_str()));
            let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
            assert_eq!(body["code"], if error == ProxyError::UnknownWebhook { 10015 } else { 0 });
            assert!(!body["message"].as_str().unwrap().is_empty());
            let own_trouble = !matches!(response.status().as_u16(), 401 | 429);
            assert_eq!(header(&response, "x-nirn-proxy-error"), own_trouble.then_some("true"), "{error:?}");
            let retry = match response.status().as_u16() {
                503 => Some("1"),
                429 => Some("2"),
                _ => None,
            };
            assert_eq!(header(&response, "retry-after"), retry, "{error:?}");
        }
    }

    #[test]
    fn only_a_cooldown_carries_rate_limit_headers() {
        for error in every_error() {
            let limited = matches!(error, ProxyError::RateLimited(_));
            let response = error.response();
            let any = response.headers().keys().any(|name| name.as_str().starts_with("x-ratelimit-"));
            assert_eq!(any, limited, "{error:?}");
        }
    }

    #[test]
    fn an_invalid_token_gets_discords_own_words() {
        let response = ProxyError::InvalidToken.response();
        assert_eq!(&response.body()[..], br#"{"message": "401: Unauthorized", "code": 0}"#);
    }

    #[test]
    fn an_unknown_webhook_gets_discords_own_words() {
        let response = ProxyError::UnknownWebhook.response();
        assert_eq!(&response.body()[..], br#"{"message": "Unknown Webhook", "code": 10015}"#);
    }

    #[test]
    fn a_buckets_cooldown_is_told_exactly_and_rounded_up() {
        let cases = [
            (Duration::from_millis(1), "1", 0.001, "0.001"),
            (Duration::from_millis(1000), "1", 1.0, "1.000"),
            (Duration::from_nanos(1_000_000_001), "2", 1.000_000_001, "1.001"),
            (Duration::from_millis(61_250), "62", 61.25, "61.250"),
            (Duration::ZERO, "1", 0.0, "0.000"),
        ];
        for scope in [Scope::User, Scope::Shared] {
            for (retry_after, whole, exact, reset_after) in cases {
                let response = ProxyError::RateLimited(Cooldown { retry_after, scope }).response();
                let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
                assert_eq!(header(&response, "retry-after"), Some(whole));
                assert_eq!(body["retry_after"], exact);
                assert_eq!(body["global"], false);
                assert_eq!(header(&response, "x-ratelimit-scope"), Some(scope.as_str()));
                assert_eq!(header(&response, "x-ratelimit-remaining"), Some("0"));
                assert_eq!(header(&response, "x-ratelimit-reset-after"), Some(reset_after));
                assert_eq!(header(&response, "x-ratelimit-global"), None);
            }
        }
    }

    #[test]
    fn a_global_cooldown_is_told_as_global() {
        let cooldown = Cooldown { retry_after: Duration::from_millis(250), scope: Scope::Global };
        let response = ProxyError::RateLimited(cooldown).response();
        let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
        assert_eq!(body["global"], true);
        assert_eq!(header(&response, "x-ratelimit-scope"), Some("global"));
        assert_eq!(header(&response, "x-ratelimit-global"), Some("true"));
        assert_eq!(header(&response, "x-ratelimit-remaining"), None);
        assert_eq!(header(&response, "x-ratelimit-reset-after"), None);
    }

    #[test]
    fn what_went_wrong_on_the_way_to_discord_is_told() {
        let message = ProxyError::Upstream("connection refused".into()).message();
        assert!(message.contains("DISCORD_API_URL") && message.ends_with("connection refused"));
    }
}
