//! Several nodes as one proxy: who they are, which of them owns a credential, and the way to it.
//!
//! The order of a start: a node's own certificate is checked, its sockets are bound, its peer listener serves, and only
//! then does it gossip, so that whoever hears of it can reach it. A stop goes the other way round: the others are told
//! first, and what still arrives is served.

mod heard;
pub mod members;
pub mod node;
pub mod owners;
pub mod peer;
pub mod seal;
pub mod seeds;
pub mod swim;
mod telling;
pub mod tls;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use http::Request;
use http_body::Body;
use rustls::ServerConfig;
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::watch;
use tokio::time::{Instant as Deadline, timeout_at};

use self::heard::Heard;
use self::members::{Former, Key, Member, Members, Owner, View};
use self::owners::Owners;
use self::peer::Peers;
use self::swim::{Gossip, Settings};
use self::tls::Pem;
use crate::config::{self, Config};
use crate::error::{ProxyError, Reason};
use crate::identity::{Identity, Kind};
use crate::route::{self, Route};
use crate::scheduler::{Dispatched, Scheduler};
use crate::{agreed, clock, front};

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

/// Why a node hands credentials over.
#[derive(Debug)]
pub enum Occasion<'a> {
    /// Others came or went; these were the members before.
    Changed(&'a [Arc<Member>]),
    /// It has left.
    Left,
}

/// A node's knowledge of its cluster, and its way to the others.
pub struct Membership {
    name: Arc<str>,
    owners: Owners,
    peers: Peers,
    heard: Heard,
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
        Self { name, owners: Owners::new(members), peers, heard: Heard::default() }
    }

    /// The members now.
    fn members(&self) -> watch::Ref<'_, Arc<View>> {
        self.owners.members().borrow()
    }

    /// Whether this node owned a key until a moment ago: a peer that has not heard of the change may still send it.
    fn owned(&self, key: &Key) -> bool {
        self.members().owned(key, Instant::now())
    }

    /// The owner of a key, and whoever comes after it if this node has left, hears no gossip any more, and knows from a
    /// handover that the owner has left too.
    fn standing(&self, key: &Key, owner: Arc<Member>) -> Arc<Member> {
        let view = self.members().clone();
        if view.left().is_none() || !self.heard.is_gone(&owner) {
            return owner;
        }
        match self.heirs(&view).owner(key) {
            Owner::Peer(next) => next,
            Owner::Local | Owner::OverCapacity => owner,
        }
    }

    /// Who may get what is not this node's: all members, or those that are not known to have left if this node hears no
    /// gossip any more.
    fn heirs(&self, view: &View) -> Arc<Members> {
        match view.left() {
            None => view.members(),
            Some(_) => Arc::new(view.without(view.epoch(), |member| self.heard.is_gone(member))),
        }
    }

    /// Who is next to get what was sent here, by a `former` owner or not, if this node has left.
    fn next_heir(&self, key: &Key, owner: Arc<Member>, former: bool) -> Option<Arc<Member>> {
        self.members().next_heir(key, owner, former, Instant::now())
    }

    /// A former owner of a key of this node's whose word is to be waited for.
    fn awaited(&self, key: &Key) -> Option<Former> {
        let members = self.members();
        members.former_owners(key, Instant::now()).find(|former| !self.heard.has_told(former))
    }

    /// Waits for this node to hear that it owns a key, as a peer says by sending it.
    async fn agreed(&self, key: &Key, deadline: Deadline) -> Result<(), ProxyError> {
        let mut members = self.owners.members().clone();
        let agreed = members.wait_for(|members| !matches!(members.owner(key), Owner::Peer(_)));
        let agreed = timeout_at(deadline.min(Deadline::now() + AGREEMENT), agreed).await;
        agreed.map(drop).map_err(|_| ProxyError::Unavailable(Reason::ClusterRouting))
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
                    Some(former) => unheard |= !membership.heard.wait(&former, deadline).await,
                },
                Owner::Peer(peer) if hops == 0 && !moved => return Ok(Way::There(peer, 1)),
                Owner::Peer(peer) => {
                    let peer = membership.standing(key, peer);
                    if hops < MAX_HOPS && (moved || membership.owned(key)) {
                        return Ok(Way::There(peer, hops + 1));
                    }
                    // A first hop comes from where the request entered: that node was mistaken, or has just lost the key.
                    let heir = (hops < MAX_HOPS).then(|| membership.next_heir(key, peer, hops > 1));
                    match heir.flatten() {
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

    /// Takes in what another node hands over. When the future is done, what is yet another one's by now has been passed on:
    /// then all of it has arrived, and whoever handed it over may say so. False if it could not be passed on.
    pub fn take(&self, scheduler: &Scheduler, message: &[u8]) -> impl Future<Output = bool> + use<> {
        let taken = match self {
            Self::Alone => None,
            Self::Member(membership) => membership.take(scheduler, message),
        };
        or(taken, true)
    }

    /// Lets all credentials go that other nodes of the view own, and tells these nodes what is known of them. Those that are
    /// new, all if this node has left, are told even if that is nothing: they wait for it. What is let go is so before the
    /// future is first polled.
    pub fn hand_over(
        &self,
        scheduler: &Scheduler,
        view: &View,
        occasion: Occasion<'_>,
    ) -> impl Future<Output = ()> + use<> {
        let handed = match self {
            Self::Alone => None,
            Self::Member(membership) => membership.hand_over(scheduler, view, occasion),
        };
        or(handed, ())
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

async fn or<T>(future: Option<impl Future<Output = T>>, otherwise: T) -> T {
    match future {
        Some(future) => future.await,
        None => otherwise,
    }
}

#[cfg(test)]
mod tests;
