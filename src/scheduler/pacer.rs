//! A credential's global limit: so many requests in any rolling second, as Discord sees them.
//!
//! An idle credential may send its whole limit at once. One that has run into the limit is spread evenly over the
//! second until a slot goes unused, so that nobody waits a whole second behind somebody else's burst. The window is a
//! little longer than a second: by a margin that grows when Discord disagrees and shrinks again (network jitter can
//! push two of our seconds into one of Discord's), and by how late our own timers have been of late (a busy machine
//! sends as unevenly as it wakes).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

const SECOND: Duration = Duration::from_secs(1);
const BASE_MARGIN: Duration = Duration::from_millis(1);
const MAX_MARGIN: Duration = Duration::from_millis(100);
const WIDEN_BY: Duration = Duration::from_millis(32);
/// A request counts from this long after its claim at the latest: beyond it Discord works, and no connection is opened.
const MAX_LATE: Duration = Duration::from_millis(500);
/// The learned part of the margin halves in this time.
const NARROW_EVERY: Duration = Duration::from_secs(300);
/// The part that our own lateness asks for halves in this time, once the requests that were stalled have left the window.
const CALM_DOWN: Duration = Duration::from_secs(5);
/// Timers are late by a millisecond or two at any time; beyond this the machine stood still.
const STALL: Duration = Duration::from_millis(5);
/// What was sent longer before a stall had arrived.
const ON_ITS_WAY: Duration = Duration::from_millis(20);
/// Nobody waited for a slot that was taken so much later.
const UNWANTED: Duration = Duration::from_millis(500);
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
    margin: Duration,
    margin_at: Instant,
    /// How late the timers of waiting requests have been, as of when.
    lateness: (Duration, Instant),
    /// What the last request that had to wait was promised.
    promised: Option<Instant>,
    blocked_until: Option<Instant>,
    /// The time the quickest answers of late took, over connections that were open.
    quickest: Duration,
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
            margin: BASE_MARGIN,
            margin_at: now,
            lateness: (Duration::ZERO, now),
            promised: None,
            blocked_until: None,
            quickest: Duration::MAX,
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

    /// What another node should know, when `promised` more requests will go from here at the next even slots.
    pub fn pack(&mut self, now: Instant, promised: u32) -> PacerState {
        let left = |at: Instant| (at + PAST).checked_duration_since(now);
        let busy = (promised > 0).then(|| self.window(now) / self.limit * promised);
        let spread = self.spread.and_then(|slot| slot.checked_duration_since(now));
        PacerState {
            sends: self.sends.iter().filter_map(|(at, count)| Some((left(*at)?, *count))).collect(),
            spread: busy.map(|busy| spread.unwrap_or_default() + busy).or(spread),
            margin: self.margin_now(now),
            blocked: self.blocked(now).map(|until| until - now),
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
    }

    /// Takes one request's allowance, or names the instant to try again.
    pub fn claim(&mut self, now: Instant) -> Result<(), Instant> {
        // Before anything else: after a stall not even the first request may trust the usual window.
        if let Some(at) = self.promised.take_if(|at| *at <= now) {
            self.woken(at.elapsed_at(now), now);
        }
        let claimed = self.try_claim(now);
        if let Err(at) = claimed {
            self.promised = Some(at);
        }
        claimed
    }

    /// Somebody who waited woke so late.
    fn woken(&mut self, late: Duration, now: Instant) {
        // What stalled this one may have caught the one before it on its way, a slot earlier if slots are short.
        let stall = if late > STALL { late + (self.window(now) / self.limit).min(ON_ITS_WAY) } else { late };
        if stall > self.lateness(now) && late < UNWANTED {
            self.lateness = (stall, now);
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
        }
        if self.count >= self.limit {
            let free = self.sends.front().map_or(now, |(at, _)| *at + window);
            let slot = self.spread.get_or_insert(free);
            return Err(free.max(*slot));
        }
        if let Some(slot) = self.spread.filter(|slot| *slot > now) {
            return Err(slot);
        }
        if let Some(slot) = &mut self.spread {
            // From the slot, not from now: a late timer must not slow the stream down for good.
            *slot += spacing;
        }
        self.record(now);
        Ok(())
    }

    /// Discord answered 429 for all of the credential: nothing until then, and evenly after it.
    pub fn block(&mut self, now: Instant, until: Instant) {
        if self.blocked_until.is_none_or(|known| known < until) {
            self.blocked_until = Some(until);
            self.spread = Some(until);
        }
        self.margin = (self.margin_now(now) + WIDEN_BY).min(MAX_MARGIN);
        self.margin_at = now;
    }

    /// The end of a live global block.
    pub fn blocked(&mut self, now: Instant) -> Option<Instant> {
        self.blocked_until = self.blocked_until.filter(|until| *until > now);
        self.blocked_until
    }

    /// What was claimed at `claimed` has been answered. One whose connection had to be opened first arrived at Discord
    /// later than its claim, and the next second's, over connections that are open, will not. So it counts from the
    /// latest moment that the quickest way there and back leaves room for.
    pub fn answered(&mut self, claimed: Instant, now: Instant, connected: bool) {
        let took = claimed.elapsed_at(now);
        if !connected {
            self.quickest = if took < self.quickest { took } else { self.quickest + (took - self.quickest) / 1024 };
            return;
        }
        // Before any answer came over an open connection, nobody knows how quick one can be.
        let quickest = if self.quickest == Duration::MAX { Duration::ZERO } else { self.quickest };
        let late = took.saturating_sub(quickest).min(MAX_LATE);
        if late.is_zero() || self.limit > EXACT_UP_TO {
            return;
        }
        let Ok(place) = self.sends.binary_search_by(|(at, _)| at.cmp(&claimed)) else { return };
        let Some((at, count)) = self.sends.remove(place) else { return };
        let place = self.sends.partition_point(|(known, _)| *known <= at + late);
        self.sends.insert(place, (at + late, count));
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
        let calm = at.elapsed_at(now).saturating_sub(2 * SECOND);
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seasoned(limit: u32) -> (Pacer, Instant) {
        let born = Instant::now();
        let now = born + Duration::from_secs(10);
        (Pacer::new(limit, now, born), now)
    }

    #[test]
    fn a_burst_that_was_late_counts_from_when_it_can_have_arrived() {
        let (mut pacer, start) = seasoned(2);
        for _ in 0..2 {
            assert_eq!(pacer.claim(start), Ok(()));
        }
        // Both had to connect first: Discord may have counted them as late as this.
        let answered = start + Duration::from_millis(300);
        for _ in 0..2 {
            pacer.answered(start, answered, true);
        }
        let Err(free) = pacer.claim(start + SECOND + 2 * BASE_MARGIN) else { panic!("a rolling second of three") };
        assert_eq!(free, answered + SECOND + BASE_MARGIN);
        assert_eq!(pacer.claim(free), Ok(()));
    }

    #[test]
    fn slow_answers_over_open_connections_cost_nothing() {
        let (mut pacer, start) = seasoned(2);
        assert_eq!(pacer.claim(start), Ok(()));
        assert_eq!(pacer.claim(start), Ok(()));
        pacer.answered(start, start + Duration::from_millis(900), false);
        assert_eq!(pacer.claim(start), Err(start + SECOND + BASE_MARGIN));
    }

    /// Sends `count` requests as fast as allowed, each timer late by `late`.
    fn drain(pacer: &mut Pacer, mut now: Instant, count: usize, late: Duration) -> Vec<Instant> {
        let mut sent = Vec::new();
        while sent.len() < count {
            match pacer.claim(now) {
                Ok(()) => sent.push(now),
                Err(at) => now = at + late,
            }
        }
        sent
    }

    fn at_most(sent: &[Instant], limit: usize) -> bool {
        sent.windows(limit + 1).all(|run| run[limit] - run[0] >= SECOND)
    }

    #[test]
    fn an_idle_credential_sends_its_limit_at_once_and_then_evenly() {
        let (mut pacer, now) = seasoned(50);
        let sent = drain(&mut pacer, now, 150, Duration::ZERO);
        assert_eq!(sent[49], now);
        assert!(at_most(&sent, 50));
        let gaps: Vec<_> = sent[50..].windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(
            gaps.iter().all(|gap| *gap >= Duration::from_millis(19) && *gap <= Duration::from_millis(21)),
            "{gaps:?}"
        );
        assert!(sent[149] - now < Duration::from_millis(3000));
    }

    #[test]
    fn late_timers_do_not_add_up() {
        let (mut pacer, now) = seasoned(50);
        let sent = drain(&mut pacer, now, 3200, Duration::from_millis(1));
        assert!(at_most(&sent, 50));
        assert!(sent[3199] - now < Duration::from_millis(64_200), "{:?}", sent[3199] - now);
    }

    #[test]
    fn a_machine_that_wakes_late_leaves_as_much_room() {
        let (mut pacer, now) = seasoned(50);
        let sent = drain(&mut pacer, now, 200, Duration::from_millis(60));
        assert!(sent[100..].windows(51).all(|run| run[50] - run[0] >= SECOND + Duration::from_millis(30)));
        assert!(pacer.lateness(sent[199] + CALM_DOWN * 8) < Duration::from_millis(1));
    }

    #[test]
    fn a_fresh_process_has_no_credit_for_its_first_second() {
        let now = Instant::now() + SECOND * 5;
        let mut pacer = Pacer::new(50, now, now);
        let sent = drain(&mut pacer, now, 60, Duration::ZERO);
        assert!(sent.iter().filter(|at| **at - now < Duration::from_millis(500)).count() <= 25);
        assert!(at_most(&sent, 50));
    }

    #[test]
    fn what_another_may_have_sent_counts_on_top_of_what_was_sent_here() {
        let (mut pacer, now) = seasoned(50);
        assert_eq!(drain(&mut pacer, now, 10, Duration::ZERO)[9], now);
        pacer.doubt(now, now);
        let sent = drain(&mut pacer, now, 60, Duration::ZERO);
        assert!(sent.iter().filter(|at| **at - now < Duration::from_millis(500)).count() <= 25);
        assert!(sent.windows(51).all(|run| run[50] - run[0] >= SECOND));
        assert!(pacer.sends.iter().is_sorted());
    }

    #[test]
    fn a_global_block_holds_and_is_followed_by_an_even_stream() {
        let (mut pacer, now) = seasoned(50);
        let until = now + Duration::from_millis(1600);
        pacer.block(now, until);
        assert_eq!(pacer.claim(now), Err(until));
        let sent = drain(&mut pacer, now, 50, Duration::ZERO);
        assert!(sent[0] >= until);
        assert!(sent[49] - until > Duration::from_millis(900));
    }

    #[test]
    fn disagreement_widens_the_window_and_time_narrows_it() {
        let (mut pacer, now) = seasoned(50);
        for _ in 0..9 {
            pacer.block(now, now);
        }
        assert_eq!(pacer.margin, MAX_MARGIN);
        assert!(pacer.margin_now(now + NARROW_EVERY * 8) < BASE_MARGIN * 2);
    }

    proptest! {
        #[test]
        fn no_rolling_second_exceeds_the_limit(
            limit in 1u32..60, idle in 0u64..3, steps in prop::collection::vec((0u64..300, 1usize..40), 1..60)
        ) {
            let born = Instant::now();
            let mut now = born + Duration::from_secs(idle);
            let mut pacer = Pacer::new(limit, now, born);
            let mut sent = Vec::new();
            for (pause, burst) in steps {
                now += Duration::from_millis(pause);
                for _ in 0..burst {
                    if pacer.claim(now).is_ok() { sent.push(now); }
                }
            }
            prop_assert!(at_most(&sent, limit as usize));
        }

        #[test]
        fn a_promised_instant_holds(limit in 1u32..60, burst in 1usize..200) {
            let (mut pacer, mut now) = seasoned(limit);
            for _ in 0..burst {
                if let Err(at) = pacer.claim(now) {
                    prop_assert!(at > now);
                    now = at;
                    prop_assert_eq!(pacer.claim(now), Ok(()));
                }
            }
        }

        #[test]
        fn below_the_limit_nobody_waits(limit in 2u32..60, count in 1u32..60) {
            let (mut pacer, now) = seasoned(limit);
            for step in 0..count.min(limit) {
                prop_assert!(pacer.claim(now + Duration::from_millis(u64::from(step))).is_ok());
            }
        }

        #[test]
        fn large_limits_cost_bounded_memory(limit in 1001u32..1_000_000) {
            let (mut pacer, now) = seasoned(limit);
            for step in 0..5000u32 {
                if pacer.claim(now + Duration::from_micros(u64::from(step) * 500)).is_err() { break; }
            }
            prop_assert!(pacer.sends.len() <= 1110);
        }
    }
}
