//! Whose turn it is: from arrival to the grant.

use std::time::Instant;

use super::*;

impl Client {
    /// Refuses what Discord is known to refuse whenever it is asked.
    pub(super) fn check_refused(&self, now: Instant, ask: &Ask) -> Result<(), ProxyError> {
        if !ask.path_token {
            return if self.validity == Validity::Invalid { Err(ProxyError::InvalidToken) } else { Ok(()) };
        }
        let gone = !ask.interaction && self.gone.get(&ask.major).is_some_and(|until| *until > now);
        if gone { Err(ProxyError::UnknownWebhook) } else { Ok(()) }
    }

    /// Refuses at once what a known cooldown keeps from having a full attempt before its deadline.
    pub(super) fn check_cooldown(
        &mut self,
        now: Instant,
        ask: &Ask,
        lane: LaneId,
        deadline: Instant,
    ) -> Result<(), ProxyError> {
        let mut worst = self.lanes[lane].bucket.closed(now).map(|until| (until, Scope::User));
        let mut consider = |until: Option<Instant>, scope| {
            if let Some(until) = until.filter(|until| worst.is_none_or(|(known, _)| known < *until)) {
                worst = Some((until, scope));
            }
        };
        if let Some(route) = self.routes.get(&ask.route) {
            if let Some((until, shared)) = route.held(ask.detail, now) {
                consider(Some(until), if shared { Scope::Shared } else { Scope::User });
            }
            for extra in route.extras(|lane| self.closed_by(now, lane, ask)) {
                consider(self.lanes[extra].bucket.closed(now), Scope::User);
            }
        }
        if !ask.interaction {
            consider(self.pacer.blocked(now), Scope::Global);
        }
        match worst {
            Some((until, scope)) if until + self.limits.attempt > deadline => {
                Err(ProxyError::RateLimited(Cooldown { retry_after: until - now, scope }))
            }
            _ => Ok(()),
        }
    }

    /// The bucket a route queues in, made if it is not known yet.
    pub(super) fn lane_of(&mut self, now: Instant, ask: &Ask) -> Result<LaneId, ProxyError> {
        if let Some(route) = self.routes.get(&ask.route) {
            return Ok(route.lane);
        }
        let shared = if ask.interaction { self.named.get(&ask.provisional).copied() } else { None };
        if !self.take_room(usize::from(shared.is_none()), 1) {
            return Err(ProxyError::Unavailable(Reason::BucketLimit));
        }
        let lane = shared.unwrap_or_else(|| {
            // An interaction's bucket is found by the interaction, for good; any other once Discord has named it.
            let key = ask.interaction.then_some(ask.provisional);
            self.new_lane(Bucket::new(None, now), key)
        });
        self.lanes[lane].routes += 1;
        self.routes.insert(ask.route, RouteEntry::new(lane));
        Ok(lane)
    }

    pub(super) fn new_lane(&mut self, bucket: Bucket, key: Option<Key>) -> LaneId {
        let lane = self.lanes.insert(Lane { bucket, line: None, key, routes: 0, closed_by: 0 });
        if let Some(key) = key {
            self.named.insert(key, lane);
        }
        lane
    }

    /// Whether every bucket the route may count in lets it go.
    pub(super) fn admit(&self, now: Instant, ask: &Ask, lane: LaneId) -> Admission {
        let own = self.admit_in(now, ask.class, lane);
        let Some(route) = self.routes.get(&ask.route).filter(|route| !route.is_simple()) else { return own };
        route.extras(|lane| self.closed_by(now, lane, ask)).fold(own, |so_far, lane| {
            match (so_far, self.admit_in(now, ask.class, lane)) {
                (Admission::OnAnswer, _) | (_, Admission::OnAnswer) => Admission::OnAnswer,
                (Admission::At(one), Admission::At(other)) => Admission::At(one.max(other)),
                (Admission::Now, other) => other,
                (at, Admission::Now) => at,
            }
        })
    }

    fn admit_in(&self, now: Instant, class: Class, lane: LaneId) -> Admission {
        let bucket = &self.lanes[lane].bucket;
        bucket.admit(now, class, profile_of(&self.profiles, bucket))
    }

    /// Whether this route's own answer keeps a bucket closed.
    fn closed_by(&self, now: Instant, lane: LaneId, ask: &Ask) -> bool {
        let lane = &self.lanes[lane];
        lane.closed_by == ask.route.short() && lane.bucket.closed(now).is_some()
    }

    /// Interactions know no global limit; a path's own token is not held up by a credential nobody has judged.
    pub(super) fn bypasses(&self, ask: &Ask) -> bool {
        ask.interaction || (ask.path_token && self.validity == Validity::Unjudged)
    }

    /// What concerns the whole credential: the judging of an unknown one, then the global limit. The error is when to
    /// try again, if time alone decides.
    pub(super) fn claim(&mut self, now: Instant, ask: &Ask) -> Result<(), Option<Instant>> {
        if ask.interaction {
            return Ok(());
        }
        let unjudged = self.validity == Validity::Unjudged && !ask.path_token && self.judging > 0;
        if unjudged || self.blocking > 0 {
            return Err(None);
        }
        self.pacer.claim(now).map_err(Some)
    }

    pub(super) fn grant(&mut self, now: Instant, ask: Ask, deadline: Instant, seq: u64, lane: LaneId) -> Grant {
        let extras = self.routes.get(&ask.route).filter(|route| !route.is_simple()).and_then(|route| {
            let extras: Box<[LaneId]> = route.extras(|lane| self.closed_by(now, lane, &ask)).collect();
            (!extras.is_empty()).then_some(extras)
        });
        let judges = self.validity == Validity::Unjudged && !ask.path_token;
        let grant = Grant { ask, deadline, seq, lane, extras, sent_at: now, judges, blocks: false, written: Some(now) };
        for lane in grant.lanes() {
            self.lanes[lane].bucket.sent(ask.class);
        }
        self.in_flight += 1;
        self.judging += u32::from(judges);
        grant
    }

    pub(super) fn join(&mut self, now: Instant, ask: Ask, deadline: Instant, seq: u64, lane: LaneId) -> Ticket {
        let ticket = self.waiters.insert(Waiter { seq, ask, lane, deadline, waker: None, held: false, ready: false });
        if !self.join_hold(now, ticket) {
            self.join_line(lane, seq, ticket);
        }
        ticket
    }

    /// One waiting request's turn.
    pub(super) fn turn(&mut self, now: Instant, ticket: Ticket) -> Step {
        let Waiter { seq, ask, deadline, .. } = self.waiters[ticket];
        if self.place == Place::Gone {
            return Step::Move(ask);
        }
        let lane = self.routes.get(&ask.route).map_or(self.waiters[ticket].lane, |route| route.lane);
        if let Err(error) = self.check_refused(now, &ask).and_then(|()| self.check_cooldown(now, &ask, lane, deadline))
        {
            return Step::Refuse(error);
        }
        if now >= deadline {
            return Step::Refuse(ProxyError::QueueTimeout);
        }
        if self.place == Place::Moving {
            return Step::Wait;
        }
        if let Some(until) = self.turn_held(now, ticket) {
            return until.map_or(Step::Wait, |until| Step::At(until.min(deadline)));
        }
        let lane = self.waiters[ticket].lane;
        if self.lanes[lane].line.as_ref().and_then(|line| line.head()) != Some(ticket) {
            // One that came back may have taken the head.
            self.set_unready(ticket);
            return Step::Wait;
        }
        let admission = self.admit(now, &ask, lane);
        if admission != Admission::Now {
            self.set_unready(ticket);
            self.wait_elsewhere(now, &ask, ticket);
            let at = if let Admission::At(at) = admission { at } else { deadline };
            return Step::At(at.min(deadline));
        }
        if !self.bypasses(&ask) {
            if !std::mem::replace(&mut self.waiters[ticket].ready, true) {
                self.ready.push_back(ticket);
            }
            if self.ready.front() != Some(&ticket) {
                return Step::At(deadline);
            }
        }
        if let Err(at) = self.claim(now, &ask) {
            return Step::At(at.unwrap_or(deadline).min(deadline));
        }
        let grant = self.grant(now, ask, deadline, seq, lane);
        self.leave(now, ticket);
        Step::Go(grant)
    }

    /// Remembers which buckets besides its own have to answer before a request may go.
    fn wait_elsewhere(&mut self, now: Instant, ask: &Ask, ticket: Ticket) {
        let Some(route) = self.routes.get(&ask.route).filter(|route| !route.is_simple()) else { return };
        let extras = route.extras(|lane| self.closed_by(now, lane, ask));
        let busy = extras.filter(|lane| self.admit_in(now, ask.class, *lane) == Admission::OnAnswer);
        let new = busy.map(|lane| (lane, ticket)).filter(|place| !self.elsewhere.contains(place)).collect::<Vec<_>>();
        self.elsewhere.extend(new);
    }

    /// Wakes those who wait for an answer in a bucket besides their own.
    pub(super) fn wake_elsewhere(&mut self, lane: LaneId) {
        let mut at = 0;
        while let Some(&(awaited, ticket)) = self.elsewhere.get(at) {
            if awaited == lane {
                self.elsewhere.swap_remove(at);
                self.wake(Some(ticket));
            } else {
                at += 1;
            }
        }
    }

    /// If a hold covers the request: when to look again (never, for those behind its first). Holds that are over let
    /// everybody back into line.
    fn turn_held(&mut self, now: Instant, ticket: Ticket) -> Option<Option<Instant>> {
        let Waiter { seq, ask, lane, held, .. } = self.waiters[ticket];
        if !held {
            if !self.join_hold(now, ticket) {
                return None;
            }
            self.set_unready(ticket);
            self.leave_line(now, lane, seq);
        }
        let route = self.routes.get_mut(&ask.route)?;
        if let Some((until, _)) = route.held(ask.detail, now) {
            let next = route.wait_longer(ask.detail, now, seq, ticket);
            let heads = route.heads_hold(ticket);
            self.wake(next);
            return Some(heads.then_some(until));
        }
        self.release_held(now, &ask);
        None
    }

    /// Whether a hold covers a request that comes now. Whoever waited for one that is over stands before it, woken or not.
    pub(super) fn holds(&mut self, now: Instant, ask: &Ask) -> bool {
        if self.routes[&ask.route].is_simple() {
            return false;
        }
        self.release_held(now, ask);
        self.routes[&ask.route].held(ask.detail, now).is_some()
    }

    /// Lets those back into line whose hold is over.
    fn release_held(&mut self, now: Instant, ask: &Ask) {
        let Some(route) = self.routes.get_mut(&ask.route) else { return };
        let lane = route.lane;
        let released = route.release(now);
        if released.is_empty() {
            return;
        }
        for (seq, ticket) in released {
            self.waiters[ticket].held = false;
            self.waiters[ticket].lane = lane;
            self.join_line(lane, seq, ticket);
        }
        self.wake_head(lane);
    }

    /// Queues behind the hold that covers the request, if there is one.
    fn join_hold(&mut self, now: Instant, ticket: Ticket) -> bool {
        let Waiter { seq, ask, .. } = self.waiters[ticket];
        let Some(route) = self.routes.get_mut(&ask.route) else { return false };
        if route.held(ask.detail, now).is_none() {
            return false;
        }
        route.wait_held(ask.detail, now, seq, ticket);
        self.waiters[ticket].held = true;
        true
    }

    pub(super) fn join_line(&mut self, lane: LaneId, seq: u64, ticket: Ticket) {
        let line = self.lanes[lane].line.get_or_insert_default();
        let head = line.head();
        line.join(seq, ticket);
        // Who stood at the head may hold a place that is the head's.
        if line.head() == Some(ticket) {
            self.wake(head);
        }
    }

    pub(super) fn leave_line(&mut self, now: Instant, lane: LaneId, seq: u64) {
        let Some(line) = &mut self.lanes[lane].line else { return };
        let was_head = line.leave(seq);
        if line.is_empty() {
            self.lanes[lane].line = None;
        } else if was_head {
            let next = self.lanes[lane].line.as_ref().and_then(|line| line.head());
            // A head that can only wait for an answer in this bucket is woken by it.
            let class = next.map(|ticket| self.waiters[ticket].ask.class);
            if class.is_some_and(|class| self.admit_in(now, class, lane) != Admission::OnAnswer) {
                self.wake(next);
            }
        }
    }

    /// Leaves the line of those whose bucket lets them go; the next one there must look.
    pub(super) fn set_unready(&mut self, ticket: Ticket) {
        if !std::mem::replace(&mut self.waiters[ticket].ready, false) {
            return;
        }
        self.drop_ready(ticket);
    }

    pub(super) fn drop_ready(&mut self, ticket: Ticket) {
        let was_front = self.ready.front() == Some(&ticket);
        if was_front {
            self.ready.pop_front();
            self.wake(self.ready.front().copied());
        } else {
            self.ready.retain(|other| *other != ticket);
        }
    }

    pub(super) fn wake(&mut self, ticket: Option<Ticket>) {
        if let Some(waker) = ticket.and_then(|ticket| self.waiters.get_mut(ticket)).and_then(|it| it.waker.take()) {
            self.wakes.push(waker);
        }
    }

    pub(super) fn wake_head(&mut self, lane: LaneId) {
        let head = self.lanes.get(lane).and_then(|lane| lane.line.as_ref()).and_then(|line| line.head());
        self.wake(head);
    }

    /// Takes places for so many more buckets and routes, if there are any.
    pub(super) fn take_room(&mut self, lanes: usize, routes: usize) -> bool {
        let want = (self.lanes.len() + lanes).max(self.routes.len() + routes);
        while self.places < want {
            if !self.room.take() {
                self.give_room_back();
                return false;
            }
            self.places += 1;
        }
        true
    }

    pub(super) fn give_room_back(&mut self) {
        let have = self.lanes.len().max(self.routes.len());
        if let Some(surplus) = self.places.checked_sub(have) {
            self.room.give_back(surplus);
            self.places = have;
        }
    }
}
