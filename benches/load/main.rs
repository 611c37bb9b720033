//! What a request costs, side by side: straight at a fast upstream, through plain nginx, and through nirn-proxy, in turn,
//! round by round, on this machine. Machines are noisy: only the ratios taken within one round mean something.
//!
//! `cargo bench --bench load` needs `nginx`, `wrk` and `taskset` (Debian: `nginx-light`, `wrk`, `util-linux`), uses
//! loopback only and takes about four minutes. `cargo bench --bench load -- --quick` takes one round of each.
//!
//! Each proxy is pinned to one core, upstream and load to the other. Upstream answers 741 bytes with rate-limit headers;
//! one token asks for 1,000 channels; the global limit is lifted by an override, everything else is at its default.

mod measure;
mod paced;
mod servers;

use measure::{Sample, median, spread};
use servers::{Nginx, Proxy, Upstream};

/// Seconds of one run.
const SECONDS: u32 = 4;

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let rounds = if quick { 1 } else { 5 };
    let upstream = Upstream::start();
    throughput(&upstream, rounds);
    latency(&upstream, rounds);
    memory(&upstream);
}

fn throughput(upstream: &Upstream, rounds: usize) {
    println!("\n| connections | by | requests/s | CPU/request | against nginx (median, spread) |");
    println!("|---|---|---|---|---|");
    for connections in [64, 1024] {
        let (mut direct, mut nginx, mut nirn, mut ratios) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            direct.push(measure::wrk(upstream.address(), connections, SECONDS, &[]));
            let plain = Nginx::start(upstream.address());
            nginx.push(measure::wrk(plain.address(), connections, SECONDS, &plain.processes()));
            drop(plain);
            let proxy = Proxy::start(upstream.address());
            nirn.push(measure::wrk(proxy.address(), connections, SECONDS, &proxy.processes()));
            drop(proxy);
            ratios.push(nirn[nirn.len() - 1].cpu_us / nginx[nginx.len() - 1].cpu_us);
        }
        row(connections, "nothing between", &direct, "-");
        row(connections, "nginx", &nginx, "1");
        row(connections, "nirn-proxy", &nirn, &format!("{:.2} ({})", median(&ratios), spread(&ratios)));
    }
}

fn row(connections: u32, by: &str, samples: &[Sample], ratio: &str) {
    let per_second: Vec<f64> = samples.iter().map(|sample| sample.per_second).collect();
    let cpu: Vec<f64> = samples.iter().map(|sample| sample.cpu_us).collect();
    let errors: u64 = samples.iter().map(|sample| sample.errors).sum();
    assert_eq!(errors, 0, "{by}: answers that were not 2xx, or sockets that broke");
    println!("| {connections} | {by} | {:.0} | {:.1} us | {ratio} |", median(&per_second), median(&cpu));
}

fn latency(upstream: &Upstream, rounds: usize) {
    println!("\n| at 1,000 requests/s | median | p99 | median over nginx | p99 over nginx |\n|---|---|---|---|---|");
    let (mut nginx, mut nirn) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let plain = Nginx::start(upstream.address());
        nginx.push(paced::run(plain.address()));
        drop(plain);
        let proxy = Proxy::start(upstream.address());
        nirn.push(paced::run(proxy.address()));
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

fn memory(upstream: &Upstream) {
    let proxy = Proxy::start(upstream.address());
    let idle = proxy.resident_mib();
    measure::wrk(proxy.address(), 1000, SECONDS, &[]);
    let used = proxy.resident_mib();
    std::thread::park_timeout(std::time::Duration::from_secs(3));
    println!("\n| resident memory | MiB |\n|---|---|");
    println!("| after the start | {idle:.1} |");
    println!("| after 1,000 channels over 1,000 connections | {used:.1} |");
    println!("| 3 s later | {:.1} |", proxy.resident_mib());
}
