//! Calls through a node to a fake Discord, and what tests say of them.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fake_discord::{Arrival, FakeDiscord, Reply, Script};
use nirn_proxy::config::Config;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::client::{Answer, Client};
use super::{Node, PATIENCE, config};

/// What a busy machine may add to a wait.
pub const SLACK: Duration = Duration::from_secs(1);

/// Less than any wait here, more than a call that does not wait.
pub const AT_ONCE: Duration = Duration::from_millis(700);

pub fn ms(length: u64) -> Duration {
    Duration::from_millis(length)
}

/// A proxy before a fake with these limits.
pub async fn setup(script: Script, change: impl FnOnce(&mut Config)) -> (FakeDiscord, Node) {
    let fake = FakeDiscord::start(script).await;
    let mut settings = config(fake.addr);
    change(&mut settings);
    let node = Node::start_with(settings, |_| {});
    (fake, node)
}

/// A request's bytes; `token` is an `Authorization` value, or empty for none.
pub fn request(token: &str, method: &str, path: &str, body: &str) -> String {
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: proxy\r\n");
    if !token.is_empty() {
        write!(head, "Authorization: {token}\r\n").unwrap();
    }
    if !matches!(method, "GET" | "DELETE") {
        write!(head, "Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()).unwrap();
    }
    head + "\r\n" + body
}

/// One call over a connection of its own.
pub async fn ask(node: SocketAddr, token: &str, method: &str, path: &str) -> Answer {
    let mut client = Client::connect(node).await;
    client.send(request(token, method, path, "")).await;
    client.answer_to(method).await
}

/// Calls (token, method, path), a pause between their starts, and their answers in order.
pub async fn ask_all(node: SocketAddr, pause: Duration, calls: Vec<(String, &'static str, String)>) -> Vec<Answer> {
    let mut tasks = JoinSet::new();
    for (index, (token, method, path)) in calls.into_iter().enumerate() {
        tasks.spawn(async move { (index, ask(node, &token, method, &path).await) });
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
    }
    let mut answers = timeout(PATIENCE * 2, tasks.join_all()).await.expect("every answer in time");
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// A path in one of many channels.
pub fn channel(number: usize) -> String {
    format!("/api/v10/channels/1000000000000{number:05}/messages")
}

pub fn statuses(answers: &[Answer]) -> Vec<u16> {
    answers.iter().map(|answer| answer.status).collect()
}

/// How many answers have a status.
pub fn with_status(answers: &[Answer], status: u16) -> usize {
    answers.iter().filter(|answer| answer.status == status).count()
}

/// From the judgement of one request to the arrival of another.
pub fn wait_between(first: &Arrival, second: &Arrival) -> Duration {
    second.at.saturating_duration_since(first.judged_at.unwrap())
}

#[track_caller]
pub fn assert_within(length: Duration, from: Duration, to: Duration) {
    assert!(length >= from, "waited {length:?}, less than {from:?}");
    assert!(length <= to + SLACK, "waited {length:?}, longer than {to:?} and the slack");
}

/// An answer that the proxy gave by itself.
pub fn is_local(answer: &Answer) -> bool {
    answer.header("generated-by-proxy").is_some()
}

/// A call of `token` that Discord answers, so that it is known to be good.
pub async fn warm_up(fake: &FakeDiscord, node: &Node, token: &str) {
    fake.on("GET", "/voice/regions", vec![Reply::json(200, &serde_json::json!([]))]);
    assert_eq!(ask(node.address(), token, "GET", "/api/v10/voice/regions").await.status, 200);
}

/// The 503 that the contract describes, for this reason.
#[track_caller]
pub fn assert_unavailable(answer: &Answer, node: &Node, reason: &str) {
    assert_eq!(answer.status, 503, "{}", answer.text());
    for (name, value) in [("x-nirn-proxy-error", "true"), ("generated-by-proxy", "true"), ("retry-after", "1")] {
        assert_eq!(answer.header(name), Some(value), "{name}");
    }
    assert!(node.failures(reason) > 0.0, "not counted as {reason}: {}", answer.text());
}

/// Measures, in microseconds, the longest time for which this thread, or the machine, did not get to what was due.
pub async fn pulse(longest: Arc<AtomicU64>) {
    loop {
        let due = tokio::time::Instant::now() + ms(2);
        tokio::time::sleep_until(due).await;
        let late = u64::try_from(due.elapsed().as_micros()).unwrap_or(u64::MAX);
        longest.fetch_max(late, Ordering::Relaxed);
    }
}
