//! Those who wait and are served, and those whose time runs out.

use std::time::Instant;

use fake_discord::{Action, Arrival, FakeDiscord, Gate, Reply, Script};
use tokio::time::timeout;

use crate::gone::crowded;
use crate::support::calls::*;
use crate::support::client::Client;
use crate::support::{Node, PATIENCE, config, eventually};

fn targets(fake: &FakeDiscord) -> Vec<String> {
    fake.arrivals().iter().map(Arrival::target_text).collect()
}

#[tokio::test]
async fn c83_a_client_that_gives_up_is_never_sent_and_holds_nobody_up() {
    let (fake, node) = setup(Script::default(), |_| {}).await;
    fake.on("POST", "/channels/**", vec![Reply::status(200).bucket("abcd8383", "5", "0", "3")]);
    fake.always("POST", "/channels/**", Reply::status(200).bucket("abcd8383", "5", "3", "3"));
    assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
    let start = Instant::now();
    let mut clients = Vec::new();
    for number in 1..=3 {
        let mut client = Client::connect(node.address()).await;
        client.send(request("Bot A", "POST", &format!("{}?client={number}", channel(1)), "")).await;
        eventually("it waits", || node.open() == f64::from(number)).await;
        clients.push(client);
    }
    tokio::time::sleep(ms(1000).saturating_sub(start.elapsed())).await;
    drop(clients.remove(1));
    eventually("it has left", || node.open() == 2.0).await;
    for mut client in clients {
        assert_eq!(client.answer().await.status, 200);
    }
    let arrivals = fake.arrivals();
    let expected = [channel(1), format!("{}?client=1", channel(1)), format!("{}?client=3", channel(1))];
    assert_eq!(targets(&fake), expected);
    assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(3000), ms(3500));
    assert!(wait_between(&arrivals[1], &arrivals[2]) < AT_ONCE, "no gap");
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
    assert_eq!(node.failures("client_closed"), 1.0);
}

#[tokio::test]
async fn past_queue_timeout_those_without_headers_get_408() {
    let (fake, node) = setup(Script::default(), |config| {
        config.scheduling.queue_timeout = ms(1000);
    })
    .await;
    warm_up(&fake, &node, "Bot A").await;
    let gate = Gate::default();
    fake.on("POST", "/channels/**", vec![Reply::status(200).bucket("abcd0408", "5", "4", "1").held(&gate)]);
    let start = Instant::now();
    let calls = (0..3).map(|_| ("Bot A".to_owned(), "POST", channel(1))).collect();
    let answers = ask_all(node.address(), ms(10), calls).await;
    assert_within(start.elapsed(), ms(1000), ms(1000));
    for answer in answers {
        assert_eq!((answer.status, answer.header("x-nirn-proxy-error")), (408, Some("true")));
        assert!(answer.text().contains("QUEUE_TIMEOUT"), "{}", answer.text());
        assert_eq!(answer.header("retry-after"), None);
    }
    assert_eq!(node.failures("queue_timeout"), 3.0);
    assert_eq!(node.open(), 0.0);
    assert!(!node.scheduler.is_quiet(), "what was sent is still listened to");
    gate.open(1);
    eventually("it is heard", || node.scheduler.is_quiet()).await;
    assert_eq!(fake.arrivals_at("POST", "**").len(), 1, "those who only waited were not sent");
    assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
}

#[tokio::test]
async fn queue_timeout_passes_while_a_connection_to_discord_is_made() {
    let (discord, _full) = crowded().await;
    let mut config = config(discord.local_addr().unwrap());
    config.scheduling.queue_timeout = ms(400);
    let node = Node::start_with(config, |_| {});
    let start = Instant::now();
    let answer = ask(node.address(), "Bot A", "POST", &channel(1)).await;
    assert_eq!(answer.status, 408);
    assert_within(start.elapsed(), ms(400), ms(900));
    assert_eq!(node.failures("queue_timeout"), 1.0);
    assert!(node.open() == 0.0 && node.scheduler.is_quiet(), "it holds nothing");
}

#[tokio::test]
async fn queue_timeout_is_one_deadline_over_all_attempts() {
    let (fake, node) = setup(Script::default(), |config| {
        config.scheduling.queue_timeout = ms(2000);
        config.scheduling.request_timeout = ms(500);
        config.upstream.request_timeout = ms(500);
    })
    .await;
    fake.always("GET", "/channels/**", Reply::limited("user", 0.6));
    let start = Instant::now();
    let answer = ask(node.address(), "Bot A", "GET", &channel(1)).await;
    assert!(start.elapsed() < ms(2000) + SLACK, "{:?}", start.elapsed());
    assert_eq!((answer.status, is_local(&answer)), (429, false), "Discord's own, once no other attempt fits");
    let attempts = fake.counts().arrivals;
    assert!((2..=4).contains(&attempts), "{attempts}");
}

#[tokio::test]
async fn a_body_past_queue_timeout_is_cut_and_never_looks_complete() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.queue_timeout = ms(1000)).await;
    let body = vec![b'x'; 1000];
    for framing in [fake_discord::Framing::Length, fake_discord::Framing::Chunked] {
        let reply = Reply { body: body.clone().into(), framing, ..Reply::action(Action::StallBody(500)) };
        fake.on("GET", "/channels/**", vec![reply]);
        let start = Instant::now();
        let mut client = Client::connect(node.address()).await;
        client.send(request("Bot A", "GET", &channel(1), "")).await;
        let head = timeout(PATIENCE, client.head()).await.unwrap().unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let rest = client.rest_within(PATIENCE).await.expect("an end");
        assert!(rest.len() < 1000 && !rest.ends_with(b"0\r\n\r\n"), "{}", rest.len());
        let took = start.elapsed();
        assert!(took >= ms(1000) && took < ms(1000) + AT_ONCE, "its client is told at once: {took:?}");
    }
    eventually("both are counted", || node.failures("response_aborted") == 2.0).await;
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn a_slow_body_holds_nobody_up() {
    let (fake, node) = setup(Script::default(), |_| {}).await;
    let slow = Reply { body: vec![b'x'; 1000].into(), ..Reply::action(Action::StallBody(1)) };
    fake.on("POST", "/channels/**", vec![slow.bucket("abcd0001", "5", "4", "5")]);
    let mut client = Client::connect(node.address()).await;
    client.send(request("Bot A", "POST", &channel(1), "")).await;
    assert!(timeout(PATIENCE, client.head()).await.unwrap().is_some());
    let start = Instant::now();
    for _ in 0..3 {
        assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
    }
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    drop(client);
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

/// Sends a call that Discord holds, and lets its client leave.
async fn leave_after_it_was_sent(node: &Node, fake: &FakeDiscord) {
    let before = fake.counts().arrivals;
    let mut client = Client::connect(node.address()).await;
    client.send(request("Bot A", "POST", &channel(1), "{}")).await;
    fake.wait_for(before + 1, PATIENCE).await;
    drop(client);
    eventually("its client has left", || node.open() == 0.0).await;
    assert!(!node.scheduler.is_quiet(), "the attempt goes on");
}

#[tokio::test]
async fn an_attempt_whose_client_left_still_learns() {
    for refused in [false, true] {
        let (fake, node) = setup(Script::default(), |_| {}).await;
        let gate = Gate::default();
        let answer = if refused { Reply::limited("user", 1.5) } else { Reply::status(200) };
        fake.on("POST", "/channels/**", vec![answer.bucket("abcd0001", "5", "0", "1.5").held(&gate)]);
        leave_after_it_was_sent(&node, &fake).await;
        gate.open(1);
        eventually("its headers are handled", || node.scheduler.is_quiet()).await;
        assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
        let arrivals = fake.arrivals();
        assert_eq!(arrivals.len(), 2, "nobody is left to try again for");
        assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(1500), ms(2000));
    }
}

#[tokio::test]
async fn an_attempt_whose_client_left_keeps_its_turn_until_its_headers_or_its_end() {
    let (fake, node) = setup(Script::default(), |config| {
        config.scheduling.request_timeout = ms(1000);
        config.upstream.request_timeout = ms(1000);
    })
    .await;
    fake.on("POST", "/channels/**", vec![Reply::action(Action::Stall)]);
    leave_after_it_was_sent(&node, &fake).await;
    assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
    let arrivals = fake.arrivals();
    let gap = arrivals[1].at - arrivals[0].at;
    assert_within(gap, ms(950), ms(1500));
    eventually("nothing is held", || node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order_and_whole_although_the_first_waits() {
    let (fake, node) = setup(Script::default(), |_| {}).await;
    fake.on("POST", "/channels/**", vec![Reply::status(200).bucket("abcd0001", "5", "0", "2")]);
    assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
    for number in 1..=3 {
        let body = serde_json::json!({ "answer": number });
        let method = if number == 1 { "POST" } else { "GET" };
        fake.on(method, channel(number).trim_start_matches("/api/v10"), vec![Reply::json(200, &body)]);
    }
    let mut client = Client::connect(node.address()).await;
    let one = request("Bot A", "POST", &channel(1), "{}");
    client.send(one + &request("Bot A", "GET", &channel(2), "") + &request("Bot A", "GET", &channel(3), "")).await;
    for number in 1..=3 {
        assert_eq!(client.answer().await.text(), format!("{{\"answer\":{number}}}"));
    }
    let arrivals = fake.arrivals();
    assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(2000), ms(2500));
}
