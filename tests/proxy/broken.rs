//! Upstreams that are not there, do not speak HTTP, close or stall at each stage: the client gets the answer that the
//! contract names, nothing leaks, and the next request works.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::support::client::Client;
use crate::support::upstream::{Arrival, Upstream};
use crate::support::{Node, PATIENCE, config, eventually};

/// A node that gives an attempt up soon.
fn hasty(upstream: &Upstream) -> Node {
    let mut config = config(upstream.address);
    config.upstream.request_timeout = Duration::from_millis(400);
    config.scheduling.request_timeout = Duration::from_millis(400);
    Node::start_with(config, |_| {})
}

/// Everything that a request holds is given back, and the same bucket goes on.
async fn works_again(node: &Node, upstream: &mut Upstream) {
    eventually("nothing open", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
    let mut client = Client::connect(node.address()).await;
    client.send("POST /guilds/200000000000000001/channels HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}").await;
    upstream.next().await.ok("fine").await;
    assert_eq!(client.answer().await.text(), "fine");
    eventually("nothing open", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

async fn ask(node: &Node, upstream: &mut Upstream) -> (Client, Arrival) {
    let mut client = Client::connect(node.address()).await;
    client.send("POST /guilds/200000000000000001/channels HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}").await;
    let arrival = upstream.next().await;
    (client, arrival)
}

#[tokio::test]
async fn answers_that_are_not_http_are_502() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let endless = format!("HTTP/1.1 200 OK\r\nx-endless: {}", "y".repeat(600_000));
    let answers = [
        "SSH-2.0-OpenSSH_9.2\r\n",
        "\u{15}\u{3}\u{1}\u{0}\u{2}\u{2}(",
        "HTTP/1.1 abc OK\r\n\r\n",
        "HTTP/9.9 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        "HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        &endless,
    ];
    for (number, wrong) in answers.into_iter().enumerate() {
        let (mut client, arrival) = ask(&node, &mut upstream).await;
        arrival.write(wrong).await;
        let answer = client.answer().await;
        let shown = &wrong[..wrong.len().min(80)];
        assert_eq!((answer.status, answer.header("x-nirn-proxy-error")), (502, Some("true")), "{shown:?}");
        assert_eq!(node.failures("upstream_error"), (number + 1) as f64);
        drop(arrival);
        works_again(&node, &mut upstream).await;
    }
}

#[tokio::test]
async fn c82_an_upstream_that_closes_without_an_answer_is_502_and_the_turn_passes_on() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    for piece in ["", "HTTP/1.1 200", "HTTP/1.1 200 OK\r\ncontent-len"] {
        let (mut client, arrival) = ask(&node, &mut upstream).await;
        if !piece.is_empty() {
            arrival.write(piece).await;
        }
        arrival.cut().await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.header("generated-by-proxy")), (502, Some("true")), "{piece}");
        works_again(&node, &mut upstream).await;
    }
    assert_eq!(node.failures("upstream_error"), 3.0);
}

#[tokio::test]
async fn a_body_that_breaks_off_is_aborted_and_never_looks_complete() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\nzz\r\n",
    ] {
        let (mut client, arrival) = ask(&node, &mut upstream).await;
        arrival.write(answer).await;
        assert!(client.head().await.unwrap().starts_with("HTTP/1.1 200 "));
        arrival.cut().await;
        let rest = client.rest_within(PATIENCE).await.expect("an end");
        assert!(!rest.ends_with(b"0\r\n\r\n") && rest.len() < 100, "{rest:?}");
        works_again(&node, &mut upstream).await;
    }
    assert_eq!(node.failures("response_aborted"), 3.0);
}

#[tokio::test]
async fn what_came_of_an_answer_goes_out_before_the_connection_is_closed() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let (mut client, arrival) = ask(&node, &mut upstream).await;
    // Too long to wait for, so that the client gets it: its head, what there is of its body and its end all at once.
    arrival.write("HTTP/1.1 429 Too Many Requests\r\nretry-after: 9999\r\ncontent-length: 100\r\n\r\nhalf").await;
    arrival.cut().await;
    assert!(client.head().await.expect("a head").starts_with("HTTP/1.1 429 "));
    assert_eq!(client.rest_within(PATIENCE).await.as_deref(), Some(&b"half"[..]));
}

#[tokio::test]
async fn c82_an_upstream_that_stalls_is_504_and_mid_body_an_abort() {
    let mut upstream = Upstream::start().await;
    let node = hasty(&upstream);
    for piece in ["", "HTTP/1.1 200 OK\r\nx-"] {
        let start = Instant::now();
        let (mut client, arrival) = ask(&node, &mut upstream).await;
        if !piece.is_empty() {
            arrival.write(piece).await;
        }
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.header("x-nirn-proxy-error")), (504, Some("true")), "{piece}");
        assert!(answer.text().contains("REQUEST_TIMEOUT"));
        assert!(start.elapsed() >= Duration::from_millis(400));
        arrival.given_up().await;
        works_again(&node, &mut upstream).await;
    }
    assert_eq!(node.failures("upstream_timeout"), 2.0);
    let (mut client, arrival) = ask(&node, &mut upstream).await;
    arrival.write("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf").await;
    assert!(client.head().await.unwrap().starts_with("HTTP/1.1 200 "));
    assert_eq!(client.rest_within(PATIENCE).await.as_deref(), Some(&b"half"[..]));
    arrival.given_up().await;
    assert_eq!(node.failures("response_aborted"), 1.0);
    works_again(&node, &mut upstream).await;
}

#[tokio::test]
async fn an_upstream_that_is_not_there_is_502() {
    let nobody = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let node = Node::start(nobody);
    let mut client = Client::connect(node.address()).await;
    for number in 1..=3 {
        let answer = client.get("/api/v10/gateway?secret=hidden").await;
        assert_eq!((answer.status, answer.header("generated-by-proxy")), (502, Some("true")));
        assert!(!answer.text().contains("hidden"));
        assert_eq!(node.failures("upstream_error"), f64::from(number));
    }
    eventually("nothing open", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn an_upstream_that_takes_a_part_of_an_upload_and_closes_is_502() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let node = Node::start(listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let mut taken = 0;
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut part = vec![0; 64 * 1024];
            stream.read_exact(&mut part).await.unwrap();
            taken += 1;
        }
        taken
    });
    for framing in ["content-length: 3145728", "transfer-encoding: chunked"] {
        let mut client = Client::connect(node.address()).await;
        client.send(format!("POST /x HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n")).await;
        let body = [b"300000\r\n".as_slice(), &vec![b'x'; 3 << 20], b"\r\n0\r\n\r\n"].concat();
        let body = if framing.starts_with('c') { &body[8..8 + (3 << 20)] } else { &body };
        // How much of it the proxy takes once its attempt has failed is its business.
        _ = tokio::io::AsyncWriteExt::write_all(&mut client.stream, body).await;
        assert_eq!(client.answer().await.status, 502, "{framing}");
    }
    assert_eq!(server.await.unwrap(), 2, "one attempt each");
    eventually("nothing open", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn a_request_that_found_no_connection_used_nothing_of_its_bucket() {
    let mut discord = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = discord.local_addr().unwrap();
    let node = Node::start(address);
    for round in 0..3 {
        let mut client = Client::connect(node.address()).await;
        client.send("GET /channels/100000000000000001/x HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let (mut stream, _) =
            timeout(PATIENCE, discord.accept()).await.expect("at once, whatever failed before").unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            assert!(stream.read_buf(&mut head).await.unwrap() > 0);
        }
        let limits = "x-ratelimit-bucket: a\r\nx-ratelimit-limit: 9\r\nx-ratelimit-reset-after: 1800";
        let left = 3 - round;
        let answer = format!("HTTP/1.1 200 OK\r\nconnection: close\r\n{limits}\r\nx-ratelimit-remaining: {left}");
        stream.write_all(format!("{answer}\r\ncontent-length: 0\r\n\r\n").as_bytes()).await.unwrap();
        assert_eq!(client.answer().await.status, 200);
        drop((stream, discord));
        for _ in 0..left {
            assert_eq!(client.get("/channels/100000000000000001/x").await.status, 502);
        }
        discord = TcpListener::bind(address).await.unwrap();
    }
}
