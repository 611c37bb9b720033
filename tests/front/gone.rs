//! Clients that vanish, at every stage of their request: nothing they held may stay taken.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::support::client::Client;
use crate::support::upstream::Upstream;
use crate::support::{Node, PATIENCE, config, eventually};

/// A node that admits one request at a time, so that a slot that is not given back is noticed at once.
async fn narrow() -> (Upstream, Node) {
    let upstream = Upstream::start().await;
    let mut config = config(upstream.address);
    config.max_in_flight_requests = 1;
    let node = Node::start_with(config, |_| {});
    (upstream, node)
}

/// Waits until the client is counted as gone and its slot is free.
async fn given_back(node: &Node, upstream: &mut Upstream) {
    eventually("the request is counted", || node.failures("client_closed") == 1.0).await;
    eventually("the gauge is back at zero", || node.open() == 0.0).await;
    let mut next = Client::connect(node.address()).await;
    next.send("GET /channels/999999999999999999/next HTTP/1.1\r\nhost: a\r\n\r\n").await;
    upstream.next().await.ok("served").await;
    assert_eq!(next.answer().await.text(), "served");
}

#[tokio::test]
async fn a_client_that_leaves_before_the_headers_frees_its_slot() {
    let (mut upstream, node) = narrow().await;
    let mut client = Client::connect(node.address()).await;
    client.send("GET /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let _unanswered = upstream.next().await;
    drop(client);
    given_back(&node, &mut upstream).await;
}

#[tokio::test]
async fn a_client_that_leaves_with_more_requests_in_its_pipe_frees_its_slot() {
    let (mut upstream, node) = narrow().await;
    let mut client = Client::connect(node.address()).await;
    client.send("GET /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\n\r\n".repeat(3)).await;
    let _unanswered = upstream.next().await;
    drop(client);
    given_back(&node, &mut upstream).await;
}

#[tokio::test]
async fn a_client_that_resets_its_connection_frees_its_slot() {
    let (mut upstream, node) = narrow().await;
    let mut client = Client::connect(node.address()).await;
    client.send("POST /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}").await;
    let _unanswered = upstream.next().await;
    socket2::SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    given_back(&node, &mut upstream).await;
}

#[tokio::test]
async fn a_client_that_closes_its_sending_half_while_it_waits_counts_as_gone() {
    let (mut upstream, node) = narrow().await;
    let mut client = Client::connect(node.address()).await;
    client.send("GET /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let _unanswered = upstream.next().await;
    client.stream.shutdown().await.unwrap();
    assert_eq!(client.rest_within(PATIENCE).await.as_deref(), Some(&b""[..]));
    given_back(&node, &mut upstream).await;
}

#[tokio::test]
async fn what_needs_no_waiting_is_answered_to_a_half_closed_connection_too() {
    let (_upstream, node) = narrow().await;
    let mut client = Client::connect(node.address()).await;
    client.send("GET /nirn/healthz HTTP/1.1\r\nhost: a\r\n\r\n").await;
    client.stream.shutdown().await.unwrap();
    assert_eq!(client.answer().await.status, 200);
    assert!(client.rest_within(PATIENCE).await.is_some(), "closed then");
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_its_upload_frees_its_slot() {
    let (mut upstream, node) = narrow().await;
    let mut client = Client::connect(node.address()).await;
    client.send("POST /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nhalf").await;
    eventually("admitted", || node.open() == 1.0).await;
    drop(client);
    given_back(&node, &mut upstream).await;
    assert_eq!(node.failures("upstream_error"), 0.0);
}

#[tokio::test]
async fn a_client_that_leaves_while_its_response_pauses_frees_its_slot() {
    let (mut upstream, node) = narrow().await;
    let mut client = Client::connect(node.address()).await;
    client.send("GET /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let arrival = upstream.next().await;
    arrival.write("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf").await;
    client.head().await.unwrap();
    assert_eq!(client.take(4).await.unwrap(), b"half");
    drop(client);
    given_back(&node, &mut upstream).await;
    arrival.given_up().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off_at_the_deadline() {
    let mut upstream = Upstream::start().await;
    let mut config = config(upstream.address);
    config.max_in_flight_requests = 1;
    config.upstream.request_timeout = Duration::from_secs(1);
    config.scheduling.request_timeout = Duration::from_secs(1);
    let node = Node::start_with(config, |_| {});
    let mut client = Client::connect(node.address()).await;
    client.send("GET /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let arrival = upstream.next().await;
    let size = 64 * 1024 * 1024;
    arrival.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n")).await;
    tokio::spawn(async move { while arrival.write(vec![b'x'; 1024 * 1024]).await {} });
    eventually("the response is aborted", || node.failures("response_aborted") == 1.0).await;
    eventually("the gauge is back at zero", || node.open() == 0.0).await;
    let read = client.rest_within(PATIENCE).await.expect("a close");
    assert!(read.len() < size, "never ended as if complete");
}

#[tokio::test]
async fn a_response_that_breaks_off_upstream_is_aborted() {
    let (mut upstream, node) = narrow().await;
    for head in ["content-length: 100\r\n\r\nhalf", "transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"] {
        let mut client = Client::connect(node.address()).await;
        client.send("GET /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let arrival = upstream.next().await;
        arrival.write(format!("HTTP/1.1 200 OK\r\n{head}")).await;
        client.head().await.unwrap();
        arrival.cut().await;
        let rest = client.rest_within(PATIENCE).await.expect("a close");
        assert!(!rest.ends_with(b"0\r\n\r\n"), "{:?}", String::from_utf8_lossy(&rest));
    }
    eventually("both counted", || node.failures("response_aborted") == 2.0).await;
    assert_eq!((node.open(), node.failures("client_closed")), (0.0, 0.0));
}

#[tokio::test]
async fn a_stream_that_is_reset_frees_its_slot_and_leaves_its_connection_alone() {
    let (mut upstream, node) = narrow().await;
    let stream = TcpStream::connect(node.address()).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let ask = |path: &str| {
        let uri = format!("http://proxy/channels/{path}");
        http::Request::post(uri).body(Full::new(Bytes::from_static(b"{}"))).unwrap()
    };
    let waiting = tokio::spawn(sender.send_request(ask("100000000000000001/a")));
    let _unanswered = upstream.next().await;
    waiting.abort();
    eventually("the request is counted", || node.failures("client_closed") == 1.0).await;
    eventually("the gauge is back at zero", || node.open() == 0.0).await;
    let next = tokio::spawn(sender.send_request(ask("100000000000000002/a")));
    upstream.next().await.ok("served").await;
    assert_eq!(next.await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn waiting_costs_no_turns_of_the_loop_when_the_client_is_there() {
    let (mut upstream, node) = narrow().await;
    let mut client = Client::connect(node.address()).await;
    client.send("POST /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}").await;
    let arrival = upstream.next().await;
    let before = cpu_ticks();
    sleep(Duration::from_secs(1)).await;
    assert!(cpu_ticks() - before < 50, "a core was busy while nothing happened");
    arrival.ok("done").await;
    assert_eq!(client.answer().await.text(), "done");
}

/// Of two requests of one bucket the second waits; its client leaves, and Discord must not see it.
async fn leaves_while_it_waits(waiting: &[u8]) {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut first = Client::connect(node.address()).await;
    first.send("POST /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}").await;
    let arrival = upstream.next().await;
    let mut second = Client::connect(node.address()).await;
    second.send(waiting).await;
    eventually("both are open", || node.open() == 2.0).await;
    drop(second);
    eventually("the request is counted", || node.failures("client_closed") == 1.0).await;
    eventually("its place is free", || node.open() == 1.0).await;
    arrival.ok("done").await;
    assert_eq!(first.answer().await.text(), "done");
    first.send("POST /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nlast").await;
    let arrival = upstream.next().await;
    assert_eq!(arrival.body, b"last", "the one that left was never sent");
    arrival.ok("done").await;
    assert_eq!(first.answer().await.text(), "done");
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_is_never_seen_by_discord_without_a_body() {
    leaves_while_it_waits(
        b"POST /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    )
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_is_never_seen_by_discord_with_its_body_unread() {
    let head = "POST /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n";
    leaves_while_it_waits(format!("{head}body here").as_bytes()).await;
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_is_never_seen_by_discord_with_a_large_body_half_sent() {
    let head = "POST /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 9000000\r\n\r\n";
    leaves_while_it_waits(&[head.as_bytes(), &[b'x'; 100_000]].concat()).await;
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_is_never_seen_by_discord_while_it_waits_to_be_told_to_continue() {
    let head = "POST /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\n";
    leaves_while_it_waits(format!("{head}content-length: 9\r\nexpect: 100-continue\r\n\r\n").as_bytes()).await;
}

/// This thread's CPU time in hundredths of a second: the whole test runs on one thread.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}
