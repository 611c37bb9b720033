//! How much memory the process holds, row by row, each on a fresh process with its usual settings: what the kernel counts
//! as resident, pages of the program itself included.
//!
//! `cargo bench --bench memory` uses loopback only, needs no tool and takes about two minutes. Fails when a row misses
//! its target. `cargo bench --bench memory -- PATH` measures another binary, such as the image's.

mod world;

use std::time::{Duration, Instant};

use tokio::time::sleep;
use world::{Proxy, Upstream};

/// Channels, and connections where there are many.
const MANY: usize = 1000;
/// Connections where there are few.
const FEW: usize = 64;
/// What `MAX_BUCKET_STATES` allows.
const BUCKETS: usize = 65_536;
const WAITERS: usize = 10_000;
/// A bucket's line takes no more (`MAX_QUEUE_DEPTH`).
const LINE: usize = 1000;
/// What is free is back at the system by then.
const SETTLED: Duration = Duration::from_secs(3);
/// Connections to upstream that a burst opened are closed by then, and their memory too.
const CALM: Duration = Duration::from_secs(8);

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    // Anything but `cargo bench` only wants to know that it runs.
    let part = if std::env::args().any(|argument| argument == "--bench") { 1 } else { 100 };
    let upstream = Upstream::start().await;
    let mut table = Table { enforced: part == 1, missed: Vec::new() };
    println!("| resident memory | MiB | target |\n|---|---|---|");
    many_connections(&upstream, &mut table, part).await;
    few_connections(&upstream, &mut table, part).await;
    waiters(&upstream, &mut table, part, false).await;
    waiters(&upstream, &mut table, part, true).await;
    assert!(table.missed.is_empty(), "over the target: {:?}", table.missed);
}

/// Prints as it goes.
struct Table {
    enforced: bool,
    missed: Vec<String>,
}

impl Table {
    fn row(&mut self, what: &str, mib: f64, target: Option<f64>) {
        let text = target.map_or_else(String::new, |target| format!("{target}"));
        println!("| {what} | {mib:.1} | {text} |");
        if self.enforced && target.is_some_and(|target| mib > target) {
            self.missed.push(format!("{what}: {mib:.1}"));
        }
    }
}

async fn many_connections(upstream: &Upstream, table: &mut Table, part: usize) {
    let proxy = Proxy::start(upstream.address()).await;
    sleep(SETTLED).await;
    table.row("after the start", proxy.resident(), Some(8.0));
    let mut clients = proxy.connect(MANY / part).await;
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        world::all_at_once(&mut clients, 20, |client, _| client % MANY).await;
    }
    let open = format!("{MANY} connections that have asked for {MANY} channels, open");
    table.row(&open, proxy.resident(), None);
    sleep(CALM).await;
    table.row("the same, 8 s later", proxy.resident(), None);
    drop(clients);
    sleep(CALM).await;
    table.row("the same, 8 s after they were closed", proxy.resident(), Some(24.0));
}

async fn few_connections(upstream: &Upstream, table: &mut Table, part: usize) {
    let proxy = Proxy::start(upstream.address()).await;
    let mut clients = proxy.connect(FEW).await;
    let rounds = 100_000 / FEW / part;
    world::all_at_once(&mut clients, rounds, |client, round| (round * FEW + client) % MANY).await;
    table.row("100,000 requests over 1,000 channels, 64 connections", proxy.resident(), Some(16.0));
    sleep(SETTLED).await;
    let before = proxy.resident();
    let rounds = BUCKETS / FEW / part;
    world::all_at_once(&mut clients, rounds, |client, round| round * FEW + client).await;
    sleep(SETTLED).await;
    table.row("65,536 idle buckets, more", proxy.resident() - before, Some(16.0));
}

/// One asks for each channel and closes its bucket; the others wait, each on a connection or a stream of its own.
async fn waiters(upstream: &Upstream, table: &mut Table, part: usize, http2: bool) {
    let proxy = Proxy::start(upstream.address()).await;
    let mut first = proxy.connect(1).await;
    let lines = WAITERS / LINE;
    world::all_at_once(&mut first, lines, |_, round| world::CLOSING + round).await;
    sleep(SETTLED).await;
    let before = proxy.resident();
    let count = WAITERS / part;
    let channel = |waiter: usize| world::CLOSING + waiter % lines;
    let waiting = if http2 { proxy.wait_http2(count, channel).await } else { proxy.wait(count, channel).await };
    let until = Instant::now() + Duration::from_secs(20);
    while proxy.open().await < count {
        assert!(Instant::now() < until, "not everybody waits");
        sleep(Duration::from_millis(100)).await;
    }
    let by = if http2 { "over HTTP/2" } else { "each on its connection" };
    table.row(&format!("10,000 waiting requests {by}, more"), proxy.resident() - before, Some(40.0));
    drop(waiting);
}
