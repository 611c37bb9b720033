//! Real processes on loopback addresses of their own, with certificates of one authority, in front of a fake Discord.
#![allow(unreachable_pub, reason = "the same file is part of several test binaries")]
#![allow(dead_code, reason = "each test binary uses the part it needs")]

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use fake_discord::{FakeDiscord, Script};
use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    SanType,
};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::support::PATIENCE;
use crate::support::client::{Answer, Client};

/// A certificate authority.
pub struct Ca(CertifiedIssuer<'static, KeyPair>);

impl Ca {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }
}

impl Ca {
    /// Writes its certificate and its key.
    pub fn write(&self, cert: &Path, key: &Path) {
        fs::write(cert, self.0.pem()).unwrap();
        fs::write(key, self.0.key().serialize_pem()).unwrap();
    }
}

/// The nodes of one test: every test has a network of its own, so that all can use the usual ports.
pub struct Town {
    ip: Box<dyn Fn(u8) -> Ipv4Addr + Send + Sync>,
    folder: tempfile::TempDir,
    pub ca: Ca,
    pub discord: FakeDiscord,
}

impl Town {
    /// Nodes in a network that no other test of this run has.
    pub async fn new(script: Script) -> Self {
        static NETWORKS: AtomicU8 = AtomicU8::new(1);
        let network = NETWORKS.fetch_add(1, Ordering::Relaxed);
        // Two runs on one machine do not meet.
        let run = u8::try_from(std::process::id() % 150).unwrap() + 64;
        Self::of(FakeDiscord::start(script).await, move |number| Ipv4Addr::new(127, run, network, number))
    }

    /// Nodes at addresses of the test's choice.
    pub fn of(discord: FakeDiscord, ip: impl Fn(u8) -> Ipv4Addr + Send + Sync + 'static) -> Self {
        Self { ip: Box::new(ip), folder: tempfile::tempdir().unwrap(), ca: Ca::new(), discord }
    }

    pub fn ip(&self, number: u8) -> Ipv4Addr {
        (self.ip)(number)
    }

    /// Starts a node with a good certificate, and waits until it serves.
    pub async fn node(&self, number: u8) -> Node {
        self.node_with(number, &[]).await
    }

    pub async fn node_with(&self, number: u8, settings: &[(&str, &str)]) -> Node {
        let node = self.launch(number, settings, &self.ca, |_| {});
        node.serves().await;
        node
    }

    /// Starts a node with the settings and the certificate a test wants, and waits for nothing.
    pub fn launch(
        &self,
        number: u8,
        settings: &[(&str, &str)],
        ca: &Ca,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Node {
        self.launch_in(None, number, settings, ca, change)
    }

    /// The same in a network namespace.
    pub fn launch_in(
        &self,
        namespace: Option<&str>,
        number: u8,
        settings: &[(&str, &str)],
        ca: &Ca,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Node {
        let ip = self.ip(number);
        let (ca_file, cert_file, key_file) = self.issue(number, ca, change);
        let seeds = format!("{},{}", self.ip(1), self.ip(2));
        let binary = env!("CARGO_BIN_EXE_nirn-proxy");
        let mut command = Command::new(if namespace.is_some() { "ip" } else { binary });
        if let Some(namespace) = namespace {
            // Replaced by the binary: signals reach it.
            command.args(["netns", "exec", namespace, binary]);
        }
        let mut child = command
            .env_clear()
            .env("BIND_IP", ip.to_string())
            .env("DISCORD_API_URL", self.discord.url())
            .env("NODE_NAME", format!("node-{number}"))
            .env("CLUSTER_MEMBERS", seeds)
            .env("CLUSTER_SECRET", "the secret of all nodes of this test")
            .env("CLUSTER_CA_FILE", ca_file)
            .env("CLUSTER_CERT_FILE", cert_file)
            .env("CLUSTER_KEY_FILE", key_file)
            .envs(settings.iter().copied())
            .current_dir(self.folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let log = Arc::default();
        follow(child.stdout.take().unwrap(), Arc::clone(&log));
        follow(child.stderr.take().unwrap(), Arc::clone(&log));
        Node { child, ip, log }
    }

    fn issue(&self, number: u8, ca: &Ca, change: impl FnOnce(&mut CertificateParams)) -> (PathBuf, PathBuf, PathBuf) {
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::IpAddress(IpAddr::V4(self.ip(number)))];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &ca.0).unwrap();
        let file = |name: &str, text: String| {
            let path = self.folder.path().join(format!("{number}-{name}.pem"));
            fs::write(&path, text).unwrap();
            path
        };
        (file("ca", ca.0.pem()), file("cert", cert.pem()), file("key", key.serialize_pem()))
    }
}

fn follow(stream: impl AsyncRead + Unpin + Send + 'static, log: Arc<Mutex<String>>) {
    tokio::spawn(async move {
        let mut lines = BufReader::new(stream).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let mut log = log.lock();
            log.push_str(&line);
            log.push('\n');
        }
    });
}

/// A node's process, killed when the test ends.
pub struct Node {
    pub child: Child,
    pub ip: Ipv4Addr,
    pub log: Arc<Mutex<String>>,
}

impl Node {
    pub fn address(&self) -> SocketAddr {
        (self.ip, 8080).into()
    }

    /// An answer to a GET with a bot's token and more header lines; none while nobody listens.
    pub async fn ask(&self, path: &str, token: &str, headers: &str) -> Answer {
        let mut client = Client::connect(self.address()).await;
        let head = format!("GET {path} HTTP/1.1\r\nhost: proxy\r\nauthorization: Bot {token}\r\n{headers}\r\n");
        client.send(head).await;
        client.answer().await
    }

    pub async fn health(&self) -> Option<u16> {
        let Ok(stream) = tokio::net::TcpStream::connect(self.address()).await else { return None };
        drop(stream);
        Some(Client::connect(self.address()).await.get("/nirn/healthz").await.status)
    }

    pub async fn serves(&self) {
        self.has_health(200).await;
    }

    pub async fn has_health(&self, status: u16) {
        let start = Instant::now();
        // Connections are queued before a node has joined, so that an answer may take its time.
        while !matches!(timeout(Duration::from_secs(2), self.health()).await, Ok(Some(now)) if now == status) {
            assert!(start.elapsed() < PATIENCE, "health {status} at {}:\n{}", self.ip, self.log.lock());
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// The sum of a metric's series.
    pub async fn metric(&self, name: &str) -> f64 {
        let answer = Client::connect((self.ip, 9000).into()).await.get("/metrics").await;
        let series = answer
            .text()
            .lines()
            .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') || rest.starts_with(' ')));
        series.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    /// How many requests failed for this reason.
    pub async fn failures(&self, reason: &str) -> f64 {
        self.metric(&format!("nirn_proxy_failures_total{{reason=\"{reason}\"}}")).await
    }

    pub async fn sees(&self, members: f64) {
        let start = Instant::now();
        while self.metric("nirn_proxy_cluster_members").await != members {
            assert!(start.elapsed() < PATIENCE, "{members} members at {}:\n{}", self.ip, self.log.lock());
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits for a line of the log.
    pub async fn says(&self, text: &str) {
        let start = Instant::now();
        while !self.log.lock().contains(text) {
            assert!(start.elapsed() < PATIENCE, "{text:?} at {}:\n{}", self.ip, self.log.lock());
            sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn signal(&self, name: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().await.unwrap().success());
    }

    /// Waits for the end: the exit code and what was logged.
    pub async fn ended(mut self) -> (Option<i32>, String) {
        let status = timeout(PATIENCE, self.child.wait()).await.expect("an end in time").unwrap();
        sleep(Duration::from_millis(50)).await;
        (status.code(), self.log.lock().clone())
    }
}
