//! Two nodes of a cluster, and one more TLS hop of nginx.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    SanType,
};

use crate::servers::{BOT_ID, PROXY_CORE, Process, TOKEN, Way, nginx};

const PATIENCE: Duration = Duration::from_secs(20);
/// Requests on their way at a time while buckets are made.
const SIDE_BY_SIDE: usize = 100;

/// nginx that reaches `to` by another nginx, over TLS.
pub(crate) struct Hop {
    near: Process,
    _far: Process,
}

impl Hop {
    pub(crate) fn start(to: SocketAddr) -> Self {
        let upstream = |address: SocketAddr| {
            format!("upstream up {{ server {address}; keepalive 1100; keepalive_requests 100000000;")
        };
        let http = r#"proxy_http_version 1.1; proxy_set_header Connection "";"#;
        let far = format!("ssl_protocols TLSv1.3; location / {{ proxy_pass http://up; {http} }} }} {}", upstream(to));
        let far = nginx(&far, PROXY_CORE, Way::Tls);
        let near = format!(
            "location / {{ proxy_pass https://up; {http} proxy_ssl_protocols TLSv1.3; proxy_ssl_verify on;
             proxy_ssl_trusted_certificate {}; proxy_ssl_name localhost; }} }} {}",
            far.root().display(),
            upstream(far.address)
        );
        Self { near: nginx(&near, PROXY_CORE, Way::Plain), _far: far }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.near.address
    }
}

/// Two nodes that have found each other.
pub(crate) struct Nodes {
    nodes: Vec<Node>,
    _folder: tempfile::TempDir,
}

struct Node {
    child: Child,
    ip: Ipv4Addr,
}

impl Drop for Node {
    fn drop(&mut self) {
        // One that was told to stop is gone.
        self.child.kill().ok();
        ok(self.child.wait());
    }
}

impl Nodes {
    pub(crate) fn start(upstream: SocketAddr) -> Self {
        let folder = ok(tempfile::tempdir());
        let ca = authority();
        // Two runs on one machine do not meet.
        let run = (std::process::id() % 250) as u8;
        let ip = |number: u8| Ipv4Addr::new(127, 77, run, number);
        let nodes = Self {
            nodes: [1, 2].map(|number| Node::start(ip(number), ip(1), &ca, folder.path(), upstream)).into(),
            _folder: folder,
        };
        let until = Instant::now() + PATIENCE;
        while !nodes.nodes.iter().all(|node| node.metric("nirn_proxy_cluster_members") == 2.0) {
            assert!(Instant::now() < until, "the nodes did not find each other");
            std::thread::park_timeout(Duration::from_millis(20));
        }
        // The first second of an owner is paced with care.
        std::thread::park_timeout(Duration::from_secs(3));
        nodes
    }

    pub(crate) fn processes(&self) -> Vec<u32> {
        self.nodes.iter().map(|node| node.child.id()).collect()
    }

    /// Where a request of the bench's token makes no hop, and where it makes one.
    pub(crate) fn owner_and_other(&self) -> (SocketAddr, SocketAddr) {
        let [one, two] = &self.nodes[..] else { panic!("two nodes") };
        one.ask(1, 0);
        let hops = one.metric("nirn_proxy_requests_routed_sent") > 0.0;
        let (owner, other) = if hops { (two, one) } else { (one, two) };
        (owner.address(), other.address())
    }

    /// Makes so many buckets and stops their owner; how many milliseconds it took to hand them over, by its own word.
    pub(crate) fn hand_over(mut self, buckets: usize) -> f64 {
        let (owner, _) = self.owner_and_other();
        let at = self.nodes.iter().position(|node| node.address() == owner).unwrap_or_default();
        let mut node = self.nodes.swap_remove(at);
        for first in (0..buckets).step_by(SIDE_BY_SIDE) {
            node.ask(SIDE_BY_SIDE.min(buckets - first), first);
        }
        let told = Command::new("kill").arg(node.child.id().to_string()).status();
        assert!(told.is_ok_and(|status| status.success()), "a node that runs");
        let log = node.child.stderr.take().unwrap_or_else(|| panic!("a log"));
        for line in BufReader::new(log).lines() {
            let line = ok(line);
            let Ok(record) = serde_json::from_str::<serde_json::Value>(&line) else { continue };
            if let Some(took) = record.get("took_ms").and_then(serde_json::Value::as_f64) {
                assert!(record["credentials"].as_u64() >= Some(1), "{line}");
                return took;
            }
        }
        panic!("it did not say that it handed anything over");
    }
}

impl Node {
    fn start(
        ip: Ipv4Addr,
        seed: Ipv4Addr,
        ca: &CertifiedIssuer<'_, KeyPair>,
        folder: &Path,
        upstream: SocketAddr,
    ) -> Self {
        let name = ip.to_string();
        issue(ca, folder, &name, SanType::IpAddress(IpAddr::V4(ip)));
        let file = |name: String| folder.join(name);
        let child = Command::new("taskset")
            .args(["-c", PROXY_CORE, env!("CARGO_BIN_EXE_nirn-proxy")])
            .env_clear()
            .env("BIND_IP", &name)
            .env("NODE_NAME", &name)
            .env("LOG_FORMAT", "json")
            .env("DISCORD_API_URL", format!("http://{upstream}"))
            .env("BOT_RATELIMIT_OVERRIDES", format!("{BOT_ID}:1000000"))
            .env("CLUSTER_MEMBERS", seed.to_string())
            .env("CLUSTER_SECRET", "the secret of both nodes of this bench")
            .env("CLUSTER_CA_FILE", file("ca.pem".to_owned()))
            .env("CLUSTER_CERT_FILE", file(format!("{name}.pem")))
            .env("CLUSTER_KEY_FILE", file(format!("{name}.key")))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let node = Self { child: ok(child), ip };
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect(node.address()).is_err() {
            assert!(Instant::now() < until, "nothing listens on {}", node.address());
            std::thread::park_timeout(Duration::from_millis(20));
        }
        node
    }

    fn address(&self) -> SocketAddr {
        (self.ip, 8080).into()
    }

    /// So many requests side by side, each in a channel of its own.
    fn ask(&self, count: usize, first: usize) {
        let connections: Vec<TcpStream> = (first..first + count)
            .map(|channel| {
                let path = format!("/api/v10/channels/{}/messages", 100_000_000_000_000_000 + channel);
                let mut stream = ok(TcpStream::connect(self.address()));
                let head = format!("GET {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bot {TOKEN}\r\n");
                ok(stream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes()));
                stream
            })
            .collect();
        for mut stream in connections {
            let mut answer = String::new();
            ok(stream.read_to_string(&mut answer));
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
    }

    fn metric(&self, name: &str) -> f64 {
        let mut stream = ok(TcpStream::connect((self.ip, 9000)));
        ok(stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n"));
        let mut text = String::new();
        ok(stream.read_to_string(&mut text));
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or(f64::NAN)
    }
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    ok(CertifiedIssuer::self_signed(params, ok(KeyPair::generate())))
}

/// Writes a certificate, its key and that of its authority.
fn issue(ca: &CertifiedIssuer<'_, KeyPair>, folder: &Path, name: &str, subject: SanType) {
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![subject];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = ok(KeyPair::generate());
    let certificate = ok(params.signed_by(&key, ca));
    ok(fs::write(folder.join("ca.pem"), ca.pem()));
    ok(fs::write(folder.join(format!("{name}.pem")), certificate.pem()));
    ok(fs::write(folder.join(format!("{name}.key")), key.serialize_pem()));
}

fn ok<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
