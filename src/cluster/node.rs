//! One member of the gossip, without its socket and its clock.
//!
//! Drives `foca` (SWIM) by three inputs (a datagram, the passing of time, the wish to leave) and keeps what comes of
//! them for the shell to collect: datagrams to send, what happened, who the members are now. It owns the one heap of
//! timers, the repeated announces to the seeds, and what `foca` leaves to its user: rejoining when the others hold a
//! younger generation of this very node, and telling everybody, not just a few, that it leaves.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::SocketAddr;
use std::num::{NonZeroU8, NonZeroUsize};
use std::time::{Duration, Instant};

use bytes::Bytes;
use foca::{AccumulatingRuntime, Foca, NoCustomBroadcast, OwnedNotification, PeriodicParams, PostcardCodec, State};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};

use crate::cluster::members::Member;
use crate::cluster::seal;

/// The largest datagram: fits an Ethernet frame, tunnels' headers included.
pub const MAX_DATAGRAM: usize = 1_400;

/// Until a member accepts it, a node announces itself to every address it knows this often.
const RETRY_ALONE: Duration = Duration::from_millis(500);
/// A node with company looks this often for seeds that are not among its members: the other side of a partition.
const RETRY_MISSING: Duration = Duration::from_secs(3);
/// A node that nobody has accepted for so long, after it rejoined, no longer believes in the members it knew.
const FORSAKEN: Duration = Duration::from_secs(3);
/// A timer that fires later than this was held up by the process, not by the network.
const STALL: Duration = Duration::from_millis(100);
/// Rejoins further apart than this have nothing to do with each other.
const REJOIN_MEMORY: Duration = Duration::from_secs(30);

/// What the other members see: the identity of `foca`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct NodeId {
    name: String,
    gossip: SocketAddr,
    peer_port: u16,
    generation: u64,
}

impl NodeId {
    /// Somebody of whom only the address is known.
    fn at(gossip: SocketAddr) -> Self {
        Self { name: String::new(), gossip, peer_port: 0, generation: 0 }
    }

    fn member(&self) -> Member {
        Member {
            name: self.name.as_str().into(),
            gossip: self.gossip,
            peer_port: self.peer_port,
            generation: self.generation,
        }
    }
}

impl foca::Identity for NodeId {
    type Addr = SocketAddr;

    fn renew(&self) -> Option<Self> {
        Some(Self { generation: self.generation.saturating_add(1), ..self.clone() })
    }

    fn addr(&self) -> SocketAddr {
        self.gossip
    }

    fn win_addr_conflict(&self, adversary: &Self) -> bool {
        self.generation > adversary.generation
    }
}

/// Something an operator wants to read about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A member appeared.
    Joined(Member),
    /// A member left or was found dead.
    Gone(Member),
    /// A member does not answer; it is found dead unless it objects.
    Suspected(Member),
    /// The others had found this node dead; it joins anew.
    Rejoined,
}

/// A member of the gossip.
pub struct Node {
    foca: Foca<NodeId, PostcardCodec, SmallRng, NoCustomBroadcast>,
    effects: AccumulatingRuntime<NodeId>,
    timers: BinaryHeap<Reverse<Pending>>,
    submitted: u64,
    seeds: Vec<SocketAddr>,
    retry_at: Instant,
    rejoins: u32,
    rejoined_at: Instant,
    left: bool,
    /// Since when no member has accepted this node, unless one has. Meanwhile `foca` probes nobody.
    outside_since: Option<Instant>,
    known: BTreeMap<SocketAddr, (NodeId, bool)>,
    changed: bool,
    sends: Vec<(SocketAddr, Bytes)>,
    events: Vec<Event>,
}

impl Node {
    /// A node that knows nobody yet; `random` seeds its choices of whom to talk to.
    pub fn new(local: &Member, random: u64, now: Instant) -> Self {
        let id = NodeId {
            name: local.name.to_string(),
            gossip: local.gossip,
            peer_port: local.peer_port,
            generation: local.generation,
        };
        Self {
            foca: Foca::new(id, settings(), SmallRng::seed_from_u64(random), PostcardCodec),
            effects: AccumulatingRuntime::new(),
            timers: BinaryHeap::new(),
            submitted: 0,
            seeds: Vec::new(),
            retry_at: now,
            rejoins: 0,
            rejoined_at: now,
            left: false,
            outside_since: Some(now),
            known: BTreeMap::new(),
            changed: true,
            sends: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Sets where members may be found; this node's own address is taken out. The next tick announces to them.
    pub fn seek(&mut self, seeds: impl IntoIterator<Item = SocketAddr>, now: Instant) {
        let own = self.foca.identity().gossip;
        self.seeds = seeds.into_iter().filter(|&seed| seed != own).collect();
        if self.alone() {
            self.retry_at = now;
        }
    }

    /// Takes an opened datagram. What it says wrongly is ignored.
    pub fn receive(&mut self, message: &[u8], now: Instant) {
        if self.left {
            return;
        }
        // An error means a message that is malformed or not for this node: `foca` is as it was, or has recovered.
        self.foca.handle_data(message, &mut self.effects).ok();
        self.settle(now);
    }

    /// Fires what is due, oldest first, each after what it followed.
    pub fn tick(&mut self, now: Instant) {
        if self.left {
            return;
        }
        self.forgive_stall(now);
        while self.timers.peek().is_some_and(|Reverse(pending)| pending.at <= now) {
            let Some(Reverse(pending)) = self.timers.pop() else { break };
            if self.is_refuted(&pending.timer) {
                continue;
            }
            // An error means a probe that did not run its course: `foca` starts the next one all the same.
            self.foca.handle_timer(pending.timer, &mut self.effects).ok();
            self.settle(now);
        }
        if self.retry_at <= now {
            self.announce(now);
        }
    }

    /// When [`Node::tick`] is wanted next; never once the node has left.
    pub fn next_tick(&self) -> Option<Instant> {
        let timer = self.timers.peek().map_or(self.retry_at, |Reverse(pending)| pending.at.min(self.retry_at));
        (!self.left).then_some(timer)
    }

    /// Tells every member that this node leaves. Call again to tell them once more: datagrams get lost.
    pub fn leave(&mut self, now: Instant) {
        let everybody = NonZeroUsize::new(self.foca.num_members()).unwrap_or(NonZeroUsize::MIN);
        // `foca` tells only as many as it would ask for an indirect probe, and not more often than an update is sent.
        let told = foca::Config { num_indirect_probes: everybody, max_transmissions: NonZeroU8::MAX, ..settings() };
        self.foca.set_config(told).ok();
        if self.left {
            self.foca.gossip(&mut self.effects).ok();
        } else {
            self.foca.leave_cluster(&mut self.effects).ok();
        }
        self.collect(now);
        self.left = true;
        self.timers.clear();
    }

    /// No other member is known to live.
    pub fn alone(&self) -> bool {
        self.foca.num_members() == 0
    }

    /// All members if they are not what the last call gave, this node first. Suspects still count.
    pub fn members_if_changed(&mut self) -> Option<Vec<Member>> {
        (std::mem::take(&mut self.changed) && !self.left).then(|| self.members())
    }

    /// All members, this node first.
    pub fn members(&self) -> Vec<Member> {
        let others = self.known.values().map(|(id, _)| id.member());
        std::iter::once(self.foca.identity().member()).chain(others).collect()
    }

    /// Datagrams to seal and send, in order.
    pub fn take_sends(&mut self) -> Vec<(SocketAddr, Bytes)> {
        std::mem::take(&mut self.sends)
    }

    /// What happened since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Time in which the process did not run must not count against those whose answers it could not read: the
    /// timers are moved by what the first of them is late.
    fn forgive_stall(&mut self, now: Instant) {
        let Some(Reverse(first)) = self.timers.peek() else { return };
        let late = now.saturating_duration_since(first.at);
        if late > STALL {
            let moved = std::mem::take(&mut self.timers).into_iter();
            self.timers = moved.map(|Reverse(pending)| Reverse(Pending { at: pending.at + late, ..pending })).collect();
        }
    }

    /// Whether a timer ends a suspicion that its member has refuted: `foca` would let it live, and tell it that it is dead.
    fn is_refuted(&self, timer: &foca::Timer<NodeId>) -> bool {
        let foca::Timer::ChangeSuspectToDown { member_id, incarnation, .. } = timer else { return false };
        let suspected = |member: &foca::Member<NodeId>| {
            member.id() == member_id && member.incarnation() == *incarnation && member.state() == State::Suspect
        };
        !self.foca.iter_members().any(suspected)
    }

    /// Looks for company: everybody who may be there until one accepts this node, then the seeds that are not among
    /// the members.
    fn announce(&mut self, now: Instant) {
        let mut wanted: Vec<NodeId> = self.seeds.iter().map(|&seed| NodeId::at(seed)).collect();
        if let Some(since) = self.outside_since {
            wanted.extend(self.foca.iter_membership_state().map(|member| member.id().clone()));
            if now.saturating_duration_since(since) >= FORSAKEN {
                let gone = self.known.values().map(|(id, _)| foca::Member::down(id.clone()));
                self.foca.apply_many(gone, false, &mut self.effects).ok();
            }
        } else {
            wanted.retain(|id| !self.known.contains_key(&id.gossip));
        }
        let own = self.foca.identity().gossip;
        wanted.retain(|id| id.gossip != own);
        wanted.sort_by_key(|id| (id.gossip, Reverse(id.generation)));
        wanted.dedup_by_key(|id| id.gossip);
        for id in wanted {
            self.foca.announce(id, &mut self.effects).ok();
        }
        self.settle(now);
        self.retry_at = now + if self.outside_since.is_some() { RETRY_ALONE } else { RETRY_MISSING };
    }

    /// Collects effects and notes who came, went or fell silent.
    fn settle(&mut self, now: Instant) {
        self.collect(now);
        let current: BTreeMap<SocketAddr, (NodeId, bool)> = self
            .foca
            .iter_members()
            .map(|member| (member.id().gossip, (member.id().clone(), member.state() == State::Suspect)))
            .collect();
        if current == self.known {
            return;
        }
        let before = std::mem::replace(&mut self.known, current);
        for (address, (id, _)) in &before {
            if !self.known.contains_key(address) {
                self.events.push(Event::Gone(id.member()));
            }
        }
        for (address, (id, suspect)) in &self.known {
            match before.get(address) {
                None => self.events.push(Event::Joined(id.member())),
                Some((_, false)) if *suspect => self.events.push(Event::Suspected(id.member())),
                Some(_) => {}
            }
        }
        self.changed = true;
    }

    fn collect(&mut self, now: Instant) {
        while let Some((after, timer)) = self.effects.to_schedule() {
            self.submitted += 1;
            self.timers.push(Reverse(Pending { at: now + after, order: self.submitted, timer }));
        }
        let mut rejoined = false;
        while let Some(notification) = self.effects.to_notify() {
            match notification {
                OwnedNotification::Active => self.outside_since = None,
                OwnedNotification::Idle | OwnedNotification::Defunct => self.outside(now),
                OwnedNotification::Rejoin(_) => {
                    self.outside(now);
                    rejoined = true;
                }
                OwnedNotification::MemberUp(_) | OwnedNotification::MemberDown(_) | OwnedNotification::Rename(..) => {}
            }
        }
        while let Some((to, message)) = self.effects.to_send() {
            self.sends.push((to.gossip, message));
        }
        if rejoined {
            self.rejoined(now);
        }
    }

    fn outside(&mut self, now: Instant) {
        self.outside_since = Some(now);
        self.retry_at = now;
    }

    /// A clock that went back over a restart gives a generation below the one the others know, and adding one for each
    /// refusal could take hours: from the fourth refusal in a row on the step doubles.
    fn rejoined(&mut self, now: Instant) {
        let recent = now.saturating_duration_since(self.rejoined_at) < REJOIN_MEMORY;
        self.rejoins = if recent { self.rejoins + 1 } else { 1 };
        self.rejoined_at = now;
        self.changed = true;
        self.events.push(Event::Rejoined);
        if self.rejoins > 3 {
            let mut id = self.foca.identity().clone();
            id.generation = id.generation.saturating_add(1 << self.rejoins.min(40));
            self.foca.change_identity(id, &mut self.effects).ok();
            self.collect(now);
        }
    }
}

/// A timer of `foca`, in the order of its time and then of its submission.
struct Pending {
    at: Instant,
    order: u64,
    timer: foca::Timer<NodeId>,
}

impl PartialEq for Pending {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for Pending {}

impl PartialOrd for Pending {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Pending {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Tuned for 2 to 32 nodes on a LAN: a crash is known to all in about 3 s, a leave in half a second, at some 5 packets
/// a second for each node.
fn settings() -> foca::Config {
    const fn count(number: usize) -> NonZeroUsize {
        NonZeroUsize::new(number).expect("not zero")
    }
    let every = |millis, members| {
        Some(PeriodicParams { frequency: Duration::from_millis(millis), num_members: count(members) })
    };
    foca::Config {
        probe_period: Duration::from_millis(500),
        probe_rtt: Duration::from_millis(150),
        num_indirect_probes: count(3),
        max_transmissions: const { NonZeroU8::new(15).expect("not zero") },
        suspect_to_down_after: Duration::from_millis(1_500),
        // Beyond an hour it is the seeds through which the sides of a partition find each other.
        remove_down_after: Some(Duration::from_secs(3_600)),
        max_packet_size: count(MAX_DATAGRAM - seal::OVERHEAD),
        notify_down_members: true,
        periodic_announce: every(3_000, 1),
        periodic_announce_to_down_members: every(2_000, 2),
        periodic_gossip: every(200, 3),
    }
}

#[cfg(test)]
mod tests;
