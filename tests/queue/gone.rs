//! Clients that vanish while the scheduler has their request: nothing they held may stay taken, and Discord never sees
//! what was still waiting.

use std::time::Duration;

use fake_discord::{Action, FakeDiscord, Gate, Reply, Script};
use nirn_proxy::config::Config;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::support::calls::*;
use crate::support::client::Client;
use crate::support::{Node, PATIENCE, eventually};

const BOT: &str = "Bot MTAwMDAw.x";

/// A node whose every bound is one, so that what is not given back is noticed at once.
async fn narrow(change: impl FnOnce(&mut Config)) -> (FakeDiscord, Node) {
    setup(Script { keep_bodies: true, ..Script::default() }, |config| {
        config.max_in_flight_requests = 1;
        config.scheduling.max_queue_depth = 1;
        config.scheduling.invalid_request_limit = 2;
        config.scheduling.max_retry_capture_bytes = 64 * 1024;
        change(config);
    })
    .await
}

/// A Discord with no room for another connection, for now: whoever knocks has to knock again, a second later.
pub(crate) async fn crowded() -> (TcpListener, [TcpStream; 2]) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let discord = socket.listen(1).unwrap();
    let address = discord.local_addr().unwrap();
    let full = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
    (discord, full)
}

/// Sends a request that comes to wait, lets its client vanish, and checks that it has left nothing behind.
async fn vanish(node: &Node, fake: &FakeDiscord, request: impl AsRef<[u8]>) {
    let (arrivals, counted) = (fake.counts().arrivals, node.failures("client_closed"));
    let mut client = Client::connect(node.address()).await;
    client.send(request).await;
    eventually("it is admitted", || node.open() == 1.0).await;
    // It has come as far as it can go by itself.
    tokio::time::sleep(ms(50)).await;
    assert_eq!((node.open(), fake.counts().arrivals), (1.0, arrivals), "it waits");
    drop(client);
    eventually("it is counted", || node.failures("client_closed") == counted + 1.0).await;
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

/// The next request of the same bucket is served, and it alone has reached Discord since `arrivals`.
async fn next_works(node: &Node, fake: &FakeDiscord, arrivals: u64) {
    assert_eq!(ask(node.address(), BOT, "POST", &format!("{}?next", channel(1))).await.status, 200);
    let seen = fake.arrivals();
    assert_eq!(seen.len() as u64, arrivals + 1, "what waited was never sent");
    assert!(seen.last().unwrap().target_text().ends_with("?next"));
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

/// What may wait: without a body, with one, with half of one, and with none until it is asked for.
fn waiting() -> [String; 4] {
    let whole = request(BOT, "POST", &channel(1), &"x".repeat(60_000));
    let asking = request(BOT, "POST", &channel(1), "{}").replace("\r\n\r\n{}", "\r\nExpect: 100-continue\r\n\r\n");
    [request(BOT, "POST", &channel(1), ""), whole[..30_000].to_owned(), whole, asking]
}

#[tokio::test]
async fn in_a_cooldown() {
    let (fake, node) = narrow(|_| {}).await;
    fake.on("POST", "/channels/**", vec![Reply::status(200).bucket("abcd0001", "5", "0", "2")]);
    assert_eq!(ask(node.address(), BOT, "POST", &channel(1)).await.status, 200);
    for request in waiting() {
        vanish(&node, &fake, request).await;
    }
    next_works(&node, &fake, 1).await;
    let arrivals = fake.arrivals();
    assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(2000), ms(2500));
}

#[tokio::test]
async fn in_a_hold() {
    let (fake, node) = narrow(|config| config.scheduling.queue_timeout = ms(6000)).await;
    // Too long for the first, whose time has begun; short enough for those that follow.
    fake.on("POST", "/channels/**", vec![Reply::limited("shared", 1.5).after(ms(50))]);
    assert_eq!(ask(node.address(), BOT, "POST", &channel(1)).await.status, 429);
    tokio::time::sleep(ms(600)).await;
    for request in waiting() {
        vanish(&node, &fake, request).await;
    }
    next_works(&node, &fake, 1).await;
    let arrivals = fake.arrivals();
    assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(1500), ms(2000));
}

#[tokio::test]
async fn in_a_global_block() {
    let (fake, node) = narrow(|config| config.scheduling.queue_timeout = ms(6000)).await;
    fake.on("POST", "/channels/**", vec![Reply::limited("global", 1.5)]);
    assert_eq!(ask(node.address(), BOT, "POST", &channel(2)).await.status, 429);
    tokio::time::sleep(ms(600)).await;
    for request in waiting() {
        vanish(&node, &fake, request).await;
    }
    next_works(&node, &fake, 1).await;
    let arrivals = fake.arrivals();
    assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(1500), ms(2000));
}

#[tokio::test]
async fn in_the_pacer() {
    let (fake, node) = narrow(|config| {
        config.scheduling.overrides.by_bot_id.insert(100_000, 1);
    })
    .await;
    for round in 0..2 {
        assert_eq!(ask(node.address(), BOT, "POST", &channel(2)).await.status, 200);
        for request in &waiting()[..2] {
            vanish(&node, &fake, request).await;
        }
        next_works(&node, &fake, 2 * round + 1).await;
    }
    let arrivals = fake.arrivals();
    assert!(arrivals.windows(2).all(|pair| pair[1].at - pair[0].at >= ms(990)), "one a second");
    let took = arrivals[3].at - arrivals[0].at;
    assert!(took < ms(3000) + SLACK, "those who left took no allowance: {took:?}");
}

#[tokio::test]
async fn behind_the_first_of_an_unjudged_credential() {
    let (fake, node) = narrow(|config| config.max_in_flight_requests = 2).await;
    let gate = Gate::default();
    fake.on("POST", "/channels/**", vec![Reply::status(200).held(&gate)]);
    let address = node.address();
    let first = tokio::spawn(async move { ask(address, BOT, "POST", &channel(2)).await });
    fake.wait_for(1, PATIENCE).await;
    for (number, request) in waiting().into_iter().enumerate() {
        let mut client = Client::connect(address).await;
        client.send(request).await;
        eventually("it is admitted", || node.open() == 2.0).await;
        drop(client);
        eventually("it is counted", || node.failures("client_closed") == (number + 1) as f64).await;
        eventually("it has left", || node.open() == 1.0).await;
    }
    gate.open(1);
    assert_eq!(first.await.unwrap().status, 200);
    next_works(&node, &fake, 1).await;
}

#[tokio::test]
async fn between_two_attempts() {
    for body in [String::new(), "x".repeat(60_000)] {
        let (fake, node) = narrow(|_| {}).await;
        fake.on("POST", "/channels/**", vec![Reply::limited("user", 1.5).bucket("abcd0001", "5", "0", "1.5")]);
        let mut client = Client::connect(node.address()).await;
        client.send(request(BOT, "POST", &channel(1), &body)).await;
        fake.wait_until(PATIENCE, |fake| fake.counts().status(429) == 1).await;
        tokio::time::sleep(ms(100)).await;
        assert!(!node.scheduler.is_quiet(), "it waits for another attempt");
        drop(client);
        eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
        assert_eq!(node.failures("client_closed"), 1.0);
        // Its refusal has counted, and a slot is left for one.
        next_works(&node, &fake, 1).await;
        let arrivals = fake.arrivals();
        assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(1500), ms(2000));
    }
}

#[tokio::test]
async fn before_the_queue_with_a_small_body_half_sent() {
    let (fake, node) = narrow(|_| {}).await;
    // An edit of a channel is looked at before it queues: its fields have limits of their own.
    let edit = request(BOT, "PATCH", "/api/v10/channels/100000000000000001", r#"{"name": "general"}"#);
    vanish(&node, &fake, &edit[..edit.len() - 5]).await;
    vanish(&node, &fake, edit.split("{").next().unwrap()).await;
    next_works(&node, &fake, 0).await;
}

#[tokio::test]
async fn while_its_body_is_being_sent() {
    let (fake, node) = narrow(|_| {}).await;
    for chunked in [false, true] {
        let before = fake.counts().arrivals;
        let head = format!("POST {} HTTP/1.1\r\nHost: a\r\nAuthorization: {BOT}\r\n", channel(1));
        let part = "x".repeat(20_000);
        let request = if chunked {
            format!("{head}Transfer-Encoding: chunked\r\n\r\n4e20\r\n{part}\r\n4e20\r\nhalf")
        } else {
            format!("{head}Content-Length: 40000\r\n\r\n{part}")
        };
        let mut client = Client::connect(node.address()).await;
        client.send(request).await;
        fake.wait_for(before + 1, PATIENCE).await;
        drop(client);
        eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
        next_works(&node, &fake, before + 1).await;
        let broken = &fake.arrivals()[before as usize];
        assert_eq!(broken.body_sha256, None, "Discord never takes half a body for a whole one");
    }
    assert_eq!((node.failures("client_closed"), node.failures("upstream_error")), (2.0, 0.0));
}

#[tokio::test]
async fn before_its_headers_and_in_the_middle_of_its_body() {
    let (fake, node) = narrow(|_| {}).await;
    for mid_body in [false, true] {
        let gate = Gate::default();
        let before = fake.counts().arrivals;
        let whole = Reply { body: vec![b'x'; 100_000].into(), ..Reply::status(200) };
        let reply = if mid_body { Reply { action: Action::StallBody(10), ..whole } } else { whole.held(&gate) };
        fake.on("POST", "/channels/**", vec![reply]);
        let mut client = Client::connect(node.address()).await;
        client.send(request(BOT, "POST", &channel(1), "{}")).await;
        fake.wait_for(before + 1, PATIENCE).await;
        if mid_body {
            assert!(client.head().await.is_some());
        }
        drop(client);
        eventually("its slot is free", || node.open() == 0.0).await;
        if !mid_body {
            assert!(!node.scheduler.is_quiet(), "the attempt goes on");
            gate.open(1);
        }
        eventually("nothing is held", || node.scheduler.is_quiet()).await;
        next_works(&node, &fake, before + 1).await;
    }
    assert_eq!(node.failures("client_closed"), 2.0);
    // Broken off in the middle, a connection is of no more use; the others are kept.
    fake.wait_until(PATIENCE, |fake| fake.counts().open_connections <= 2).await;
}

#[tokio::test]
async fn at_any_moment() {
    let (fake, node) = setup(Script::default(), |config| {
        config.max_in_flight_requests = 40;
        config.scheduling.overrides.by_bot_id.insert(100_000, 400);
    })
    .await;
    fake.always("POST", "/channels/**", Reply::status(200).bucket("abcd0001", "5", "1", "0.02").after(ms(3)));
    let mut leaving = Vec::new();
    for number in 0..400_u64 {
        let mut client = Client::connect(node.address()).await;
        client.send(request(BOT, "POST", &channel((number % 5) as usize), "{\"content\": \"text\"}")).await;
        leaving.push(tokio::spawn(async move {
            tokio::time::sleep(Duration::from_micros(number * 7919 % 15_000)).await;
            drop(client);
        }));
        if number % 20 == 0 {
            tokio::time::sleep(ms(5)).await;
        }
    }
    for client in leaving {
        client.await.unwrap();
    }
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
    for number in 0..5 {
        assert_eq!(ask(node.address(), BOT, "POST", &channel(number)).await.status, 200);
    }
}

#[tokio::test]
async fn while_a_connection_to_discord_is_made() {
    let (discord, full) = crowded().await;
    let node = Node::start(discord.local_addr().unwrap());
    let mut client = Client::connect(node.address()).await;
    client.send(request(BOT, "POST", &channel(1), "")).await;
    eventually("it is admitted", || node.open() == 1.0).await;
    tokio::time::sleep(ms(50)).await;
    drop(client);
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
    let mut accepted = Vec::new();
    for _ in 0..=full.len() {
        accepted.push(timeout(PATIENCE, discord.accept()).await.expect("a connection in time").unwrap().0);
    }
    let mut stream = accepted.pop().unwrap();
    let seen = timeout(ms(300), stream.read(&mut [0])).await;
    assert!(seen.is_err(), "what had left before was never sent: {seen:?}");
    let next =
        tokio::spawn(async move { ask(node.address(), BOT, "POST", &format!("{}?next", channel(1))).await.status });
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        assert!(timeout(PATIENCE, stream.read_buf(&mut head)).await.expect("a request in time").unwrap() > 0);
    }
    assert!(head.starts_with(format!("POST {}?next ", channel(1)).as_bytes()), "{}", String::from_utf8_lossy(&head));
    stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
    assert_eq!(next.await.unwrap(), 204);
}
