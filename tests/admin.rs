//! The operators' listeners, over real sockets.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use nirn_proxy::identity::Kind;
use nirn_proxy::observe::{admin, metrics::Metrics};
use pprof::protos::{Message, Profile};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Read by jemalloc when the process starts: what the heap profile needs.
#[expect(unsafe_code, reason = "the allocator finds its settings by the symbol's name")]
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static MALLOC_CONF: &[u8] = b"prof:true,prof_active:false,lg_prof_sample:12\0";

/// A listener of the kind under test, stopped and awaited by `stop`.
struct Server {
    address: std::net::SocketAddr,
    shutdown: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Server {
    async fn metrics(metrics: Metrics) -> Self {
        Self::start(|listener, shutdown| tokio::spawn(admin::serve_metrics(listener, metrics, shutdown))).await
    }

    async fn pprof() -> Self {
        Self::start(|listener, shutdown| tokio::spawn(admin::serve_pprof(listener, shutdown))).await
    }

    async fn start<F>(serve: F) -> Self
    where
        F: FnOnce(TcpListener, Box<dyn Future<Output = ()> + Send + Unpin>) -> JoinHandle<()>,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, signal) = oneshot::channel();
        let signal = Box::new(Box::pin(async move { drop(signal.await) }));
        Self { address, shutdown, task: serve(listener, signal) }
    }

    async fn ask(&self, method: &str, target: &str) -> Answer {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(format!("{method} {target} HTTP/1.1\r\nhost: proxy\r\n\r\n").as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        let read = stream.read_to_end(&mut bytes);
        tokio::time::timeout(Duration::from_secs(30), read).await.expect("an answer in time").unwrap();
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a whole head") + 4;
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
        Answer { status: head[9..12].parse().unwrap(), head, body: bytes[end..].to_vec() }
    }

    async fn stop(self) {
        self.shutdown.send(()).unwrap();
        tokio::time::timeout(Duration::from_secs(5), self.task).await.expect("it stops at once").unwrap();
    }
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

#[tokio::test]
async fn a_scrape_gets_the_text_format() {
    let metrics = Metrics::new();
    metrics.failed(nirn_proxy::error::Reason::QueueFull);
    let server = Server::metrics(metrics).await;
    let answer = server.ask("GET", "/metrics").await;
    assert_eq!(answer.status, 200);
    assert!(answer.head.contains("\r\ncontent-type: text/plain; version=0.0.4"), "{}", answer.head);
    assert!(answer.text().contains("\nnirn_proxy_failures_total{reason=\"queue_full\"} 1\n"));
    assert!(answer.text().contains("\nprocess_cpu_seconds_total "));
    let head = server.ask("HEAD", "/metrics").await;
    assert_eq!((head.status, head.body.len()), (200, 0));
    server.stop().await;
}

#[tokio::test]
async fn only_the_documented_pages_exist() {
    let (metrics, pprof) = (Server::metrics(Metrics::new()).await, Server::pprof().await);
    for target in ["/", "/metrics/", "/metric", "/debug/pprof/", "/nirn/healthz", "/Metrics", "//metrics"] {
        assert_eq!(metrics.ask("GET", target).await.status, 404, "{target}");
    }
    for target in ["/", "/metrics", "/debug/pprof", "/debug/pprof/cmdline", "/debug/pprof/goroutine", "/debug/vars"] {
        assert_eq!(pprof.ask("GET", target).await.status, 404, "{target}");
    }
    for (server, target) in [(&metrics, "/metrics"), (&pprof, "/debug/pprof/heap"), (&pprof, "/debug/pprof/")] {
        let answer = server.ask("POST", target).await;
        assert_eq!(answer.status, 405, "{target}");
        assert!(answer.head.contains("\r\nallow: get, head\r\n"), "{}", answer.head);
    }
    let index = pprof.ask("GET", "/debug/pprof/").await;
    assert!(index.status == 200 && index.text().contains("profile?seconds=30") && index.text().contains("heap"));
    metrics.stop().await;
    pprof.stop().await;
}

#[tokio::test]
async fn a_slow_or_silent_client_is_closed() {
    let server = Server::metrics(Metrics::new()).await;
    let mut silent = TcpStream::connect(server.address).await.unwrap();
    let mut slow = TcpStream::connect(server.address).await.unwrap();
    let start = Instant::now();
    let drip = async {
        while slow.write_all(b"G").await.is_ok() && start.elapsed() < Duration::from_secs(30) {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    let mut answer = Vec::new();
    let (closed, ()) =
        tokio::join!(tokio::time::timeout(Duration::from_secs(20), silent.read_to_end(&mut answer)), drip);
    assert!(closed.is_ok(), "the silent connection was kept");
    assert!(start.elapsed() < Duration::from_secs(25), "the slow connection was kept");
    assert_eq!(server.ask("GET", "/metrics").await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn profiles_are_readable_and_one_at_a_time() {
    let server = Server::pprof().await;
    for query in ["seconds=0", "seconds=301", "seconds=x", "format=png"] {
        assert_eq!(server.ask("GET", &format!("/debug/pprof/profile?{query}")).await.status, 400, "{query}");
    }

    let busy = std::thread::spawn(|| {
        let (start, mut sum) = (Instant::now(), 0_u64);
        while start.elapsed() < Duration::from_secs(4) {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
        }
    });
    let (first, second) = tokio::join!(server.ask("GET", "/debug/pprof/profile?seconds=1"), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        server.ask("GET", "/debug/pprof/profile?seconds=1").await
    });
    assert_eq!((first.status, second.status), (200, 409));
    let profile = Profile::decode(&first.body[..]).expect("a protobuf profile");
    assert!(!profile.sample.is_empty() && !profile.function.is_empty());

    let graph = server.ask("GET", "/debug/pprof/profile?seconds=1&format=flamegraph").await;
    assert!(graph.status == 200 && graph.head.contains("image/svg+xml") && graph.text().contains("<rect"));
    busy.join().unwrap();

    let kept: Vec<Vec<u8>> = (0..1000).map(|_| vec![1; 4096]).collect();
    let heap = server.ask("GET", "/debug/pprof/heap").await;
    assert_eq!((heap.status, &heap.body[..2]), (200, &[0x1f, 0x8b][..]), "a gzipped profile");
    assert!(heap.body.len() > 200);
    drop(kept);
    server.stop().await;
}

#[tokio::test]
async fn what_is_counted_is_what_is_scraped() {
    let metrics = Metrics::new();
    let route = nirn_proxy::route::Route::classify(&Method::GET, "/api/v10/users/@me", 0);
    let series = metrics.route(&Method::GET, &route);
    let open = series.open();
    series.observe(StatusCode::OK, false, Kind::Bot, 0.2);
    let server = Server::metrics(metrics).await;
    let scrape = server.ask("GET", "/metrics").await;
    let labels = format!("clientId=\"Bot\",method=\"GET\",route=\"{}\",status=\"200 OK\"", route.label());
    assert!(scrape.text().contains(&format!("\nnirn_proxy_requests_bucket{{{labels},le=\"0.1\"}} 0\n")));
    assert!(scrape.text().contains(&format!("nirn_proxy_requests_bucket{{{labels},le=\"0.25\"}} 1\n")));
    assert!(scrape.text().contains(&format!("nirn_proxy_requests_sum{{{labels}}} 0.2\n")));
    drop(open);
    let scrape = server.ask("GET", "/metrics").await;
    let gauge = format!("\nnirn_proxy_open_connections{{method=\"GET\",route=\"{}\"}} 0\n", route.label());
    assert!(scrape.text().contains(&gauge), "{}", scrape.text());
    server.stop().await;
}
