//! Reading the numbers: fractions, units, several values, none.

use std::time::Instant;

use fake_discord::{Reply, Script, Verdict};
use serde_json::json;

use super::*;

#[tokio::test]
async fn c01_a_fraction_of_reset_after_is_kept() {
    let (fake, node) = setup(Script::default()).await;
    let path = format!("{CHANNEL_1}/messages");
    fake.on("POST", &path, vec![Reply::status(200).bucket("aaaa1111", "5", "0", "1.750")]);
    assert_eq!(ask(&node, "POST", &path).await.status, 200);
    assert_eq!(ask(&node, "POST", &path).await.status, 200);
    let arrivals = fake.arrivals();
    assert_eq!(arrivals.len(), 2);
    assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(1750), ms(2250));
}

#[tokio::test]
async fn c02_seconds_are_seconds() {
    let (fake, node) = setup(Script::default()).await;
    let path = format!("{GUILD}/members/300000000000000001/roles/400000000000000001");
    let refused = Reply::limited("user", 2.5).with("X-RateLimit-Reset-After", "2.500");
    fake.on("PUT", &path, vec![refused, Reply::status(204)]);
    assert_eq!(ask(&node, "PUT", &path).await.status, 204, "the client sees the second answer only");
    let arrivals = fake.arrivals();
    assert_eq!(arrivals.len(), 2, "exactly two attempts");
    assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(2500), ms(3500));
}

#[tokio::test]
async fn c04_of_several_retry_after_values_the_longest_counts() {
    let (fake, node) = setup(Script::default()).await;
    let joined = Reply::status(429).with("X-RateLimit-Scope", "user").with("Retry-After", "2814, 2");
    let apart = Reply::status(429).with("Retry-After", "2814").with("Retry-After", "2");
    for (channel, refused) in [(CHANNEL_1, joined), (CHANNEL_2, apart)] {
        let path = format!("{channel}/messages");
        fake.on("POST", &path, vec![refused]);
        let start = Instant::now();
        let answer = ask(&node, "POST", &path).await;
        assert_eq!((answer.status, is_local(&answer)), (429, false), "Discord's own answer: {}", answer.head);
        let later = ask(&node, "POST", &path).await;
        assert!(start.elapsed() < AT_ONCE + SLACK, "neither is held");
        assert_eq!((later.status, is_local(&later)), (429, true), "{}", later.head);
        assert!((2800..=2815).contains(&retry_after(&later)), "{}", later.head);
        assert_eq!(fake.arrivals_at("POST", &path).len(), 1, "the bucket stays shut");
    }
}

#[tokio::test]
async fn c05_a_429_without_any_time_is_not_hammered() {
    let (fake, node) = setup_with(Script::default(), |config| {
        config.scheduling.queue_timeout = Duration::from_secs(10);
        config.scheduling.request_timeout = Duration::from_secs(1);
        config.upstream.request_timeout = Duration::from_secs(1);
    })
    .await;
    let path = "/api/v10/webhooks/500000000000000001/WHTOKEN-A";
    let notice = json!({"message": "You are being blocked from accessing our API temporarily.", "code": 0});
    fake.always("POST", path, Reply::json(429, &notice));
    let answer = ask(&node, "POST", path).await;
    assert_eq!(answer.status, 429);
    assert!(answer.text().contains("blocked from accessing"), "Discord's own body: {}", answer.text());
    assert!(answer.header("retry-after").is_none_or(|seconds| seconds.parse::<u64>().unwrap() >= 1));
    let arrivals = fake.arrivals();
    assert!((2..=4).contains(&arrivals.len()), "a few attempts: {}", arrivals.len());
    let waits: Vec<_> = arrivals.windows(2).map(|pair| wait_between(&pair[0], &pair[1])).collect();
    assert!(waits.iter().all(|wait| *wait >= ms(1000)), "{waits:?}");
    assert!(waits.windows(2).all(|pair| pair[1] > pair[0]), "each longer than the one before: {waits:?}");
}

#[tokio::test]
async fn c08_a_far_reset_with_plenty_left_delays_nobody() {
    let (fake, node) = setup(Script::default()).await;
    let path = format!("{CHANNEL_1}/messages");
    let plenty = |n: u32| Reply::status(200).bucket("aaaa1111", "50000", &(48773 - n).to_string(), "102737.719");
    let mut replies: Vec<Reply> = (0..20).map(plenty).collect();
    replies.push(Reply::limited("user", 1.5).bucket("bbbb2222", "5", "0", "1.5"));
    fake.on("POST", &path, replies);
    let start = Instant::now();
    for _ in 0..20 {
        assert_eq!(ask(&node, "POST", &path).await.status, 200);
    }
    assert!(start.elapsed() < ms(1000) + SLACK, "twenty calls took {:?}", start.elapsed());
    assert_eq!(ask(&node, "POST", &path).await.status, 200);
    let arrivals = fake.arrivals();
    assert_eq!(arrivals.len(), 22);
    assert_eq!(arrivals[20].verdict, Verdict::Scripted(429));
    assert_within(wait_between(&arrivals[20], &arrivals[21]), ms(1500), ms(2000));
    let start = Instant::now();
    assert_eq!(ask(&node, "POST", &path).await.status, 200);
    assert!(start.elapsed() < AT_ONCE, "normal flow afterwards");
}
