//! Requests a second and CPU a request, side by side.

use crate::measure::{self, Sample, median, spread};
use crate::servers::{Nginx, Proxy, Upstream, Way};

/// Seconds of one run.
const SECONDS: u32 = 4;
/// Connections of the usual run, and of the one with many.
const USUAL: u32 = 64;
const MANY: u32 = 1024;
/// What one core has to carry at the least: small GETs of one token over 1,000 channels.
const CARRIED: f64 = 20_000.0;
/// Of the proxies' core, the part that anything else may have used for a run to count.
const NOISE: f64 = 0.05;

/// The runs of one comparison.
struct Runs {
    direct: Vec<Sample>,
    nginx: Vec<Sample>,
    nirn: Vec<Sample>,
    /// CPU a request of ours to nginx's, within each round.
    ratios: Vec<f64>,
    /// Rounds that something else disturbed.
    left_out: usize,
}

/// Compares over every way to the upstream, and prints what the README has of it.
pub(crate) fn run(rounds: usize) {
    println!(
        "| upstream over | connections | by | requests/s | CPU a request | rounds left out |\n|---|---|---|---|---|---|"
    );
    let usual = compare(Way::Plain, USUAL, rounds);
    let many = compare(Way::Plain, MANY, rounds);
    let tls = compare(Way::Tls, USUAL, rounds);
    let http2 = compare(Way::Http2, USUAL, rounds);
    println!("\n| CPU a request, against nginx in the same round | median (lowest to highest) |\n|---|---|");
    println!("| 64 connections | {} |", usual.ratio());
    println!("| 1,024 connections | {} |", many.ratio());
    println!("| upstream over TLS, HTTP/1.1 | {} |", tls.ratio());
    println!("| upstream over TLS, HTTP/2; nginx has HTTP/1.1 there | {} |", http2.ratio());
    let (per_second, with_many) = (per_second(&usual.nirn), per_second(&many.nirn));
    println!("\n| throughput of one core | |\n|---|---|");
    let enough = if per_second >= CARRIED { "at least" } else { "NOT" };
    println!("| small GETs of one token over 1,000 channels | {per_second:.0} a second, {enough} {CARRIED:.0} |");
    println!("| 1,024 connections against 64 | {:.2} times |", with_many / per_second);
}

fn compare(way: Way, connections: u32, rounds: usize) -> Runs {
    let upstream = Upstream::start(way);
    let mut runs = Runs { direct: Vec::new(), nginx: Vec::new(), nirn: Vec::new(), ratios: Vec::new(), left_out: 0 };
    for _ in 0..rounds {
        if way == Way::Plain {
            runs.direct.push(measure::wrk(upstream.address(), connections, SECONDS, &[]));
        }
        let plain = Nginx::start(&upstream);
        let theirs = measure::wrk(plain.address(), connections, SECONDS, &plain.processes());
        drop(plain);
        let proxy = Proxy::start(&upstream);
        let ours = measure::wrk(proxy.address(), connections, SECONDS, &proxy.processes());
        drop(proxy);
        if theirs.foreign > NOISE || ours.foreign > NOISE {
            runs.left_out += 1;
            continue;
        }
        runs.ratios.push(ours.cpu_us / theirs.cpu_us);
        runs.nginx.push(theirs);
        runs.nirn.push(ours);
    }
    row(way, connections, "nothing between", &runs.direct, 0);
    row(way, connections, "nginx", &runs.nginx, runs.left_out);
    row(way, connections, "nirn-proxy", &runs.nirn, runs.left_out);
    runs
}

fn row(way: Way, connections: u32, by: &str, samples: &[Sample], left_out: usize) {
    if samples.is_empty() && left_out == 0 {
        return;
    }
    let cpu: Vec<f64> = samples.iter().map(|sample| sample.cpu_us).collect();
    let errors: u64 = samples.iter().map(|sample| sample.errors).sum();
    assert_eq!(errors, 0, "{by}: answers that were not 2xx, or sockets that broke");
    let (per_second, cpu) = (per_second(samples), median(&cpu));
    println!("| {} | {connections} | {by} | {per_second:.0} | {cpu:.1} us | {left_out} |", way.name());
}

fn per_second(samples: &[Sample]) -> f64 {
    median(&samples.iter().map(|sample| sample.per_second).collect::<Vec<_>>())
}

impl Runs {
    fn ratio(&self) -> String {
        if self.ratios.is_empty() {
            return "too noisy to say".to_owned();
        }
        format!("{:.2} ({})", median(&self.ratios), spread(&self.ratios))
    }
}
