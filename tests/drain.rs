//! The real binary and its signals.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod support;

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use support::client::Client;
use support::upstream::Upstream;
use support::{PATIENCE, eventually};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

/// A process of its own, killed when the test ends.
struct Process {
    child: Child,
    address: SocketAddr,
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Process {
    async fn start(upstream: SocketAddr) -> Self {
        let port = free_port();
        let mut child = Command::new(env!("CARGO_BIN_EXE_nirn-proxy"))
            .env_clear()
            .env("BIND_IP", "127.0.0.1")
            .env("PORT", port.to_string())
            .env("ENABLE_METRICS", "false")
            .env("DISCORD_API_URL", format!("http://{upstream}"))
            .current_dir(std::env::temp_dir())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        // Both are drained, so that the process never waits for a reader.
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        tokio::spawn(async move {
            let mut lines = BufReader::new(out).lines();
            while let Ok(Some(_)) = lines.next_line().await {}
        });
        tokio::spawn(async move {
            let mut lines = BufReader::new(err).lines();
            while let Ok(Some(_)) = lines.next_line().await {}
        });
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let process = Self { child, address };
        eventually("the process listens", || std::net::TcpStream::connect(address).is_ok()).await;
        process
    }

    async fn signal(&self, name: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().await.unwrap().success());
    }

    /// Waits for the end and tells the exit code.
    async fn ended(mut self) -> Option<i32> {
        timeout(PATIENCE, self.child.wait()).await.expect("an end in time").unwrap().code()
    }
}

const GET: &str = "GET /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\n\r\n";

#[tokio::test]
async fn sigterm_and_sigint_let_an_admitted_request_finish() {
    for signal in ["TERM", "INT"] {
        let mut upstream = Upstream::start().await;
        let process = Process::start(upstream.address).await;
        let mut client = Client::connect(process.address).await;
        client.send(GET).await;
        let arrival = upstream.next().await;
        process.signal(signal).await;
        let start = Instant::now();
        loop {
            let mut probe = Client::connect(process.address).await;
            if probe.get("/nirn/healthz").await.status == 503 {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "health answers 503 while draining");
        }
        arrival.ok("finished").await;
        assert_eq!(client.answer().await.text(), "finished");
        assert_eq!(process.ended().await, Some(0), "after {signal}");
    }
}

#[tokio::test]
async fn a_second_signal_a_second_later_stops_at_once() {
    let mut upstream = Upstream::start().await;
    let process = Process::start(upstream.address).await;
    let mut client = Client::connect(process.address).await;
    client.send(GET).await;
    let _unanswered = upstream.next().await;
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
    let pid = process.child.id().unwrap().to_string();
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
