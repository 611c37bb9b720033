//! The invalid-request budget: an address that draws too many 401s, 403s and 429s is banned, so the proxy stops first.

use std::time::{Duration, Instant};

use fake_discord::{FakeDiscord, Gate, Reply, Script};
use serde_json::json;

use crate::support::calls::*;
use crate::support::{Node, PATIENCE, eventually};

/// A proxy that may draw so many invalid answers in so long.
async fn with_budget(limit: usize, window: Duration) -> (FakeDiscord, Node) {
    let (fake, node) = setup(Script { global_limit: None, ..Script::default() }, |config| {
        config.scheduling.invalid_request_limit = limit;
        config.scheduling.invalid_request_window = window;
        config.scheduling.overrides.by_bot_id.insert(100_000, 100_000);
    })
    .await;
    warm_up(&fake, &node, BOT).await;
    (fake, node)
}

/// A bot without a global limit to speak of.
const BOT: &str = "Bot MTAwMDAw.x";
const MINUTE: Duration = Duration::from_secs(60);

fn forbidden() -> Reply {
    Reply::json(403, &json!({"message": "Missing Permissions", "code": 50013}))
}

fn calls(from: usize, count: usize) -> Vec<(String, &'static str, String)> {
    (from..from + count).map(|n| (BOT.to_owned(), "GET", channel(n))).collect()
}

fn in_channels(fake: &FakeDiscord) -> usize {
    fake.arrivals_at("GET", "/channels/**").len()
}

#[tokio::test]
async fn c51_the_budget_stops_before_discord_does() {
    let (fake, node) = with_budget(20, MINUTE).await;
    fake.always("GET", "/channels/**", forbidden().after(ms(50)));
    let answers = ask_all(node.address(), ms(0), calls(0, 100)).await;
    assert_eq!(in_channels(&fake), 20, "those under way included");
    assert_eq!((with_status(&answers, 403), with_status(&answers, 503)), (20, 80));
    for answer in answers.iter().filter(|answer| answer.status == 503) {
        assert_unavailable(answer, &node, "invalid_request_budget");
    }
    // Everybody's: the address is what Discord bans.
    for token in ["", "Bot OTHER", "Bearer OTHER"] {
        let answer = ask(node.address(), token, "GET", "/api/v10/users/@me").await;
        assert_unavailable(&answer, &node, "invalid_request_budget");
    }
    let callback = "/api/v10/interactions/900000000000000001/aW50ZXJhY3Rpb246MQ/callback";
    assert_eq!(ask(node.address(), "", "POST", callback).await.status, 503);
    eventually("nothing is held", || node.scheduler.is_quiet() && node.open() == 0.0).await;
}

#[tokio::test]
async fn c51_slots_come_back_one_by_one() {
    let window = ms(2000);
    let (fake, node) = with_budget(4, window).await;
    fake.always("GET", "/channels/**", forbidden());
    let start = Instant::now();
    let mut number = 0;
    while start.elapsed() < window * 5 / 2 {
        number += 1;
        ask(node.address(), BOT, "GET", &channel(number)).await;
        // The first four are spread over half a window.
        tokio::time::sleep(if number < 4 { ms(250) } else { ms(10) }).await;
    }
    let arrivals = fake.arrivals_at("GET", "/channels/**");
    assert!(arrivals.len() >= 7, "the first four leave the window, one by one: {}", arrivals.len());
    for (earlier, later) in arrivals.iter().zip(&arrivals[4..]) {
        assert!(wait_between(earlier, later) >= window, "five in a window");
    }
    let gaps = arrivals[4..].windows(2).map(|pair| pair[1].at - pair[0].at);
    assert!(gaps.clone().take(2).all(|gap| gap >= ms(150)), "not all together: {:?}", gaps.collect::<Vec<_>>());
}

#[tokio::test]
async fn c51_only_401_403_and_429_count() {
    let (fake, node) = with_budget(3, MINUTE).await;
    let uncounted = [400, 404, 405, 200, 204, 304, 500, 502, 503, 520];
    for (number, status) in uncounted.into_iter().enumerate() {
        fake.on("GET", "/channels/**", vec![Reply::status(status); 2]);
        let answers = ask_all(node.address(), ms(0), calls(number * 2, 2)).await;
        assert_eq!(statuses(&answers), [status; 2]);
    }
    let counted = [Reply::status(401), Reply::status(403), Reply::limited("user", 100.0)];
    for (number, reply) in counted.into_iter().enumerate() {
        let status = reply.status;
        fake.on("GET", "/users/@me", vec![reply]);
        let answer = ask(node.address(), &format!("Bot {number}"), "GET", "/api/v10/users/@me").await;
        assert_eq!((answer.status, is_local(&answer)), (status, false));
    }
    let answer = ask(node.address(), BOT, "GET", &channel(100)).await;
    assert_unavailable(&answer, &node, "invalid_request_budget");
}

#[tokio::test]
async fn c52_shared_429s_are_free_and_those_of_the_user_are_not() {
    let (fake, node) = with_budget(20, MINUTE).await;
    fake.on("GET", "/channels/**", vec![Reply::limited("shared", 100.0); 50]);
    // Not all at once: one that may yet turn out to count has a slot reserved.
    for from in (0..50).step_by(10) {
        assert_eq!(statuses(&ask_all(node.address(), ms(0), calls(from, 10)).await), [429; 10]);
    }
    assert_eq!(in_channels(&fake), 50);
    fake.always("GET", "/channels/**", Reply::limited("user", 100.0));
    let answers = ask_all(node.address(), ms(0), calls(50, 25)).await;
    assert_eq!((with_status(&answers, 429), with_status(&answers, 503)), (20, 5));
    assert_eq!(in_channels(&fake), 70);
    assert_eq!(fake.counts().invalid, 20);
}

#[tokio::test]
async fn c52_429s_without_headers_are_not_free() {
    let (fake, node) = with_budget(20, MINUTE).await;
    let page = Reply { bare: true, body: "<html>1015</html>".into(), ..Reply::status(429) };
    fake.always("GET", "/channels/**", page.with("Content-Type", "text/html; charset=UTF-8"));
    let answers = ask_all(node.address(), ms(0), calls(0, 25)).await;
    assert!(answers.iter().all(|answer| matches!(answer.status, 429 | 503)), "{:?}", statuses(&answers));
    assert!(in_channels(&fake) <= 20, "{}", in_channels(&fake));
    assert!(fake.counts().invalid <= 20);
    assert_eq!(ask(node.address(), "Bot OTHER", "GET", "/api/v10/users/@me").await.status, 503);
}

#[tokio::test]
async fn a_slot_is_reserved_while_its_request_is_under_way_and_given_back_by_a_good_answer() {
    let (fake, node) = with_budget(3, MINUTE).await;
    for _round in 0..3 {
        let gate = Gate::default();
        let before = fake.counts().arrivals;
        fake.on("GET", "/channels/**", vec![Reply::status(200).held(&gate); 3]);
        let held = tokio::spawn(ask_all(node.address(), ms(0), calls(0, 3)));
        fake.wait_for(before + 3, PATIENCE).await;
        let answer = ask(node.address(), BOT, "GET", &channel(9)).await;
        assert_unavailable(&answer, &node, "invalid_request_budget");
        gate.open(3);
        assert_eq!(statuses(&held.await.unwrap()), [200; 3]);
        assert_eq!(ask(node.address(), BOT, "GET", &channel(9)).await.status, 200);
    }
    eventually("nothing is held", || node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn who_waited_while_the_budget_ran_out_is_refused_and_not_sent() {
    let (fake, node) = with_budget(2, MINUTE).await;
    let gate = Gate::default();
    fake.on("POST", "/channels/**", vec![forbidden().held(&gate)]);
    let post = || vec![(BOT.to_owned(), "POST", channel(1))];
    let first = tokio::spawn(ask_all(node.address(), ms(0), post()));
    fake.wait_until(PATIENCE, |fake| fake.arrivals_at("POST", "**").len() == 1).await;
    let second = tokio::spawn(ask_all(node.address(), ms(0), post()));
    eventually("it waits", || node.open() == 2.0).await;
    fake.on("GET", "/channels/**", vec![forbidden()]);
    assert_eq!(ask(node.address(), BOT, "GET", &channel(2)).await.status, 403);
    gate.open(1);
    assert_eq!(statuses(&first.await.unwrap()), [403]);
    assert_unavailable(&second.await.unwrap()[0], &node, "invalid_request_budget");
    assert_eq!(fake.arrivals_at("POST", "**").len(), 1);
    eventually("nothing is held", || node.scheduler.is_quiet() && node.open() == 0.0).await;
}

#[tokio::test]
async fn each_attempt_of_a_retried_request_counts() {
    let (fake, node) = with_budget(3, MINUTE).await;
    fake.on("GET", "/channels/**", vec![Reply::limited("user", 0.1); 2]);
    assert_eq!(ask(node.address(), BOT, "GET", &channel(1)).await.status, 200);
    assert_eq!(in_channels(&fake), 3);
    fake.on("GET", "/channels/**", vec![forbidden()]);
    assert_eq!(ask(node.address(), BOT, "GET", &channel(2)).await.status, 403);
    assert_unavailable(&ask(node.address(), BOT, "GET", &channel(3)).await, &node, "invalid_request_budget");
}
