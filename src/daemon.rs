//! The daemon's life: every listener bound, then served, then drained.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::config::Config;
use crate::front;
use crate::front::admission::{Admission, Phase};
use crate::front::handler::Handler;
use crate::front::headers::Outgoing;
use crate::front::report::Report;
use crate::front::socket::Patience;
use crate::observe::admin;
use crate::observe::metrics::Metrics;
use crate::scheduler::Scheduler;
use crate::upstream::Upstream;

/// For the last answers once the drain's time is up.
const LAST_WORDS: Duration = Duration::from_millis(1500);

/// A daemon with every listener bound.
pub struct Daemon {
    /// How patient it is; what the documents say unless a test says otherwise.
    pub limits: Limits,
    listeners: Listeners,
    addresses: Addresses,
    handler: Arc<Handler>,
}

struct Listeners {
    proxy: TcpListener,
    metrics: Option<TcpListener>,
    pprof: Option<TcpListener>,
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
    let listen = |port: u16, variable: &str| front::listen(config.bind_ip, port, variable);
    let proxy = listen(config.port, "PORT")?;
    let metrics = config.metrics_port.map(|port| listen(port, "METRICS_PORT")).transpose()?;
    let pprof = config.pprof_port.map(|port| listen(port, "PPROF_PORT")).transpose()?;
    let listeners = Listeners { proxy, metrics, pprof };
    let addresses = listeners.addresses()?;
    let outgoing = Outgoing::new(&config.upstream.authority)?;
    let upstream = Upstream::new(&config.upstream)?;
    let scheduler = Scheduler::new(&config.scheduling, upstream);
    scheduler.check()?;
    let metrics = Metrics::new();
    let (admission, report) = (Admission::new(config.max_in_flight_requests), Report::new(metrics.clone()));
    let handler = Handler { admission, outgoing, metrics, report, scheduler };
    Ok(Daemon { limits: Limits::default(), listeners, addresses, handler: Arc::new(handler) })
}

impl Listeners {
    fn addresses(&self) -> Result<Addresses, String> {
        Ok(Addresses {
            proxy: local(&self.proxy)?,
            metrics: self.metrics.as_ref().map(local).transpose()?,
            pprof: self.pprof.as_ref().map(local).transpose()?,
        })
    }
}

fn local(listener: &TcpListener) -> Result<SocketAddr, String> {
    listener.local_addr().map_err(|error| format!("cannot tell a listener's address: {error}"))
}

impl Daemon {
    /// Where it listens: the ports that were chosen where the settings say 0.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Who brings requests to Discord.
    pub fn scheduler(&self) -> Scheduler {
        self.handler.scheduler.clone()
    }

    /// What it counts.
    pub fn metrics(&self) -> Metrics {
        self.handler.metrics.clone()
    }

    /// Serves until `shutdown` completes, then drains; `hurry` ends it at once. Completes when every connection is
    /// closed or the drain's time is up.
    ///
    /// # Errors
    ///
    /// When a task that must live as long as the daemon ended before it.
    pub async fn run(self, shutdown: impl Future<Output = ()>, hurry: impl Future<Output = ()>) -> Result<(), String> {
        let Self { limits, listeners, handler, .. } = self;
        let admission = handler.admission.clone();
        // Aborted when this future is done or dropped.
        let mut tasks = JoinSet::new();
        if let Some(listener) = listeners.metrics {
            tasks.spawn(admin::serve_metrics(listener, handler.metrics.clone(), pending()));
        }
        if let Some(listener) = listeners.pprof {
            tasks.spawn(admin::serve_pprof(listener, pending()));
        }
        let scheduler = handler.scheduler.clone();
        tasks.spawn(async move { scheduler.sweep().await });
        let patience = Patience { head: limits.head, idle: limits.idle };
        let front = tasks.spawn(front::accept(listeners.proxy, handler, patience));
        let stopped = async {
            shutdown.await;
            drain(&admission, limits.drain, || front.abort()).await;
        };
        tokio::select! {
            biased;
            () = hurry => admission.advance(Phase::Stopping),
            () = stopped => {}
            error = first_failure(&mut tasks) => return Err(error),
        }
        Ok(())
    }
}

/// Lets admitted requests finish for as long as `patience`, and ends what is left.
async fn drain(admission: &Admission, patience: Duration, close_listener: impl FnOnce()) {
    let deadline = Instant::now() + patience;
    admission.advance(Phase::Draining);
    // Health must go on answering, so the listener stays open for as long as there is work.
    _ = timeout_at(deadline, admission.emptied()).await;
    close_listener();
    // Answers may still be on their way to clients that read slowly.
    if timeout_at(deadline, admission.unfollowed()).await.is_err() {
        admission.advance(Phase::Stopping);
        _ = timeout_at(Instant::now() + LAST_WORDS, admission.unfollowed()).await;
    }
}

/// Waits for a task to end that should not; one that was told to does not count.
async fn first_failure(tasks: &mut JoinSet<()>) -> String {
    loop {
        match tasks.join_next().await {
            Some(Err(error)) if error.is_cancelled() => {}
            Some(Err(error)) => return format!("a background task failed: {error}"),
            Some(Ok(())) => return "a listener ended by itself".to_owned(),
            None => pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_background_task_that_ends_is_told_and_one_that_was_stopped_is_not() {
        let mut tasks = JoinSet::new();
        tasks.spawn(pending()).abort();
        tasks.spawn(async { panic!("on purpose") });
        let error = first_failure(&mut tasks).await;
        assert!(error.starts_with("a background task failed"), "{error}");
        tasks.spawn(async {});
        assert_eq!(first_failure(&mut tasks).await, "a listener ended by itself");
    }
}
