//! Heads that are too large, too slow, contradictory or no heads at all, and connections that say nothing.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::support::client::{Answer, Client};
use crate::support::upstream::Upstream;
use crate::support::{Node, PATIENCE, config, eventually};

/// Short patience, so that both sides of it fit in a test.
async fn hasty_node(head: u64, idle: u64) -> Node {
    Node::start_with(config(Upstream::echo().await), |daemon| {
        daemon.limits.head = Duration::from_millis(head);
        daemon.limits.idle = Duration::from_millis(idle);
    })
}

#[tokio::test]
async fn a_length_beside_a_transfer_coding_is_refused_and_the_connection_closed() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    for lines in [
        "content-length: 5\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 5",
        "Transfer-Encoding: chunked\r\nContent-Length: 0",
    ] {
        let mut client = Client::connect(node.address()).await;
        let smuggled = "0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n";
        client.send(format!("POST /x HTTP/1.1\r\nhost: a\r\n{lines}\r\n\r\n{smuggled}")).await;
        let answer = client.answer().await;
        assert_eq!(answer.status, 400, "{lines}");
        assert_eq!(answer.header("connection"), Some("close"));
        assert_eq!(client.rest_within(PATIENCE).await.as_deref(), Some(&b""[..]), "closed, and nothing else answered");
    }
    assert!(upstream.is_untouched());
    assert_eq!(node.failures("bad_request"), 3.0);
}

#[tokio::test]
async fn a_fragment_is_refused_rather_than_cut_off() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    let answer = client.get("/channels/100000000000000001/messages?x=1#fragment").await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("fragment"));
    assert!(upstream.is_untouched());
}

#[tokio::test]
async fn heads_that_cannot_be_read_are_refused_and_never_forwarded() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    for (number, request) in [
        "POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        "POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        "POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999\r\n\r\n",
        "POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
        "POST /x HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET /x HTTP/1.1\r\nhost : a\r\n\r\n",
        "GET /x HTTP/1.1\r\nbad header\r\n\r\n",
        "GET /x HTTP/1.1\r\nhost: a\r\n folded: b\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}TLS hello\r\n\r\n",
        "G@T /x HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET /x HTTP/3.0\r\nhost: a\r\n\r\n",
        "GET /a b HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET /x HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n",
        "hello\r\n\r\n",
    ]
    .into_iter()
    .enumerate()
    {
        let mut client = Client::connect(node.address()).await;
        client.send(request).await;
        let answer = client.answer().await;
        assert_eq!(answer.status, 400, "{request:?}");
        assert_own(&answer, "malformed");
        assert_eq!(client.rest_within(PATIENCE).await.as_deref(), Some(&b""[..]), "{request:?}");
        eventually("it is counted", || node.failures("bad_request") == (number + 1) as f64).await;
    }
    assert!(upstream.is_untouched());
}

/// An answer that says who gave it and why, the last on its connection.
fn assert_own(answer: &Answer, why: &str) {
    for (name, value) in [
        ("generated-by-proxy", "true"),
        ("via", "1.1 nirn-proxy"),
        ("x-nirn-proxy-error", "true"),
        ("content-type", "application/json"),
        ("connection", "close"),
    ] {
        assert_eq!(answer.all(name).collect::<Vec<_>>(), [value], "{name}");
    }
    assert!(answer.header("date").is_some_and(|date| date.ends_with(" GMT")));
    assert!(answer.text().contains(why) && answer.text().contains("\"code\":0"), "{}", answer.text());
}

#[tokio::test]
async fn a_head_that_cannot_be_read_leaves_the_answers_before_it_whole() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    client.send("GET /a HTTP/1.1\r\nhost: a\r\n\r\nGET /b HTTP/1.1\r\nbad header\r\n\r\n").await;
    upstream.next().await.ok("first").await;
    assert_eq!(client.answer().await.text(), "first");
    let answer = client.answer().await;
    assert_eq!(answer.status, 400);
    assert_own(&answer, "malformed");
    eventually("it is counted", || node.failures("bad_request") == 1.0).await;
}

#[tokio::test]
async fn what_discord_answers_with_is_not_taken_for_an_answer_of_ours() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    for lines in ["content-length: 0", "connection: close\r\ncontent-length: 0"] {
        let date = "date: Mon, 30 Nov 2026 10:09:23 GMT";
        let mut client = Client::connect(node.address()).await;
        client.send("GET /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
        upstream.next().await.write(format!("HTTP/1.1 400 Bad Request\r\n{lines}\r\n{date}\r\n\r\n")).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text(), answer.header("generated-by-proxy")), (400, "", None));
    }
    assert_eq!(node.failures("bad_request"), 0.0);
}

#[tokio::test]
async fn a_header_line_of_16_kib_passes_and_a_block_over_64_kib_is_431() {
    let node = Node::start(Upstream::echo().await);
    let mut client = Client::connect(node.address()).await;
    let line = "x".repeat(16 * 1024);
    client.send(format!("GET /x HTTP/1.1\r\nhost: a\r\nx-long: {line}\r\n\r\n")).await;
    assert_eq!(client.answer().await.status, 200);
    let lines: String = (0..90).map(|number| format!("x-{number}: {}\r\n", "y".repeat(600))).collect();
    client.send(format!("GET /x?{line} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
    assert_eq!(client.answer().await.status, 200);
    client.send(format!("GET /x HTTP/1.1\r\nhost: a\r\n{lines}\r\n")).await;
    assert_eq!(client.answer().await.status, 200);
    client.send(format!("GET /x HTTP/1.1\r\nhost: a\r\nx-long: {}\r\n\r\n", line.repeat(5))).await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 431);
    assert_own(&answer, "64 KiB");
    assert!(client.rest_within(PATIENCE).await.is_some());
    eventually("it is counted", || node.failures("bad_request") == 1.0).await;

    let mut endless = Client::connect(node.address()).await;
    endless.send(format!("GET /x HTTP/1.1\r\nx-long: {}", line.repeat(5))).await;
    assert_eq!(endless.answer().await.status, 431);

    // The target is a part of the block.
    let mut long = Client::connect(node.address()).await;
    long.send(format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", line.repeat(4))).await;
    assert_eq!(long.answer().await.status, 431);

    let mut many = Client::connect(node.address()).await;
    many.send(format!("GET /x HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(101))).await;
    let answer = many.answer().await;
    assert_eq!(answer.status, 431);
    assert_own(&answer, "100 lines");
}

#[tokio::test]
async fn a_silent_connection_is_closed() {
    let node = hasty_node(300, 60_000).await;
    let mut client = Client::connect(node.address()).await;
    assert_eq!(client.rest_within(PATIENCE).await.as_deref(), Some(&b""[..]));
    let mut half_a_preface = Client::connect(node.address()).await;
    half_a_preface.send("PRI * HTTP/2.0\r\n").await;
    assert!(half_a_preface.rest_within(PATIENCE).await.is_some());
}

#[tokio::test]
async fn a_head_that_comes_a_byte_at_a_time_is_cut_off_in_time() {
    let node = hasty_node(500, 60_000).await;
    let mut client = Client::connect(node.address()).await;
    let start = Instant::now();
    let head = "GET /x HTTP/1.1\r\nhost: a\r\nx-endless: ";
    let mut bytes = head.bytes().chain(std::iter::repeat(b'y'));
    while start.elapsed() < PATIENCE {
        // Writing into a closed connection fails, sooner or later.
        let byte = bytes.next().unwrap();
        if tokio::io::AsyncWriteExt::write_all(&mut client.stream, &[byte]).await.is_err() {
            break;
        }
        sleep(Duration::from_millis(20)).await;
    }
    assert!(start.elapsed() >= Duration::from_millis(500));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[tokio::test]
async fn an_idle_connection_outlives_the_head_timer_and_is_closed_after_the_idle_time() {
    let node = hasty_node(200, 1_500).await;
    let mut client = Client::connect(node.address()).await;
    assert_eq!(client.get("/a").await.status, 200);
    sleep(Duration::from_millis(900)).await;
    assert_eq!(client.get("/b").await.status, 200);
    let idle = Instant::now();
    assert_eq!(client.rest_within(PATIENCE).await.as_deref(), Some(&b""[..]));
    assert!(idle.elapsed() >= Duration::from_millis(1_400), "{:?}", idle.elapsed());
    assert!(idle.elapsed() < Duration::from_secs(4), "{:?}", idle.elapsed());
}

#[tokio::test]
async fn a_waiting_request_is_neither_idle_nor_slow() {
    let mut upstream = Upstream::start().await;
    let node = Node::start_with(config(upstream.address), |daemon| {
        daemon.limits.head = Duration::from_millis(100);
        daemon.limits.idle = Duration::from_millis(200);
    });
    let mut client = Client::connect(node.address()).await;
    client.send("GET /x HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let arrival = upstream.next().await;
    sleep(Duration::from_millis(800)).await;
    arrival.ok("late").await;
    assert_eq!(client.answer().await.text(), "late");
}
