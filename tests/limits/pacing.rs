//! Windows, cold starts and order.

use std::time::Instant;

use fake_discord::{Latency, Reply, Rule, Script, smallest_gap};

use super::*;

/// POST messages: so many in a window.
fn messages(limit: u32, period: Duration) -> Script {
    let rule = Rule::window("POST /channels/{}/messages", "abcd3333", limit, period);
    Script { rules: vec![rule], ..Script::default() }
}

fn posts(n: usize) -> Vec<(&'static str, String)> {
    vec![("POST", format!("{CHANNEL_1}/messages")); n]
}

#[tokio::test]
async fn c32_a_window_that_ended_in_silence_is_not_carried_on() {
    let (fake, node) = setup(messages(5, ms(2000))).await;
    assert_eq!(ask(&node, "POST", &format!("{CHANNEL_1}/messages")).await.status, 200);
    tokio::time::sleep(ms(2400)).await;
    assert_eq!(statuses(&ask_all(&node, ms(0), posts(6)).await), [200; 6]);
    assert_eq!(fake.counts().limited(), 0);
    let arrivals = fake.arrivals();
    assert!(wait_between(&arrivals[1], &arrivals[5]) < AT_ONCE + SLACK, "five go at once");
    assert_within(wait_between(&arrivals[1], &arrivals[6]), ms(2000), ms(2500));
}

#[tokio::test]
async fn c33_a_cold_burst_on_an_unknown_route_draws_no_429() {
    let (fake, node) = setup(messages(5, ms(1000))).await;
    let start = Instant::now();
    assert_eq!(statuses(&ask_all(&node, ms(0), posts(50)).await), [200; 50]);
    assert_eq!(fake.counts().limited(), 0);
    assert_within(start.elapsed(), ms(9000), ms(11_000));
}

#[tokio::test]
async fn c33_a_cold_burst_over_many_channels_runs_in_parallel() {
    let mut script = messages(5, ms(5000));
    script.latency = Latency { before_ms: (100, 100), after_ms: (0, 0) };
    let (fake, node) = setup(script).await;
    let start = Instant::now();
    let calls = (0..50).map(|n| ("POST", format!("/api/v10/channels/1000000000000000{n:02}/messages"))).collect();
    assert_eq!(statuses(&ask_all(&node, ms(0), calls).await), [200; 50]);
    assert_eq!(fake.counts().limited(), 0);
    assert!(start.elapsed() < ms(1500) + SLACK, "{:?}", start.elapsed());
}

#[tokio::test]
async fn c37_a_bucket_of_a_quarter_second_is_not_rounded_up() {
    let rule = Rule::window("PUT /channels/{}/messages/{}/reactions/**", "abcd3737", 1, ms(250));
    let (fake, node) = setup(Script { rules: vec![rule], ..Script::default() }).await;
    let path = |n| format!("{CHANNEL_1}/messages/600000000000000001/reactions/%F0%9F%91%8{n}/@me");
    let calls = (0..8).map(|n| ("PUT", path(n))).collect();
    assert_eq!(statuses(&ask_all(&node, ms(0), calls).await), [200; 8]);
    assert_eq!(fake.counts().limited(), 0);
    let arrivals = fake.arrivals();
    let judged: Vec<Instant> = arrivals.iter().map(|arrival| arrival.judged_at.unwrap()).collect();
    assert!(smallest_gap(&judged).unwrap() >= ms(250), "{:?}", smallest_gap(&judged));
    assert_within(wait_between(&arrivals[0], &arrivals[7]), ms(1750), ms(2500));
}

#[tokio::test]
async fn c38_a_deep_queue_keeps_its_order_through_a_429() {
    let (fake, node) = setup(messages(15, ms(500))).await;
    let mut refused = false;
    fake.on_each("POST", "/channels/{}/messages", move |arrival| {
        let is_17 = !refused && arrival.target.ends_with(b"n=017");
        refused |= is_17;
        is_17.then(|| Reply::limited("user", 0.3).bucket("abcd3333", "15", "0", "0.3"))
    });
    let calls = (0..300).map(|n| ("POST", format!("{CHANNEL_1}/messages?n={n:03}"))).collect();
    let answers = ask_all(&node, ms(3), calls).await;
    assert!(answers.iter().all(|answer| answer.status == 200), "{:?}", statuses(&answers));
    let seen: Vec<String> = fake.arrivals().iter().map(fake_discord::Arrival::target_text).collect();
    assert_eq!(seen.len(), 301, "one was sent twice");
    let numbers: Vec<&str> = seen.iter().map(|target| &target[target.len() - 3..]).collect();
    assert!(numbers.is_sorted(), "{numbers:?}");
    assert_eq!(fake.counts().limited(), 0);
}
