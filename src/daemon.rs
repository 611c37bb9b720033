//! The daemon's life: every listener bound, then served, then drained.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::{Instant, timeout_at};

use crate::config::Config;
use crate::front;
use crate::front::admission::{Admission, Phase};
use crate::front::direct::Direct;
use crate::front::handler::Handler;
use crate::front::socket::Patience;
use crate::observe::metrics::Metrics;

/// For the last answers once the drain's time is up.
const LAST_WORDS: Duration = Duration::from_millis(1500);

/// A daemon with every listener bound.
pub struct Daemon {
    /// How patient it is; what the documents say unless a test says otherwise.
    pub limits: Limits,
    listener: TcpListener,
    addresses: Addresses,
    handler: Arc<Handler>,
}

/// The times that no setting governs.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For a client to send a header block.
    pub head: Duration,
    /// After which an idle connection is closed.
    pub idle: Duration,
    /// For admitted requests to finish once the daemon is told to stop.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { head: Duration::from_secs(10), idle: Duration::from_secs(60), drain: Duration::from_secs(15) }
    }
}

/// Where the daemon listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The proxy itself.
    pub proxy: SocketAddr,
    /// `/metrics`, if it is on.
    pub metrics: Option<SocketAddr>,
    /// `/debug/pprof/`, if it is on.
    pub pprof: Option<SocketAddr>,
}

/// Binds every enabled listener. Call it within a runtime.
///
/// # Errors
///
/// In words for the operator, naming the variable that governs it: a port in use, or a way to Discord that cannot work.
pub fn bind(config: Config) -> Result<Daemon, String> {
    let listener = front::listen(config.bind_ip, config.port, "PORT")?;
    let addresses = Addresses { proxy: local(&listener)?, metrics: None, pprof: None };
    let handler = Handler {
        admission: Admission::new(config.max_in_flight_requests),
        metrics: Metrics::new(),
        scheduler: Direct::new(&config.upstream),
    };
    Ok(Daemon { limits: Limits::default(), listener, addresses, handler: Arc::new(handler) })
}

fn local(listener: &TcpListener) -> Result<SocketAddr, String> {
    listener.local_addr().map_err(|error| format!("cannot tell a listener's address: {error}"))
}

impl Daemon {
    /// Where it listens: the ports that were chosen where the settings say 0.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// What it counts.
    pub fn metrics(&self) -> Metrics {
        self.handler.metrics.clone()
    }

    /// Serves until `shutdown` completes, then drains; `hurry` ends it at once. Completes when every connection is
    /// closed or the drain's time is up.
    pub async fn run(self, shutdown: impl Future<Output = ()>, hurry: impl Future<Output = ()>) {
        let Self { limits, listener, handler, .. } = self;
        let admission = handler.admission.clone();
        let stop = admission.clone();
        let patience = Patience { head: limits.head, idle: limits.idle };
        let life = async {
            let front = front::accept(listener, handler, patience);
            let deadline = tokio::select! {
                () = front => return,
                deadline = async {
                    shutdown.await;
                    admission.advance(Phase::Draining);
                    let deadline = Instant::now() + limits.drain;
                    // Health must go on answering, so the listener stays open for as long as there is work.
                    _ = timeout_at(deadline, admission.emptied()).await;
                    deadline
                } => deadline,
            };
            // Answers may still be on their way to clients that read slowly.
            if timeout_at(deadline, admission.unfollowed()).await.is_ok() {
                return;
            }
            admission.advance(Phase::Stopping);
            _ = timeout_at(Instant::now() + LAST_WORDS, admission.unfollowed()).await;
        };
        tokio::select! {
            () = life => {}
            () = hurry => stop.advance(Phase::Stopping),
        }
    }
}
