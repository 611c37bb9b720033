//! The global limit, and who is outside it.

use std::time::Instant;

use fake_discord::{Reply, Script, Verdict};

use super::*;

/// Arrivals of the caller of a token.
fn of<'a>(arrivals: &'a [Arrival], token: &str) -> Vec<&'a Arrival> {
    arrivals.iter().filter(|arrival| arrival.token.as_deref() == Some(token)).collect()
}

#[tokio::test]
async fn c40_a_global_429_holds_everything_of_its_token_and_nothing_else() {
    let (fake, node) = setup(Script::default()).await;
    warm_up(&fake, &node, "Bot A").await;
    warm_up(&fake, &node, "Bot B").await;
    for _round in 0..2 {
        let before = fake.counts().arrivals;
        fake.on("GET", "/users/@me", vec![Reply::limited("global", 1.6)]);
        let address = node.address();
        let blocked = tokio::spawn(async move { ask_with(address, "Bot A", "GET", "/api/v10/users/@me", "").await });
        fake.wait_until(PATIENCE, |fake| fake.counts().statuses.values().sum::<u64>() > before).await;
        let calls =
            |n: usize| (0..n).map(|n| ("POST", format!("/api/v10/channels/10000000000000000{}/messages", n % 10)));
        // The answer is written; give the proxy the moment it needs to have read it.
        tokio::time::sleep(ms(50)).await;
        let start = Instant::now();
        let others = async {
            let answers = ask_all_as("Bot B", address, ms(0), calls(5).collect()).await;
            (answers, start.elapsed())
        };
        let (own, (others, took)) = tokio::join!(ask_all(&node, ms(0), calls(20).collect()), others);
        assert_eq!((statuses(&own), statuses(&others)), (vec![200; 20], vec![200; 5]));
        assert_eq!(blocked.await.unwrap().status, 200);
        assert!(took < AT_ONCE, "B waited {took:?}");
        let arrivals = fake.arrivals();
        let limit = arrivals.iter().rfind(|arrival| arrival.verdict == Verdict::Scripted(429)).unwrap();
        for arrival in of(&arrivals, "A").into_iter().filter(|arrival| arrival.index > limit.index) {
            assert_within(wait_between(limit, arrival), ms(1600), ms(2500));
        }
    }
    assert!(fake.counts().peaks.iter().all(|peak| *peak <= 50), "{:?}", fake.counts().peaks);
}

#[tokio::test]
async fn c43_interactions_pass_a_global_block() {
    let (fake, node) = setup(Script::default()).await;
    warm_up(&fake, &node, "Bot A").await;
    fake.block_globally(Some("A"), ms(2000));
    let address = node.address();
    let waiting = tokio::spawn(async move { ask_all_as("Bot A", address, ms(0), guilds(100)).await });
    fake.wait_until(PATIENCE, |fake| fake.counts().verdict("global_limited") >= 1).await;
    let start = Instant::now();
    for (n, token) in ["Bot A", ""].into_iter().enumerate() {
        let secret = format!("aW50ZXJhY3Rpb246{n}");
        let callback = format!("/api/v10/interactions/900000000000000001/{secret}/callback");
        assert_eq!(ask_with(address, token, "POST", &callback, "").await.status, 200);
        let original = format!("/api/v10/webhooks/700000000000000001/{secret}/messages/@original");
        assert_eq!(ask_with(address, token, "PATCH", &original, "").await.status, 200);
    }
    assert!(start.elapsed() < AT_ONCE, "four calls took {:?}", start.elapsed());
    assert!(fake.arrivals_at("GET", "/guilds/**").iter().all(|arrival| arrival.verdict != Verdict::Ok));
    assert!(waiting.await.unwrap().iter().all(|answer| answer.status == 200));
}

#[tokio::test]
async fn c43_interactions_take_nothing_from_the_fifty() {
    let (fake, node) = setup(Script::default()).await;
    warm_up(&fake, &node, "Bot A").await;
    let callback = |n| format!("/api/v10/interactions/900000000000000{n:03}/aW50ZXJhY3Rpb246{n}/callback");
    let start = Instant::now();
    let calls = (0..200).map(|n| ("POST", callback(n))).collect();
    let (callbacks, ordinary) = tokio::join!(ask_all(&node, ms(0), calls), ask_all(&node, ms(0), guilds(40)));
    assert!(callbacks.iter().chain(&ordinary).all(|answer| answer.status == 200));
    assert!(start.elapsed() < ms(1000) + SLACK, "{:?}", start.elapsed());
    assert_eq!(fake.counts().limited(), 0);
}

#[tokio::test]
async fn c45_of_a_global_and_a_bucket_wait_the_later_one_rules() {
    for (bucket, global) in [(5000, 1000), (1000, 3000)] {
        let (fake, node) = setup(Script::default()).await;
        let path = format!("{CHANNEL_1}/messages");
        let seconds = |length: u64| format!("{:.3}", length as f64 / 1000.0);
        fake.on("POST", &path, vec![Reply::status(200).bucket("abcd4545", "1", "0", &seconds(bucket))]);
        fake.on("GET", "/users/@me", vec![Reply::limited("global", global as f64 / 1000.0)]);
        assert_eq!(ask(&node, "POST", &path).await.status, 200);
        let calls = vec![("GET", "/api/v10/users/@me".into()), ("POST", path.clone()), ("GET", GUILD.into())];
        assert_eq!(statuses(&ask_all(&node, ms(200), calls).await), [200; 3]);
        let arrivals = fake.arrivals();
        let (shut, blocked) = (&arrivals[0], &arrivals[1]);
        assert_eq!(blocked.verdict, Verdict::Scripted(429));
        let at = |path: &str| arrivals[2..].iter().find(|arrival| arrival.target_text() == path).unwrap();
        assert_within(wait_between(blocked, at(GUILD)), ms(global), ms(global + 500));
        assert!(wait_between(blocked, at(&path)) >= ms(global));
        assert!(wait_between(shut, at(&path)) >= ms(bucket));
        let later = ms(bucket).max(wait_between(shut, blocked) + ms(global));
        assert!(wait_between(shut, at(&path)) <= later + ms(500) + SLACK);
    }
}
