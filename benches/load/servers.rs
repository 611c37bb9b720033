//! The processes that are measured: a fast upstream, plain nginx as a proxy, and nirn-proxy. Each ends with its guard.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The core of upstream and load.
pub(crate) const LOAD_CORE: &str = "1";
/// The core of the proxies.
const PROXY_CORE: &str = "0";
/// What the bots' token starts with: the base64 of the ID below.
pub(crate) const TOKEN: &str = "MTIzNDU2Nzg5MDEyMzQ1Njc4.bench.bench";
const BOT_ID: &str = "123456789012345678";

/// A process that is stopped when dropped.
struct Process {
    child: Child,
    address: SocketAddr,
    folder: Option<PathBuf>,
}

/// nginx answering by itself.
pub(crate) struct Upstream(Process);

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
    pub(crate) fn start() -> Self {
        let body = "x".repeat(741);
        let server = format!(
            r#"location / {{
                add_header X-RateLimit-Bucket 0123456789abcdef; add_header X-RateLimit-Limit 1000000;
                add_header X-RateLimit-Remaining 999999; add_header X-RateLimit-Reset-After 1.000;
                default_type application/json; return 200 "{body}"; }}"#
        );
        Self(nginx(&server, LOAD_CORE))
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.address
    }
}

impl Nginx {
    pub(crate) fn start(upstream: SocketAddr) -> Self {
        let server = format!(
            r#"location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; }} }}
               upstream up {{ server {upstream}; keepalive 1100; keepalive_requests 100000000;"#
        );
        Self(nginx(&server, PROXY_CORE))
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
    pub(crate) fn start(upstream: SocketAddr) -> Self {
        let (port, metrics) = (free_port(), free_port());
        let child = Command::new("taskset")
            .args(["-c", PROXY_CORE, env!("CARGO_BIN_EXE_nirn-proxy")])
            .env_clear()
            .env("BIND_IP", "127.0.0.1")
            .env("PORT", port.to_string())
            .env("METRICS_PORT", metrics.to_string())
            .env("DISCORD_API_URL", format!("http://{upstream}"))
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

    pub(crate) fn resident_mib(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
        line.split_whitespace().next().and_then(|text| text.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
    }
}

fn nginx(server: &str, core: &str) -> Process {
    let port = free_port();
    let folder = std::env::temp_dir().join(format!("nirn-bench-{port}"));
    fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let path = folder.join("nginx.conf");
    let at = folder.display();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary: String = temporary.iter().map(|name| format!("{name}_temp_path {at}/{name};")).collect();
    let config = format!(
        r"daemon off; worker_processes 1; pid {at}/pid; error_log /dev/null; worker_rlimit_nofile 16384;
          events {{ worker_connections 8192; }}
          http {{ access_log off; keepalive_requests 100000000; {temporary}
            server {{ listen 127.0.0.1:{port} backlog=4096; {server} }} }}"
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

fn free_port() -> u16 {
    let bound = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    bound.unwrap_or_else(|error| panic!("no free port: {error}")).port()
}
