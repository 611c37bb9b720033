//! One bucket's model: what Discord's answers so far allow, and from when.
//!
//! Reads (GET, HEAD) of a bucket may be under way side by side, up to what remains after those in flight. Everything
//! else goes alone, so that writes reach Discord in their order. A bucket nobody has an answer of sends one at a time, and
//! so does a window whose reset has just passed: its announcement may have been early, and one 429 tells as much as five.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::profile::{Profile, Reading, Shape};
use super::signal::{BucketHash, MAX_WAIT, Signal};

/// No reset is known to have been announced earlier than this: from then on a window that should be over is.
const DOUBT: Duration = Duration::from_millis(500);

/// How a request may share its bucket with others in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// GET and HEAD.
    Read,
    /// Everything else.
    Write,
}

/// Whether a request may go now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It may.
    Now,
    /// Not before this instant.
    At(Instant),
    /// Only once something in flight has been answered.
    OnAnswer,
}

/// What is known of a bucket besides closures.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
enum Knowledge {
    /// No answer yet, or the numbers are incomplete: one at a time.
    Nothing,
    /// Its answers carry no limit headers.
    Limitless,
    /// `limit` and `remaining` hold, until `reset_at`.
    Counted,
}

/// A bucket's model for another node: times are what is left of them, or how long they are past.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BucketState {
    hash: Option<BucketHash>,
    limit: u32,
    remaining: u32,
    reset: Duration,
    closed: Option<Duration>,
    seen: Duration,
    knowledge: Knowledge,
    untimed: u8,
}

/// The model of one bucket.
#[derive(Clone, Debug)]
pub struct Bucket {
    hash: Option<BucketHash>,
    limit: u32,
    remaining: u32,
    reset_at: Instant,
    /// Closed by a zero or a 429; only time opens it.
    closed_until: Option<Instant>,
    /// The last answer, or the creation.
    seen: Instant,
    in_flight: u32,
    knowledge: Knowledge,
    /// A write is in flight: alone.
    exclusive: bool,
    /// 429s in a row that did not say how long to wait.
    untimed: u8,
}

impl Bucket {
    /// A bucket nothing is known of.
    pub fn new(hash: Option<BucketHash>, now: Instant) -> Self {
        Self {
            hash,
            limit: 0,
            remaining: 0,
            reset_at: now,
            closed_until: None,
            seen: now,
            in_flight: 0,
            knowledge: Knowledge::Nothing,
            exclusive: false,
            untimed: 0,
        }
    }

    /// Discord's name for it.
    pub fn hash(&self) -> Option<BucketHash> {
        self.hash
    }

    /// Discord named it.
    pub fn name(&mut self, hash: BucketHash) {
        self.hash = Some(hash);
    }

    /// Requests in flight that may count in it.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// When it was last answered (or made).
    pub fn seen(&self) -> Instant {
        self.seen
    }

    /// The end of a live closure.
    pub fn closed(&self, now: Instant) -> Option<Instant> {
        self.closed_until.filter(|until| *until > now)
    }

    /// Whether a request may go now.
    pub fn admit(&self, now: Instant, class: Class, profile: &Profile) -> Admission {
        if self.exclusive || (class == Class::Write && self.in_flight > 0) {
            return Admission::OnAnswer;
        }
        if let Some(until) = self.closed(now) {
            return Admission::At(until);
        }
        let room = match self.knowledge {
            Knowledge::Limitless => return Admission::Now,
            Knowledge::Nothing => 1,
            Knowledge::Counted => self.capacity(now, profile),
        };
        match () {
            () if room > self.in_flight => Admission::Now,
            () if self.in_flight > 0 => Admission::OnAnswer,
            () => Admission::At(self.next_call(now, profile)),
        }
    }

    /// A request that was admitted has been sent.
    pub fn sent(&mut self, class: Class) {
        self.in_flight += 1;
        self.exclusive |= class == Class::Write;
    }

    /// A request that has landed got no answer, or one that tells nothing of the bucket: it may have counted.
    pub fn unanswered(&mut self, now: Instant, profile: &Profile) {
        if self.knowledge != Knowledge::Counted {
            return;
        }
        if let Shape::Drip { period } = profile.shape() {
            self.reset_at = self.reset_at.max(now) + period;
        }
        if now < self.reset_at {
            self.remaining = self.remaining.saturating_sub(1);
            self.exhausted(now, profile);
        }
    }

    /// Closes it if, with nothing in flight that could tell better, nothing is left of what is known.
    fn exhausted(&mut self, now: Instant, profile: &Profile) {
        if self.remaining == 0 && now < self.reset_at {
            let known = Reading { limit: self.limit, remaining: 0, reset_after: self.reset_at - now, at: now };
            self.close(profile.opening(&known) + profile.margin(now));
        }
    }

    /// A request is no longer in flight.
    pub fn landed(&mut self, class: Class) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if class == Class::Write {
            self.exclusive = false;
        }
    }

    /// Learns from an answer to a request sent at `sent_at`, which has landed already.
    pub fn learn(&mut self, now: Instant, sent_at: Instant, signal: &Signal, profile: &mut Profile) {
        if !signal.refused() {
            self.untimed = 0;
        }
        let numbers = signal.remaining.zip(signal.reset_after);
        let Some((remaining, reset_after)) = numbers else {
            match self.knowledge {
                Knowledge::Counted => {
                    self.remaining =
                        signal.remaining.map_or(self.remaining, |remaining| self.remaining.min(remaining + 1));
                    self.unanswered(now, profile);
                }
                _ if signal.limit.is_none() && signal.remaining.is_none() && tells(signal) => {
                    self.knowledge = Knowledge::Limitless;
                }
                _ => {}
            }
            self.seen = now;
            return;
        };
        let limit = signal.limit.unwrap_or(self.limit.max(remaining)).max(1);
        let reading = Reading { limit, remaining, reset_after, at: now };
        if self.knowledge == Knowledge::Counted && self.in_flight == 0 && !signal.refused() {
            let before = self.reset_at.saturating_duration_since(self.seen);
            let before = Reading { limit: self.limit, remaining: self.remaining, reset_after: before, at: self.seen };
            profile.compare(&before, &reading);
        }
        self.count(&reading, sent_at, profile);
        if remaining == 0 && !signal.refused() {
            self.close(profile.opening(&reading) + profile.margin(now));
        }
        self.seen = now;
    }

    /// A 429 of this bucket: closed for `wait`.
    pub fn refuse(&mut self, now: Instant, sent_at: Instant, wait: Duration, signal: &Signal, profile: &mut Profile) {
        let opened = self.closed_until.unwrap_or(self.reset_at);
        if opened <= sent_at && self.knowledge == Knowledge::Counted && signal.reset_after.is_some() {
            let announced = opened.checked_sub(profile.margin(now)).unwrap_or(opened);
            profile.too_early(now, sent_at.saturating_duration_since(announced), wait);
        }
        if let (Some(limit), Some(0), Some(reset)) = (signal.limit, signal.remaining, signal.reset_after) {
            profile.refused(limit, reset, wait, now);
        }
        self.close(now + wait + profile.margin(now).min(wait / 10));
    }

    /// How long a 429 without any usable time holds: 1 s, and growing while they go on.
    pub fn untimed_wait(&mut self) -> Duration {
        let wait = Duration::from_secs(1 << (2 * self.untimed.min(3)));
        self.untimed = self.untimed.saturating_add(1);
        wait.min(Duration::from_secs(60))
    }

    /// Takes over what another bucket (the one its route had before Discord named this one) knows to be closed.
    pub fn absorb(&mut self, other: &Self) {
        if let Some(until) = other.closed_until {
            self.close(until);
        }
        self.untimed = self.untimed.max(other.untimed);
    }

    /// Whether nothing is lost by forgetting it.
    pub fn idle(&self, now: Instant) -> bool {
        self.in_flight == 0 && self.closed(now).is_none() && self.reset_at <= now
    }

    /// Keeps it closed at least until then.
    pub fn close(&mut self, until: Instant) {
        self.closed_until = Some(self.closed_until.map_or(until, |known| known.max(until)));
    }

    fn count(&mut self, reading: &Reading, sent_at: Instant, profile: &Profile) {
        let reset_at = reading.at + reading.reset_after;
        let drip = matches!(profile.shape(), Shape::Drip { .. });
        // The next use of a drip pushes its reset by a period, however short.
        let slack = if drip { Duration::ZERO } else { (reading.reset_after / 4).min(Duration::from_millis(250)) };
        let live = self.knowledge == Knowledge::Counted && sent_at < self.reset_at;
        if live && reset_at <= self.reset_at + slack {
            // Of the same window, or older than what is known: never raises it.
            self.remaining = self.remaining.min(reading.remaining);
            if !drip {
                self.reset_at = self.reset_at.min(reset_at).max(reading.at);
            }
        } else if live && !drip && reading.at < self.reset_at {
            // Later than the known window's end, before that end: a drip not told yet, or a route Discord counts apart.
            self.remaining = self.remaining.min(reading.remaining);
            self.reset_at = reset_at;
        } else {
            // An answer that took its time may push a drip's reset without being the later one.
            let overlaps = live && drip && sent_at < self.seen;
            self.remaining = if overlaps { self.remaining.min(reading.remaining) } else { reading.remaining };
            self.reset_at = reset_at;
        }
        self.limit = reading.limit;
        self.knowledge = Knowledge::Counted;
    }

    /// Calls that fit now, those in flight included.
    fn capacity(&self, now: Instant, profile: &Profile) -> u32 {
        let left = self.left(now, profile);
        match profile.shape() {
            Shape::Window | Shape::Unknown if left.is_zero() && now < self.reset_at + DOUBT => self.limit.min(1),
            _ if left.is_zero() => self.limit,
            Shape::Drip { period } => {
                let used = left.as_nanos().div_ceil(period.as_nanos().max(1));
                self.remaining.max(self.limit.saturating_sub(u32::try_from(used).unwrap_or(u32::MAX)))
            }
            Shape::Window | Shape::Unknown => self.remaining,
        }
    }

    /// When the next call fits, with nothing in flight.
    fn next_call(&self, now: Instant, profile: &Profile) -> Instant {
        let left = self.left(now, profile);
        match profile.shape() {
            Shape::Drip { period } => {
                now + left.saturating_sub(period * self.limit.saturating_sub(1)).max(Duration::from_millis(1))
            }
            Shape::Window | Shape::Unknown => now + left,
        }
    }

    /// Time until it is full again, margin included.
    fn left(&self, now: Instant, profile: &Profile) -> Duration {
        (self.reset_at + profile.margin(now)).saturating_duration_since(now)
    }
}

impl Bucket {
    /// What another node should know of it: what is under way counts as answered.
    pub fn pack(&self, now: Instant) -> BucketState {
        BucketState {
            hash: self.hash,
            limit: self.limit,
            remaining: self.remaining.saturating_sub(self.in_flight),
            reset: self.reset_at.saturating_duration_since(now),
            closed: self.closed(now).map(|until| until - now),
            seen: now.saturating_duration_since(self.seen),
            knowledge: self.knowledge,
            untimed: self.untimed,
        }
    }

    /// A bucket as another node knew it.
    pub fn unpack(now: Instant, state: &BucketState) -> Self {
        Self {
            limit: state.limit,
            remaining: state.remaining,
            reset_at: now + state.reset.min(MAX_WAIT),
            closed_until: state.closed.map(|left| now + left.min(MAX_WAIT)),
            seen: now.checked_sub(state.seen.min(MAX_WAIT)).unwrap_or(now),
            knowledge: state.knowledge,
            untimed: state.untimed,
            ..Self::new(state.hash, now)
        }
    }

    /// Takes over what another node knows of the same bucket.
    pub fn merge(&mut self, other: &Self) {
        if other.seen > self.seen && other.knowledge != Knowledge::Nothing {
            (self.limit, self.remaining, self.reset_at) = (other.limit, other.remaining, other.reset_at);
            (self.seen, self.knowledge) = (other.seen, other.knowledge);
        }
        self.absorb(other);
    }
}

/// Whether an answer without limit headers means that its route has none. 429s and 5xx come without for other reasons.
fn tells(signal: &Signal) -> bool {
    !signal.refused() && !signal.status.is_server_error()
}

#[cfg(test)]
#[path = "bucket_tests.rs"]
mod tests;
