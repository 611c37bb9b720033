//! The processes that are measured: a fast upstream, plain nginx as a proxy, and nirn-proxy. Each ends with its guard.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The core of upstream and load.
pub(crate) const LOAD_CORE: &str = "1";
/// The core of the proxies.
pub(crate) const PROXY_CORE: &str = "0";
/// What the bots' token starts with: the base64 of the ID below.
pub(crate) const TOKEN: &str = "MTIzNDU2Nzg5MDEyMzQ1Njc4.bench.bench";
pub(crate) const BOT_ID: &str = "123456789012345678";

/// A process that is stopped when dropped.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: SocketAddr,
    folder: Option<PathBuf>,
}

/// How the proxies reach the upstream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Without TLS.
    Plain,
    /// HTTP/1.1 over TLS.
    Tls,
    /// HTTP/2 over TLS. nginx does not speak it to upstreams, and uses HTTP/1.1.
    Http2,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "TCP",
            Self::Tls => "TLS",
            Self::Http2 => "TLS, HTTP/2",
        }
    }
}

/// nginx answering by itself.
pub(crate) struct Upstream {
    process: Process,
    way: Way,
}

/// nginx passing on.
pub(crate) struct Nginx(Process);

/// nirn-proxy.
pub(crate) struct Proxy(Process);

impl Process {
    fn wait(child: Child, address: SocketAddr, folder: Option<PathBuf>) -> Self {
        let process = Self { child, address, folder };
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(address).is_err() {
            assert!(Instant::now() < until, "nothing listens on {address}");
            std::thread::park_timeout(Duration::from_millis(20));
        }
        process
    }

    /// The root that its certificate is checked against, if it has one.
    pub(crate) fn root(&self) -> PathBuf {
        self.folder.iter().collect::<PathBuf>().join("cert.pem")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let stopped =
            Command::new("kill").arg(self.child.id().to_string()).status().is_ok_and(|status| status.success());
        assert!(stopped && self.child.wait().is_ok(), "a measured process did not stop");
        if let Some(folder) = &self.folder {
            assert!(fs::remove_dir_all(folder).is_ok(), "a folder of a measured process is left");
        }
    }
}

impl Upstream {
    pub(crate) fn start(way: Way) -> Self {
        let body = "x".repeat(741);
        let server = format!(
            r#"location / {{
                add_header X-RateLimit-Bucket 0123456789abcdef; add_header X-RateLimit-Limit 1000000;
                add_header X-RateLimit-Remaining 999999; add_header X-RateLimit-Reset-After 1.000;
                default_type application/json; return 200 "{body}"; }}"#
        );
        Self { process: nginx(&server, LOAD_CORE, way), way }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.process.address
    }

    fn url(&self) -> String {
        let scheme = if self.way == Way::Plain { "http" } else { "https" };
        format!("{scheme}://{}", self.process.address)
    }

    fn root(&self) -> Option<PathBuf> {
        Some(self.process.root()).filter(|_| self.way != Way::Plain)
    }
}

impl Nginx {
    pub(crate) fn start(upstream: &Upstream) -> Self {
        let (scheme, trust) = match upstream.root() {
            Some(root) => (
                "https",
                format!(
                    "proxy_ssl_verify on; proxy_ssl_name localhost; proxy_ssl_trusted_certificate {};",
                    root.display()
                ),
            ),
            None => ("http", String::new()),
        };
        let server = format!(
            r#"location / {{ proxy_pass {scheme}://up; {trust} proxy_http_version 1.1; proxy_set_header Connection ""; }} }}
               upstream up {{ server {}; keepalive 1100; keepalive_requests 100000000;"#,
            upstream.address()
        );
        Self(nginx(&server, PROXY_CORE, Way::Plain))
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// The worker, which does the work.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let pid = self.0.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        children.split_whitespace().filter_map(|text| text.parse().ok()).chain([pid]).collect()
    }
}

impl Proxy {
    pub(crate) fn start(upstream: &Upstream) -> Self {
        let (port, metrics) = (free_port(), free_port());
        let child = Command::new("taskset")
            .args(["-c", PROXY_CORE, env!("CARGO_BIN_EXE_nirn-proxy")])
            .env_clear()
            .env("BIND_IP", "127.0.0.1")
            .env("PORT", port.to_string())
            .env("METRICS_PORT", metrics.to_string())
            .env("DISCORD_API_URL", upstream.url())
            .env("DISABLE_HTTP_2", (upstream.way != Way::Http2).to_string())
            .envs(upstream.root().map(|root| ("SSL_CERT_FILE", root)))
            .env("BOT_RATELIMIT_OVERRIDES", format!("{BOT_ID}:1000000"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = child.unwrap_or_else(|error| panic!("taskset: {error}"));
        Self(Process::wait(child, SocketAddr::from(([127, 0, 0, 1], port)), None))
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.address
    }

    pub(crate) fn processes(&self) -> Vec<u32> {
        vec![self.0.child.id()]
    }
}

/// With the rest of its `server` block.
pub(crate) fn nginx(server: &str, core: &str, way: Way) -> Process {
    let port = free_port();
    let folder = std::env::temp_dir().join(format!("nirn-bench-{port}"));
    fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let path = folder.join("nginx.conf");
    let at = folder.display();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary: String = temporary.iter().map(|name| format!("{name}_temp_path {at}/{name};")).collect();
    let tls = match way {
        Way::Plain => "",
        Way::Tls => "ssl",
        Way::Http2 => "ssl http2",
    };
    let keys = if way == Way::Plain { String::new() } else { certificate(&folder) };
    let config = format!(
        r"daemon off; worker_processes 1; pid {at}/pid; error_log /dev/null; worker_rlimit_nofile 16384;
          events {{ worker_connections 8192; }}
          http {{ access_log off; keepalive_requests 100000000; {temporary}
            server {{ listen 127.0.0.1:{port} {tls} backlog=4096; {keys} {server} }} }}"
    );
    let mut file = fs::File::create(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    file.write_all(config.as_bytes()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let child = Command::new("taskset")
        .args(["-c", core, "nginx", "-c"])
        .arg(&path)
        .args(["-e", "/dev/null"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let child = child.unwrap_or_else(|error| panic!("nginx (Debian: nginx-light): {error}"));
    Process::wait(child, SocketAddr::from(([127, 0, 0, 1], port)), Some(folder))
}

/// Makes a certificate in `folder`, and what nginx is told of it.
fn certificate(folder: &Path) -> String {
    // nginx does not look for addresses in certificates
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned(), "localhost".to_owned()]);
    let made = made.unwrap_or_else(|error| panic!("no certificate: {error}"));
    let (cert, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    for (path, text) in [(&cert, made.cert.pem()), (&key, made.signing_key.serialize_pem())] {
        fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    format!("ssl_certificate {}; ssl_certificate_key {};", cert.display(), key.display())
}

fn free_port() -> u16 {
    let bound = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    bound.unwrap_or_else(|error| panic!("no free port: {error}")).port()
}
