//! What is known of one of Discord's bucket hashes, whatever its major parameter: whether its buckets are windows or
//! drip, and by how much their resets are announced early.
//!
//! Both shapes are seen in public experiments. A *window* ends as a whole: `Reset-After` only shrinks. A *drip* bucket
//! gives back one call a period: each use pushes `Reset-After`, the time until it is full, up by one period. Two answers
//! in a row tell them apart; until then the safe reading (a window) is acted on.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Resets are told in whole milliseconds, and counted from when an answer arrived: this much is enough for honest ones.
const BASE_MARGIN: Duration = Duration::from_millis(2);
/// Margins never grow beyond this.
const MAX_MARGIN: Duration = Duration::from_secs(1);
/// The learned margin halves in this time.
const DECAY: Duration = Duration::from_secs(3600);
/// Shorter resets say nothing about the shape: network jitter is of their size.
const MIN_TELLING: Duration = Duration::from_millis(200);
/// After a drip reading proved wrong the safe one holds this long.
const DISTRUST: Duration = Duration::from_secs(600);

/// How a bucket gives calls back.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Not known yet: treated as a window.
    Unknown,
    /// All at once, at the reset.
    Window,
    /// One call a period.
    Drip {
        /// The period, never longer than the true one as far as the answers so far can tell.
        period: Duration,
    },
}

/// One answer's numbers, as far as a bucket is concerned.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// `X-RateLimit-Limit`.
    pub limit: u32,
    /// `X-RateLimit-Remaining`.
    pub remaining: u32,
    /// Time until the reset.
    pub reset_after: Duration,
    /// When it was received.
    pub at: Instant,
}

/// The knowledge about one hash.
#[derive(Clone, Debug)]
pub struct Profile {
    shape: Shape,
    contradictions: u8,
    distrust_until: Option<Instant>,
    margin: Duration,
    margin_at: Option<Instant>,
}

/// A profile for another node.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ProfileState {
    shape: Shape,
    contradictions: u8,
    distrust: Option<Duration>,
    margin: Duration,
}

impl Default for Profile {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

impl Profile {
    /// Nothing known: the safe readings.
    pub const UNKNOWN: Self = Self {
        shape: Shape::Unknown,
        contradictions: 0,
        distrust_until: None,
        margin: Duration::ZERO,
        margin_at: None,
    };

    /// What another node should know.
    pub fn pack(&self, now: Instant) -> ProfileState {
        ProfileState {
            shape: self.shape,
            contradictions: self.contradictions,
            distrust: self.distrust_until.and_then(|until| until.checked_duration_since(now)),
            margin: self.learned(now),
        }
    }

    /// As another node knew it.
    pub fn unpack(now: Instant, state: &ProfileState) -> Self {
        let margin = state.margin.min(MAX_MARGIN);
        Self {
            shape: state.shape,
            contradictions: state.contradictions.min(1),
            distrust_until: state.distrust.map(|left| now + left.min(DISTRUST)),
            margin,
            margin_at: (!margin.is_zero()).then_some(now),
        }
    }

    /// The shape to act on.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How long after the announced instant a bucket really opens.
    pub fn margin(&self, now: Instant) -> Duration {
        (BASE_MARGIN + self.learned(now)).min(MAX_MARGIN)
    }

    /// When the next single call is allowed after a reading with nothing remaining, without the margin.
    pub fn opening(&self, reading: &Reading) -> Instant {
        let whole = reading.at + reading.reset_after;
        match self.shape {
            Shape::Drip { period } => {
                let rest = period * reading.limit.saturating_sub(1);
                reading.at.max(whole.checked_sub(rest).unwrap_or(reading.at))
            }
            Shape::Window | Shape::Unknown => whole,
        }
    }

    /// Compares two answers that followed each other with nothing else in flight.
    pub fn compare(&mut self, before: &Reading, after: &Reading) {
        let used = after.limit.saturating_sub(after.remaining);
        let calls = before.remaining.saturating_sub(after.remaining);
        if before.limit != after.limit
            || after.limit < 2
            || calls == 0
            || used == 0
            || after.reset_after < MIN_TELLING
            || before.at + before.reset_after <= after.at
            || self.distrust_until.is_some_and(|until| after.at < until)
        {
            return;
        }
        let (old, new) = (before.at + before.reset_after, after.at + after.reset_after);
        let lowest = after.reset_after / used;
        let pushed = new.saturating_duration_since(old) / calls;
        let verdict = if pushed < lowest / 4 {
            Shape::Window
        } else {
            // The level, in periods, is a little under the calls used: all but the part that has dripped since.
            let level = after.reset_after.as_secs_f64() / pushed.as_secs_f64();
            if level < f64::from(used) - 1.35 || level > f64::from(used) + 0.35 {
                return;
            }
            let earlier = before.reset_after / before.limit.saturating_sub(before.remaining).max(1);
            Shape::Drip { period: lowest.max(earlier.min(after.reset_after)) }
        };
        self.settle(verdict);
    }

    /// A 429 that says a call is allowed after `wait` although the bucket is full after `reset_after`: only a drip
    /// bucket does that, and it tells its period.
    pub fn refused(&mut self, limit: u32, reset_after: Duration, wait: Duration, now: Instant) {
        if limit < 2 || self.distrust_until.is_some_and(|until| now < until) {
            return;
        }
        let Some(rest) = reset_after.checked_sub(wait) else { return };
        let period = rest / (limit - 1);
        if period >= MIN_TELLING / 4 && wait <= period + period / 10 {
            self.settle(Shape::Drip { period });
        }
    }

    /// A call sent `past` its announced opening was still refused for `missing`.
    pub fn too_early(&mut self, now: Instant, past: Duration, missing: Duration) {
        if past > MAX_MARGIN {
            return;
        }
        if let Shape::Drip { period } = self.shape
            && missing > period + period / 2
        {
            self.shape = Shape::Window;
            self.distrust_until = Some(now + DISTRUST);
            return;
        }
        let needed = past + missing;
        if needed <= MAX_MARGIN {
            let headroom = needed / 4 + Duration::from_millis(2);
            self.margin = (needed + headroom).max(self.learned(now) * 2).min(MAX_MARGIN);
            self.margin_at = Some(now);
        }
    }

    fn learned(&self, now: Instant) -> Duration {
        let Some(at) = self.margin_at else { return Duration::ZERO };
        let halves = now.saturating_duration_since(at).as_secs_f64() / DECAY.as_secs_f64();
        self.margin.mul_f64(0.5f64.powf(halves))
    }

    fn settle(&mut self, verdict: Shape) {
        self.shape = match (self.shape, verdict) {
            (Shape::Drip { period: known }, Shape::Drip { period }) => {
                self.contradictions = 0;
                // Readings only ever fall short of the period, unless the limit itself was changed.
                if period < known / 2 { Shape::Drip { period } } else { Shape::Drip { period: known.max(period) } }
            }
            (Shape::Window, Shape::Window) | (Shape::Unknown, _) => {
                self.contradictions = 0;
                verdict
            }
            (known, _) => {
                self.contradictions += 1;
                if self.contradictions < 2 {
                    known
                } else {
                    self.contradictions = 0;
                    verdict
                }
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    fn readings(start: Instant, list: &[(u64, u32, u64)]) -> Vec<Reading> {
        list.iter()
            .map(|(at, remaining, reset)| Reading {
                limit: 5,
                remaining: *remaining,
                reset_after: ms(*reset),
                at: start + ms(*at),
            })
            .collect()
    }

    fn learn(list: &[Reading]) -> Profile {
        let mut profile = Profile::default();
        for pair in list.windows(2) {
            profile.compare(&pair[0], &pair[1]);
        }
        profile
    }

    #[test]
    fn a_published_drip_series_is_told_by_its_second_answer() {
        let start = Instant::now();
        let list = readings(start, &[(0, 4, 4000), (179, 3, 7821), (376, 2, 11624), (579, 1, 15421), (754, 0, 19246)]);
        assert_eq!(learn(&list[..2]).shape(), Shape::Drip { period: ms(4000) });
        let profile = learn(&list);
        let opening = profile.opening(&list[4]);
        assert!(opening >= start + ms(3990) && opening <= start + ms(4010), "{:?}", opening - start);
    }

    #[test]
    fn a_window_is_told_even_with_jittering_answers() {
        let start = Instant::now();
        let list = readings(start, &[(0, 4, 5000), (210, 3, 4830), (400, 2, 4560), (640, 1, 4400), (800, 0, 4190)]);
        assert_eq!(learn(&list[..2]).shape(), Shape::Window);
        let profile = learn(&list);
        assert_eq!(profile.shape(), Shape::Window);
        assert_eq!(profile.opening(&list[4]), start + ms(4990));
    }

    #[test]
    fn the_end_of_a_short_window_is_not_mistaken_for_drip() {
        let start = Instant::now();
        let list = readings(start, &[(0, 4, 1000), (880, 3, 150), (900, 2, 160)]);
        assert!(!matches!(learn(&list[1..]).shape(), Shape::Drip { .. }));
    }

    #[test]
    fn margins_grow_by_what_was_missing_and_decay_slowly() {
        let now = Instant::now();
        let mut profile = Profile::default();
        assert_eq!(profile.margin(now), BASE_MARGIN);
        profile.too_early(now, ms(3), ms(97));
        let margin = profile.margin(now);
        assert!(margin >= ms(125) && margin < ms(135), "{margin:?}");
        assert!(profile.margin(now + Duration::from_secs(500)) >= ms(110));
        assert!(profile.margin(now + Duration::from_secs(36_000)) < ms(4));
        profile.too_early(now, ms(0), ms(900));
        assert_eq!(profile.margin(now), MAX_MARGIN);
    }

    #[test]
    fn a_drip_reading_that_proves_wrong_is_not_repeated_blindly() {
        let start = Instant::now();
        let list = readings(start, &[(0, 4, 4000), (100, 3, 7900)]);
        let mut profile = learn(&list);
        profile.too_early(start + ms(4000), ms(5), ms(15_000));
        assert_eq!(profile.shape(), Shape::Window);
        profile.compare(&list[0], &list[1]);
        assert_eq!(profile.shape(), Shape::Window);
    }
}
