//! Who is in the cluster, and which of them owns a key.
//!
//! Knows nothing of gossip or of requests: it is given the members and answers for 32-byte keys. Two nodes with equal
//! views name the same owner, whatever build or processor they run on, so everything that is hashed here is hashed as
//! bytes by a hash with fixed keys. The golden values in the tests must never change: nodes of two versions share a
//! cluster during a rolling update.

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rendezvous_hash::{KeyValueNode, Node, NodeHasher, RendezvousNodes};
use siphasher::sip::SipHasher13;

/// What ownership is decided by: a credential's SHA-256, or what stands in for it.
pub type Key = [u8; 32];

/// One node as the others know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// NODE_NAME: what the rendezvous hash ranks, unique in the cluster.
    pub name: Arc<str>,
    /// The address and port it gossips on.
    pub gossip: SocketAddr,
    /// The port of its peer listener, on the gossip address.
    pub peer_port: u16,
    /// Unix milliseconds at its start, raised whenever it had to rejoin.
    pub generation: u64,
}

impl Member {
    /// Where its peer listener is dialled.
    pub fn peer(&self) -> SocketAddr {
        SocketAddr::new(self.gossip.ip(), self.peer_port)
    }
}

/// Who owns a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This node.
    Local,
    /// Another node.
    Peer(Arc<Member>),
    /// Nobody: there are more members than CLUSTER_MAX_NODES.
    OverCapacity,
}

/// One view of the cluster, this node included. Immutable: a change makes a new one with the next epoch.
pub struct Members {
    epoch: u64,
    sorted: Vec<Arc<Member>>,
    ranking: RendezvousNodes<KeyValueNode<Name, u16>, Pinned>,
    local: Option<u16>,
    left: Option<Arc<Member>>,
    /// Where this node gossips.
    address: SocketAddr,
    namesake: Option<Arc<Member>>,
    cap: usize,
}

impl Members {
    /// A view of `members` from the node that gossips at `local`; with more than `cap` of them nobody owns anything.
    ///
    /// Of two members with one name the older counts: one that takes a name by mistake, and stops when it finds out, must
    /// not take the credentials of the other. One that replaces a dead node under its name waits until that is found dead.
    pub fn new(epoch: u64, members: impl IntoIterator<Item = Member>, local: SocketAddr, cap: usize) -> Self {
        let members: Vec<Member> = members.into_iter().collect();
        let own = members.iter().find(|member| member.gossip == local);
        let namesake = own.and_then(|own| {
            members.iter().find(|member| member.name == own.name && member.gossip != local).cloned().map(Arc::new)
        });
        let mut by_name: HashMap<Arc<str>, Member> = HashMap::new();
        for member in members {
            let rank = |member: &Member| (member.generation, member.gossip);
            match by_name.get(&member.name) {
                Some(known) if rank(known) <= rank(&member) => {}
                _ => {
                    by_name.insert(member.name.clone(), member);
                }
            }
        }
        let mut sorted: Vec<Arc<Member>> = by_name.into_values().map(Arc::new).collect();
        sorted.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        sorted.truncate(usize::from(u16::MAX));
        let mut ranking = RendezvousNodes::new(Pinned);
        ranking.extend((0..).zip(&sorted).map(|(at, member)| KeyValueNode::new(Name::new(member.name.clone()), at)));
        let place = (0..).zip(&sorted).find(|(_, member)| member.gossip == local).map(|(at, _)| at);
        Self { epoch, sorted, ranking, local: place, left: None, address: local, namesake, cap }
    }

    /// Rises with every view of one process, so that an answer can be kept for as long as it holds.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Every member, by name.
    pub fn list(&self) -> &[Arc<Member>] {
        &self.sorted
    }

    /// What is left of the cluster when this node goes, if anything is.
    pub fn without_local(&self, epoch: u64) -> Option<Self> {
        let local = self.sorted.get(usize::from(self.local?))?;
        let rest = self.without(epoch, |member| member.name == local.name);
        (self.sorted.len() > 1).then(|| Self { left: Some(local.clone()), ..rest })
    }

    /// What is left of the cluster when those that are `gone` go.
    pub fn without(&self, epoch: u64, gone: impl Fn(&Member) -> bool) -> Self {
        let rest = self.sorted.iter().filter(|member| !gone(member)).map(|member| (**member).clone());
        Self { left: self.left.clone(), ..Self::new(epoch, rest, self.address, self.cap) }
    }

    /// This node, once it has left.
    pub fn left(&self) -> Option<&Member> {
        self.left.as_deref()
    }

    /// Whether this node is one of the members: it is until it leaves.
    pub fn has_local(&self) -> bool {
        self.local.is_some()
    }

    /// More members than CLUSTER_MAX_NODES.
    pub fn over_capacity(&self) -> bool {
        self.sorted.len() > self.cap
    }

    /// Another member that goes by this node's name.
    pub fn namesake(&self) -> Option<&Member> {
        self.namesake.as_deref()
    }

    /// Whether some member gossips from this address.
    pub fn has_ip(&self, ip: IpAddr) -> bool {
        self.sorted.iter().any(|member| member.gossip.ip() == ip)
    }

    /// The owner of a key: the member whose name ranks highest for it.
    pub fn owner(&self, key: &Key) -> Owner {
        self.at(self.rank(key))
    }

    /// The owner's place in the list, for [`Members::at`]; none while over capacity.
    pub fn rank(&self, key: &Key) -> Option<u16> {
        if self.over_capacity() {
            return None;
        }
        let key = Ranked(digest(key));
        // The first of all candidates, without sorting the others.
        let rank = |node: &&KeyValueNode<Name, u16>| (node.hash_code(&Pinned, &key), node.value);
        self.ranking.iter().max_by_key(rank).map(|node| node.value)
    }

    /// Who would own a key without this node.
    fn owner_without_local(&self, key: &Key) -> Option<Arc<Member>> {
        self.ranked(key).find(|&(place, _)| Some(place) != self.local).map(|(_, member)| member.clone())
    }

    /// Every member and its place, the owner of a key first, then who would own it without the one before.
    fn ranked(&self, key: &Key) -> impl Iterator<Item = (u16, &Arc<Member>)> {
        let places = self.ranking.calc_candidates(&Ranked(digest(key))).map(|node| node.value);
        places.filter_map(|place| Some((place, self.sorted.get(usize::from(place))?)))
    }

    /// The owner at a place that [`Members::rank`] of this view gave.
    pub fn at(&self, place: Option<u16>) -> Owner {
        match place.and_then(|place| self.sorted.get(usize::from(place))) {
            None => Owner::OverCapacity,
            Some(_) if place == self.local => Owner::Local,
            Some(member) => Owner::Peer(member.clone()),
        }
    }
}

/// How long a node still takes what it owned and sends it on, when a hop comes from a peer that has not heard of the
/// change: gossip takes half a second to reach everybody.
const GRACE: Duration = Duration::from_secs(2);
/// How long the word of a former owner is waited for before what it owned is served.
const PATIENCE: Duration = Duration::from_millis(1_500);
/// A former owner may have told before this node heard of the change.
const EARLY: Duration = Duration::from_secs(1);
/// A node that has found no other in its first seconds begins a cluster; who comes later has nothing to tell it.
const YOUTH: Duration = Duration::from_secs(11);
/// Former views that are kept at most.
const FORMER: usize = 16;

impl Former {
    /// Whether what a node said then is what is waited for.
    pub fn is_told_by(&self, name: &str, at: Instant) -> bool {
        *name == *self.member.name && at >= self.since
    }
}

/// The view in force and those it replaced a moment ago.
#[derive(Debug)]
pub struct View {
    members: Arc<Members>,
    /// Each with when it was replaced.
    former: Vec<(Instant, Arc<Members>)>,
    born: Instant,
    /// When this node joined others.
    joined: Option<Instant>,
}

/// A former owner whose word is waited for.
#[derive(Clone, Debug)]
pub struct Former {
    /// Who.
    pub member: Arc<Member>,
    /// What it said before counts for an earlier change.
    pub since: Instant,
    /// What it has not said by then it does not say.
    pub until: Instant,
}

impl View {
    /// A first view.
    pub fn new(members: Members, now: Instant) -> Self {
        Self { members: Arc::new(members), former: Vec::new(), born: now, joined: None }
    }

    /// The members in force.
    pub fn members(&self) -> Arc<Members> {
        self.members.clone()
    }

    /// The view that comes after this one.
    pub fn followed_by(&self, members: Members, now: Instant) -> Self {
        let mut former = self.former.clone();
        former.retain(|&(changed, _)| changed + GRACE > now);
        former.truncate(FORMER - 1);
        former.push((now, self.members.clone()));
        let joins = members.list().len() > 1 && now < self.born + YOUTH;
        let joined = self.joined.or(joins.then_some(now));
        Self { members: Arc::new(members), former, born: self.born, joined }
    }

    /// Who is next to get what came from one that thinks this node its owner, once this node has left. If that one is a
    /// `former` owner, and this node has seen no other owner than `owner`, it has not heard that this one left: then it is
    /// the next one's.
    pub fn next_heir(&self, key: &Key, owner: Arc<Member>, former: bool, now: Instant) -> Option<Arc<Member>> {
        if self.has_local() {
            return None;
        }
        let heard = self.former.iter().filter(|(changed, _)| *changed + GRACE > now);
        let same = |owned: Owner| matches!(owned, Owner::Peer(member) if member.name == owner.name);
        if !former || !heard.map(|(_, members)| members.owner(key)).all(same) {
            return Some(owner);
        }
        let next = self.ranked(key).find(|(_, member)| member.name != owner.name).map(|(_, member)| member.clone());
        Some(next.unwrap_or(owner))
    }

    /// Whether this node owned a key a moment ago.
    pub fn owned(&self, key: &Key, now: Instant) -> bool {
        self.former.iter().any(|(changed, members)| *changed + GRACE > now && members.owner(key) == Owner::Local)
    }

    /// Who owned a key of this node's until a moment ago: the members that went, the last one first, and, if it is this
    /// node that has come, the one that owned it without this node. Where several went at once, what the first of them knew
    /// may come by way of the next, and only its own word says that it has come.
    pub fn former_owners(&self, key: &Key, now: Instant) -> impl Iterator<Item = Former> {
        let waited = move |changed: Instant| {
            let until = changed + PATIENCE;
            (until > now).then(|| (changed.checked_sub(EARLY).unwrap_or(changed), until))
        };
        // The time is looked at first: most requests come long after any change, and ranking is not for nothing.
        let gone = self.former.iter().rev().filter_map(move |(changed, members)| {
            let (mut since, mut until) = waited(*changed)?;
            let member = match members.owner(key) {
                Owner::Peer(member) => member,
                Owner::Local => {
                    (since, until) = waited(self.joined?)?;
                    members.owner_without_local(key)?
                }
                Owner::OverCapacity => return None,
            };
            let gone = self.members.list().iter().all(|other| other.name != member.name);
            gone.then_some(Former { member, since, until })
        });
        let without_this = self
            .joined
            .and_then(waited)
            .and_then(|(since, until)| Some(Former { member: self.members.owner_without_local(key)?, since, until }));
        gone.chain(without_this)
    }
}

impl Deref for View {
    type Target = Members;

    fn deref(&self) -> &Members {
        &self.members
    }
}

impl fmt::Debug for Members {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Members")
            .field("epoch", &self.epoch)
            .field("sorted", &self.sorted)
            .finish_non_exhaustive()
    }
}

/// SipHash-1-3 with fixed keys, over 16 bytes: a digest of the key, then one of the name.
struct Pinned;

impl<N: Hash> NodeHasher<N> for Pinned {
    fn hash<T: Hash>(&self, node: &N, item: &T) -> u64 {
        let mut hasher = pinned();
        item.hash(&mut hasher);
        node.hash(&mut hasher);
        hasher.finish()
    }
}

fn pinned() -> SipHasher13 {
    SipHasher13::new_with_keys(0x6e69_726e_2d70_726f, 0x7879_2d76_322e_3030)
}

/// Digested once for a view or a look-up, so that ranking hashes two words for a node and not their whole text.
fn digest(bytes: &[u8]) -> [u8; 8] {
    let mut hasher = pinned();
    hasher.write(bytes);
    hasher.finish().to_le_bytes()
}

/// A node's name: hashed by its digest, told apart by itself.
#[derive(PartialEq, Eq, PartialOrd, Ord, Clone)]
struct Name(Arc<str>, [u8; 8]);

impl Name {
    fn new(name: Arc<str>) -> Self {
        let digest = digest(name.as_bytes());
        Self(name, digest)
    }
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.1);
    }
}

/// A key's digest. Its own `Hash` writes the bytes alone: an array's adds its length as a machine word.
struct Ranked([u8; 8]);

impl Hash for Ranked {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0);
    }
}

#[cfg(test)]
mod tests;
