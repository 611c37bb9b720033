//! Latency at a steady 1,000 requests a second: each request at its planned time, whatever became of the others.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::servers::{LOAD_CORE, TOKEN};

/// What is compared runs side by side and is asked in turn, so often in a round: short runs, since what else the machine
/// does changes in seconds. And many rounds, since where a process got its memory matters for as long as it runs.
pub(crate) const TURNS: usize = 4;
pub(crate) const ROUNDS: usize = 13;
const REQUESTS: u32 = 1000;
const WARM_UP: u32 = 100;

/// The median and the 99th percentile in milliseconds.
pub(crate) fn run(address: SocketAddr) -> (f64, f64) {
    stay_off_the_proxies_core();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.unwrap_or_else(|error| panic!("no runtime: {error}"));
    let mut times = runtime.block_on(measure(address));
    times.sort_by(f64::total_cmp);
    let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize] * 1000.0;
    (at(0.5), at(0.99))
}

/// Where the scheduler puts the load would otherwise decide what is measured, anew in each run.
fn stay_off_the_proxies_core() {
    let this = std::process::id().to_string();
    let pinned = Command::new("taskset").args(["-cp", LOAD_CORE, &this]).stdout(Stdio::null()).status();
    assert!(pinned.is_ok_and(|status| status.success()), "taskset could not pin the load");
}

async fn measure(address: SocketAddr) -> Vec<f64> {
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let start = Instant::now();
    let mut running = JoinSet::new();
    for index in 0..REQUESTS {
        sleep_until(start + Duration::from_millis(u64::from(index))).await;
        let client = client.clone();
        running.spawn(async move {
            let channel = 100_000_000_000_000_000u64 + u64::from(index % 1000);
            let request = Request::get(format!("http://{address}/api/v10/channels/{channel}/messages?limit=1"))
                .header("authorization", format!("Bot {TOKEN}"))
                .body(Empty::new());
            let request = request.unwrap_or_else(|error| panic!("{error}"));
            let sent = Instant::now();
            let response = client.request(request).await.unwrap_or_else(|error| panic!("{error}"));
            assert!(response.status().is_success(), "{}", response.status());
            response.into_body().collect().await.unwrap_or_else(|error| panic!("{error}"));
            (index, sent.elapsed().as_secs_f64())
        });
    }
    running.join_all().await.into_iter().filter(|(index, _)| *index >= WARM_UP).map(|(_, took)| took).collect()
}
