//! What a request costs, side by side: straight at a fast upstream, through plain nginx, and through nirn-proxy, in turn,
//! round by round, on this machine. Machines are noisy: only the ratios taken within one round mean something.
//!
//! `cargo bench --bench load` needs `nginx`, `wrk` and `taskset` (Debian: `nginx-light`, `wrk`, `util-linux`), uses
//! loopback only and takes about seven minutes. `cargo bench --bench load -- --quick` takes one round of each.
//!
//! Each proxy is pinned to one core, upstream and load to the other. Upstream answers 741 bytes with rate-limit headers;
//! one token asks for 1,000 channels; the global limit is lifted by an override, everything else is at its default. A round
//! in which something else used more than a twentieth of the proxies' core is left out, and counted.
//!
//! # Where the time goes
//!
//! Of a request's CPU at 64 connections the kernel has 57%: two reads and two writes, as nginx makes them. The rest is
//! 57,000 instructions (`valgrind --tool=callgrind` over the whole daemon, divided by its requests):
//!
//! | part | instructions |
//! |---|---|
//! | hyper: two parsers, two encoders, two connection machines, and the channel between them | 13,400 |
//! | `http` and `bytes`: header maps and names, twice each | 8,900 |
//! | tokio: four wake-ups, one timer, readiness | 7,200 |
//! | copies of requests and answers from one future or channel into the next | 4,200 |
//! | the allocator | 3,000 |
//! | SHA-256 of the token (without SHA instructions; a tenth of it with them) | 2,400 |
//! | ours, with the hashes of route and bucket: route 3,500, identity 1,300, metrics 900, signal 1,800, gate 2,200, the rest head rules, guards and the walk | 12,900 |
//! | the system's clock, memory and string functions, and what has no name | 4,700 |
//!
//! nginx does all of its work in about 40% of that user time, and as much kernel time. At 1.2 times nginx no more than that
//! would be left to user space: less than the first three rows, which are the price of hyper's two connections with a task
//! each. It takes one task and one parser for both sides to get there, not a leaner scheduler.

mod measure;
mod paced;
mod servers;
mod throughput;

use measure::median;
use servers::{Nginx, Proxy, Upstream, Way};

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let (rounds, latency_rounds) = if quick { (1, 1) } else { (5, paced::ROUNDS) };
    throughput::run(rounds);
    let upstream = Upstream::start(Way::Plain);
    latency(&upstream, latency_rounds);
}

fn latency(upstream: &Upstream, rounds: usize) {
    println!("\n| at 1,000 requests/s | median | p99 | median over nginx | p99 over nginx |\n|---|---|---|---|---|");
    let (mut nginx, mut nirn) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (plain, proxy) = (Nginx::start(upstream), Proxy::start(upstream));
        for _ in 0..paced::TURNS {
            nginx.push(paced::run(plain.address()));
            nirn.push(paced::run(proxy.address()));
        }
    }
    let pick = |runs: &[(f64, f64)], tail: bool| -> Vec<f64> {
        runs.iter().map(|(half, p99)| if tail { *p99 } else { *half }).collect()
    };
    let over = |tail: bool| -> f64 {
        let pairs = pick(&nirn, tail).into_iter().zip(pick(&nginx, tail));
        median(&pairs.map(|(ours, theirs)| ours - theirs).collect::<Vec<_>>())
    };
    println!("| nginx | {:.3} ms | {:.3} ms | | |", median(&pick(&nginx, false)), median(&pick(&nginx, true)));
    println!(
        "| nirn-proxy | {:.3} ms | {:.3} ms | {:.3} ms | {:.3} ms |",
        median(&pick(&nirn, false)),
        median(&pick(&nirn, true)),
        over(false),
        over(true)
    );
}
