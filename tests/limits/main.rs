//! Limits, as bots and Discord see them kept: the cases of public reports, each named after its number.
//!
//! Discord is a fake that enforces what it announces; a wait is measured from its judgement of one request to the
//! arrival of the next. Lower bounds are hard. Upper bounds leave [`SLACK`] for a busy machine.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod buckets;
mod fifty;

mod global;
mod hidden;
mod numbers;
mod odd_numbers;
mod pacing;
#[path = "../support/mod.rs"]
mod support;
mod tls;
mod webhooks_and_edge;

use std::net::SocketAddr;
use std::time::Duration;

use fake_discord::{Arrival, FakeDiscord, Script};
use nirn_proxy::config::Config;
use support::calls::{
    self, AT_ONCE, SLACK, assert_within, is_local, ms, request, setup as setup_with, statuses, wait_between, warm_up,
};
use support::client::{Answer, Client};
use support::{Node, PATIENCE};

const CHANNEL_1: &str = "/api/v10/channels/100000000000000001";
const CHANNEL_2: &str = "/api/v10/channels/100000000000000002";
const GUILD: &str = "/api/v10/guilds/200000000000000001";

/// A proxy before a fake with these limits.
async fn setup(script: Script) -> (FakeDiscord, Node) {
    setup_with(script, |_| {}).await
}

/// A queue that holds nobody longer than a second or two.
fn impatient(config: &mut Config) {
    config.scheduling.queue_timeout = Duration::from_secs(3);
    config.scheduling.request_timeout = Duration::from_secs(1);
    config.upstream.request_timeout = Duration::from_secs(1);
}

/// One call over a connection of its own; `token` is an `Authorization` value, or empty for none.
async fn ask_with(node: SocketAddr, token: &str, method: &str, path: &str, body: &str) -> Answer {
    let mut client = Client::connect(node).await;
    client.send(request(token, method, path, body)).await;
    client.answer_to(method).await
}

/// One call of bot A.
async fn ask(node: &Node, method: &str, path: &str) -> Answer {
    ask_with(node.address(), "Bot A", method, path, "").await
}

/// So many calls of bot A, a pause between their starts, and their answers in order.
async fn ask_all(node: &Node, pause: Duration, calls: Vec<(&'static str, String)>) -> Vec<Answer> {
    ask_all_as("Bot A", node.address(), pause, calls).await
}

/// So many calls of one bot.
async fn ask_all_as(token: &str, node: SocketAddr, pause: Duration, calls: Vec<(&'static str, String)>) -> Vec<Answer> {
    let calls = calls.into_iter().map(|(method, path)| (token.to_owned(), method, path)).collect();
    calls::ask_all(node, pause, calls).await
}

fn guilds(n: usize) -> Vec<(&'static str, String)> {
    (0..n).map(|n| ("GET", format!("/api/v10/guilds/200000000000000{n:03}"))).collect()
}

fn retry_after(answer: &Answer) -> u64 {
    answer.header("retry-after").expect("Retry-After").parse().expect("whole seconds")
}
