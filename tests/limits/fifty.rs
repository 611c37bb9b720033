//! Fifty in a second, and no more, whatever the network does.
//!
//! What was paced evenly arrives in a bunch after the thread of proxy and fake stood still, so the second that is asked
//! for is shorter by twice the longest stall measured on it (the length of one before, and of one after).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fake_discord::{Arrival, Script, Verdict, most_in};

use super::*;
use crate::support::calls::pulse;

/// Bare tokens are bots'. Their IDs, as Discord writes them: 123456789012345678 and 223456789012345678.
const BOT_OF_100: &str = "MTIzNDU2Nzg5MDEyMzQ1Njc4.made.up";
const BOT_OF_50: &str = "MjIzNDU2Nzg5MDEyMzQ1Njc4.made.up";

#[tokio::test]
async fn c41_no_rolling_second_sees_more_than_fifty() {
    let (fake, node) = setup(Script::default()).await;
    let stall = watch();
    for _ in 0..3 {
        let start = Instant::now();
        assert_eq!(ask(&node, "GET", "/api/v10/users/@me").await.status, 200);
        assert!(start.elapsed() < ms(300), "an idle bot is not slowed down: {:?}", start.elapsed());
    }
    let start = Instant::now();
    let answers = ask_all(&node, ms(0), guilds(300)).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    let span = second(&stall);
    told(&fake, span);
    let times: Vec<Instant> = fake.arrivals().iter().map(|arrival| arrival.at).collect();
    assert!(most_in(&times, span) <= 50, "{} in {span:?}", most_in(&times, span));
    assert_within(start.elapsed(), ms(4900), ms(6500) + 6 * (ms(1000) - span));
}

#[tokio::test]
async fn c41_a_higher_limit_holds_for_the_bot_it_names() {
    let overrides = vec![(BOT_OF_100.to_owned(), 100)];
    let (fake, node) = setup_with(Script { global_overrides: overrides, ..Script::default() }, |config| {
        config.scheduling.overrides.by_bot_id.insert(123_456_789_012_345_678, 100);
    })
    .await;
    let stall = watch();
    let address = node.address();
    let ask = |token: &'static str| async move {
        let start = Instant::now();
        let answers = ask_all_as(token, address, ms(0), guilds(150)).await;
        assert!(answers.iter().all(|answer| answer.status == 200));
        start.elapsed()
    };
    let (more, usual) = tokio::join!(ask(BOT_OF_100), ask(BOT_OF_50));
    let span = second(&stall);
    told(&fake, span);
    assert_within(more, ms(500), ms(2200) + 3 * (ms(1000) - span));
    assert_within(usual, ms(1900), ms(3500) + 3 * (ms(1000) - span));
}

/// Watches this thread for stalls.
fn watch() -> Arc<AtomicU64> {
    let longest = Arc::new(AtomicU64::new(0));
    drop(tokio::spawn(pulse(Arc::clone(&longest))));
    longest
}

/// A second, less twice the longest stall beyond a timer's usual lateness.
fn second(stall: &AtomicU64) -> Duration {
    let stall = Duration::from_micros(stall.load(Ordering::Relaxed)).saturating_sub(ms(2));
    ms(1000).saturating_sub(2 * stall)
}

/// Fails with where in the run the fake refused a caller that had sent its limit within `span`.
#[track_caller]
fn told(fake: &FakeDiscord, span: Duration) {
    let arrivals = fake.arrivals();
    let earned = |refused: &Arrival| {
        let limit = if refused.token.as_deref() == Some(BOT_OF_100) { 100 } else { 50 };
        let within = arrivals.iter().filter(|other| {
            let counts = other.caller == refused.caller && other.verdict != Verdict::GlobalLimited;
            counts && other.at <= refused.at && refused.at - other.at < span
        });
        within.count() >= limit
    };
    let refused = arrivals.iter().filter(|arrival| arrival.verdict == Verdict::GlobalLimited);
    let Some(refused) = refused.into_iter().find(|arrival| earned(arrival)) else { return };
    let start = arrivals[0].at;
    let at: Vec<String> = arrivals
        .iter()
        .filter(|arrival| arrival.caller == refused.caller)
        .map(|arrival| format!("{}{}", if arrival.status == 429 { "!" } else { "" }, (arrival.at - start).as_millis()))
        .collect();
    panic!("caller {} was refused in {span:?}; arrivals at ms (! is a 429): {}", refused.caller, at.join(" "));
}
