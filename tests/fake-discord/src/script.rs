//! What a fake Discord is told: its limits, its answers, its faults. Plain data; from Rust or from TOML.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

/// Everything a fake Discord is told before it starts.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// Families of routes and their buckets; the first rule that names a request's route is its rule.
    pub rules: Vec<Rule>,
    /// Whether the rules of [`crate::believable::rules`] follow the ones above, and unknown paths are 404.
    pub believable: bool,
    /// Calls of one token, or of one unauthenticated address, in any rolling second; `None` or 0 lifts it.
    pub global_limit: Option<u32>,
    /// The span of the above in milliseconds.
    pub global_window_ms: u64,
    /// Tokens (without scheme) whose global limit is another.
    pub global_overrides: Vec<(String, u32)>,
    /// Invalid answers (401, 403, 429 that is not shared) in a window that an address may draw before it is banned.
    pub invalid_limit: usize,
    /// The window of the above in milliseconds.
    pub invalid_window_ms: u64,
    /// How long a ban lasts, in milliseconds.
    pub ban_ms: u64,
    /// Whether a ban's answer says how long it lasts in `Retry-After`.
    pub ban_retry_after: bool,
    /// The tokens (without scheme) that are valid; `None` accepts all, and requests without one.
    pub tokens: Option<Vec<String>>,
    /// Webhooks that were deleted: an id, or `id/token`.
    pub deleted_webhooks: Vec<String>,
    /// How much too early resets are announced, in milliseconds, where a rule does not say: from, to.
    pub early_ms: (u64, u64),
    /// Latency where a rule does not say.
    pub latency: Latency,
    /// How many arrivals are remembered; 0 records none (counts are always kept).
    pub record: usize,
    /// Whether recorded arrivals keep their bodies.
    pub keep_bodies: bool,
    /// Closes a connection that was idle for so long, in milliseconds.
    pub idle_ms: Option<u64>,
    /// Closes a connection, without saying so, after so many answers.
    pub close_after: Option<u64>,
    /// TLS, with its ALPN protocols; without it plain HTTP/1.1 and h2c with prior knowledge.
    #[serde(skip)]
    pub tls: Option<Arc<rustls::ServerConfig>>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            rules: Vec::new(),
            believable: false,
            global_limit: Some(50),
            global_window_ms: 1000,
            global_overrides: Vec::new(),
            invalid_limit: 10_000,
            invalid_window_ms: 600_000,
            ban_ms: 600_000,
            ban_retry_after: true,
            tokens: None,
            deleted_webhooks: Vec::new(),
            early_ms: (0, 0),
            latency: Latency::default(),
            record: 100_000,
            keep_bodies: false,
            idle_ms: None,
            close_after: None,
            tls: None,
        }
    }
}

/// Delays in milliseconds, each drawn evenly from (from, to).
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Latency {
    /// Between the request's end and its judgement.
    pub before_ms: (u64, u64),
    /// Between judgement and answer.
    pub after_ms: (u64, u64),
}

/// A family of routes that count together.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    /// `METHOD /path`, without `/api` and version: `{}` is any one segment, a last `**` any rest, method `*` any.
    pub routes: Vec<String>,
    /// The buckets of the family: usually one; with several each request takes the next; none: no headers.
    pub buckets: Vec<Bucket>,
    /// Limits that no header speaks of until they are met.
    pub sub_limits: Vec<SubLimit>,
    /// Resets announced too early, in milliseconds: from, to.
    pub early_ms: Option<(u64, u64)>,
    /// This family's latency.
    pub latency: Option<Latency>,
    /// Headers left out of the answers.
    pub drop_headers: Vec<String>,
    /// Headers put into the answers after the ones above were left out, as they are, true or not.
    pub add_headers: Vec<(String, String)>,
    /// The status of an allowed request where it is not the believable one.
    pub status: Option<u16>,
}

impl Rule {
    /// One route (or several, by comma) with one window bucket.
    pub fn window(routes: &str, hash: &str, limit: u32, period: Duration) -> Self {
        Self::one(routes, hash, Shape::Window, limit, period)
    }

    /// One route (or several, by comma) with one drip bucket.
    pub fn drip(routes: &str, hash: &str, limit: u32, period: Duration) -> Self {
        Self::one(routes, hash, Shape::Drip, limit, period)
    }

    fn one(routes: &str, hash: &str, shape: Shape, limit: u32, period: Duration) -> Self {
        let period_ms = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
        let bucket = Bucket { hashes: vec![hash.into()], shape, limit, period_ms, ..Bucket::default() };
        let routes = routes.split(',').map(|route| route.trim().to_owned()).collect();
        Self { routes, buckets: vec![bucket], ..Self::default() }
    }
}

/// The shape of a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// Everything comes back at the window's end.
    #[default]
    Window,
    /// One call comes back every period.
    Drip,
}

/// A bucket: one counter for each major parameter and caller.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bucket {
    /// The hash it is announced by; of several, the next one every [`Bucket::hash_every`] answers.
    pub hashes: Vec<String>,
    /// Answers before the next of several hashes is used.
    pub hash_every: u64,
    /// How it refills.
    pub shape: Shape,
    /// Calls when full.
    pub limit: u32,
    /// The window, or the time for one call to come back, in milliseconds.
    pub period_ms: u64,
    /// Counts all callers together, and answers with scope `shared`.
    pub shared: bool,
}

impl Default for Bucket {
    fn default() -> Self {
        let (hashes, shape) = (vec!["0123456789abcdef".into()], Shape::Window);
        Self { hashes, hash_every: 1, shape, limit: 5, period_ms: 5000, shared: false }
    }
}

/// A limit that shows only in its 429, whose other headers describe the bucket.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SubLimit {
    /// Applies to JSON bodies with one of these fields; empty: to all requests.
    pub fields: Vec<String>,
    /// Calls in a window.
    pub limit: u32,
    /// The window in milliseconds.
    pub period_ms: u64,
    /// `X-RateLimit-Scope`.
    pub scope: String,
    /// Counts all major parameters together.
    pub over_all: bool,
    /// The `code` in the body.
    pub code: Option<u64>,
    /// The `message` in the body.
    pub message: String,
}

impl Default for SubLimit {
    fn default() -> Self {
        Self {
            fields: Vec::new(),
            limit: 2,
            period_ms: 600_000,
            scope: "user".into(),
            over_all: false,
            code: None,
            message: "You are being rate limited.".into(),
        }
    }
}
