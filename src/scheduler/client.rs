//! One credential: its routes and buckets, who waits for them, its global limit and whether it is valid.
//!
//! A pure state machine: every method takes `now`, none blocks. Whoever must look again is woken through
//! [`Client::take_wakes`]. Only the request at the head of a line needs a timer for its turn; everybody behind it is woken
//! when its turn may have come, and needs one for its deadline alone.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use ahash::AHashMap;
use http::Method;
use serde::{Deserialize, Serialize};
use slab::Slab;

pub mod handover;
mod learning;
mod turns;

use super::bucket::{Admission, Bucket, Class};
use super::key::{Key, KeyHasher};
use super::line::{Line, Ticket};
use super::pacer::Pacer;
use super::profile::Profile;
use super::room::Room;
use super::routes::{LaneId, RouteEntry};
use super::signal::{BucketHash, Signal};
use crate::error::{Cooldown, ProxyError, Reason, Scope};
use crate::route::Route;

/// State that nobody used for this long, with nothing blocked, waiting or in flight, is dropped.
pub const IDLE: Duration = Duration::from_secs(600);
/// Hashes whose shape and margin are remembered; beyond it the knowledge starts anew.
const MAX_PROFILES: usize = 1024;

/// So long a webhook that Discord did not know is not asked for again.
const GONE_FOR: Duration = Duration::from_secs(600);
/// Such webhooks that are remembered; beyond it the one that is forgotten soonest goes.
const MAX_GONE: usize = 1024;

/// The settings a client needs.
#[derive(Clone, Debug)]
pub struct Limits {
    /// MAX_QUEUE_DEPTH.
    pub queue_depth: usize,
    /// REQUEST_TIMEOUT: what must be left after a wait.
    pub attempt: Duration,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Method, template and major parameter.
    pub route: Key,
    /// The bucket until Discord names one.
    pub provisional: Key,
    /// The major parameter.
    pub major: Key,
    /// Read or write.
    pub class: Class,
    /// Details of the body that have sub-limits of their own, as bits.
    pub detail: u8,
    /// Outside the global limit, in the queue of its interaction.
    pub interaction: bool,
    /// Authenticated by its path: says nothing about the credential.
    pub path_token: bool,
}

impl Ask {
    /// What a request of this method and route asks for, before anything of its body is known.
    pub fn new(method: &Method, route: &Route) -> Self {
        let class = if matches!(*method, Method::GET | Method::HEAD) { Class::Read } else { Class::Write };
        Self {
            route: route.key.into(),
            provisional: route.provisional.into(),
            major: route.major.into(),
            class,
            detail: 0,
            interaction: route.interaction,
            path_token: route.path_token,
        }
    }
}

/// Whether Discord accepts the credential.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
enum Validity {
    /// Not told yet: one request at a time.
    Unjudged,
    /// It does, or nobody keeps count.
    Valid,
    /// It answered 401.
    Invalid,
}

/// Whether its requests go from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// They do.
    Here,
    /// It is about to move: all wait.
    Moving,
    /// It has another owner, who knows all that is known here.
    Gone,
}

/// One bucket with its line.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) bucket: Bucket,
    line: Option<Box<Line>>,
    /// Its key in `named`, if it is there.
    key: Option<Key>,
    /// Routes that queue here.
    routes: u32,
    /// The route whose answer closed it last.
    closed_by: u32,
}

#[derive(Debug)]
struct Waiter {
    seq: u64,
    ask: Ask,
    lane: LaneId,
    deadline: Instant,
    waker: Option<Waker>,
    held: bool,
    ready: bool,
}

/// Permission to send one request. Given back by [`Client::answered`] or [`Client::unanswered`], exactly once.
#[derive(Debug)]
pub struct Grant {
    /// What was asked for.
    pub ask: Ask,
    /// The end of scheduling.
    pub deadline: Instant,
    seq: u64,
    lane: LaneId,
    extras: Option<Box<[LaneId]>>,
    sent_at: Instant,
    judges: bool,
    /// Its answer blocks the credential.
    blocks: bool,
    /// When it left: at once, until more is known. Of one that had to wait for a connection nobody knows.
    pub written: Option<Instant>,
}

/// What a request should do now.
#[derive(Debug)]
pub enum Step {
    /// Send.
    Go(Grant),
    /// Give up, with this answer.
    Refuse(ProxyError),
    /// Go to the credential's new owner, and ask for this there.
    Move(Ask),
    /// Look again at this instant, or when woken.
    At(Instant),
    /// Look again when woken, and at the deadline.
    Wait,
}

/// How a request enters.
#[derive(Debug)]
pub enum Entered {
    /// At once.
    Go(Grant),
    /// It waits.
    Waits(Ticket),
}

/// The state of one credential.
#[derive(Debug)]
pub struct Client {
    limits: Arc<Limits>,
    room: Arc<Room>,
    pacer: Pacer,
    place: Place,
    validity: Validity,
    /// Whether answers judge it at all.
    judged: bool,
    /// Requests in flight that will judge the credential.
    judging: u32,
    /// Global 429s whose bodies are still being read: how long they block everything is in there.
    blocking: u32,
    pub(super) lanes: Slab<Lane>,
    named: HashMap<Key, LaneId, BuildHasherDefault<KeyHasher>>,
    routes: HashMap<Key, RouteEntry, BuildHasherDefault<KeyHasher>>,
    profiles: AHashMap<BucketHash, Profile>,
    /// Webhooks that Discord does not know, by their major parameter, and until when that is believed.
    gone: AHashMap<Key, Instant>,
    waiters: Slab<Waiter>,
    /// Heads of lines whose bucket lets them go, waiting for what concerns the whole credential.
    ready: VecDeque<Ticket>,
    /// Heads of lines that can only wait for an answer in a bucket besides their own, and which.
    elsewhere: Vec<(LaneId, Ticket)>,
    wakes: Vec<Waker>,
    in_flight: usize,
    next_seq: u64,
    used: Instant,
    /// Places taken in `room`: one for each bucket, and for each route beyond the first that shares one.
    places: usize,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.room.give_back(self.places);
    }
}

impl Client {
    /// A credential nothing is known of; `judged` if Discord's answers decide whether it is valid.
    pub fn new(limits: Arc<Limits>, room: Arc<Room>, pacer: Pacer, judged: bool, now: Instant) -> Self {
        Self {
            limits,
            room,
            pacer,
            place: Place::Here,
            validity: if judged { Validity::Unjudged } else { Validity::Valid },
            judged,
            judging: 0,
            blocking: 0,
            lanes: Slab::new(),
            named: HashMap::default(),
            routes: HashMap::default(),
            profiles: AHashMap::new(),
            gone: AHashMap::new(),
            waiters: Slab::new(),
            ready: VecDeque::new(),
            elsewhere: Vec::new(),
            wakes: Vec::new(),
            in_flight: 0,
            next_seq: 0,
            used: now,
            places: 0,
        }
    }

    /// Refuses a request that is about to be made ready to enter, if it would not be let in as things are.
    pub fn foresee(&mut self, now: Instant, ask: &Ask, deadline: Instant) -> Result<(), ProxyError> {
        self.used = now;
        self.check_refused(now, ask)?;
        let lane = self.routes.get(&ask.route).map(|route| route.lane);
        lane.map_or(Ok(()), |lane| self.check_cooldown(now, ask, lane, deadline))
    }

    /// A request arrives.
    pub fn enter(&mut self, now: Instant, ask: Ask, deadline: Instant) -> Result<Entered, ProxyError> {
        self.used = now;
        self.check_refused(now, &ask)?;
        let lane = self.lane_of(now, &ask)?;
        self.check_cooldown(now, &ask, lane, deadline)?;
        let held = self.holds(now, &ask);
        let seq = self.next_seq;
        self.next_seq += 1;
        let line_empty = self.lanes[lane].line.is_none();
        if self.place == Place::Here
            && !held
            && line_empty
            && self.admit(now, &ask, lane) == Admission::Now
            && (self.bypasses(&ask) || self.ready.is_empty())
            && self.claim(now, &ask).is_ok()
        {
            return Ok(Entered::Go(self.grant(now, ask, deadline, seq, lane)));
        }
        let waiting = if held {
            self.routes[&ask.route].held_count()
        } else {
            self.lanes[lane].line.as_ref().map_or(0, |line| line.len())
        };
        if waiting >= self.limits.queue_depth {
            return Err(ProxyError::Unavailable(Reason::QueueFull));
        }
        Ok(Entered::Waits(self.join(now, ask, deadline, seq, lane)))
    }

    /// What a waiting request should do now. Once it is `Go`, `Refuse` or `Move` the ticket is used up.
    pub fn poll(&mut self, now: Instant, ticket: Ticket, waker: &Waker) -> Step {
        let step = self.turn(now, ticket);
        match &step {
            Step::Go(_) => {}
            Step::Refuse(_) | Step::Move(_) => self.leave(now, ticket),
            Step::At(_) | Step::Wait => {
                let slot = &mut self.waiters[ticket].waker;
                if !slot.as_ref().is_some_and(|known| known.will_wake(waker)) {
                    *slot = Some(waker.clone());
                }
            }
        }
        step
    }

    /// A waiting request goes away.
    pub fn leave(&mut self, now: Instant, ticket: Ticket) {
        let Some(waiter) = self.waiters.try_remove(ticket) else { return };
        if waiter.ready {
            self.drop_ready(ticket);
        }
        if waiter.held {
            let next = self.routes.get_mut(&waiter.ask.route).and_then(|route| route.leave_held(waiter.seq));
            self.wake(next);
        } else {
            self.leave_line(now, waiter.lane, waiter.seq);
        }
    }

    /// A granted request was not sent after all.
    pub fn unsent(&mut self, now: Instant, grant: &Grant) {
        self.landed(now, grant);
        self.settle(grant);
    }

    /// A request ended without an answer.
    pub fn unanswered(&mut self, now: Instant, grant: &Grant) {
        self.landed(now, grant);
        for lane in grant.lanes() {
            let bucket = &mut self.lanes[lane].bucket;
            let before = bucket.closed(now);
            bucket.unanswered(now, profile_of(&self.profiles, bucket));
            if bucket.closed(now) != before {
                self.wake_refused(now, lane);
            }
        }
        self.settle(grant);
    }

    /// The headers of a global 429 are there, and its body is to be read: until it was answered, nothing else goes out.
    pub fn blocks(&mut self, grant: &mut Grant) {
        self.blocking += u32::from(!std::mem::replace(&mut grant.blocks, true));
    }

    /// A request was answered: learns, and gives its turn on. `retry` keeps its place for another attempt, unless the
    /// wait that the answer asks for does not fit: then its reason.
    pub fn answered(
        &mut self,
        now: Instant,
        grant: &Grant,
        signal: &Signal,
        retry: bool,
    ) -> Option<Result<Ticket, ProxyError>> {
        self.landed(now, grant);
        if !grant.ask.interaction {
            self.pacer.answered(grant.sent_at, grant.written, now);
        }
        self.judge(grant, signal);
        if signal.unknown_webhook {
            self.webhook_is_gone(now, grant.ask.major);
        }
        if signal.refused() && signal.global {
            let wait = signal.retry_after.unwrap_or(Duration::from_secs(1)).max(super::signal::MIN_RETRY);
            let until = now + wait + wait / 100;
            self.pacer.block(now, until);
            self.wake_refused_by_block(now);
            if grant.ask.interaction {
                // The block is none of theirs, but this one was refused.
                self.lanes[grant.lane].bucket.close(until);
                self.wake_refused(now, grant.lane);
            }
        } else {
            self.learn(now, grant, signal);
        }
        let again = retry.then(|| self.rejoin(now, grant));
        self.settle(grant);
        again
    }

    /// Those who must look again: wake them after unlocking.
    pub fn take_wakes(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.wakes)
    }

    /// Whether nothing waits or is in flight.
    pub fn is_quiet(&self) -> bool {
        self.waiters.is_empty() && self.in_flight == 0
    }

    /// Somebody else may have used the credential until now.
    pub fn doubt(&mut self, now: Instant) {
        self.pacer.doubt(now, now);
    }

    /// When it was last used, if nothing is lost by forgetting it.
    pub fn disposable(&mut self, now: Instant) -> Option<Instant> {
        let blocked = self.pacer.blocked(now).is_some()
            || self.lanes.iter().any(|(_, lane)| lane.bucket.closed(now).is_some())
            || self.routes.values().any(|route| route.is_held(now));
        (self.is_quiet() && !blocked).then_some(self.used)
    }

    /// Drops buckets nobody used since `before`, at most `most`, and says how many.
    pub fn sweep(&mut self, now: Instant, before: Instant, most: usize) -> usize {
        let mut old: Vec<(Instant, LaneId)> = self
            .lanes
            .iter()
            .filter(|(_, lane)| lane.line.is_none() && lane.bucket.idle(now) && lane.bucket.seen() <= before)
            .map(|(id, lane)| (lane.bucket.seen(), id))
            .collect();
        if old.is_empty() {
            return 0;
        }
        let held: ahash::AHashSet<LaneId> =
            self.routes.values().filter(|route| route.is_held(now)).map(|route| route.lane).collect();
        old.retain(|(_, id)| !held.contains(id));
        old.sort_unstable();
        old.truncate(most);
        let gone: ahash::AHashSet<LaneId> = old.iter().map(|(_, id)| *id).collect();
        self.routes.retain(|_, route| {
            route.forget(|lane| gone.contains(&lane));
            !gone.contains(&route.lane)
        });
        for id in gone.iter().copied() {
            if let Some(key) = self.lanes.remove(id).key {
                self.named.remove(&key);
            }
        }
        self.give_room_back();
        gone.len()
    }
}

/// What is known of a bucket's hash.
fn profile_of<'a>(profiles: &'a AHashMap<BucketHash, Profile>, bucket: &Bucket) -> &'a Profile {
    bucket.hash().and_then(|hash| profiles.get(&hash)).unwrap_or(const { &Profile::UNKNOWN })
}

impl Grant {
    fn lanes(&self) -> impl Iterator<Item = LaneId> {
        std::iter::once(self.lane).chain(self.extras.iter().flat_map(|list| list.iter().copied()))
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "client_simulation.rs"]
mod simulation;
