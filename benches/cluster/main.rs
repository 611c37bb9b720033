//! What a cluster costs: a hop against one more TLS hop of plain nginx, in turn, round by round; both nodes' CPU against
//! that of a request which enters at its owner; the hand-over of 10,000 buckets by a node that stops; and the look-up of an
//! owner among 32. Machines are noisy: only the ratios taken within one round mean something.
//!
//! `cargo bench --bench cluster` needs `nginx`, `wrk` and `taskset` (Debian: `nginx-light`, `wrk`, `util-linux`), uses
//! loopback only and takes about seven minutes. `cargo bench --bench cluster -- --quick` takes one round of each.
//!
//! All proxies and nodes share one core, upstream and load have the other.

mod lookup;
#[allow(dead_code, reason = "another bench uses the rest")]
#[path = "../load/measure.rs"]
mod measure;
mod nodes;
#[path = "../load/paced.rs"]
mod paced;
#[allow(dead_code, reason = "another bench uses the rest")]
#[path = "../load/servers.rs"]
mod servers;

use measure::{median, spread};
use nodes::{Hop, Nodes};
use servers::{Nginx, Upstream, Way};

/// Seconds of one run.
const SECONDS: u32 = 4;
const ROUNDS: usize = 5;

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let (rounds, latency_rounds) = if quick { (1, 1) } else { (ROUNDS, paced::ROUNDS) };
    lookup::run();
    let upstream = Upstream::start(Way::Plain);
    latency(&upstream, latency_rounds);
    cpu(&upstream, rounds);
    hand_over(&upstream, rounds);
}

fn latency(upstream: &Upstream, rounds: usize) {
    let (mut nginx, mut nirn, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (plain, hop) = (Nginx::start(upstream), Hop::start(upstream.address()));
        let nodes = Nodes::start(upstream.address());
        let (owner, other) = nodes.owner_and_other();
        let half = |address| paced::run(address).0;
        let turns = || {
            let added = [plain.address(), hop.address(), owner, other].map(half);
            (added[1] - added[0], added[3] - added[2])
        };
        let (theirs, ours): (Vec<f64>, Vec<f64>) = (0..paced::TURNS).map(|_| turns()).unzip();
        nginx.push(median(&theirs));
        nirn.push(median(&ours));
        ratios.push(median(&ours) / median(&theirs));
    }
    println!("\n| a hop at 1,000 requests/s | adds to the median | against nginx (median, spread) |\n|---|---|---|");
    println!("| nginx, TLS | {:.3} ms | 1 |", median(&nginx));
    println!("| nirn-proxy | {:.3} ms | {:.2} ({}) |", median(&nirn), median(&ratios), spread(&ratios));
}

fn cpu(upstream: &Upstream, rounds: usize) {
    let (mut without, mut with, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let nodes = Nodes::start(upstream.address());
        let (owner, other) = nodes.owner_and_other();
        let processes = nodes.processes();
        for (address, into) in [(owner, &mut without), (other, &mut with)] {
            let sample = measure::wrk(address, 64, SECONDS, &processes);
            assert_eq!(sample.errors, 0, "answers that were not 2xx, or sockets that broke");
            into.push(sample.cpu_us);
        }
        ratios.push(with[with.len() - 1] / without[without.len() - 1]);
    }
    println!("\n| 64 connections | CPU/request, both nodes | ratio (median, spread) |\n|---|---|---|");
    println!("| at its owner | {:.1} us | 1 |", median(&without));
    println!("| with a hop | {:.1} us | {:.2} ({}) |", median(&with), median(&ratios), spread(&ratios));
}

fn hand_over(upstream: &Upstream, rounds: usize) {
    let mut took = Vec::new();
    for _ in 0..rounds {
        let nodes = Nodes::start(upstream.address());
        took.push(nodes.hand_over(10_000));
    }
    println!("\n| hand-over of 10,000 buckets | {:.0} ms ({}) |\n|---|---|", median(&took), spread(&took));
}
