//! From (name, value) pairs to a [`Config`], all problems at once.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use tracing::Level;

use super::read::{Reader, is_host_name};
use super::table::{self, Variable};
use super::{Cluster, Config, Log, Problem, Proxy, Scheduling, Secret, Seeds, Upstream};

/// Discord bans an IP at 10,000 invalid requests in 10 minutes; the rest is room for what is under way.
const INVALID_REQUEST_LIMIT: usize = 9500;
const INVALID_REQUEST_WINDOW: Duration = Duration::from_secs(600);
const SECRET_LENGTH: usize = 32;

/// The values of the variables as they were given, before anything is read into them. Empty ones are gone.
#[derive(Default, Deserialize)]
struct Raw {
    log_level: Option<String>,
    log_format: Option<String>,
    bind_ip: Option<String>,
    port: Option<String>,
    max_in_flight_requests: Option<String>,
    discord_api_url: Option<String>,
    outbound_ip: Option<String>,
    request_timeout: Option<String>,
    disable_http_2: Option<String>,
    https_proxy: Option<String>,
    http_proxy: Option<String>,
    no_proxy: Option<String>,
    queue_timeout: Option<String>,
    max_queue_depth: Option<String>,
    bot_ratelimit_overrides: Option<String>,
    disable_401_lock: Option<String>,
    max_retry_body_bytes: Option<String>,
    max_retry_capture_bytes: Option<String>,
    max_bearer_count: Option<String>,
    max_client_states: Option<String>,
    max_bucket_states: Option<String>,
    enable_metrics: Option<String>,
    metrics_port: Option<String>,
    enable_pprof: Option<String>,
    pprof_port: Option<String>,
    cluster_members: Option<String>,
    cluster_dns: Option<String>,
    cluster_port: Option<String>,
    cluster_peer_port: Option<String>,
    cluster_max_nodes: Option<String>,
    cluster_secret: Option<String>,
    cluster_ca_file: Option<String>,
    cluster_cert_file: Option<String>,
    cluster_key_file: Option<String>,
    cluster_advertise_ip: Option<String>,
    node_name: Option<String>,
    buffer_size: Option<String>,
    disable_global_ratelimit_detection: Option<String>,
}

impl Config {
    /// Reads settings from (name, value) pairs; of one name the last pair counts. Unknown names are ignored.
    ///
    /// BIND_IP has to be an IP address here: only [`Config::load`] resolves host names.
    pub fn from_vars(vars: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self, Vec<Problem>> {
        Self::from_vars_on(vars, "nirn-proxy".to_owned(), |_| None)
    }

    /// The same on a host: what NODE_NAME is if it is unset, and how to find the address of a name in BIND_IP.
    pub(super) fn from_vars_on(
        vars: impl IntoIterator<Item = (OsString, OsString)>,
        node_name: String,
        resolve: impl FnOnce(&str) -> Option<IpAddr>,
    ) -> Result<Self, Vec<Problem>> {
        let mut reader = Reader::default();
        let mut raw = collect(vars, &mut reader);
        raw.node_name.get_or_insert(node_name);
        let config = raw.read(&mut reader, resolve);
        if reader.problems.is_empty() { Ok(config) } else { Err(reader.problems) }
    }
}

/// Picks the known variables with a value. Names are matched as they are: `port` is not PORT.
fn collect(vars: impl IntoIterator<Item = (OsString, OsString)>, reader: &mut Reader) -> Raw {
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in vars {
        let Ok(name) = name.into_string() else { continue };
        let Some(variable) = table::find(&name) else { continue };
        match value.into_string() {
            Ok(value) if value.trim().is_empty() => {
                known.remove(&name);
            }
            // A blank may be part of a secret; anywhere else it is a slip of the hand.
            Ok(value) if variable.name == table::CLUSTER_SECRET.name => {
                known.insert(name, value);
            }
            Ok(value) => {
                known.insert(name, value.trim().to_owned());
            }
            Err(_) => reader.problems.push(Problem::refused(variable, ", got text that is not UTF-8")),
        }
    }
    for variable in [table::HTTPS_PROXY, table::HTTP_PROXY, table::NO_PROXY] {
        if let Some(lower) = known.remove(&variable.name.to_ascii_lowercase()) {
            known.entry(variable.name.to_owned()).or_insert(lower);
        }
    }
    // Every field is an optional text and every name is there once: nothing is left that could fail.
    envy::from_iter(known).unwrap_or_default()
}

impl Raw {
    fn read(&self, reader: &mut Reader, resolve: impl FnOnce(&str) -> Option<IpAddr>) -> Config {
        let cluster = self.cluster(reader);
        let request_timeout = reader.duration(self.request_timeout.as_deref(), &table::REQUEST_TIMEOUT);
        let upstream = self.upstream(reader, request_timeout);
        Config {
            log: self.log(reader),
            bind_ip: self.bind_ip(reader, cluster.is_some(), resolve),
            port: reader.port(self.port.as_deref(), &table::PORT),
            scheduling: self.scheduling(reader, request_timeout, cluster.as_ref()),
            max_in_flight_requests: reader
                .count(self.max_in_flight_requests.as_deref(), &table::MAX_IN_FLIGHT_REQUESTS),
            metrics_port: optional_port(
                reader,
                (self.enable_metrics.as_deref(), &table::ENABLE_METRICS),
                (self.metrics_port.as_deref(), &table::METRICS_PORT),
            ),
            pprof_port: optional_port(
                reader,
                (self.enable_pprof.as_deref(), &table::ENABLE_PPROF),
                (self.pprof_port.as_deref(), &table::PPROF_PORT),
            ),
            node_name: self.node_name(reader),
            warnings: self.warnings(&upstream),
            upstream,
            cluster,
        }
    }

    fn log(&self, reader: &mut Reader) -> Log {
        let level = match reader.word(self.log_level.as_deref(), &table::LOG_LEVEL) {
            "panic" | "fatal" | "error" => Level::ERROR,
            "warn" | "warning" => Level::WARN,
            "debug" => Level::DEBUG,
            "trace" => Level::TRACE,
            _ => Level::INFO,
        };
        let json = reader.word(self.log_format.as_deref(), &table::LOG_FORMAT) == "json";
        Log { level, json }
    }

    fn bind_ip(&self, reader: &mut Reader, clustered: bool, resolve: impl FnOnce(&str) -> Option<IpAddr>) -> IpAddr {
        let text = self.bind_ip.as_deref().unwrap_or(table::BIND_IP.default);
        // Peers dial what a node binds, so in a cluster a name is no answer.
        let named = || if !clustered && is_host_name(text) { resolve(text) } else { None };
        text.parse().ok().or_else(named).unwrap_or_else(|| {
            reader.refuse(&table::BIND_IP, text);
            Ipv4Addr::UNSPECIFIED.into()
        })
    }

    fn upstream(&self, reader: &mut Reader, request_timeout: Duration) -> Upstream {
        let (https, authority) = reader.base_url(self.discord_api_url.as_deref(), &table::DISCORD_API_URL);
        Upstream {
            https,
            authority,
            outbound_ip: reader.ip(self.outbound_ip.as_deref(), &table::OUTBOUND_IP),
            request_timeout,
            http2: !reader.switch(self.disable_http_2.as_deref(), &table::DISABLE_HTTP_2),
            proxy: Proxy {
                http: reader.proxy_url(self.http_proxy.as_deref(), &table::HTTP_PROXY),
                https: reader.proxy_url(self.https_proxy.as_deref(), &table::HTTPS_PROXY),
                no: self.no_proxy.clone(),
            },
            extra_roots: Vec::new(),
        }
    }

    fn scheduling(&self, reader: &mut Reader, request_timeout: Duration, cluster: Option<&Cluster>) -> Scheduling {
        Scheduling {
            queue_timeout: reader.duration(self.queue_timeout.as_deref(), &table::QUEUE_TIMEOUT),
            request_timeout,
            max_queue_depth: reader.count(self.max_queue_depth.as_deref(), &table::MAX_QUEUE_DEPTH),
            max_retry_body_bytes: reader.number(self.max_retry_body_bytes.as_deref(), &table::MAX_RETRY_BODY_BYTES),
            max_retry_capture_bytes: reader
                .number(self.max_retry_capture_bytes.as_deref(), &table::MAX_RETRY_CAPTURE_BYTES),
            max_bearer_count: reader.count(self.max_bearer_count.as_deref(), &table::MAX_BEARER_COUNT),
            max_client_states: reader.count(self.max_client_states.as_deref(), &table::MAX_CLIENT_STATES),
            max_bucket_states: reader.count(self.max_bucket_states.as_deref(), &table::MAX_BUCKET_STATES),
            overrides: reader.overrides(self.bot_ratelimit_overrides.as_deref(), &table::BOT_RATELIMIT_OVERRIDES),
            disable_401_lock: reader.switch(self.disable_401_lock.as_deref(), &table::DISABLE_401_LOCK),
            // The nodes of a cluster may share one IP, and Discord counts by IP.
            invalid_request_limit: cluster
                .map_or(INVALID_REQUEST_LIMIT, |cluster| (INVALID_REQUEST_LIMIT / cluster.max_nodes.max(1)).max(1)),
            invalid_request_window: INVALID_REQUEST_WINDOW,
        }
    }

    /// Reads every cluster variable, and asks for the required ones only if clustering is on.
    fn cluster(&self, reader: &mut Reader) -> Option<Cluster> {
        let port = reader.port(self.cluster_port.as_deref(), &table::CLUSTER_PORT);
        let peer_port = reader.port(self.cluster_peer_port.as_deref(), &table::CLUSTER_PEER_PORT);
        let max_nodes = reader.count(self.cluster_max_nodes.as_deref(), &table::CLUSTER_MAX_NODES);
        let advertise_ip = reader.ip(self.cluster_advertise_ip.as_deref(), &table::CLUSTER_ADVERTISE_IP);
        let members = reader.seeds(self.cluster_members.as_deref(), &table::CLUSTER_MEMBERS, port);
        let dns = reader.seeds(self.cluster_dns.as_deref(), &table::CLUSTER_DNS, port);
        let seeds = match (&self.cluster_members, &self.cluster_dns) {
            (Some(_), _) => Seeds::Members(members),
            (None, Some(_)) => Seeds::Dns(dns),
            (None, None) => return None,
        };
        Some(Cluster {
            seeds,
            port,
            peer_port,
            max_nodes,
            secret: self.secret(reader),
            ca_file: required_file(reader, self.cluster_ca_file.as_deref(), &table::CLUSTER_CA_FILE),
            cert_file: required_file(reader, self.cluster_cert_file.as_deref(), &table::CLUSTER_CERT_FILE),
            key_file: required_file(reader, self.cluster_key_file.as_deref(), &table::CLUSTER_KEY_FILE),
            advertise_ip,
        })
    }

    fn secret(&self, reader: &mut Reader) -> Secret {
        let secret = self.cluster_secret.clone().unwrap_or_default();
        if secret.is_empty() {
            reader.problems.push(Problem::missing(&table::CLUSTER_SECRET));
        } else if secret.chars().count() < SECRET_LENGTH {
            reader.refuse(&table::CLUSTER_SECRET, &secret);
        }
        Secret(secret)
    }

    fn node_name(&self, reader: &mut Reader) -> String {
        let name = self.node_name.as_deref().unwrap_or_default();
        if !(1..=128).contains(&name.len()) || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            reader.refuse(&table::NODE_NAME, name);
        }
        name.to_owned()
    }

    fn warnings(&self, upstream: &Upstream) -> Vec<String> {
        let ignored = [
            (&self.buffer_size, table::BUFFER_SIZE, "queues are bounded by MAX_QUEUE_DEPTH"),
            (
                &self.disable_global_ratelimit_detection,
                table::DISABLE_GLOBAL_RATELIMIT_DETECTION,
                "global limits that are not 50 are set by BOT_RATELIMIT_OVERRIDES",
            ),
        ];
        let mut warnings: Vec<String> = ignored
            .into_iter()
            .filter(|(given, ..)| given.is_some())
            .map(|(_, variable, instead)| {
                format!("{} is a setting of nirn-proxy 1.x and is ignored: {instead}", variable.name)
            })
            .collect();
        if !upstream.https && !is_loopback(upstream.authority.host()) {
            warnings.push(format!(
                "DISCORD_API_URL is plain http to {}: tokens and messages can be read on the way",
                upstream.authority
            ));
        }
        warnings
    }
}

fn optional_port(
    reader: &mut Reader,
    enable: (Option<&str>, &Variable),
    port: (Option<&str>, &Variable),
) -> Option<u16> {
    let port = reader.port(port.0, port.1);
    reader.switch(enable.0, enable.1).then_some(port)
}

fn required_file(reader: &mut Reader, given: Option<&str>, variable: &Variable) -> PathBuf {
    if given.is_none() {
        reader.problems.push(Problem::missing(variable));
    }
    PathBuf::from(given.unwrap_or_default())
}

fn is_loopback(host: &str) -> bool {
    let name = host.eq_ignore_ascii_case("localhost");
    let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name || ip.is_ok_and(|ip| ip.is_loopback())
}
