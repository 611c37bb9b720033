//! Every variable the daemon knows: its name, its default, what it accepts.
//!
//! The parser takes defaults and ranges from here and CONFIG.md is tested against it, so the three cannot disagree.

use std::fmt;

/// One environment variable.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Its name, in upper case.
    pub name: &'static str,
    /// The value taken when it is unset, or in words what happens then.
    pub default: &'static str,
    /// What is accepted.
    pub accepts: Accepts,
    /// Its value is never shown.
    pub secret: bool,
}

/// What a variable accepts. Displays as CONFIG.md writes it.
#[derive(Clone, Copy, Debug)]
pub enum Accepts {
    /// A whole number.
    Number {
        /// The least one.
        min: u64,
        /// The largest one.
        max: u64,
    },
    /// A duration in whole milliseconds.
    Milliseconds {
        /// The shortest one.
        min: u64,
        /// The longest one.
        max: u64,
    },
    /// `true`, `false`, `1` or `0` in any case.
    Bool,
    /// One of these words in any case.
    OneOf(&'static [&'static str]),
    /// Something described in words.
    Text(&'static str),
}

impl fmt::Display for Accepts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { min, max } | Self::Milliseconds { min, max } => write!(f, "{min}..{max}"),
            Self::Bool => f.write_str("true, false, 1, 0"),
            Self::OneOf(words) => f.write_str(&words.join(", ")),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl Accepts {
    /// The same as the end of a sentence that begins with "accepts".
    pub(super) fn sentence(&self) -> String {
        match self {
            Self::Number { min, max } => format!("a whole number from {min} to {max}"),
            Self::Milliseconds { min, max } => format!("whole milliseconds from {min} to {max}"),
            Self::Bool => "true, false, 1 or 0".to_owned(),
            Self::OneOf(words) => format!("one of {}", words.join(", ")),
            Self::Text(text) => (*text).to_owned(),
        }
    }
}

const fn variable(name: &'static str, default: &'static str, accepts: Accepts) -> Variable {
    Variable { name, default, accepts, secret: false }
}

const fn secret(name: &'static str, default: &'static str, accepts: Accepts) -> Variable {
    Variable { name, default, accepts, secret: true }
}

const fn number(name: &'static str, default: &'static str, min: u64, max: u64) -> Variable {
    variable(name, default, Accepts::Number { min, max })
}

const fn milliseconds(name: &'static str, default: &'static str) -> Variable {
    variable(name, default, Accepts::Milliseconds { min: 1, max: 86_400_000 })
}

const fn port(name: &'static str, default: &'static str) -> Variable {
    number(name, default, 1, 65_535)
}

const fn switch(name: &'static str, default: &'static str) -> Variable {
    variable(name, default, Accepts::Bool)
}

macro_rules! variables {
    ($($name:ident = $value:expr;)*) => {
        $(pub(super) const $name: Variable = $value;)*
        /// Every known variable, in the order of CONFIG.md.
        pub const VARIABLES: &[Variable] = &[$($name),*];
    };
}

const LEVELS: &[&str] = &["panic", "fatal", "error", "warn", "warning", "info", "debug", "trace"];
const PROXY_URL: Accepts = Accepts::Text("an http or https URL");
const FILE: Accepts = Accepts::Text("path of a PEM file");
const IP: Accepts = Accepts::Text("IP address");
const IGNORED: Accepts = Accepts::Text("anything");
const SEEDS: Accepts = Accepts::Text("comma-separated list of host[:port]");

variables! {
    LOG_LEVEL = variable("LOG_LEVEL", "info", Accepts::OneOf(LEVELS));
    LOG_FORMAT = variable("LOG_FORMAT", "text", Accepts::OneOf(&["text", "json"]));

    BIND_IP = variable("BIND_IP", "0.0.0.0", Accepts::Text("IP address, or a host name when not in a cluster"));
    PORT = port("PORT", "8080");
    MAX_IN_FLIGHT_REQUESTS = number("MAX_IN_FLIGHT_REQUESTS", "4096", 1, 1_000_000);

    DISCORD_API_URL = variable(
        "DISCORD_API_URL",
        "https://discord.com",
        Accepts::Text("http or https URL without credentials, path or query"),
    );
    OUTBOUND_IP = variable("OUTBOUND_IP", "unset", IP);
    REQUEST_TIMEOUT = milliseconds("REQUEST_TIMEOUT", "5000");
    DISABLE_HTTP_2 = switch("DISABLE_HTTP_2", "true");
    HTTPS_PROXY = secret("HTTPS_PROXY", "unset", PROXY_URL);
    HTTP_PROXY = secret("HTTP_PROXY", "unset", PROXY_URL);
    NO_PROXY = variable("NO_PROXY", "unset", Accepts::Text("comma-separated list of hosts, domains, IPs and CIDRs"));

    QUEUE_TIMEOUT = milliseconds("QUEUE_TIMEOUT", "60000");
    MAX_QUEUE_DEPTH = number("MAX_QUEUE_DEPTH", "1000", 1, 1_000_000);
    BOT_RATELIMIT_OVERRIDES = variable(
        "BOT_RATELIMIT_OVERRIDES",
        "empty",
        Accepts::Text("comma-separated list of <bot id>:<n> and sha256:<64 lower-case hex>:<n>, n from 1"),
    );
    DISABLE_401_LOCK = switch("DISABLE_401_LOCK", "false");

    MAX_RETRY_BODY_BYTES = number("MAX_RETRY_BODY_BYTES", "26214400", 0, 1_073_741_824);
    MAX_RETRY_CAPTURE_BYTES = number("MAX_RETRY_CAPTURE_BYTES", "268435456", 0, 1_099_511_627_776);
    MAX_BEARER_COUNT = number("MAX_BEARER_COUNT", "1024", 1, 1_000_000);
    MAX_CLIENT_STATES = number("MAX_CLIENT_STATES", "4096", 1, 1_000_000);
    MAX_BUCKET_STATES = number("MAX_BUCKET_STATES", "65536", 1, 10_000_000);

    ENABLE_METRICS = switch("ENABLE_METRICS", "true");
    METRICS_PORT = port("METRICS_PORT", "9000");
    ENABLE_PPROF = switch("ENABLE_PPROF", "false");
    PPROF_PORT = port("PPROF_PORT", "7654");

    CLUSTER_MEMBERS = variable("CLUSTER_MEMBERS", "empty", SEEDS);
    CLUSTER_DNS = variable("CLUSTER_DNS", "empty", SEEDS);
    CLUSTER_PORT = port("CLUSTER_PORT", "7946");
    CLUSTER_PEER_PORT = port("CLUSTER_PEER_PORT", "8443");
    CLUSTER_MAX_NODES = number("CLUSTER_MAX_NODES", "32", 1, 9500);
    CLUSTER_SECRET = secret("CLUSTER_SECRET", "required in a cluster", Accepts::Text("at least 32 characters"));
    CLUSTER_CA_FILE = variable("CLUSTER_CA_FILE", "required in a cluster", FILE);
    CLUSTER_CERT_FILE = variable("CLUSTER_CERT_FILE", "required in a cluster", FILE);
    CLUSTER_KEY_FILE = variable("CLUSTER_KEY_FILE", "required in a cluster", FILE);
    CLUSTER_ADVERTISE_IP = variable("CLUSTER_ADVERTISE_IP", "unset", IP);
    NODE_NAME = variable(
        "NODE_NAME",
        "host name and a random suffix",
        Accepts::Text("1 to 128 visible ASCII characters"),
    );

    BUFFER_SIZE = variable("BUFFER_SIZE", "ignored", IGNORED);
    DISABLE_GLOBAL_RATELIMIT_DETECTION = variable("DISABLE_GLOBAL_RATELIMIT_DETECTION", "ignored", IGNORED);
}

/// The variable of that exact name. Proxies are known in lower case too, as everywhere.
pub(super) fn find(name: &str) -> Option<&'static Variable> {
    let proxy = matches!(name, "https_proxy" | "http_proxy" | "no_proxy");
    VARIABLES.iter().find(|variable| variable.name == name || (proxy && variable.name.eq_ignore_ascii_case(name)))
}
