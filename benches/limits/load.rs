//! Requests at planned times, straight at the fake through a library's limiter or through the proxy, and what became of
//! them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fake_discord::FakeDiscord;
use http_body_util::{BodyExt, Full};
use hyper::{Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use nirn_proxy::config::Config;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::library::Library;
use crate::scenarios::Scenario;

const TOKEN: &str = "Bot MTIzNDU2Nzg5MDEyMzQ1Njc4.bench.bench";
const ME: &str = "/api/v10/users/@me";

/// One request to make.
#[derive(Clone)]
pub(crate) struct Job {
    /// When, after the start.
    pub(crate) at: Duration,
    /// By which of the bot's processes.
    pub(crate) process: usize,
    pub(crate) method: &'static str,
    pub(crate) path: String,
    pub(crate) body: &'static str,
}

/// What became of them.
pub(crate) struct Report {
    pub(crate) requests: usize,
    /// From the start to the last answer.
    pub(crate) took: Duration,
    /// 429s that the fake counted.
    pub(crate) refused: u64,
    /// Seconds from each request's planned time to its answer, sorted.
    pub(crate) latencies: Vec<f64>,
    /// Answers that were not 2xx, and what was given up.
    pub(crate) failed: usize,
    /// Instants after the start at which the fake refused.
    pub(crate) refused_at: Vec<Duration>,
    /// When each request arrived at the fake and was let through.
    pub(crate) accepted_at: Vec<Duration>,
}

impl Report {
    /// A quantile of the latencies, in milliseconds.
    pub(crate) fn quantile(&self, q: f64) -> f64 {
        let last = self.latencies.len().saturating_sub(1);
        self.latencies.get((last as f64 * q).round() as usize).copied().unwrap_or_default() * 1000.0
    }
}

type Http = Client<HttpConnector, Full<Bytes>>;

/// Threads of their own for Discord and for the proxies, as they have processes of their own: thousands of clients in a
/// crowd must not keep them from running.
pub(crate) struct Machines {
    discord: Runtime,
    proxies: Runtime,
}

impl Machines {
    pub(crate) fn new() -> Self {
        let machine = || Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let machine = || machine().unwrap_or_else(|error| panic!("{error}"));
        Self { discord: machine(), proxies: machine() }
    }
}

/// Runs the jobs against a fresh fake, through a fresh proxy or not.
pub(crate) async fn run(machines: &Machines, scenario: &Scenario, proxied: bool) -> Report {
    let (jobs, patience) = ((scenario.jobs)(), scenario.patience());
    let fake = FakeDiscord::start((scenario.script)());
    let fake = machines.discord.spawn(fake).await.unwrap_or_else(|error| panic!("{error}"));
    let http: Http = Client::builder(TokioExecutor::new()).build_http();
    let mut base = fake.url();
    if proxied {
        let started = machines.proxies.spawn(start_proxy(fake.addr, scenario.queue)).await;
        base = started.unwrap_or_else(|error| panic!("{error}"));
        // A fresh process starts without credit for its first second, and knows no answer; a running one is what is measured.
        for _ in 0..2 {
            _ = send(&http, &base, &Job { at: Duration::ZERO, process: 0, method: "GET", path: ME.into(), body: "" })
                .await;
        }
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    let processes = jobs.iter().map(|job| job.process).max().unwrap_or(0) + 1;
    let libraries: Arc<Vec<Library>> = Arc::new((0..processes).map(|_| Library::default()).collect());
    let start = Instant::now() + Duration::from_millis(20);
    let requests = jobs.len();
    let mut running = JoinSet::new();
    for job in jobs {
        let (http, base, libraries) = (http.clone(), base.clone(), Arc::clone(&libraries));
        running.spawn(async move {
            sleep_until(start + job.at).await;
            let status =
                if proxied { send(&http, &base, &job).await.0 } else { alone(&http, &base, &job, &libraries).await };
            (start + job.at, Instant::now(), status)
        });
    }
    let mut report = Report {
        requests,
        took: Duration::ZERO,
        refused: 0,
        latencies: Vec::with_capacity(requests),
        failed: 0,
        refused_at: Vec::new(),
        accepted_at: Vec::new(),
    };
    while let Ok(Some(Ok((planned, ended, status)))) = timeout_at(start + patience, running.join_next()).await {
        report.took = report.took.max(ended - start);
        report.latencies.push((ended - planned).as_secs_f64());
        report.failed += usize::from(!status.is_success());
    }
    report.failed += requests - report.latencies.len();
    if report.latencies.len() < requests {
        report.took = patience;
    }
    report.latencies.sort_by(f64::total_cmp);
    report.refused = fake.counts().status(429);
    let origin = start.into_std();
    for arrival in fake.arrivals().into_iter().filter(|arrival| arrival.at >= origin) {
        let at = arrival.at.saturating_duration_since(origin);
        if arrival.verdict.name() == "ok" { report.accepted_at.push(at) } else { report.refused_at.push(at) }
    }
    report
}

async fn start_proxy(discord: SocketAddr, queue: Duration) -> String {
    let mut config = Config::from_vars(Vec::new()).unwrap_or_else(|problems| panic!("{problems:?}"));
    config.bind_ip = [127, 0, 0, 1].into();
    config.port = 0;
    config.metrics_port = None;
    config.upstream.https = false;
    config.upstream.authority = discord.to_string().parse().unwrap_or_else(|error| panic!("{error}"));
    config.scheduling.queue_timeout = queue;
    config.scheduling.max_queue_depth = 100_000;
    config.max_in_flight_requests = 100_000;
    let daemon = nirn_proxy::bind(config).unwrap_or_else(|error| panic!("{error}"));
    let url = format!("http://{}", daemon.addresses().proxy);
    tokio::spawn(async move {
        let forever = std::future::pending::<()>;
        daemon.run(forever(), forever()).await.unwrap_or_else(|error| panic!("{error}"));
    });
    url
}

/// As a library does it, with its process's own knowledge.
async fn alone(http: &Http, base: &str, job: &Job, libraries: &[Library]) -> StatusCode {
    let library = &libraries[job.process];
    let route = library.route(&format!("{} {}", job.method, template(&job.path)));
    let mut route = route.lock().await;
    loop {
        route.open().await;
        library.global().await;
        let (status, headers) = send(http, base, job).await;
        if !route.learn(library, status.as_u16(), &headers).await {
            return status;
        }
    }
}

/// The path up to its first two segments with their ID, and what follows them without IDs.
fn template(path: &str) -> String {
    let mut segments = path.trim_start_matches("/api/v10/").split('/');
    let major: Vec<&str> = segments.by_ref().take(2).collect();
    let rest = segments.map(|segment| if segment.len() > 16 { "!" } else { segment });
    major.into_iter().chain(rest).collect::<Vec<_>>().join("/")
}

async fn send(http: &Http, base: &str, job: &Job) -> (StatusCode, hyper::HeaderMap) {
    let mut request = Request::builder().method(job.method).uri(format!("{base}{}", job.path));
    request = request.header("authorization", TOKEN).header("user-agent", "DiscordBot (https://example.test, 1.0)");
    if !job.body.is_empty() {
        request = request.header("content-type", "application/json");
    }
    let request = request.body(Full::new(Bytes::from_static(job.body.as_bytes())));
    let request = request.unwrap_or_else(|error| panic!("{error}"));
    match http.request(request).await {
        Ok(response) => {
            let (parts, body) = response.into_parts();
            let whole = body.collect().await.is_ok();
            (if whole { parts.status } else { StatusCode::BAD_GATEWAY }, parts.headers)
        }
        Err(_) => (StatusCode::BAD_GATEWAY, hyper::HeaderMap::new()),
    }
}
