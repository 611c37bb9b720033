//! The operators' listeners: `/metrics` on one port, profiles under `/debug/pprof/` on another.
//!
//! Both serve one request per connection, under a time limit for the whole of it: a scraper loses nothing by that, and a
//! slow or silent client cannot keep a connection. Neither port is meant for strangers, and neither shows what a client sent.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::metrics::Metrics;
use super::profile;

/// Connections of one listener at a time; further ones wait in the listener's backlog.
const MAX_CONNECTIONS: usize = 64;
/// From a connection's start to the end of its request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// From a connection's start to the end of the answer, beside the seconds a profile takes.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// After a failed accept, such as one without a free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const TEXT: &str = "text/plain; charset=utf-8";
const INDEX: &str = r#"<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>nirn-proxy profiles</title></head><body>
<h1>Profiles</h1>
<ul>
<li><a href="profile?seconds=30">profile?seconds=30</a>: CPU, for <code>go tool pprof</code></li>
<li><a href="profile?seconds=30&amp;format=flamegraph">profile?seconds=30&amp;format=flamegraph</a>: CPU, as a flame graph</li>
<li><a href="heap">heap</a>: live memory, for <code>go tool pprof</code></li>
</ul>
</body></html>
"#;

/// Serves `/metrics` until `shutdown` completes.
pub async fn serve_metrics(listener: TcpListener, metrics: Metrics, shutdown: impl Future<Output = ()>) {
    serve(listener, Pages::Metrics(metrics), CONNECTION_TIMEOUT, shutdown).await;
}

/// Serves `/debug/pprof/` until `shutdown` completes, and samples the heap for as long.
pub async fn serve_pprof(listener: TcpListener, shutdown: impl Future<Output = ()>) {
    let longest = Duration::from_secs(profile::MAX_SECONDS.into());
    jemalloc_pprof::activate_jemalloc_profiling().await;
    serve(listener, Pages::Profiles, CONNECTION_TIMEOUT + longest, shutdown).await;
    jemalloc_pprof::deactivate_jemalloc_profiling().await;
}

/// What a listener has to show.
#[derive(Clone)]
enum Pages {
    Metrics(Metrics),
    Profiles,
}

async fn serve(listener: TcpListener, pages: Pages, limit: Duration, shutdown: impl Future<Output = ()>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    // Dropped at the return, which ends what is still open.
    let mut connections = JoinSet::new();
    let accept = async {
        loop {
            // The semaphore is never closed.
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            while connections.try_join_next().is_some() {}
            match listener.accept().await {
                Ok((stream, _)) => {
                    let connection = timeout(limit, connection(stream, pages.clone()));
                    connections.spawn(async move {
                        // Past the limit it is closed as it stands.
                        drop(connection.await);
                        drop(slot);
                    });
                }
                Err(_) => sleep(ACCEPT_PAUSE).await,
            }
        }
    };
    tokio::select! {
        () = accept => {}
        () = shutdown => {}
    }
}

async fn connection(stream: TcpStream, pages: Pages) {
    let service = service_fn(|request| {
        let pages = pages.clone();
        async move { Ok::<_, Infallible>(pages.answer(&request).await) }
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).keep_alive(false).max_buf_size(16 * 1024);
    // A client that breaks off has no one to tell it to.
    drop(server.serve_connection(TokioIo::new(stream), service).await);
}

impl Pages {
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let known = match self {
            Self::Metrics(_) => &["/metrics"][..],
            Self::Profiles => &["/debug/pprof/", "/debug/pprof/profile", "/debug/pprof/heap"],
        };
        let path = request.uri().path();
        if !known.contains(&path) {
            return text(StatusCode::NOT_FOUND, format!("nothing lives here, only {}", known.join(", ")));
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let answer = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are served here".to_owned());
            return with(answer, ALLOW, "GET, HEAD");
        }
        match (self, path) {
            (Self::Metrics(metrics), _) => scrape(metrics.clone()).await,
            (Self::Profiles, "/debug/pprof/") => page("text/html; charset=utf-8", INDEX.into()),
            // The head alone is not worth the seconds a profile takes.
            (Self::Profiles, _) if request.method() == Method::HEAD => page("application/octet-stream", Bytes::new()),
            (Self::Profiles, "/debug/pprof/heap") => profiled("heap", profile::heap().await),
            (Self::Profiles, _) => match profile::CpuRequest::from_query(request.uri().query().unwrap_or_default()) {
                Ok(wanted) => profiled("profile", profile::cpu(wanted).await),
                Err(refusal) => text(StatusCode::BAD_REQUEST, refusal),
            },
        }
    }
}

async fn scrape(metrics: Metrics) -> Response<Full<Bytes>> {
    // Thousands of series and the reads from /proc would hold up a worker for milliseconds.
    let rendered = tokio::task::spawn_blocking(move || metrics.render()).await;
    match rendered.unwrap_or_else(|error| Err(error.to_string())) {
        Ok((content_type, body)) => page(&content_type, body.into()),
        Err(message) => text(StatusCode::INTERNAL_SERVER_ERROR, message),
    }
}

fn profiled(name: &str, outcome: Result<profile::Profile, profile::Refusal>) -> Response<Full<Bytes>> {
    match outcome {
        Ok(profile::Profile::Svg(svg)) => page("image/svg+xml", svg.into()),
        Ok(profile::Profile::Pprof(bytes)) => {
            let disposition = format!("attachment; filename=\"nirn-proxy-{name}.pb\"");
            with(page("application/octet-stream", bytes.into()), http::header::CONTENT_DISPOSITION, &disposition)
        }
        Err(profile::Refusal::Busy) => {
            text(StatusCode::CONFLICT, "another CPU profile is being taken; try again when it is done".to_owned())
        }
        Err(profile::Refusal::Unavailable(why)) => text(StatusCode::NOT_IMPLEMENTED, why),
        Err(profile::Refusal::Failed(why)) => text(StatusCode::INTERNAL_SERVER_ERROR, why),
    }
}

fn page(content_type: &str, body: Bytes) -> Response<Full<Bytes>> {
    with(with(Response::new(Full::new(body)), CONTENT_TYPE, content_type), CACHE_CONTROL, "no-store")
}

fn text(status: StatusCode, mut line: String) -> Response<Full<Bytes>> {
    line.push('\n');
    let mut answer = page(TEXT, line.into());
    *answer.status_mut() = status;
    answer
}

fn with(mut answer: Response<Full<Bytes>>, name: HeaderName, value: &str) -> Response<Full<Bytes>> {
    if let Ok(value) = HeaderValue::from_str(value) {
        answer.headers_mut().insert(name, value);
    }
    answer
}
