//! What an answer changes: the credential's validity, which bucket the route counts in, and what is closed.

use std::time::{Duration, Instant};

use http::StatusCode;

use super::*;
use crate::scheduler::signal::MIN_RETRY;

/// A 429's wait that goes beyond the bucket's own reset by more than this concerns its route alone.
const BEYOND: Duration = Duration::from_secs(1);

impl Client {
    /// The request is no longer in flight.
    pub(super) fn landed(&mut self, now: Instant, grant: &Grant) {
        self.used = now;
        self.in_flight -= 1;
        self.judging -= u32::from(grant.judges);
        self.blocking -= u32::from(grant.blocks);
        for lane in grant.lanes() {
            self.lanes[lane].bucket.landed(grant.ask.class);
        }
    }

    /// Wakes whoever may go now that a request has landed, and drops a bucket that nothing leads to any more.
    pub(super) fn settle(&mut self, grant: &Grant) {
        for lane in grant.lanes() {
            self.wake_head(lane);
            self.wake_elsewhere(lane);
            if self.lanes.get(lane).is_some_and(|it| it.routes == 0 && it.key.is_none() && it.is_empty()) {
                self.lanes.remove(lane);
                self.give_room_back();
            }
        }
        if let Some(lane) = self.routes.get(&grant.ask.route).map(|route| route.lane) {
            self.wake_head(lane);
        }
        if grant.judges || grant.blocks {
            self.wake(self.ready.front().copied());
        }
    }

    /// Discord's answer to the `Authorization` header: 401 condemns, anything it can only say to a valid credential
    /// acquits; 429 and 5xx prove nothing. Nothing acquits after a 401: what is still answered was sent before it.
    pub(super) fn judge(&mut self, grant: &Grant, signal: &Signal) {
        if grant.ask.path_token || !self.judged || self.validity == Validity::Invalid {
            return;
        }
        let was = self.validity;
        match signal.status {
            StatusCode::UNAUTHORIZED => self.validity = Validity::Invalid,
            StatusCode::TOO_MANY_REQUESTS => {}
            status if status.is_server_error() => {}
            _ => self.validity = Validity::Valid,
        }
        if self.validity != was {
            self.wake_all(|_| true);
        }
    }

    /// Discord does not know a webhook: who goes on calling it is restricted (Discord's documentation, "Rate Limits").
    pub(super) fn webhook_is_gone(&mut self, now: Instant, major: Key) {
        if self.gone.len() >= MAX_GONE {
            self.gone.retain(|_, until| *until > now);
            let soonest = self.gone.iter().min_by_key(|(_, until)| **until).map(|(key, _)| *key);
            if let Some(soonest) = soonest.filter(|_| self.gone.len() >= MAX_GONE) {
                self.gone.remove(&soonest);
            }
        }
        self.gone.insert(major, now + GONE_FOR);
        self.wake_all(|waiter| waiter.ask.major == major);
    }

    /// Learns from an answer that is not a global 429.
    pub(super) fn learn(&mut self, now: Instant, grant: &Grant, signal: &Signal) {
        let ask = &grant.ask;
        let lane_id = self.bind(now, ask, grant.lane, signal);
        let lane = &mut self.lanes[lane_id];
        let mut scratch = Profile::UNKNOWN;
        let profile = match lane.bucket.hash() {
            Some(hash) => {
                if self.profiles.len() >= MAX_PROFILES && !self.profiles.contains_key(&hash) {
                    self.profiles.clear();
                }
                self.profiles.entry(hash).or_default()
            }
            None => &mut scratch,
        };
        let before = lane.bucket.closed(now);
        lane.bucket.learn(now, grant.sent_at, signal, profile);
        let mut hold = None;
        if signal.refused() {
            let wait = match signal.retry_after {
                Some(wait) => wait.max(MIN_RETRY),
                None => lane.bucket.untimed_wait(),
            };
            let shared = signal.scope == Some(Scope::Shared);
            if shared || signal.reset_after.is_some_and(|reset| wait > reset + BEYOND) {
                hold = Some((now + wait + profile.margin(now), shared));
            } else {
                lane.bucket.refuse(now, grant.sent_at, wait, signal, profile);
            }
        }
        if lane.bucket.closed(now) != before {
            lane.closed_by = ask.route.short();
            self.wake_refused(now, lane_id);
        }
        if let Some((until, shared)) = hold {
            self.hold(ask, until, shared);
        }
    }

    /// Opens a hold on a route; whoever waits for it must look whether it is concerned.
    fn hold(&mut self, ask: &Ask, until: Instant, shared: bool) {
        if let Some(route) = self.routes.get_mut(&ask.route) {
            route.hold(ask.detail, until, shared);
            self.wake_all(|waiter| waiter.ask.route == ask.route);
        }
    }

    /// The bucket an answer counts in, after binding the route to it.
    fn bind(&mut self, now: Instant, ask: &Ask, sent_in: LaneId, signal: &Signal) -> LaneId {
        let Some(route) = self.routes.get(&ask.route) else { return sent_in };
        let current = route.lane;
        let Some(hash) = signal.bucket else { return current };
        if ask.interaction {
            self.lanes[current].bucket.name(hash);
            return current;
        }
        if self.lanes[current].bucket.hash() == Some(hash) {
            return current;
        }
        let key = Key::bucket(hash, ask.major);
        let known = self.named.get(&key).copied();
        match (self.lanes[current].bucket.hash(), known) {
            (None, None) => {
                let lane = &mut self.lanes[current];
                lane.bucket.name(hash);
                lane.key = Some(key);
                self.named.insert(key, current);
                current
            }
            (None, Some(lane)) => {
                let own = self.lanes[current].bucket.clone();
                self.lanes[lane].bucket.absorb(&own);
                self.rebind(ask, current, lane);
                lane
            }
            (Some(_), known) => {
                let lane = match known {
                    Some(lane) => lane,
                    None if self.take_room(1, 0) => self.new_lane(Bucket::new(Some(hash), now), Some(key)),
                    None => return current,
                };
                if self.routes.get_mut(&ask.route).is_some_and(|route| route.met(lane, now)) {
                    self.rebind(ask, current, lane);
                }
                lane
            }
        }
    }

    /// Moves a route, and whoever waits for it, in order of arrival, to another bucket.
    fn rebind(&mut self, ask: &Ask, from: LaneId, to: LaneId) {
        if let Some(route) = self.routes.get_mut(&ask.route) {
            route.lane = to;
        }
        self.lanes[from].routes = self.lanes[from].routes.saturating_sub(1);
        self.lanes[to].routes += 1;
        let waiters = &self.waiters;
        let Some(line) = &mut self.lanes[from].line else { return };
        let moved = line.take_if(|ticket| waiters[ticket].ask.route == ask.route);
        if line.is_empty() {
            self.lanes[from].line = None;
        }
        for (seq, ticket) in moved {
            self.waiters[ticket].lane = to;
            self.set_unready(ticket);
            self.join_line(to, seq, ticket);
        }
        self.wake_head(from);
        self.wake_head(to);
    }

    /// Takes its old place again for another attempt.
    pub(super) fn rejoin(&mut self, now: Instant, grant: &Grant) -> Result<Ticket, ProxyError> {
        let lane = self.lane_of(now, &grant.ask)?;
        self.check_refused(now, &grant.ask)?;
        self.check_cooldown(now, &grant.ask, lane, grant.deadline)?;
        Ok(self.join(now, grant.ask, grant.deadline, grant.seq, lane))
    }

    /// Wakes those at the front of a line whose deadline a closure leaves no full attempt.
    pub(super) fn wake_refused(&mut self, now: Instant, lane: LaneId) {
        let Some(until) = self.lanes[lane].bucket.closed(now) else { return };
        let attempt = self.limits.attempt;
        let tickets: Vec<Ticket> =
            self.lanes[lane].line.iter().flat_map(|line| line.iter()).map(|(_, it)| it).collect();
        for ticket in tickets {
            if self.waiters[ticket].deadline < until + attempt {
                self.wake(Some(ticket));
            }
        }
    }

    /// Wakes everybody whom a global block leaves no full attempt.
    pub(super) fn wake_refused_by_block(&mut self, now: Instant) {
        if let Some(until) = self.pacer.blocked(now) {
            let limit = until + self.limits.attempt;
            self.wake_all(|waiter| waiter.deadline < limit && !waiter.ask.interaction);
        }
    }

    fn wake_all(&mut self, concerned: impl Fn(&Waiter) -> bool) {
        for (_, waiter) in &mut self.waiters {
            if concerned(waiter) {
                self.wakes.extend(waiter.waker.take());
            }
        }
    }
}

impl Lane {
    fn is_empty(&self) -> bool {
        self.line.is_none() && self.bucket.in_flight() == 0
    }
}
