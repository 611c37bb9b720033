//! Settings: environment variables to a checked [`Config`].

use std::net::IpAddr;
use std::time::Duration;

use ahash::AHashMap;

/// Everything the daemon was told, by consumer.
#[derive(Clone, Debug)]
pub struct Config {
    /// LOG_LEVEL and LOG_FORMAT.
    pub log: Log,
    /// BIND_IP and PORT; port 0 (tests only) takes a free one.
    pub bind_ip: IpAddr,
    /// The proxy's HTTP port.
    pub port: u16,
    /// The way to Discord.
    pub upstream: Upstream,
    /// Queues, deadlines and state.
    pub scheduling: Scheduling,
    /// MAX_IN_FLIGHT_REQUESTS.
    pub max_in_flight_requests: usize,
    /// METRICS_PORT, if ENABLE_METRICS.
    pub metrics_port: Option<u16>,
    /// PPROF_PORT, if ENABLE_PPROF.
    pub pprof_port: Option<u16>,
    /// NODE_NAME.
    pub node_name: String,
    /// Lines to log as warnings once logging is up (ignored 1.x settings, plain http).
    pub warnings: Vec<String>,
}

/// Logging.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    /// LOG_LEVEL.
    pub level: tracing::Level,
    /// LOG_FORMAT is json.
    pub json: bool,
}

/// The way to Discord.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// DISCORD_API_URL: https (or http) and the authority.
    pub https: bool,
    /// Host, and port if it is not the scheme's, as in a `Host` header.
    pub authority: http::uri::Authority,
    /// OUTBOUND_IP.
    pub outbound_ip: Option<IpAddr>,
    /// REQUEST_TIMEOUT.
    pub request_timeout: Duration,
    /// Not DISABLE_HTTP_2.
    pub http2: bool,
    /// HTTPS_PROXY, HTTP_PROXY and NO_PROXY (upper case, else lower case), read once at the start.
    pub proxy: Proxy,
    /// More roots to trust beside the system's (SSL_CERT_FILE is honoured by rustls-native-certs; this one is for tests). DER.
    pub extra_roots: Vec<Vec<u8>>,
}

/// Outbound proxies of Discord traffic.
#[derive(Clone, Debug, Default)]
pub struct Proxy {
    /// HTTP_PROXY.
    pub http: Option<String>,
    /// HTTPS_PROXY.
    pub https: Option<String>,
    /// NO_PROXY.
    pub no: Option<String>,
}

/// Queues, deadlines, state and retries.
#[derive(Clone, Debug)]
pub struct Scheduling {
    /// QUEUE_TIMEOUT.
    pub queue_timeout: Duration,
    /// REQUEST_TIMEOUT.
    pub request_timeout: Duration,
    /// MAX_QUEUE_DEPTH.
    pub max_queue_depth: usize,
    /// MAX_RETRY_BODY_BYTES.
    pub max_retry_body_bytes: u64,
    /// MAX_RETRY_CAPTURE_BYTES.
    pub max_retry_capture_bytes: u64,
    /// MAX_BEARER_COUNT.
    pub max_bearer_count: usize,
    /// MAX_CLIENT_STATES.
    pub max_client_states: usize,
    /// MAX_BUCKET_STATES.
    pub max_bucket_states: usize,
    /// BOT_RATELIMIT_OVERRIDES.
    pub overrides: Overrides,
    /// DISABLE_401_LOCK.
    pub disable_401_lock: bool,
    /// Invalid requests in a rolling 10 minutes: 9,500, or a cluster node's share (tests set it low).
    pub invalid_request_limit: usize,
    /// The window of the above: 10 minutes (tests set it low).
    pub invalid_request_window: Duration,
}

/// Global limits that are not 50.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// By bot ID; wins over the hash.
    pub by_bot_id: AHashMap<u64, u32>,
    /// By SHA-256 of the credential.
    pub by_key: AHashMap<[u8; 32], u32>,
}
