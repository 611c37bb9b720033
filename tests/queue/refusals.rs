//! Those who cannot wait: what they are told, and how soon.

use std::time::{Duration, Instant};

use fake_discord::{Gate, Reply, Rule, Script};
use serde_json::Value;

use crate::support::calls::*;
use crate::support::client::{Answer, Client};
use crate::support::{PATIENCE, eventually};

/// Checks a 429 of the proxy's own against what Discord documents of its; returns `retry_after`.
#[track_caller]
fn local_429(answer: &Answer, scope: &str, most: f64) -> f64 {
    assert_eq!((answer.status, is_local(answer)), (429, true), "{}", answer.head);
    assert_eq!(answer.header("x-nirn-proxy-error"), None);
    assert_eq!(answer.header("via"), Some("1.1 nirn-proxy"));
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("x-ratelimit-scope"), Some(scope));
    let body: Value = serde_json::from_slice(&answer.body).unwrap();
    assert!(body["message"].as_str().is_some_and(|message| !message.is_empty()));
    assert_eq!((body["global"].as_bool(), body["code"].as_u64()), (Some(scope == "global"), Some(0)));
    let exact = body["retry_after"].as_f64().unwrap();
    assert!(exact > most - 5.0 && exact <= most * 1.02, "{exact} of {most}");
    let header: f64 = answer.header("retry-after").unwrap().parse::<u32>().unwrap().into();
    assert_eq!(header, exact.ceil().max(1.0), "rounded up");
    if scope == "global" {
        assert_eq!(answer.header("x-ratelimit-global"), Some("true"));
        assert_eq!(answer.header("x-ratelimit-remaining"), None);
    } else {
        assert_eq!(answer.header("x-ratelimit-global"), None);
        assert_eq!(answer.header("x-ratelimit-remaining"), Some("0"));
        let reset: f64 = answer.header("x-ratelimit-reset-after").unwrap().parse().unwrap();
        assert!(reset >= exact && reset - exact < 0.002, "{reset} against {exact}");
    }
    exact
}

#[tokio::test]
async fn c86_a_wait_longer_than_the_client_can_bear_is_refused_at_once() {
    for (answer, scope) in [
        (Reply::status(200).bucket("abcd8686", "5", "0", "120"), "user"),
        (Reply::limited("user", 120.0).bucket("abcd8686", "5", "0", "120"), "user"),
        (Reply::limited("shared", 120.0), "shared"),
        (Reply::limited("user", 120.0).bucket("abcd8686", "5", "4", "2"), "user"),
        (Reply::limited("global", 120.0), "global"),
    ] {
        let (fake, node) = setup(Script::default(), |config| config.scheduling.queue_timeout = ms(10_000)).await;
        let status = answer.status;
        fake.on("POST", "/channels/**", vec![answer]);
        let first = ask(node.address(), "Bot A", "POST", &channel(1)).await;
        assert_eq!((first.status, is_local(&first)), (status, false), "Discord's own");
        let other = ask(node.address(), "Bot A", "POST", &channel(2)).await;
        assert_eq!(other.status, if scope == "global" { 429 } else { 200 });
        let before = fake.counts().arrivals;
        let start = Instant::now();
        let answer = ask(node.address(), "Bot A", "POST", &channel(1)).await;
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
        let first = local_429(&answer, scope, 120.0);
        tokio::time::sleep(ms(300)).await;
        let second = local_429(&ask(node.address(), "Bot A", "POST", &channel(1)).await, scope, 120.0);
        assert!(first - second >= 0.3, "it counts down: {first}, then {second}");
        assert_eq!(fake.counts().arrivals, before, "nothing is sent");
        assert_eq!(ask(node.address(), "Bot B", "POST", &channel(1)).await.status, 200, "another bot's is its own");
    }
}

#[tokio::test]
async fn c86_of_many_behind_a_slow_bucket_some_are_served_and_the_rest_are_told() {
    let rule = Rule::window("POST /channels/{}/messages", "abcd8686", 1, ms(1000));
    let script = Script { rules: vec![rule], ..Script::default() };
    let (fake, node) = setup(script, |config| {
        config.scheduling.queue_timeout = ms(5000);
        config.scheduling.request_timeout = ms(1000);
        config.upstream.request_timeout = ms(1000);
        config.scheduling.max_queue_depth = 400;
    })
    .await;
    let start = Instant::now();
    let calls = (0..500).map(|_| ("Bot A".to_owned(), "POST", channel(1))).collect();
    let answers = ask_all(node.address(), ms(0), calls).await;
    assert!(start.elapsed() < ms(5000) + SLACK, "{:?}", start.elapsed());
    let served = with_status(&answers, 200);
    assert!((3..=6).contains(&served), "{served} served");
    assert!(with_status(&answers, 503) >= 90, "the queue holds 400: {}", with_status(&answers, 503));
    for answer in answers.iter().filter(|answer| answer.status != 200) {
        assert!(matches!(answer.status, 408 | 429 | 503) && is_local(answer), "{}", answer.head);
    }
    assert_eq!(fake.counts().limited(), 0);
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn those_already_waiting_are_told_as_soon_as_it_is_known() {
    for (answer, scope) in [
        (Reply::status(200).bucket("abcd0001", "5", "0", "120"), "user"),
        (Reply::limited("user", 120.0), "user"),
        (Reply::limited("shared", 120.0), "shared"),
        (Reply::limited("global", 120.0), "global"),
    ] {
        let (fake, node) = setup(Script::default(), |_| {}).await;
        warm_up(&fake, &node, "Bot A").await;
        let gate = Gate::default();
        fake.on("POST", "/channels/**", vec![answer.held(&gate)]);
        let calls = (0..5).map(|_| ("Bot A".to_owned(), "POST", channel(1))).collect();
        let answers = tokio::spawn(ask_all(node.address(), ms(5), calls));
        eventually("all wait", || node.open() == 5.0).await;
        let start = Instant::now();
        gate.open(1);
        let answers = answers.await.unwrap();
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
        assert!(!is_local(&answers[0]));
        for answer in &answers[1..] {
            local_429(answer, scope, 120.0);
        }
        assert_eq!(fake.arrivals_at("POST", "**").len(), 1);
        assert_eq!(node.failures("rate_limit_deadline"), 4.0);
    }
}

#[tokio::test]
async fn a_wait_that_leaves_a_full_attempt_is_waited_for() {
    let (fake, node) = setup(Script::default(), |config| {
        config.scheduling.queue_timeout = ms(3000);
        config.scheduling.request_timeout = ms(1000);
        config.upstream.request_timeout = ms(1000);
    })
    .await;
    for (reset, status) in [("1.2", 200), ("2.5", 429)] {
        fake.on("POST", "/channels/**", vec![Reply::status(200).bucket("abcd0001", "5", "0", reset)]);
        assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
        let start = Instant::now();
        assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, status, "{reset}");
        let least = if status == 200 { Duration::from_millis(1000) } else { Duration::ZERO };
        assert!(start.elapsed() >= least && start.elapsed() < least + AT_ONCE, "{:?}", start.elapsed());
        // What is left of it would let another call wait.
        assert_eq!(fake.arrivals().len(), if status == 200 { 2 } else { 3 });
    }
}

#[tokio::test]
async fn a_full_queue_is_503_and_nobody_elses_trouble() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_queue_depth = 2).await;
    warm_up(&fake, &node, "Bot A").await;
    let gate = Gate::default();
    fake.on("POST", "/channels/**", vec![Reply::status(200).held(&gate)]);
    let mut clients = Vec::new();
    for number in 1..=3 {
        let mut client = Client::connect(node.address()).await;
        client.send(request("Bot A", "POST", &channel(1), "{}")).await;
        fake.wait_for(2, PATIENCE).await;
        eventually("it waits", || node.open() == f64::from(number)).await;
        clients.push(client);
    }
    let start = Instant::now();
    for _ in 0..3 {
        let answer = ask(node.address(), "Bot A", "POST", &channel(1)).await;
        assert_unavailable(&answer, &node, "queue_full");
        assert!(answer.text().contains("MAX_QUEUE_DEPTH"), "{}", answer.text());
    }
    for (token, path) in [("Bot A", channel(2)), ("Bot B", channel(1)), ("", channel(1))] {
        assert_eq!(ask(node.address(), token, "POST", &path).await.status, 200, "{token} {path}");
    }
    assert!(start.elapsed() < AT_ONCE * 2, "{:?}", start.elapsed());
    // Who leaves makes room for one.
    drop(clients.pop());
    eventually("it has left", || node.open() == 2.0).await;
    let mut last = Client::connect(node.address()).await;
    last.send(request("Bot A", "POST", &channel(1), "{}")).await;
    eventually("the last waits", || node.open() == 3.0).await;
    assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 503);
    gate.open(1);
    for mut client in clients.into_iter().chain([last]) {
        assert_eq!(client.answer().await.status, 200);
    }
    assert_eq!(node.failures("queue_full"), 4.0);
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn a_queue_behind_a_hold_has_the_same_depth() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_queue_depth = 2).await;
    warm_up(&fake, &node, "Bot A").await;
    fake.on("POST", "/channels/**", vec![Reply::limited("shared", 2.0)]);
    let address = node.address();
    let calls = (0..2).map(|_| ("Bot A".to_owned(), "POST", channel(1))).collect();
    let waiting = tokio::spawn(ask_all(address, ms(5), calls));
    fake.wait_until(PATIENCE, |fake| fake.counts().status(429) == 1).await;
    eventually("both wait", || node.open() == 2.0).await;
    tokio::time::sleep(ms(100)).await;
    assert_unavailable(&ask(address, "Bot A", "POST", &channel(1)).await, &node, "queue_full");
    assert_eq!(statuses(&waiting.await.unwrap()), [200; 2]);
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}
