//! Never more than 50 in a second for a token, and no 429.
#![allow(unreachable_pub, reason = "a module of one test binary")]

use std::time::{Duration, Instant};

use fake_discord::{FakeDiscord, Verdict, most_in};

/// Discord saw no second with more than 50 of a token, and refused nothing.
#[track_caller]
pub fn kept(discord: &FakeDiscord) {
    let arrivals = discord.arrivals();
    for caller in 1..=arrivals.iter().map(|arrival| arrival.caller).max().unwrap() {
        let (refused, sent): (Vec<_>, Vec<_>) = arrivals
            .iter()
            .filter(|arrival| arrival.caller == caller)
            .partition(|arrival| arrival.verdict == Verdict::GlobalLimited);
        assert!(refused.is_empty(), "caller {caller} was refused a 51st in a second");
        let times: Vec<Instant> = sent.iter().map(|arrival| arrival.at).collect();
        let most = most_in(&times, Duration::from_secs(1));
        assert!(most <= 50, "caller {caller}: {most} in a second");
        assert!(sent.iter().all(|arrival| arrival.status != 429), "a bucket that was closed");
    }
}
