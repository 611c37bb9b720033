//! The counters, pure: buckets of both shapes, the rolling second, the invalid-request count.
//!
//! Nothing here knows of requests or sockets. Every method takes `now`.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What a bucket looks like after (or without) a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Whole calls left.
    pub remaining: u32,
    /// Until the window ends, or until the drip bucket is full.
    pub reset_after: Duration,
}

/// One bucket's counter.
#[derive(Clone, Debug)]
pub enum Counter {
    /// Everything comes back at once when the window, opened by the first use, ends.
    Window {
        /// Calls in one window.
        limit: u32,
        /// The window's length.
        period: Duration,
        /// Calls used in the running window.
        used: u32,
        /// The running window's end.
        ends: Option<Instant>,
    },
    /// One call comes back every period (GCRA).
    Drip {
        /// Calls when full.
        limit: u32,
        /// Time for one call to come back.
        period: Duration,
        /// When the bucket is full again.
        full_at: Option<Instant>,
    },
}

impl Counter {
    /// A full window bucket.
    pub fn window(limit: u32, period: Duration) -> Self {
        Self::Window { limit, period, used: 0, ends: None }
    }

    /// A full drip bucket.
    pub fn drip(limit: u32, period: Duration) -> Self {
        Self::Drip { limit, period, full_at: None }
    }

    /// How long a call at `now` has to wait; `None` if it may go.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        match *self {
            Self::Window { limit, used, ends: Some(ends), .. } if now < ends => (used >= limit).then(|| ends - now),
            Self::Window { limit, period, .. } => (limit == 0).then_some(period),
            Self::Drip { limit, period, full_at } => {
                let backlog = full_at.map_or(Duration::ZERO, |full| full.saturating_duration_since(now));
                let excess = (backlog + period).saturating_sub(period * limit);
                (excess > Duration::ZERO).then_some(excess)
            }
        }
    }

    /// Takes one call.
    pub fn take(&mut self, now: Instant) {
        match self {
            Self::Window { period, used, ends, .. } => {
                if ends.is_none_or(|end| now >= end) {
                    *ends = Some(now + *period);
                    *used = 0;
                }
                *used += 1;
            }
            Self::Drip { period, full_at, .. } => {
                *full_at = Some(full_at.map_or(now, |full| full.max(now)) + *period);
            }
        }
    }

    /// What the headers say at `now`.
    pub fn standing(&self, now: Instant) -> Standing {
        match *self {
            Self::Window { limit, used, ends: Some(ends), .. } if now < ends => {
                Standing { remaining: limit.saturating_sub(used), reset_after: ends - now }
            }
            Self::Window { limit, period, .. } => Standing { remaining: limit, reset_after: period },
            Self::Drip { limit, period, full_at } => {
                let backlog = full_at.map_or(Duration::ZERO, |full| full.saturating_duration_since(now));
                let left = (period * limit).saturating_sub(backlog);
                let remaining = left.as_nanos().checked_div(period.as_nanos()).unwrap_or(u128::from(limit));
                Standing { remaining: u32::try_from(remaining).unwrap_or(limit), reset_after: backlog }
            }
        }
    }
}

/// At most a number of calls in any span of a given length.
#[derive(Clone, Debug, Default)]
pub struct Rolling {
    taken: VecDeque<Instant>,
    peak: usize,
}

impl Rolling {
    /// How long a call at `now` has to wait when `limit` are allowed in `span`; `None` if it may go.
    pub fn wait(&mut self, now: Instant, limit: usize, span: Duration) -> Option<Duration> {
        self.forget(now, span);
        if self.taken.len() < limit {
            return None;
        }
        let gives_way = self.taken.get(self.taken.len().saturating_sub(limit.max(1))).copied().unwrap_or(now);
        Some((gives_way + span).saturating_duration_since(now).max(Duration::from_millis(1)))
    }

    /// Counts one call.
    pub fn take(&mut self, now: Instant, span: Duration) {
        self.forget(now, span);
        self.taken.push_back(now);
        self.peak = self.peak.max(self.taken.len());
    }

    /// Calls in the span that ends at `now`.
    pub fn len(&mut self, now: Instant, span: Duration) -> usize {
        self.forget(now, span);
        self.taken.len()
    }

    /// The most calls any span has seen.
    pub fn peak(&self) -> usize {
        self.peak
    }

    fn forget(&mut self, now: Instant, span: Duration) {
        while self.taken.front().is_some_and(|&first| now.saturating_duration_since(first) >= span) {
            self.taken.pop_front();
        }
    }
}

/// The invalid requests of one address, and the ban that follows too many.
#[derive(Clone, Debug, Default)]
pub struct Invalid {
    seen: Rolling,
    total: u64,
    banned_until: Option<Instant>,
}

impl Invalid {
    /// What is left of the ban.
    pub fn banned(&self, now: Instant) -> Option<Duration> {
        self.banned_until.and_then(|until| until.checked_duration_since(now)).filter(|left| !left.is_zero())
    }

    /// Counts one invalid answer; more than `limit` in `span` start a ban of the given length.
    pub fn count(&mut self, now: Instant, limit: usize, span: Duration, ban: Duration) {
        self.total += 1;
        self.seen.take(now, span);
        if self.seen.len(now, span) > limit {
            self.banned_until = Some(now + ban);
        }
    }

    /// Bans from `now` on.
    pub fn ban(&mut self, now: Instant, ban: Duration) {
        self.banned_until = Some(now + ban);
    }

    /// Invalid answers ever given.
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_window_gives_everything_back_at_its_end_and_not_before() {
        let t0 = Instant::now();
        let mut window = Counter::window(2, 5 * SECOND);
        window.take(t0);
        window.take(t0 + SECOND);
        assert_eq!(window.standing(t0 + SECOND), Standing { remaining: 0, reset_after: 4 * SECOND });
        assert_eq!(window.wait(t0 + 2 * SECOND), Some(3 * SECOND));
        assert_eq!(window.wait(t0 + 5 * SECOND), None);
        window.take(t0 + 9 * SECOND);
        assert_eq!(window.standing(t0 + 9 * SECOND), Standing { remaining: 1, reset_after: 5 * SECOND });
    }

    #[test]
    fn each_use_of_a_drip_bucket_adds_one_period_to_the_time_until_full() {
        let t0 = Instant::now();
        let period = Duration::from_millis(3850);
        let mut drip = Counter::drip(5, period);
        for left in (0..5).rev() {
            assert_eq!(drip.wait(t0), None);
            drip.take(t0);
            assert_eq!(drip.standing(t0), Standing { remaining: left, reset_after: period * (5 - left) });
        }
        assert_eq!(drip.wait(t0), Some(period), "one call comes back after one period, not after all five");
        assert_eq!(drip.wait(t0 + period), None);
        assert_eq!(drip.standing(t0 + period).remaining, 1);
        assert_eq!(drip.standing(t0 + period * 3 / 2).remaining, 1, "only whole calls are told");
        assert_eq!(drip.standing(t0 + 10 * period), Standing { remaining: 5, reset_after: Duration::ZERO });
    }

    #[test]
    fn no_rolling_second_holds_more_than_the_limit() {
        let t0 = Instant::now();
        let mut rolling = Rolling::default();
        for ms in [0, 500, 900] {
            assert_eq!(rolling.wait(t0 + Duration::from_millis(ms), 3, SECOND), None);
            rolling.take(t0 + Duration::from_millis(ms), SECOND);
        }
        assert_eq!(rolling.wait(t0 + Duration::from_millis(950), 3, SECOND), Some(Duration::from_millis(50)));
        assert_eq!(rolling.wait(t0 + SECOND, 3, SECOND), None);
        rolling.take(t0 + SECOND, SECOND);
        assert_eq!(rolling.wait(t0 + SECOND, 3, SECOND), Some(Duration::from_millis(500)));
        assert_eq!(rolling.peak(), 3);
    }

    #[test]
    fn more_invalid_answers_than_allowed_start_a_ban_that_ends() {
        let t0 = Instant::now();
        let mut invalid = Invalid::default();
        for _ in 0..3 {
            invalid.count(t0, 3, 10 * SECOND, 60 * SECOND);
            assert_eq!(invalid.banned(t0), None);
        }
        invalid.count(t0 + SECOND, 3, 10 * SECOND, 60 * SECOND);
        assert_eq!(invalid.banned(t0 + SECOND), Some(60 * SECOND));
        assert_eq!(invalid.banned(t0 + 61 * SECOND), None);
    }

    #[test]
    fn old_invalid_answers_leave_the_count() {
        let t0 = Instant::now();
        let mut invalid = Invalid::default();
        for n in 0..20 {
            invalid.count(t0 + SECOND * 6 * n, 3, 10 * SECOND, SECOND);
            assert_eq!(invalid.banned(t0 + SECOND * 6 * n), None);
        }
        assert_eq!(invalid.total(), 20);
    }
}
