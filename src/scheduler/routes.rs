//! Which bucket a route counts in, and what holds it by itself.
//!
//! A route starts in a bucket of its own and is bound to the one Discord's answers name. A route that answers from
//! several buckets in turn (deletes by the message's age and outcome) has one it queues in and others it needs room in.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::line::{Line, Ticket};
use super::signal::MAX_WAIT;

/// A bucket's place in its client's table.
pub type LaneId = usize;

/// A bucket a route met besides its own is forgotten after this time without meeting it.
const FORGET: Duration = Duration::from_secs(600);
/// The most buckets one route may need room in, besides its own.
const MAX_EXTRA: usize = 4;

/// Details are three bits at most: as many holds are ever open.
const MAX_HOLDS: usize = 8;

/// One route with its major parameter.
#[derive(Debug)]
pub struct RouteEntry {
    /// The bucket it queues in.
    pub lane: LaneId,
    more: Option<Box<More>>,
}

/// What most routes never have.
#[derive(Debug, Default)]
struct More {
    extra: Vec<Extra>,
    holds: Vec<Hold>,
}

/// Another bucket that this route's answers have named.
#[derive(Clone, Copy, Debug)]
struct Extra {
    lane: LaneId,
    met: Instant,
    /// It came back: the route alternates. Else it counts only while this route's own answer keeps it closed.
    alternates: bool,
}

/// A sub-limit this route has met: a 429 that concerns it alone.
#[derive(Debug)]
struct Hold {
    detail: u8,
    until: Instant,
    shared: bool,
    line: Line,
}

/// A route for another node: its buckets as places in a list of them.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RouteState {
    /// The bucket it queues in.
    pub lane: u32,
    /// Others: for how long they were not met, and whether the route alternates.
    extra: Vec<(u32, Duration, bool)>,
    /// Details, what is left, and whether the scope was shared.
    holds: Vec<(u8, Duration, bool)>,
}

impl RouteEntry {
    /// What another node should know; `place` is a bucket's in the list that goes with it.
    pub fn pack(&self, now: Instant, place: impl Fn(LaneId) -> Option<u32>) -> Option<RouteState> {
        let age = |at| now.saturating_duration_since(at);
        let extra = self.more.iter().flat_map(|more| &more.extra);
        let extra = extra.filter_map(|extra| Some((place(extra.lane)?, age(extra.met), extra.alternates))).collect();
        let live = self.holds().filter(|hold| hold.until > now);
        let holds = live.map(|hold| (hold.detail, hold.until - now, hold.shared)).collect();
        Some(RouteState { lane: place(self.lane)?, extra, holds })
    }

    /// Takes over what another node knew; `lane` is the bucket at a place.
    pub fn unpack(&mut self, now: Instant, state: &RouteState, lane: impl Fn(u32) -> Option<LaneId>) {
        for &(place, age, alternates) in state.extra.iter().take(MAX_EXTRA) {
            let known =
                |lane| self.lane == lane || self.more.iter().any(|it| it.extra.iter().any(|it| it.lane == lane));
            let Some(lane) = lane(place).filter(|lane| !known(*lane)) else { continue };
            let met = now.checked_sub(age.min(FORGET)).unwrap_or(now);
            self.more.get_or_insert_default().extra.push(Extra { lane, met, alternates });
        }
        for &(detail, left, shared) in state.holds.iter().take(MAX_HOLDS) {
            self.hold(detail, now + left.min(MAX_WAIT), shared);
        }
    }

    /// A route that queues in `lane`.
    pub fn new(lane: LaneId) -> Self {
        Self { lane, more: None }
    }

    /// Buckets besides its own that it needs room in; `own_closure` says whether this route's own answer keeps a bucket
    /// closed.
    pub fn extras(&self, own_closure: impl Fn(LaneId) -> bool) -> impl Iterator<Item = LaneId> {
        self.more
            .iter()
            .flat_map(|more| more.extra.iter())
            .filter(move |extra| extra.alternates || own_closure(extra.lane))
            .map(|extra| extra.lane)
    }

    /// Whether it has met neither other buckets than its own nor a hold.
    pub fn is_simple(&self) -> bool {
        self.more.is_none()
    }

    /// An answer named `lane`, which is not the one it queues in. Returns whether the route is bound to it anew; if not,
    /// the route alternates between the two.
    pub fn met(&mut self, lane: LaneId, now: Instant) -> bool {
        let extra = &mut self.more.get_or_insert_default().extra;
        extra.retain(|other| now.saturating_duration_since(other.met) < FORGET);
        if let Some(known) = extra.iter_mut().find(|other| other.lane == lane) {
            known.met = now;
            known.alternates = true;
            return false;
        }
        if extra.len() == MAX_EXTRA {
            extra.remove(0);
        }
        extra.push(Extra { lane: self.lane, met: now, alternates: false });
        self.lane = lane;
        true
    }

    /// Forgets buckets that are gone.
    pub fn forget(&mut self, gone: impl Fn(LaneId) -> bool) {
        if let Some(more) = &mut self.more {
            more.extra.retain(|other| !gone(other.lane));
        }
        self.tidy();
    }

    /// The end of the longest live hold on requests with `detail`, and whether its scope was shared.
    pub fn held(&self, detail: u8, now: Instant) -> Option<(Instant, bool)> {
        self.covering(detail, now).map(|hold| (hold.until, hold.shared)).max()
    }

    /// Opens a hold, or makes a known one longer.
    pub fn hold(&mut self, detail: u8, until: Instant, shared: bool) {
        let holds = &mut self.more.get_or_insert_default().holds;
        match holds.iter_mut().find(|hold| hold.detail == detail) {
            Some(known) if known.until >= until => {}
            Some(known) => (known.until, known.shared) = (until, shared),
            None => holds.push(Hold { detail, until, shared, line: Line::default() }),
        }
    }

    /// Queues a request behind the longest live hold that covers it.
    pub fn wait_held(&mut self, detail: u8, now: Instant, seq: u64, ticket: Ticket) {
        let Some(more) = &mut self.more else { return };
        let longest = more.holds.iter_mut().filter(|hold| hold.until > now && hold.covers(detail));
        if let Some(hold) = longest.max_by_key(|hold| hold.until) {
            hold.line.join(seq, ticket);
        }
    }

    /// Moves a request that waits behind a hold to one that has become the longest; the one to wake, if it stood at the
    /// head of its line.
    pub fn wait_longer(&mut self, detail: u8, now: Instant, seq: u64, ticket: Ticket) -> Option<Ticket> {
        let longest = self.covering(detail, now).max_by_key(|hold| hold.until)?;
        if longest.line.contains(seq) {
            return None;
        }
        let next = self.leave_held(seq);
        self.wait_held(detail, now, seq, ticket);
        next
    }

    /// How many wait behind holds.
    pub fn held_count(&self) -> usize {
        self.holds().map(|hold| hold.line.len()).sum()
    }

    /// Leaves the hold's line; the one to wake, if the leaver stood at the head.
    pub fn leave_held(&mut self, seq: u64) -> Option<Ticket> {
        self.more.as_mut()?.holds.iter_mut().find_map(|hold| if hold.line.leave(seq) { hold.line.head() } else { None })
    }

    /// Whether this ticket is the one that sleeps until its hold ends.
    pub fn heads_hold(&self, ticket: Ticket) -> bool {
        self.holds().any(|hold| hold.line.head() == Some(ticket))
    }

    /// Everybody who waits behind a hold.
    pub fn held_tickets(&self) -> impl Iterator<Item = Ticket> {
        self.holds().flat_map(|hold| hold.line.iter()).map(|(_, ticket)| ticket)
    }

    /// Ends the holds whose time is over: everybody who waited behind them, in no order.
    pub fn release(&mut self, now: Instant) -> Vec<(u64, Ticket)> {
        let Some(more) = &mut self.more else { return Vec::new() };
        let mut released = Vec::new();
        more.holds.retain_mut(|hold| {
            if hold.until <= now {
                released.extend(hold.line.take_if(|_| true));
            }
            hold.until > now
        });
        self.tidy();
        released
    }

    /// Whether a hold is live at all.
    pub fn is_held(&self, now: Instant) -> bool {
        self.holds().any(|hold| hold.until > now || !hold.line.is_empty())
    }

    /// The live holds on requests with `detail`.
    fn covering(&self, detail: u8, now: Instant) -> impl Iterator<Item = &Hold> {
        self.holds().filter(move |hold| hold.until > now && hold.covers(detail))
    }

    fn holds(&self) -> impl Iterator<Item = &Hold> {
        self.more.iter().flat_map(|more| more.holds.iter())
    }

    fn tidy(&mut self) {
        if self.more.as_ref().is_some_and(|more| more.extra.is_empty() && more.holds.is_empty()) {
            self.more = None;
        }
    }
}

impl Hold {
    /// A hold drawn by a request with these details covers every request that has them all.
    fn covers(&self, detail: u8) -> bool {
        self.detail & detail == self.detail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_that_changes_its_bucket_is_bound_anew_and_one_that_comes_back_alternates() {
        let now = Instant::now();
        let mut route = RouteEntry::new(1);
        assert!(route.met(2, now));
        assert_eq!(route.lane, 2);
        assert_eq!(route.extras(|_| false).count(), 0);
        assert_eq!(route.extras(|_| true).collect::<Vec<_>>(), [1]);
        assert!(!route.met(1, now));
        assert_eq!((route.lane, route.extras(|_| false).collect::<Vec<_>>()), (2, vec![1]));
    }

    #[test]
    fn a_hold_covers_requests_that_have_all_its_details() {
        let now = Instant::now();
        let until = now + Duration::from_secs(5);
        let mut route = RouteEntry::new(0);
        route.hold(0b01, until, false);
        assert_eq!(route.held(0b11, now), Some((until, false)));
        assert_eq!(route.held(0b10, now), None);
        assert_eq!(route.held(0b00, now), None);
        route.wait_held(0b01, now, 7, 3);
        assert!(route.release(now).is_empty());
        assert_eq!(route.release(until), [(7, 3)]);
        assert!(!route.is_held(until));
    }
}
