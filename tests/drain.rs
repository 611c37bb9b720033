//! The real binary and its signals.

mod support;

use std::time::{Duration, Instant};

use support::PATIENCE;
use support::client::Client;
use support::process::Process;
use support::upstream::{Arrival, Upstream};
use tokio::process::Command;
use tokio::time::sleep;

const GET: &str = "GET /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\n\r\n";

/// A process with a request on its way, whose answer the upstream still has to give.
async fn underway() -> (Process, Client, Arrival) {
    let mut upstream = Upstream::start().await;
    let process = Process::start(upstream.address).await;
    let mut client = Client::connect(process.address).await;
    client.send(GET).await;
    let arrival = upstream.next().await;
    (process, client, arrival)
}

#[tokio::test]
async fn sigterm_and_sigint_let_an_admitted_request_finish() {
    for signal in ["TERM", "INT"] {
        let (process, mut client, arrival) = underway().await;
        process.signal(signal).await;
        draining(&process).await;
        arrival.ok("finished").await;
        assert_eq!(client.answer().await.text(), "finished");
        assert_eq!(process.ended().await, Some(0), "after {signal}");
    }
}

#[tokio::test]
async fn a_connection_made_right_before_the_drain_has_its_first_request_answered() {
    let (process, mut client, arrival) = underway().await;
    let mut silent = Client::connect(process.address).await;
    // Connections are accepted in the order they were made in.
    assert_eq!(Client::connect(process.address).await.get("/nirn/healthz").await.status, 200);
    process.signal("TERM").await;
    draining(&process).await;
    assert_eq!(silent.get("/nirn/healthz").await.status, 503);
    arrival.ok("finished").await;
    assert_eq!(client.answer().await.text(), "finished");
    assert_eq!(process.ended().await, Some(0));
}

/// Waits until health says that the process drains.
async fn draining(process: &Process) {
    let start = Instant::now();
    while Client::connect(process.address).await.get("/nirn/healthz").await.status != 503 {
        assert!(start.elapsed() < PATIENCE, "health answers 503 while draining");
    }
}

#[tokio::test]
async fn a_second_signal_a_second_later_stops_at_once() {
    let (process, _client, _unanswered) = underway().await;
    process.signal("TERM").await;
    sleep(Duration::from_millis(1_500)).await;
    let start = Instant::now();
    process.signal("TERM").await;
    assert_eq!(process.ended().await, Some(0));
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[tokio::test]
async fn an_idle_process_stops_at_once_with_exit_code_0() {
    let process = Process::start(Upstream::echo().await).await;
    let mut client = Client::connect(process.address).await;
    assert_eq!(client.get("/nirn/healthz").await.status, 200);
    let start = Instant::now();
    process.signal("TERM").await;
    assert_eq!(process.ended().await, Some(0));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_node_out_of_file_descriptors_recovers() {
    let process = Process::start(Upstream::echo().await).await;
    let pid = process.id().to_string();
    let limited = Command::new("prlimit").args(["--nofile=40:40", "--pid", &pid]).status().await;
    // Without util-linux there is no way to take a running process's descriptors away.
    if !limited.is_ok_and(|status| status.success()) {
        return;
    }
    let mut held = Vec::new();
    for _ in 0..60 {
        held.push(Client::connect(process.address).await);
    }
    sleep(Duration::from_millis(300)).await;
    drop(held);
    let mut client = Client::connect(process.address).await;
    assert_eq!(client.get("/nirn/healthz").await.status, 200);
    process.signal("TERM").await;
    assert_eq!(process.ended().await, Some(0));
}
