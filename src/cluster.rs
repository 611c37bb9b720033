//! Several nodes as one proxy: who they are, which of them owns a credential, and the way to it.
//!
//! The order of a start: a node's own certificate is checked, its sockets are bound, its peer listener serves, and only
//! then does it gossip, so that whoever hears of it can reach it. A stop goes the other way round: the others are told
//! first, and what still arrives is served.

pub mod members;
pub mod node;
pub mod peer;
pub mod seal;
pub mod seeds;
pub mod swim;
pub mod tls;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA256, digest};
use http::Request;
use hyper::body::Incoming;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout_at;

use self::members::{Key, Member, Owner, View};
use self::peer::Peers;
use self::swim::{Gossip, Settings};
use self::tls::Pem;
use crate::config::{self, Config};
use crate::error::ProxyError;
use crate::identity::{Identity, Kind};
use crate::route::{self, Route};
use crate::scheduler::handover::{Credential, Handover};
use crate::scheduler::{Dispatched, Scheduler};
use crate::{agreed, clock, front};

/// Owners that are remembered for the membership in force, by the first bytes of the key.
const REMEMBERED: usize = 4_096;
/// Handovers that are remembered, and how long they tell that nothing more is to come.
const HANDED: usize = 64;
const RECENT: Duration = Duration::from_secs(5);

/// Whether this process is one of several.
#[derive(Clone)]
pub enum Cluster {
    /// It is not: it owns everything.
    Alone,
    /// It is.
    Member(Arc<Membership>),
}

/// A node's knowledge of its cluster, and its way to the others.
pub struct Membership {
    members: watch::Receiver<Arc<View>>,
    peers: Peers,
    /// The last nodes that handed their credentials over as they left.
    handed: watch::Sender<VecDeque<(String, Instant)>>,
    remembered: Box<[Mutex<Remembered>]>,
}

#[derive(Clone, Copy)]
struct Remembered {
    epoch: u64,
    key: Key,
    place: Option<u16>,
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
        let ip = config.bind_ip;
        return Err(format!(
            "CLUSTER_ADVERTISE_IP: BIND_IP is {ip}, which no peer can dial; set it to this node's address"
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
    let membership = Membership::new(members, Peers::new(tls.client, local, bound));
    Ok((Cluster::Member(Arc::new(membership)), Joining { listener, tls: tls.server, settings, socket, publish }))
}

fn read(file: &Path, variable: &str) -> Result<Vec<u8>, String> {
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

    /// Splits off what serves peers, which must run before [`swim::Gossip::join`].
    pub fn split(self) -> (TcpListener, Arc<ServerConfig>, impl Future<Output = Result<Gossip, String>>) {
        (self.listener, self.tls, Gossip::join(self.settings, self.socket, self.publish))
    }
}

impl Membership {
    fn new(members: watch::Receiver<Arc<View>>, peers: Peers) -> Self {
        let nothing = Remembered { epoch: 0, key: [0; 32], place: None };
        let remembered = (0..REMEMBERED).map(|_| Mutex::new(nothing)).collect();
        Self { members, peers, handed: watch::Sender::default(), remembered }
    }

    /// The owner of a key: ranked once for a membership, then remembered until another key takes the place.
    fn owner(&self, key: &Key) -> Owner {
        let members = self.members.borrow().clone();
        if members.over_capacity() {
            return Owner::OverCapacity;
        }
        let slot = usize::from(u16::from_le_bytes([key[0], key[1]])) % REMEMBERED;
        let mut slot = self.remembered[slot].lock();
        if slot.epoch != members.epoch() || slot.key != *key {
            *slot = Remembered { epoch: members.epoch(), key: *key, place: members.rank(key) };
        }
        members.at(slot.place)
    }
}

impl Cluster {
    /// Who owns a key.
    pub fn owner(&self, key: &Key) -> Owner {
        match self {
            Self::Alone => Owner::Local,
            Self::Member(membership) => membership.owner(key),
        }
    }

    /// Whether this node owned a key until a moment ago: a peer that has not heard of the change may still send it.
    pub fn owned(&self, key: &Key) -> bool {
        match self {
            Self::Alone => true,
            Self::Member(membership) => membership.members.borrow().owned(key, Instant::now()),
        }
    }

    /// More members than CLUSTER_MAX_NODES.
    pub fn over_capacity(&self) -> bool {
        match self {
            Self::Alone => false,
            Self::Member(membership) => membership.members.borrow().over_capacity(),
        }
    }

    /// How many nodes there are, this one included.
    pub fn size(&self) -> usize {
        match self {
            Self::Alone => 1,
            Self::Member(membership) => membership.members.borrow().list().len(),
        }
    }

    /// Waits, if a key's former owner has just left, until it has handed over what it knows or has had the time to.
    pub async fn settled(&self, key: &Key) {
        let Self::Member(membership) = self else { return };
        let Some((former, until)) = membership.members.borrow().former_owner(key, Instant::now()) else { return };
        let mut handed = membership.handed.subscribe();
        let recent = |at: &Instant| at.elapsed() < RECENT;
        let told = handed.wait_for(|handed| handed.iter().any(|(name, at)| **name == *former.name && recent(at)));
        // Its time is over: what it knew is not known here.
        _ = timeout_at(until.into(), told).await;
    }

    /// Takes in what a node that leaves hands over.
    pub fn take(&self, scheduler: &Scheduler, message: &[u8]) {
        let (Self::Member(membership), Some(handover)) = (self, Handover::decode(message)) else { return };
        scheduler.unpack(&handover);
        tracing::info!(name = handover.from, credentials = handover.credentials.len(), "a leaving member handed over");
        membership.handed.send_modify(|handed| {
            handed.truncate(HANDED - 1);
            handed.push_front((handover.from, Instant::now()));
        });
    }

    /// Hands what is known of this node's credentials over to those who own them when it is gone.
    pub async fn hand_over(&self, scheduler: &Scheduler) {
        let Self::Member(membership) = self else { return };
        let members = membership.members.borrow().clone();
        let Some((local, rest)) = members.without_local() else { return };
        let mut shares: Vec<Vec<Credential>> = rest.list().iter().map(|_| Vec::new()).collect();
        for credential in scheduler.pack(|key| members.owner(key) == Owner::Local) {
            // Without an heir nobody serves it.
            if let Some(share) = rest.rank(&credential.key).and_then(|place| shares.get_mut(usize::from(place))) {
                share.push(credential);
            }
        }
        let invalid = scheduler.invalid_requests();
        let mut telling = JoinSet::new();
        for (place, (heir, credentials)) in rest.list().iter().zip(shares).enumerate() {
            let invalid = invalid.iter().skip(place).step_by(rest.list().len()).copied().collect();
            let message = Handover { from: local.name.to_string(), invalid, credentials }.encode();
            let (peers, to) = (membership.peers.clone(), heir.peer());
            telling.spawn(async move {
                let Some(message) = message else { return };
                if let Err(error) = peers.tell(to, &message).await {
                    tracing::warn!(peer = %to, %error, "could not hand credentials over");
                }
            });
        }
        while telling.join_next().await.is_some() {}
    }

    /// Sends a request on to its owner, see [`Peers::forward`].
    pub async fn forward(&self, to: &Member, request: Request<Incoming>) -> Result<Dispatched, ProxyError> {
        match self {
            Self::Alone => Err(ProxyError::Unavailable(crate::error::Reason::ClusterRouting)),
            Self::Member(membership) => membership.peers.forward(to.peer(), request).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::Method;

    use super::*;
    use crate::cluster::members::Members;
    use crate::cluster::tls::tests::{Ca, NOW};

    fn member(number: u8) -> Member {
        let gossip = SocketAddr::from(([10, 0, 0, number], 7946));
        Member { name: format!("node-{number}").into(), gossip, peer_port: 8443, generation: 0 }
    }

    fn membership(members: Members) -> (Membership, watch::Sender<Arc<View>>) {
        let (publish, members) = watch::channel(Arc::new(View::new(members)));
        let tls = tls::configure(&Ca::new().node("127.0.0.1"), [127, 0, 0, 1].into(), NOW).unwrap();
        (Membership::new(members, Peers::new(tls.client, None, Duration::from_secs(1))), publish)
    }

    #[test]
    fn a_remembered_owner_is_the_owner_and_is_forgotten_with_its_membership() {
        let view = |epoch, count: u8| Members::new(epoch, (1..=count).map(member), member(1).gossip, 4);
        let (membership, publish) = membership(view(1, 3));
        let keys: Vec<Key> = (0..2_000u32)
            .map(|number| {
                let mut key = [0; 32];
                key.copy_from_slice(digest(&SHA256, &number.to_le_bytes()).as_ref());
                key
            })
            .collect();
        for (epoch, count) in [(1, 3), (2, 4), (3, 2), (4, 5)] {
            let expected = view(epoch, count);
            publish.send_replace(Arc::new(View::new(view(epoch, count))));
            for key in keys.iter().chain(&keys) {
                assert_eq!(membership.owner(key), expected.owner(key));
            }
        }
    }

    #[test]
    fn only_unauthenticated_interactions_are_spread_by_what_they_are_for() {
        let key_of = |authorization: Option<&[u8]>, path: &str| {
            let route = Route::classify(&Method::POST, path, 0);
            key(&Identity::from_authorization(authorization), &route, path)
        };
        let callback = |token: &str| format!("/api/v10/interactions/12345678901234567/{token}/callback");
        let one = key_of(None, &callback("aW50ZXJhY3Rpb246one"));
        assert_ne!(one, key_of(None, &callback("aW50ZXJhY3Rpb246two")));
        assert_eq!(one, key_of(None, "/api/webhooks/12345678901234567/aW50ZXJhY3Rpb246one/messages/@original"));
        assert_eq!(one, key_of(None, "/webhooks/12345678901234567/aW50ZXJhY3Rpb246on%65"));
        let other = key_of(None, "/api/v10/gateway");
        assert_eq!(other, key_of(Some(b"Basic eDp5"), "/api/v10/webhooks/12345678901234567/token"));
        let bot = key_of(Some(b"Bot secret"), "/gateway");
        assert_eq!(bot, key_of(Some(b"Bot secret"), &callback("aW50ZXJhY3Rpb246one")));
        assert!(bot != other && bot != one && one != other);
    }
}
