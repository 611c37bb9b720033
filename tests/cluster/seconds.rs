//! Never more than 50 in a second for a token, and no 429.
//!
//! What was sent evenly arrives in a bunch after the machine stood still, so the second that is asked for is shorter by
//! twice the longest stall measured (the length of one before, and of one after).
#![allow(unreachable_pub, reason = "a module of one test binary")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fake_discord::{FakeDiscord, Verdict, most_in};

use crate::support::calls::pulse;

/// Watches the machine for stalls.
pub struct Seconds(Arc<AtomicU64>);

impl Seconds {
    pub fn watch() -> Self {
        let longest = Arc::new(AtomicU64::new(0));
        drop(tokio::spawn(pulse(Arc::clone(&longest))));
        Self(longest)
    }

    /// A second, less twice the longest stall beyond a timer's usual lateness.
    fn span(&self) -> Duration {
        let stall = Duration::from_micros(self.0.load(Ordering::Relaxed)).saturating_sub(Duration::from_millis(2));
        Duration::from_secs(1).saturating_sub(2 * stall)
    }

    /// Discord saw no second with more than 50, and refused nothing: within [`Seconds::span`].
    #[track_caller]
    pub fn kept(&self, discord: &FakeDiscord) {
        let (span, arrivals) = (self.span(), discord.arrivals());
        for caller in 1..=arrivals.iter().map(|arrival| arrival.caller).max().unwrap() {
            let of_caller = arrivals.iter().filter(|arrival| arrival.caller == caller);
            let (refused, sent): (Vec<_>, Vec<_>) =
                of_caller.partition(|arrival| arrival.verdict == Verdict::GlobalLimited);
            let times: Vec<Instant> = sent.iter().map(|arrival| arrival.at).collect();
            assert!(most_in(&times, span) <= 50, "caller {caller}: {} in {span:?}", most_in(&times, span));
            for refused in &refused {
                let within = times.iter().filter(|&&at| at <= refused.at && refused.at - at < span).count();
                assert!(within < 50, "caller {caller} was refused its 51st in {span:?}");
            }
            assert!(sent.iter().all(|arrival| arrival.status != 429), "a bucket that was closed");
        }
    }
}
