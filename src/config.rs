//! Settings: environment variables to a checked [`Config`].
//!
//! The types are here, [`table`] lists the variables, `build` and `read` turn text into values, and `source` is the
//! one place that looks at the process's environment, at `.env` and at the host.

mod build;
mod read;
mod source;
pub mod table;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use ahash::AHashMap;

use table::Variable;

/// Everything the daemon was told, by consumer.
#[derive(Clone, Debug)]
pub struct Config {
    /// LOG_LEVEL and LOG_FORMAT.
    pub log: Log,
    /// BIND_IP: the address of every listener.
    pub bind_ip: IpAddr,
    /// PORT: the proxy's HTTP port; 0 (tests only) takes a free one.
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
    /// NODE_NAME. [`Config::load`] makes one up when it is unset.
    pub node_name: String,
    /// The cluster to join, if CLUSTER_MEMBERS or CLUSTER_DNS is set.
    pub cluster: Option<Cluster>,
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

/// Outbound proxies of Discord traffic. Their URLs may carry passwords, so `Debug` does not show them.
#[derive(Clone, Default)]
pub struct Proxy {
    /// HTTP_PROXY.
    pub http: Option<String>,
    /// HTTPS_PROXY.
    pub https: Option<String>,
    /// NO_PROXY.
    pub no: Option<String>,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy")
            .field("http", &self.http.is_some())
            .field("https", &self.https.is_some())
            .field("no", &self.no)
            .finish()
    }
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

impl Overrides {
    /// How many credentials have a limit of their own.
    pub fn len(&self) -> usize {
        self.by_bot_id.len() + self.by_key.len()
    }

    /// Whether every credential has the usual limit.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a node needs to join its cluster.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// CLUSTER_MEMBERS, else CLUSTER_DNS.
    pub seeds: Seeds,
    /// CLUSTER_PORT: gossip over UDP.
    pub port: u16,
    /// CLUSTER_PEER_PORT: HTTPS between nodes.
    pub peer_port: u16,
    /// CLUSTER_MAX_NODES.
    pub max_nodes: usize,
    /// CLUSTER_SECRET.
    pub secret: Secret,
    /// CLUSTER_CA_FILE.
    pub ca_file: PathBuf,
    /// CLUSTER_CERT_FILE.
    pub cert_file: PathBuf,
    /// CLUSTER_KEY_FILE.
    pub key_file: PathBuf,
    /// CLUSTER_ADVERTISE_IP.
    pub advertise_ip: Option<IpAddr>,
}

/// Where the first members are looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seeds {
    /// CLUSTER_MEMBERS, which wins.
    Members(Vec<Seed>),
    /// CLUSTER_DNS: every address of every name is tried.
    Dns(Vec<Seed>),
}

/// One place to look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seed {
    /// A host name or an IP address, IPv6 without brackets.
    pub host: String,
    /// Its gossip port; CLUSTER_PORT if the entry had none.
    pub port: u16,
}

/// Text that is never shown: `Debug` masks it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Keeps a text secret.
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The text itself, for whoever derives a key from it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

/// A reason not to start, as one line that names the variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem(String);

impl Problem {
    /// `rest` is what was got, or what is wrong with it.
    fn refused(variable: &Variable, rest: &str) -> Self {
        Self(format!("{} accepts {}{rest}", variable.name, variable.accepts.sentence()))
    }

    fn missing(variable: &Variable) -> Self {
        Self(format!("{} is required in a cluster: {}", variable.name, variable.accepts.sentence()))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
