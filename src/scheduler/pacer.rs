//! A credential's global limit: so many requests in any rolling second, as Discord sees them.
//!
//! An idle credential may send its whole limit at once. One that has run into the limit is spread evenly over the
//! second until a slot goes unused, so that nobody waits a whole second behind somebody else's burst. The window is a
//! little longer than a second: by a margin that grows when Discord disagrees and shrinks again (network jitter can
//! push two of our seconds into one of Discord's), and by how late our own timers have been of late (a busy machine
//! sends as unevenly as it wakes). What may have arrived late counts from when it can have arrived: what had to connect
//! first, what was written late, what was sent and saw no answer of any request since, and what went out right before the
//! machine stood still.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

const SECOND: Duration = Duration::from_secs(1);
const BASE_MARGIN: Duration = Duration::from_micros(500);
const MAX_MARGIN: Duration = Duration::from_millis(100);
/// Two disagreements are enough where the network's jitter reaches 80 ms.
const WIDEN_BY: Duration = Duration::from_millis(45);
/// So few answers over open connections do not tell how quick one can be: each of them may have been late.
const BELIEVED: u8 = 50;
/// What exceeds the quickest answer by more than this is Discord's work and not the way there.
const MAX_LATE: Duration = Duration::from_millis(500);
/// The learned part of the margin halves in this time.
const NARROW_EVERY: Duration = Duration::from_secs(300);
/// The part that our own lateness asks for is never longer, and halves in this time, once the requests that were late
/// have left the window.
const MAX_LATENESS: Duration = Duration::from_millis(20);
const CALM_DOWN: Duration = Duration::from_secs(2);
/// A timer that is later than this was not just late: the machine stood still.
const STALL: Duration = Duration::from_millis(10);
/// What was sent longer before a stall had left.
const ON_ITS_WAY: Duration = Duration::from_millis(25);
/// Nobody waited for a slot that was taken so much later.
const UNWANTED: Duration = Duration::from_millis(500);
/// A stream that was put off catches up by this part of the space between two requests.
const CATCH_UP: u32 = 20;
/// Above this limit sends are counted by the millisecond, so that memory stays bounded by the window.
const EXACT_UP_TO: u32 = 1000;

/// Longer than any window: what was sent before counts no more.
const PAST: Duration = Duration::from_secs(2);
/// No node has more entries for its window.
const MAX_ENTRIES: usize = 1_200;
/// As a block lasts no longer.
const MAX_BLOCK: Duration = Duration::from_secs(24 * 60 * 60);

/// A pacer's recent second for another node.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PacerState {
    /// How long each still counts, of a window of [`PAST`], and how many were sent then.
    sends: Vec<(Duration, u32)>,
    spread: Option<Duration>,
    margin: Duration,
    blocked: Option<Duration>,
    quickest: Option<Duration>,
}

/// The pacer of one credential.
#[derive(Debug)]
pub struct Pacer {
    limit: u32,
    /// Sends within the window: when (never earlier than it was) and how many.
    sends: VecDeque<(Instant, u32)>,
    count: u32,
    /// While spreading: the next even slot.
    spread: Option<Instant>,
    /// By how much what was late has put the slots off, as far as it is not caught up with.
    behind: Duration,
    margin: Duration,
    margin_at: Instant,
    /// How late the timers of waiting requests have been, as of when.
    lateness: (Duration, Instant),
    /// What the last request that had to wait was promised.
    promised: Option<Instant>,
    blocked_until: Option<Instant>,
    /// The time the quickest answers of late took, over connections that were open.
    quickest: Duration,
    /// The same as a former owner knew it (without one, as quick as can be), and for how many answers more that counts.
    told: (Duration, u8),
    /// What was claimed until then can have had the answer that came last.
    heard: Instant,
}

impl Pacer {
    /// `limit` requests a second. What was sent before `credit_from` is not known (by another process, say), so that
    /// the second before it counts as spent, evenly.
    pub fn new(limit: u32, now: Instant, credit_from: Instant) -> Self {
        let limit = limit.max(1);
        let mut pacer = Self {
            limit,
            sends: VecDeque::new(),
            count: 0,
            spread: None,
            behind: Duration::ZERO,
            margin: BASE_MARGIN,
            margin_at: now,
            lateness: (Duration::ZERO, now),
            promised: None,
            blocked_until: None,
            quickest: Duration::MAX,
            told: (Duration::ZERO, BELIEVED),
            heard: credit_from,
        };
        pacer.doubt(now, credit_from);
        pacer
    }

    /// What was sent before `credit_from` is not known: the second before it counts as spent, evenly, on top of what is
    /// known.
    pub fn doubt(&mut self, now: Instant, credit_from: Instant) {
        let window = self.window(now);
        let steps = self.limit.min(EXACT_UP_TO);
        let Some(start) = credit_from.checked_sub(window) else { return };
        for step in 1..=steps {
            let share = self.limit / steps + u32::from(step <= self.limit % steps);
            let at = start + window * step / steps;
            if at + window > now {
                self.sends.push_back((at, share));
                self.count += share;
            }
        }
        self.sends.make_contiguous().sort_unstable();
    }

    /// What another node should know.
    pub fn pack(&mut self, now: Instant) -> PacerState {
        let left = |at: Instant| (at + PAST).checked_duration_since(now);
        PacerState {
            sends: self.sends.iter().filter_map(|(at, count)| Some((left(*at)?, *count))).collect(),
            spread: self.spread.and_then(|slot| slot.checked_duration_since(now)),
            margin: self.margin_now(now),
            blocked: self.blocked(now).map(|until| until - now),
            quickest: Some(self.quickest.min(self.told.0)).filter(|quickest| *quickest < Duration::MAX),
        }
    }

    /// Takes over what another node knew; it replaces what is known here unless `used`, the credential was used here too.
    pub fn unpack(&mut self, now: Instant, state: &PacerState, used: bool) {
        if !used {
            self.sends.clear();
            self.count = 0;
        }
        for &(left, count) in state.sends.iter().take(MAX_ENTRIES) {
            let count = count.min(self.limit).min(1_000_000);
            let Some(at) = (now + left.min(PAST * 2)).checked_sub(PAST).filter(|_| count > 0) else { continue };
            self.sends.push_back((at, count));
            self.count = self.count.saturating_add(count);
        }
        self.sends.make_contiguous().sort_unstable();
        let spread = state.spread.map(|left| now + left.min(MAX_BLOCK));
        self.spread = self.spread.max(spread);
        self.margin = self.margin_now(now).max(state.margin.min(MAX_MARGIN));
        self.margin_at = now;
        let blocked = state.blocked.map(|left| now + left.min(MAX_BLOCK));
        self.blocked_until = self.blocked_until.max(blocked);
        // Or what is late from the first request on would look as if it could not be quicker. Another machine may be nearer
        // to Discord, so it does not count for long.
        self.told = state.quickest.map_or(self.told, |quickest| (quickest, BELIEVED));
    }

    /// Takes one request's allowance, or names the instant to try again.
    pub fn claim(&mut self, now: Instant) -> Result<(), Instant> {
        // Before anything else: after a stall not even the first request may trust the usual window.
        if let Some(at) = self.promised.take_if(|at| *at <= now) {
            self.woken(at, now);
        }
        let claimed = self.try_claim(now);
        if let Err(at) = claimed {
            self.promised = Some(at);
        }
        claimed
    }

    /// Somebody who was to wake at `promised` woke now.
    fn woken(&mut self, promised: Instant, now: Instant) {
        let late = promised.elapsed_at(now);
        // A send counts from when it was claimed, however late that was: what a timer is late by at any time is harmless.
        if late <= STALL || late >= UNWANTED {
            return;
        }
        let caught = |at: &Instant| *at + ON_ITS_WAY > promised && *at < now;
        let caught = self.sends.iter_mut().rev().take_while(|(at, _)| caught(at));
        caught.for_each(|(at, _)| *at = now);
        let late = late.min(MAX_LATENESS);
        if late > self.lateness(now) {
            self.lateness = (late, now);
        }
    }

    fn try_claim(&mut self, now: Instant) -> Result<(), Instant> {
        if let Some(until) = self.blocked(now) {
            return Err(until);
        }
        let window = self.window(now);
        while let Some((at, count)) = self.sends.front().copied().filter(|(at, _)| *at + window <= now) {
            debug_assert!(at <= now);
            self.sends.pop_front();
            self.count -= count;
        }
        let spacing = window / self.limit;
        // A slot that nobody took ends the spreading: the credential is below its limit again.
        if self.spread.is_some_and(|slot| slot + spacing < now && self.count < self.limit) {
            self.spread = None;
            self.behind = Duration::ZERO;
        }
        if self.count >= self.limit {
            let free = self.sends.front().map_or(now, |(at, _)| *at + window);
            let slot = self.spread.get_or_insert(free);
            if *slot + spacing < free {
                // It could not be taken, so it is not one that nobody wanted.
                self.behind = (self.behind + (free - *slot)).min(SECOND);
                *slot = free;
            }
            return Err(free.max(*slot));
        }
        if let Some(slot) = self.spread.filter(|slot| *slot > now) {
            return Err(slot);
        }
        if let Some(slot) = &mut self.spread {
            // From the slot, not from now: a late timer must not slow the stream down for good. Nor must what put it off:
            // it catches up as evenly.
            let caught_up = self.behind.min(spacing / CATCH_UP);
            self.behind -= caught_up;
            *slot += spacing - caught_up;
        }
        self.record(now);
        Ok(())
    }

    /// Discord answered 429 for all of the credential: nothing until then, and evenly after it.
    pub fn block(&mut self, now: Instant, until: Instant) {
        if self.blocked_until.is_none_or(|known| known < until) {
            self.blocked_until = Some(until);
            self.spread = Some(until);
            self.behind = Duration::ZERO;
        }
        self.margin = (self.margin_now(now) + WIDEN_BY).min(MAX_MARGIN);
        self.margin_at = now;
    }

    /// The end of a live global block.
    pub fn blocked(&mut self, now: Instant) -> Option<Instant> {
        self.blocked_until = self.blocked_until.filter(|until| *until > now);
        self.blocked_until
    }

    /// What was claimed at `claimed`, and `written` then, has been answered. If it arrived at Discord later than its claim,
    /// the next second's may not. Until an answer comes, nobody knows that anything sent since the one before has arrived:
    /// the machine or the network may have stood still. So all of it counts from the latest moment that the quickest way
    /// there and back leaves room for. What was written late is late by itself, whatever others' answers say; so is what had
    /// to wait for a connection, of which nobody knows when it was written. Of all that the margin covers the first.
    pub fn answered(&mut self, claimed: Instant, written: Option<Instant>, now: Instant) {
        if self.limit > EXACT_UP_TO {
            return;
        }
        if let Some(written) = written {
            let took = written.elapsed_at(now);
            self.quickest = if took < self.quickest { took } else { self.quickest + (took - self.quickest) / 4096 };
        }
        let quickest = self.quickest.min(self.told.0);
        if written.is_some() {
            self.told = match self.told {
                (known, left @ 2..) => (known, left - 1),
                _ => (Duration::MAX, 0),
            };
        }
        let Some(left) = now.checked_sub(quickest) else { return };
        // With the margin that the window adds it is what it was.
        let Some(arrived) = left.checked_sub(self.margin) else { return };
        if left > self.heard {
            let current = now.checked_sub(self.window(now)).map_or(self.heard, |current| current.max(self.heard));
            let unheard = self.sends.partition_point(|(at, _)| *at <= current);
            for (at, _) in self.sends.range_mut(unheard..).take_while(|(at, _)| *at < arrived) {
                *at = arrived.min(*at + MAX_LATE);
            }
            self.heard = left;
        }
        let arrived = written.map_or(Some(arrived), |written| written.checked_sub(self.margin));
        if let Some(arrived) = arrived.filter(|at| *at > claimed && claimed + self.window(now) > now) {
            let arrived = arrived.min(claimed + MAX_LATE);
            // Its entry is the first since its claim, or one that has been moved: then the first is as good.
            let place = self.sends.partition_point(|(at, _)| *at < claimed);
            let Some((_, count)) = self.sends.get(place).copied().filter(|(at, _)| *at < arrived) else { return };
            self.sends.remove(place);
            let place = self.sends.partition_point(|(known, _)| *known <= arrived);
            self.sends.insert(place, (arrived, count));
        }
    }

    fn record(&mut self, now: Instant) {
        self.count += 1;
        let coarse = self.limit > EXACT_UP_TO;
        match self.sends.back_mut() {
            Some((at, count)) if coarse && *at > now => *count += 1,
            _ => self.sends.push_back((if coarse { now + Duration::from_millis(1) } else { now }, 1)),
        }
        if !self.margin_at.elapsed_at(now).is_zero() && self.margin > BASE_MARGIN {
            self.margin = self.margin_now(now);
            self.margin_at = now;
        }
    }

    fn window(&self, now: Instant) -> Duration {
        SECOND + self.margin + self.lateness(now)
    }

    fn lateness(&self, now: Instant) -> Duration {
        let (late, at) = self.lateness;
        let calm = at.elapsed_at(now).saturating_sub(SECOND);
        if late.is_zero() { late } else { halved(late, calm, CALM_DOWN) }
    }

    fn margin_now(&self, now: Instant) -> Duration {
        let learned = self.margin.saturating_sub(BASE_MARGIN);
        BASE_MARGIN + halved(learned, self.margin_at.elapsed_at(now), NARROW_EVERY)
    }
}

/// What is left of `value` after `elapsed`, if it halves in every `half_life`.
fn halved(value: Duration, elapsed: Duration, half_life: Duration) -> Duration {
    value.mul_f64(0.5f64.powf(elapsed.as_secs_f64() / half_life.as_secs_f64()))
}

trait ElapsedAt {
    fn elapsed_at(&self, now: Instant) -> Duration;
}

impl ElapsedAt for Instant {
    fn elapsed_at(&self, now: Instant) -> Duration {
        now.saturating_duration_since(*self)
    }
}

#[cfg(test)]
#[path = "pacer_tests.rs"]
mod tests;
