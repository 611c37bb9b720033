//! The daemon's life: every listener bound, then served, then drained.

use std::future::pending;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::cluster::members::{Owner, View};
use crate::cluster::{self, Cluster, Joining, Occasion, peer, swim::Gossip};
use crate::config::Config;
use crate::front;
use crate::front::admission::{Admission, Phase};
use crate::front::handler::{Handler, Origin};
use crate::front::headers::Outgoing;
use crate::front::link::Link;
use crate::front::report::Report;
use crate::front::socket::Patience;
use crate::observe::admin;
use crate::observe::metrics::Metrics;
use crate::scheduler::Scheduler;
use crate::upstream::Upstream;

/// After a node has told the others that it leaves, so long they may go on sending what it owned.
const HEARSAY: Duration = Duration::from_millis(500);
/// For the last answers once the drain's time is up.
const LAST_WORDS: Duration = Duration::from_millis(1500);

/// A daemon with every listener bound.
pub struct Daemon {
    /// How patient it is; what the documents say unless a test says otherwise.
    pub limits: Limits,
    listeners: Listeners,
    addresses: Addresses,
    handler: Arc<Handler>,
    joining: Option<Joining>,
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
    /// Where members gossip with this one and where they reach its peer listener, in a cluster.
    pub cluster: Option<(SocketAddr, SocketAddr)>,
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
    let outgoing = Outgoing::new(&config.upstream.authority)?;
    let joined = config.cluster.as_ref().map(|settings| cluster::bind(&config, settings)).transpose()?;
    let (cluster, joining) = joined.map_or((Cluster::Alone, None), |(cluster, joining)| (cluster, Some(joining)));
    let addresses = listeners.addresses(joining.as_ref().map(Joining::addresses))?;
    let upstream = Upstream::new(&config.upstream)?;
    let scheduler = Scheduler::new(&config.scheduling, upstream);
    scheduler.check()?;
    let metrics = Metrics::new();
    let (admission, report) = (Admission::new(config.max_in_flight_requests), Report::new(metrics.clone()));
    let handler = Handler { admission, outgoing, metrics, report, scheduler, cluster };
    Ok(Daemon { limits: Limits::default(), listeners, addresses, handler: Arc::new(handler), joining })
}

impl Listeners {
    fn addresses(&self, cluster: Option<(SocketAddr, SocketAddr)>) -> Result<Addresses, String> {
        Ok(Addresses {
            proxy: local(&self.proxy)?,
            metrics: self.metrics.as_ref().map(local).transpose()?,
            pprof: self.pprof.as_ref().map(local).transpose()?,
            cluster,
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

    /// Joins the cluster, if there is one, and serves until `shutdown` completes, then drains; `hurry` ends it at once.
    /// Completes when every connection is closed or the drain's time is up.
    ///
    /// # Errors
    ///
    /// When the cluster cannot be joined, or a task that must live as long as the daemon ended before it.
    pub async fn run(self, shutdown: impl Future<Output = ()>, hurry: impl Future<Output = ()>) -> Result<(), String> {
        let Self { limits, listeners, handler, joining, .. } = self;
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
        let (mut shutdown, mut hurry) = (pin!(shutdown), pin!(hurry));
        let membership = joining.map(|joining| join(joining, &handler, &mut tasks)).transpose()?;
        let (gossip, closing) = membership.unzip();
        let joined = async {
            match &gossip {
                Some(gossip) => gossip.joined().await.map(|()| true),
                None => Ok(true),
            }
        };
        // A stop while it joins is a stop like any other: the others know it already.
        let joined = tokio::select! {
            joined = joined => joined,
            () = &mut shutdown => Ok(false),
            () = &mut hurry => return Ok(()),
        };
        let front = (joined == Ok(true)).then(|| {
            if gossip.is_some() {
                tracing::info!(members = handler.cluster.size(), "joined the cluster");
            }
            let patience = Patience { head: limits.head, idle: limits.idle };
            tasks.spawn(front::accept(listeners.proxy, handler.clone(), patience))
        });
        let stopped = async {
            if front.is_some() {
                shutdown.await;
            }
            let close = || {
                if let Some(front) = front {
                    front.abort();
                }
                // Dropped when there is nobody to tell.
                closing.map(|closing: watch::Sender<bool>| closing.send_replace(true));
            };
            let leave = async {
                if let Some(gossip) = &gossip {
                    leave(gossip, &handler, HEARSAY.min(limits.drain)).await;
                }
            };
            drain(&admission, limits.drain, leave, close).await;
        };
        tokio::select! {
            biased;
            () = hurry => admission.advance(Phase::Stopping),
            () = stopped => {}
            error = first_failure(&mut tasks) => return joined.and(Err(error)),
        }
        joined.map(drop)
    }
}

/// Serves peers, and then begins to join: whoever hears of this node can reach it. The sender closes the listener for
/// peers.
fn join(
    joining: Joining,
    handler: &Arc<Handler>,
    tasks: &mut JoinSet<()>,
) -> Result<(Arc<Gossip>, watch::Sender<bool>), String> {
    let members = joining.members();
    let (listener, tls, joining) = joining.split();
    let (close, closing) = watch::channel(false);
    let served = handler.clone();
    let handle = move |request| {
        // A stream that its peer gives up takes its future with it, so that no link has to say so.
        served.clone().handle(request, &Arc::new(Link::default()), Origin::Peer)
    };
    let heir = handler.clone();
    let take = move |message: &[u8]| heir.cluster.take(&heir.scheduler, message);
    let peers = peer::serve(listener, tls, members.clone(), closing, handle, take);
    let following = handler.admission.follow();
    tasks.spawn(async move {
        peers.await;
        // The last answer to a peer is out.
        drop(following);
        pending().await
    });
    tasks.spawn(follow(members, handler.clone()));
    let gossip = Arc::new(joining()?);
    let watched = gossip.clone();
    tasks.spawn(async move { watched.ended().await });
    Ok((gossip, close))
}

/// Tells what it concerns of every change of the membership, and hands over what moves to another node.
async fn follow(mut members: watch::Receiver<Arc<View>>, handler: Arc<Handler>) {
    let Handler { metrics, scheduler, cluster, .. } = &*handler;
    let mut before = members.borrow_and_update().clone();
    let mut telling = JoinSet::new();
    loop {
        metrics.members(before.list().len());
        tokio::select! {
            changed = members.changed() => {
                if changed.is_err() {
                    pending().await
                }
            }
            Some(_) = telling.join_next() => continue,
        }
        let now = members.borrow_and_update().clone();
        if now.list() != before.list() {
            scheduler.moved(|key| now.owner(key) == Owner::Local && before.owner(key) != Owner::Local);
        }
        // A node that leaves hands over by itself, so that it can wait for it.
        if now.has_local() {
            telling.spawn(cluster.hand_over(scheduler, &now, Occasion::Changed(before.list())));
        }
        before = now;
    }
}

/// Tells the others that this node leaves, and its heirs what it knows.
async fn leave(gossip: &Gossip, handler: &Handler, hearsay: Duration) {
    let heard = Instant::now() + hearsay;
    let mut members = gossip.members();
    let handed = async {
        let left = timeout_at(heard, members.wait_for(|members| !members.has_local())).await.is_ok_and(|it| it.is_ok());
        // Alone, it has no heirs.
        if left {
            let rest = members.borrow().clone();
            handler.cluster.hand_over(&handler.scheduler, &rest, Occasion::Left).await;
        }
    };
    tokio::join!(gossip.leave(), handed);
    sleep_until(heard).await;
}

/// Lets admitted requests finish for as long as `patience`, and ends what is left.
async fn drain(admission: &Admission, patience: Duration, leave: impl Future, close: impl FnOnce()) {
    let deadline = Instant::now() + patience;
    admission.advance(Phase::Draining);
    // Said when it is so, and not when it is asked for.
    tracing::info!("draining: a second signal stops at once");
    leave.await;
    // Health must go on answering, so the listener stays open for as long as there is work.
    _ = timeout_at(deadline, admission.emptied()).await;
    close();
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
