//! The drain: who is still served, who is refused, and when it ends.

use std::time::{Duration, Instant};

use tokio::time::timeout;

use crate::support::client::Client;
use crate::support::upstream::Upstream;
use crate::support::{Node, PATIENCE, config, eventually};

fn patient(upstream: &Upstream, drain: Duration) -> Node {
    Node::start_with(config(upstream.address), |daemon| daemon.limits.drain = drain)
}

async fn ended(node: Node) {
    timeout(PATIENCE, node.task).await.expect("an end in time").unwrap().unwrap();
}

const GET: &str = "GET /channels/100000000000000001/a HTTP/1.1\r\nhost: a\r\n\r\n";

#[tokio::test]
async fn an_admitted_request_finishes_while_new_ones_and_health_get_503() {
    let mut upstream = Upstream::start().await;
    let mut node = patient(&upstream, PATIENCE);
    let mut admitted = Client::connect(node.address()).await;
    admitted.send(GET).await;
    let arrival = upstream.next().await;
    let mut idle = Client::connect(node.address()).await;
    assert_eq!(idle.get("/nirn/healthz").await.status, 200);

    node.shut_down();
    assert_eq!(idle.rest_within(PATIENCE).await.as_deref(), Some(&b""[..]), "an idle connection is closed");
    let mut probe = Client::connect(node.address()).await;
    assert_eq!(probe.get("/nirn/healthz").await.status, 503);
    let mut late = Client::connect(node.address()).await;
    let refused = late.get("/channels/100000000000000001/a").await;
    assert_eq!((refused.status, refused.header("connection")), (503, Some("close")));
    assert!(refused.text().contains("shutting down"), "{}", refused.text());
    assert_eq!(node.failures("shutting_down"), 1.0);
    assert!(!node.task.is_finished());

    arrival.ok("finished").await;
    let answer = admitted.answer().await;
    assert_eq!((answer.text(), answer.header("connection")), ("finished", Some("close")));
    ended(node).await;
}

#[tokio::test]
async fn what_is_left_after_the_drains_time_gets_503_or_is_aborted() {
    let mut upstream = Upstream::start().await;
    let mut node = patient(&upstream, Duration::from_millis(400));
    let mut waiting = Client::connect(node.address()).await;
    waiting.send(GET).await;
    let _unanswered = upstream.next().await;
    let mut reading = Client::connect(node.address()).await;
    reading.send("GET /channels/100000000000000002/b HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let half = upstream.next().await;
    half.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n").await;
    reading.head().await.unwrap();

    let start = Instant::now();
    node.shut_down();
    assert_eq!(waiting.answer().await.status, 503);
    let rest = reading.rest_within(PATIENCE).await.expect("a close");
    assert!(!rest.ends_with(b"0\r\n\r\n"));
    assert!(start.elapsed() >= Duration::from_millis(400));
    assert_eq!((node.failures("shutting_down"), node.failures("response_aborted")), (1.0, 1.0));
    assert_eq!(node.open(), 0.0);
    ended(node).await;
}

#[tokio::test]
async fn an_idle_node_stops_at_once_and_silent_connections_do_not_hold_it() {
    let upstream = Upstream::start().await;
    let mut node = patient(&upstream, PATIENCE);
    let _silent = Client::connect(node.address()).await;
    let mut kept = Client::connect(node.address()).await;
    assert_eq!(kept.get("/nirn/healthz").await.status, 200);
    let start = Instant::now();
    node.shut_down();
    let address = node.address();
    ended(node).await;
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "the port is free");
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    let mut upstream = Upstream::start().await;
    let mut node = patient(&upstream, PATIENCE);
    let mut waiting = Client::connect(node.address()).await;
    waiting.send(GET).await;
    let _unanswered = upstream.next().await;
    node.shut_down();
    eventually("the drain began", || node.failures("client_closed") == 0.0).await;
    let start = Instant::now();
    node.hurry();
    ended(node).await;
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_port_in_use_stops_the_start_and_is_named() {
    let upstream = Upstream::start().await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for variable in ["PORT", "METRICS_PORT", "PPROF_PORT"] {
        let mut config = config(upstream.address);
        match variable {
            "PORT" => config.port = port,
            "METRICS_PORT" => config.metrics_port = Some(port),
            _ => config.pprof_port = Some(port),
        }
        let error = nirn_proxy::bind(config).err().expect("a refusal");
        assert!(error.starts_with(&format!("{variable}: ")) && error.contains(&port.to_string()), "{error}");
    }
}
