//! What tests of the whole proxy share: a node on a free port, a raw HTTP client, an upstream that does as it is told.
#![allow(unreachable_pub, reason = "the same file is part of several test binaries")]
#![allow(dead_code, reason = "each test binary uses the part it needs")]
#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test")]

pub mod calls;
pub mod client;
pub mod process;
pub mod upstream;

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use nirn_proxy::config::{Config, Proxy};
use nirn_proxy::daemon::{Addresses, Daemon, bind};
use nirn_proxy::observe::metrics::Metrics;
use nirn_proxy::scheduler::Scheduler;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Longer than anything a test waits for on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A proxy of the test's own.
pub struct Node {
    pub addresses: Addresses,
    pub metrics: Metrics,
    pub scheduler: Scheduler,
    shutdown: Option<oneshot::Sender<()>>,
    hurry: Option<oneshot::Sender<()>>,
    pub task: JoinHandle<Result<(), String>>,
}

/// The settings of a node on free ports of the loopback whose Discord is `upstream`.
pub fn config(upstream: SocketAddr) -> Config {
    let mut config = Config::from_vars([]).unwrap();
    config.bind_ip = Ipv4Addr::LOCALHOST.into();
    config.port = 0;
    config.metrics_port = None;
    config.upstream.https = false;
    config.upstream.authority = upstream.to_string().parse().unwrap();
    config.upstream.proxy = Proxy::default();
    config
}

impl Node {
    /// With the usual settings.
    pub fn start(upstream: SocketAddr) -> Self {
        Self::start_with(config(upstream), |_| {})
    }

    /// With these, and with what a test changes about the bound daemon.
    pub fn start_with(config: Config, change: impl FnOnce(&mut Daemon)) -> Self {
        let mut daemon = bind(config).unwrap();
        change(&mut daemon);
        let (addresses, metrics) = (daemon.addresses(), daemon.metrics());
        let scheduler = daemon.scheduler();
        let (shutdown, on_shutdown) = oneshot::channel::<()>();
        let (hurry, on_hurry) = oneshot::channel::<()>();
        let wait = |signal: oneshot::Receiver<()>| async move {
            if signal.await.is_err() {
                std::future::pending().await
            }
        };
        let task = tokio::spawn(daemon.run(wait(on_shutdown), wait(on_hurry)));
        Self { addresses, metrics, scheduler, shutdown: Some(shutdown), hurry: Some(hurry), task }
    }

    pub fn address(&self) -> SocketAddr {
        self.addresses.proxy
    }

    /// What a first SIGTERM does.
    pub fn shut_down(&mut self) {
        self.shutdown.take().unwrap().send(()).unwrap();
    }

    /// What a second one does.
    pub fn hurry(&mut self) {
        self.hurry.take().unwrap().send(()).unwrap();
    }

    /// The sum of all series of a metric whose line contains `part`.
    pub fn sum(&self, name: &str, part: &str) -> f64 {
        let (_, text) = self.metrics.render().unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(part));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    pub fn failures(&self, reason: &str) -> f64 {
        self.sum("nirn_proxy_failures_total", &format!("\"{reason}\""))
    }

    pub fn open(&self) -> f64 {
        self.sum("nirn_proxy_open_connections", "")
    }
}

/// Waits until something is so.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"));
}
