//! One run of wrk, and what it cost the processes in between.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use crate::servers::{LOAD_CORE, PROXY_CORE, TOKEN};

/// Clock ticks a second in `/proc` (Linux: always 100 for user space).
const TICKS: f64 = 100.0;

/// What one run showed.
pub(crate) struct Sample {
    pub(crate) per_second: f64,
    /// Microseconds of CPU a request, of the given processes.
    pub(crate) cpu_us: f64,
    pub(crate) errors: u64,
    /// The part of the proxies' core that others used meanwhile.
    pub(crate) foreign: f64,
}

/// Runs wrk for some seconds after a short warm-up.
pub(crate) fn wrk(address: SocketAddr, connections: u32, seconds: u32, processes: &[u32]) -> Sample {
    run(address, connections, 1);
    let (before, busy) = (ticks(processes), core_ticks());
    let (requests, errors, took) = run(address, connections, seconds);
    let cpu = (ticks(processes) - before) / TICKS;
    let foreign = (core_ticks() - busy) / TICKS - cpu;
    Sample { per_second: requests / took, cpu_us: cpu * 1e6 / requests, errors, foreign: foreign / took }
}

fn run(address: SocketAddr, connections: u32, seconds: u32) -> (f64, u64, f64) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/load/channels.lua");
    let output = Command::new("taskset")
        .args(["-c", LOAD_CORE, "wrk", "-t1", &format!("-c{connections}"), &format!("-d{seconds}s"), "-s", script])
        .arg(format!("http://{address}/"))
        .env("TOKEN", TOKEN)
        .output();
    let output = output.unwrap_or_else(|error| panic!("wrk (Debian: wrk): {error}"));
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("result ")).unwrap_or_else(|| panic!("wrk said: {text}"));
    let numbers: Vec<f64> = line.split(' ').filter_map(|text| text.parse().ok()).collect();
    (numbers[0], numbers[1] as u64, numbers[2] / 1e6)
}

fn ticks(processes: &[u32]) -> f64 {
    let of = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let field = |index: usize| fields.get(index).and_then(|text| text.parse::<f64>().ok()).unwrap_or_default();
        // utime and stime: fields 14 and 15 of proc(5), the third being the first after the name.
        field(11) + field(12)
    };
    processes.iter().map(of).sum()
}

/// What the proxies' core was busy with, whoever used it (proc(5): all but idle and iowait, and guests, which are in user).
fn core_ticks() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let name = format!("cpu{PROXY_CORE} ");
    let line = stat.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or_default();
    let fields: Vec<f64> = line.split_whitespace().filter_map(|text| text.parse().ok()).collect();
    fields.iter().take(8).sum::<f64>() - fields.iter().skip(3).take(2).sum::<f64>()
}

/// The middle value.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The lowest and the highest value.
pub(crate) fn spread(values: &[f64]) -> String {
    let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(low, high), it| (low.min(*it), high.max(*it)));
    format!("{low:.2} to {high:.2}")
}
