//! Several nodes as one proxy: who they are, which of them owns a credential, and the way to it.
//!
//! The order of a start: a node's own certificate is checked, its sockets are bound, its peer listener serves, and only
//! then does it gossip, so that whoever hears of it can reach it. A stop goes the other way round: the others are told
//! first, and what still arrives is served.

pub mod members;
pub mod node;
pub mod owners;
pub mod peer;
pub mod seal;
pub mod seeds;
pub mod swim;
mod telling;
pub mod tls;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use http::Request;
use http_body::Body;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::watch;
use tokio::time::{Instant as Deadline, sleep, timeout, timeout_at};

use self::members::{Former, Key, Member, Owner, View};
use self::owners::Owners;
use self::peer::Peers;
use self::swim::{Gossip, Settings};
use self::tls::Pem;
use crate::config::{self, Config};
use crate::error::{ProxyError, Reason};
use crate::identity::{Identity, Kind};
use crate::route::{self, Route};
use crate::scheduler::handover::Handover;
use crate::scheduler::{Dispatched, Scheduler};
use crate::{agreed, clock, front};

/// Handovers that are remembered.
const HANDED: usize = 64;
/// What is under way when its credential moves has so long to land, that its answer may be told of; and how often that is
/// looked at.
const LANDING: Duration = Duration::from_millis(400);
const LANDING_CHECK: Duration = Duration::from_millis(5);
/// Between a node's handover and the news that it has left.
const LATELY: Duration = Duration::from_secs(1);
/// A hop that reaches a node which is no owner waits so long for it to hear that it is.
const AGREEMENT: Duration = Duration::from_secs(1);
/// Hops of one request: the first, and more while its credential moves.
const MAX_HOPS: u8 = 4;

/// Whether this process is one of several.
#[derive(Clone)]
pub enum Cluster {
    /// It is not: it owns everything.
    Alone,
    /// It is.
    Member(Arc<Membership>),
}

/// The names of those that handed something over, and when.
pub type Handed = VecDeque<(String, Instant)>;

/// A node's knowledge of its cluster, and its way to the others.
pub struct Membership {
    name: Arc<str>,
    owners: Owners,
    peers: Peers,
    /// The last nodes that handed credentials over.
    handed: watch::Sender<Handed>,
    /// Hashes of what they said.
    heard: Mutex<VecDeque<u128>>,
}

/// Where a request goes.
#[derive(Debug)]
pub enum Way {
    /// To Discord, from here; `unheard` if a former owner may have sent for the credential until a moment ago.
    Here {
        /// Whether it has not said what.
        unheard: bool,
    },
    /// To another node, as the hop of this number.
    There(Arc<Member>, u8),
}

/// A node with its sockets bound, that nobody knows yet.
pub struct Joining {
    /// The listener for peers.
    pub listener: TcpListener,
    /// The server's side of its TLS.
    pub tls: Arc<ServerConfig>,
    settings: Settings,
    socket: UdpSocket,
    publish: watch::Sender<Arc<View>>,
}

/// What ownership of a request is decided by: its credential, or, of unauthenticated ones, the interaction it belongs to.
/// All other unauthenticated requests have one owner together.
pub fn key(identity: &Identity, route: &Route, path: &str) -> Key {
    if identity.kind == Kind::Unauthenticated
        && route.interaction
        && let Some(token) = route::interaction_token(path)
    {
        let mut key = [0; 32];
        key.copy_from_slice(digest(&SHA256, &token).as_ref());
        return key;
    }
    identity.key
}

/// Checks the node's certificate and binds its sockets.
///
/// # Errors
///
/// In words that name the variable and the remedy.
pub fn bind(config: &Config, cluster: &config::Cluster) -> Result<(Cluster, Joining), String> {
    agreed::on(cluster.secret.expose().as_bytes());
    let advertised = cluster.advertise_ip.unwrap_or(config.bind_ip);
    if advertised.is_unspecified() {
        let variable = if cluster.advertise_ip.is_some() { "it" } else { "BIND_IP" };
        return Err(format!(
            "CLUSTER_ADVERTISE_IP: {variable} is {advertised}, which no peer can dial; set it to this node's address"
        ));
    }
    let pem = Pem {
        ca: read(&cluster.ca_file, "CLUSTER_CA_FILE")?,
        cert: read(&cluster.cert_file, "CLUSTER_CERT_FILE")?,
        key: read(&cluster.key_file, "CLUSTER_KEY_FILE")?,
    };
    let now = clock::unix_ms();
    let tls = tls::configure(&pem, advertised, now)?;
    let listener = front::listen(config.bind_ip, cluster.peer_port, "CLUSTER_PEER_PORT")?;
    let socket = swim::listen(config.bind_ip, cluster.port)?;
    let peer_port = listener.local_addr().map_err(|error| format!("CLUSTER_PEER_PORT: {error}"))?.port();
    let port = socket.local_addr().map_err(|error| format!("CLUSTER_PORT: {error}"))?.port();
    let gossip = SocketAddr::new(advertised, port);
    let settings = Settings {
        local: Member { name: config.node_name.as_str().into(), gossip, peer_port, generation: now },
        seeds: cluster.seeds.clone(),
        secret: cluster.secret.clone(),
        cap: cluster.max_nodes,
    };
    let (publish, members) = watch::channel(Arc::new(settings.first_view()));
    let local = (!config.bind_ip.is_unspecified()).then_some(config.bind_ip);
    let bound = config.scheduling.queue_timeout + config.scheduling.request_timeout;
    let membership = Membership::new(settings.local.name.clone(), members, Peers::new(tls.client, local, bound));
    Ok((Cluster::Member(Arc::new(membership)), Joining { listener, tls: tls.server, settings, socket, publish }))
}

fn read(file: &Path, variable: &str) -> Result<Vec<u8>, String> {
    // The text of a key must not get into an error.
    if file.as_os_str().as_encoded_bytes().iter().any(u8::is_ascii_control) || file.to_string_lossy().contains("-----")
    {
        return Err(format!("{variable}: takes the path of a PEM file, and got something else"));
    }
    std::fs::read(file).map_err(|error| format!("{variable}: cannot read {}: {error}", file.display()))
}

impl Joining {
    /// The members, as they will change.
    pub fn members(&self) -> watch::Receiver<Arc<View>> {
        self.publish.subscribe()
    }

    /// Where peers reach this node: gossip and peer port.
    pub fn addresses(&self) -> (SocketAddr, SocketAddr) {
        (self.settings.local.gossip, self.settings.local.peer())
    }

    /// Splits off what serves peers, which must run before anybody hears of this node.
    pub fn split(self) -> (TcpListener, Arc<ServerConfig>, impl FnOnce() -> Result<Gossip, String>) {
        (self.listener, self.tls, move || Gossip::start(self.settings, self.socket, self.publish))
    }
}

impl Membership {
    fn new(name: Arc<str>, members: watch::Receiver<Arc<View>>, peers: Peers) -> Self {
        Self { name, owners: Owners::new(members), peers, handed: watch::Sender::default(), heard: Mutex::default() }
    }

    /// The members now.
    fn members(&self) -> watch::Ref<'_, Arc<View>> {
        self.owners.members().borrow()
    }

    /// Whether this node owned a key until a moment ago: a peer that has not heard of the change may still send it.
    fn owned(&self, key: &Key) -> bool {
        self.members().owned(key, Instant::now())
    }

    /// Who is next to get what a former owner sent here, if this node has left too.
    fn next_heir(&self, key: &Key, owner: Arc<Member>) -> Option<Arc<Member>> {
        self.members().next_heir(key, owner, Instant::now())
    }

    /// Whether a message says something new: a node that had no answer in time says the same again, and what it sent and was
    /// refused must not count twice.
    fn is_new(&self, message: &[u8]) -> bool {
        let hash = agreed::hash(b"handover", &[message]);
        let mut heard = self.heard.lock();
        let new = !heard.contains(&hash);
        if new {
            heard.truncate(HANDED - 1);
            heard.push_front(hash);
        }
        new
    }

    /// The former owner of a key of this node's, if its word is to be waited for.
    fn awaited(&self, key: &Key) -> Option<Former> {
        let former = self.members().former_owner(key, Instant::now())?;
        let told = self.handed.borrow().iter().any(|handed| former.is_told_by(handed));
        (!told).then_some(former)
    }

    /// Waits for a former owner's word; false if its time is over, or the request's: what it knew is not known here.
    async fn told(&self, former: &Former, deadline: Deadline) -> bool {
        let mut handed = self.handed.subscribe();
        let told = handed.wait_for(|handed| handed.iter().any(|handed| former.is_told_by(handed)));
        timeout_at(deadline.min(former.until.into()), told).await.is_ok()
    }

    /// Waits for this node to hear that it owns a key, as a peer says by sending it.
    async fn agreed(&self, key: &Key, deadline: Deadline) -> Result<(), ProxyError> {
        let mut members = self.owners.members().clone();
        let agreed = members.wait_for(|members| !matches!(members.owner(key), Owner::Peer(_)));
        let agreed = timeout_at(deadline.min(Deadline::now() + AGREEMENT), agreed).await;
        agreed.map(drop).map_err(|_| ProxyError::Unavailable(Reason::ClusterRouting))
    }

    /// Whether another node handed something over a moment ago.
    fn handed_lately(&self, name: &str) -> bool {
        let now = Instant::now();
        self.handed.borrow().iter().any(|(from, at)| from == name && now.saturating_duration_since(*at) < LATELY)
    }

    fn hand_over(
        &self,
        scheduler: &Scheduler,
        known: &[Arc<Member>],
        taken: bool,
    ) -> Option<impl Future<Output = ()> + use<>> {
        let members = self.members().clone();
        if members.over_capacity() {
            return None;
        }
        let departing = scheduler.release(|key| match members.owner(key) {
            // Who has just handed it over is about to leave, which this node will hear of unless it has left too.
            Owner::Peer(owner) => !(taken && members.has_local() && self.handed_lately(&owner.name)),
            Owner::Local | Owner::OverCapacity => false,
        });
        let heirs: Vec<bool> =
            members.list().iter().map(|member| member.name != self.name && !known.contains(member)).collect();
        // A node that stays keeps its part of the budget.
        let leaves = !members.has_local() && known.is_empty();
        let invalid = if leaves { scheduler.invalid_requests() } else { Vec::new() };
        let (peers, from) = (self.peers.clone(), self.name.to_string());
        Some(async move {
            let landed = async {
                while !departing.has_landed() {
                    sleep(LANDING_CHECK).await;
                }
            };
            // What takes longer counts as if it had been answered.
            _ = timeout(LANDING, landed).await;
            let start = Instant::now();
            let credentials = departing.pack();
            let count = credentials.len();
            telling::tell(&members, heirs, credentials, &invalid, &peers, &from).await;
            // Now who waited may go there: what it waited for is known.
            drop(departing);
            if count > 0 {
                let took_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
                tracing::info!(credentials = count, took_ms, "handed credentials over to their new owners");
            }
        })
    }
}

impl Cluster {
    /// The way of a request that has made so many hops; `moved` if it has waited here, for what this node no longer owns.
    /// Waits while the credential moves, until the request's deadline.
    ///
    /// # Errors
    ///
    /// 503 when nobody owns it, or the nodes do not agree on who does; 408 past the deadline.
    pub async fn way(&self, key: &Key, hops: u8, moved: bool, deadline: Deadline) -> Result<Way, ProxyError> {
        let Self::Member(membership) = self else { return Ok(Way::Here { unheard: false }) };
        let mut unheard = false;
        let mut waited = false;
        loop {
            if std::mem::replace(&mut waited, true) && deadline <= Deadline::now() {
                return Err(ProxyError::QueueTimeout);
            }
            match membership.owners.owner(key) {
                Owner::Local => match membership.awaited(key) {
                    None => return Ok(Way::Here { unheard }),
                    // It may have moved on by the time that it is told.
                    Some(former) => unheard = !membership.told(&former, deadline).await,
                },
                Owner::Peer(peer) if hops == 0 || (hops < MAX_HOPS && (moved || membership.owned(key))) => {
                    return Ok(Way::There(peer, hops + 1));
                }
                Owner::Peer(peer) => {
                    // A first hop comes from an entry node that was mistaken, not from a former owner.
                    let handed_on = hops > 1 && hops < MAX_HOPS;
                    match handed_on.then(|| membership.next_heir(key, peer)).flatten() {
                        Some(heir) => return Ok(Way::There(heir, hops + 1)),
                        None => membership.agreed(key, deadline).await?,
                    }
                }
                Owner::OverCapacity => return Err(ProxyError::Unavailable(Reason::ClusterOverCapacity)),
            }
        }
    }

    /// More members than CLUSTER_MAX_NODES.
    pub fn over_capacity(&self) -> bool {
        match self {
            Self::Alone => false,
            Self::Member(membership) => membership.members().over_capacity(),
        }
    }

    /// How many nodes there are, this one included.
    pub fn size(&self) -> usize {
        match self {
            Self::Alone => 1,
            Self::Member(membership) => membership.members().list().len(),
        }
    }

    /// Takes in what another node hands over.
    pub fn take(&self, scheduler: &Scheduler, message: &[u8]) {
        let (Self::Member(membership), Some(handover)) = (self, Handover::decode(message)) else { return };
        if membership.is_new(message) {
            scheduler.unpack(&handover);
        }
        let (name, credentials) = (&handover.from, handover.credentials.len());
        tracing::info!(name, credentials, "another member handed over what it knew");
        membership.handed.send_modify(|handed| {
            handed.truncate(HANDED - 1);
            handed.push_front((handover.from, Instant::now()));
        });
    }

    /// Changes whenever another node has handed something over, which may belong to yet another one by now.
    pub fn handed(&self) -> watch::Receiver<Handed> {
        match self {
            Self::Alone => watch::Sender::default().subscribe(),
            Self::Member(membership) => membership.handed.subscribe(),
        }
    }

    /// Lets all credentials go that other nodes own, and tells these nodes what is known of them. All but the
    /// `known` ones are told even if that is nothing: they wait for it. What is let go is so before the future is first
    /// polled. `taken` if another node's handover is the occasion, and not a change of the membership: then a member
    /// gives nothing back.
    pub fn hand_over(
        &self,
        scheduler: &Scheduler,
        known: &[Arc<Member>],
        taken: bool,
    ) -> impl Future<Output = ()> + use<> {
        let handed = match self {
            Self::Alone => None,
            Self::Member(membership) => membership.hand_over(scheduler, known, taken),
        };
        async move {
            if let Some(handed) = handed {
                handed.await;
            }
        }
    }

    /// Sends a request on to its owner, see [`Peers::forward`].
    pub async fn forward<B>(&self, to: &Member, request: Request<B>, hop: u8) -> Result<Dispatched, ProxyError>
    where
        B: Body<Data = Bytes, Error: Into<ProxyError> + Send> + Send + 'static,
    {
        match self {
            Self::Alone => Err(ProxyError::Unavailable(Reason::ClusterRouting)),
            Self::Member(membership) => membership.peers.forward(to.peer(), request, hop).await,
        }
    }
}

#[cfg(test)]
mod tests;
