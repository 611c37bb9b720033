//! Calls that Discord never answers, a thousand times over.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fake_discord::{Action, FakeDiscord, Reply, Script};
use tokio::time::timeout;

use crate::support::calls::*;
use crate::support::client::Client;
use crate::support::process::Process;
use crate::support::{Node, PATIENCE, eventually};

const WORKERS: usize = 20;
const ROUNDS: usize = 50;
/// A bot without a global limit to speak of.
const BOT: &str = "Bot MTAwMDAw.x";
const ATTEMPT: Duration = Duration::from_millis(800);

/// What goes wrong with the first call of a guild, by the guild's number.
fn fault(number: usize) -> Reply {
    match number % 6 {
        0 => Reply::action(Action::Stall),
        1 => Reply::action(Action::Reset),
        2 => Reply::action(Action::Close),
        3 => Reply { body: vec![b'x'; 1000].into(), ..Reply::action(Action::CutBody(500)) },
        4 => Reply { body: vec![b'x'; 1000].into(), ..Reply::action(Action::ResetBody(500)) },
        _ => Reply { body: vec![b'x'; 1000].into(), ..Reply::action(Action::StallBody(500)) },
    }
}

fn path(number: usize) -> String {
    format!("/api/v10/guilds/2000000000000{number:05}/channels")
}

/// How a call ended: its status, and whether its body was whole.
async fn call(node: SocketAddr, path: &str) -> (u16, bool) {
    let mut client = Client::connect(node).await;
    client.send(request(BOT, "POST", path, "{}")).await;
    let head = timeout(PATIENCE, client.head()).await.expect("an answer in time").expect("a head");
    let status: u16 = head[9..12].parse().unwrap();
    let lower = head.to_lowercase();
    let length = lower.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().parse().unwrap();
    let body = timeout(PATIENCE, client.take(length)).await.expect("a body or its end in time");
    (status, body.is_some())
}

/// One guild's first two calls since its fault was set: the first to arrive comes to nothing, and the other is sent right
/// after.
async fn round(node: SocketAddr, number: usize) {
    let path = path(number);
    let start = Instant::now();
    let (one, other) = tokio::join!(call(node, &path), call(node, &path));
    let failed = match number % 6 {
        0 => (504, true),
        1 | 2 => (502, true),
        _ => (200, false),
    };
    let mut ended = [one, other];
    ended.sort_by_key(|ended| *ended == (200, true));
    assert_eq!(ended, [failed, (200, true)], "guild {number}");
    assert!(start.elapsed() < ATTEMPT + ms(2000) + SLACK, "guild {number}: {:?}", start.elapsed());
}

/// A round for each of these guilds, some at a time.
async fn rounds_at(address: SocketAddr, guilds: impl Iterator<Item = usize>) {
    let guilds: Arc<[usize]> = guilds.collect();
    let workers = (0..WORKERS).map(|worker| {
        let guilds = Arc::clone(&guilds);
        tokio::spawn(async move {
            for &guild in guilds.iter().skip(worker).step_by(WORKERS) {
                round(address, guild).await;
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await.unwrap();
    }
}

async fn rounds(node: &Node, from: usize, count: usize) {
    rounds_at(node.address(), from..from + count).await;
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

/// The first of each two calls of a guild goes wrong.
fn fail_first(fake: &FakeDiscord) {
    let mut failed = HashSet::new();
    fake.on_each("POST", "/guilds/{}/channels", move |arrival| {
        let target = arrival.target_text();
        let number: usize = target.split('/').nth(4)?[13..].parse().ok()?;
        Some(if failed.remove(&number) {
            Reply::status(200)
        } else {
            failed.insert(number);
            fault(number)
        })
    });
}

async fn setup_rounds() -> (FakeDiscord, Node) {
    let script = Script { global_limit: None, ..Script::default() };
    let (fake, node) = setup(script, |config| {
        config.scheduling.request_timeout = ATTEMPT;
        config.upstream.request_timeout = ATTEMPT;
        config.scheduling.overrides.by_bot_id.insert(100_000, 1_000_000);
    })
    .await;
    fail_first(&fake);
    warm_up(&fake, &node, BOT).await;
    (fake, node)
}

#[tokio::test]
async fn c82_calls_without_an_answer_give_their_place_back_a_thousand_times() {
    let (fake, node) = setup_rounds().await;
    rounds(&node, 0, 2 * WORKERS).await;
    let files = open_files();
    rounds(&node, 2 * WORKERS, WORKERS * ROUNDS).await;
    assert_eq!(fake.counts().arrivals as usize, 1 + 2 * (2 * WORKERS + WORKERS * ROUNDS), "one attempt each");
    // Pooled connections that wait for more are all there is: never more than were of use at once.
    fake.wait_until(PATIENCE, |fake| fake.counts().open_connections <= 2 * WORKERS as u64).await;
    eventually("no growth of open files", || open_files() <= files + 2 * WORKERS).await;
    assert_eq!(node.failures("client_closed"), 0.0);
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// How much the process may grow in a thousand rounds: a leak of two KiB a round would be seen.
const GROWTH_KIB: u64 = 2048;

#[tokio::test]
async fn c82_a_thousand_calls_without_an_answer_leave_the_process_as_large_as_it_was() {
    let fake = FakeDiscord::start(Script { global_limit: None, ..Script::default() }).await;
    fail_first(&fake);
    let timeout = ATTEMPT.as_millis().to_string();
    let settings = [("REQUEST_TIMEOUT", &*timeout), ("BOT_RATELIMIT_OVERRIDES", "100000:1000000")];
    let process = Process::start_with(fake.addr, &settings).await;
    let guild = |round: usize| round % (2 * WORKERS);
    rounds_at(process.address, (0..10 * WORKERS).map(guild)).await;
    let (memory, files) = (process.resident(), process.open_files());
    rounds_at(process.address, (0..WORKERS * ROUNDS).map(guild)).await;
    let grown = process.resident().saturating_sub(memory);
    assert!(grown <= GROWTH_KIB, "{memory} KiB before, {grown} KiB more after");
    eventually("no growth of open files", || process.open_files() <= files + WORKERS).await;
}
