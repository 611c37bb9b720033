//! Series by method and route: bounded in number, and reached without building text.
//!
//! A client chooses its methods and paths, so both are folded into closed sets before they become labels: methods outside
//! the nine standard ones are `OTHER`, and when [`MAX_LABELS`] routes have been seen, further ones share `/unknown`.

use std::sync::Arc;

use ahash::{AHashMap, AHashSet};
use http::{Method, StatusCode};
use parking_lot::RwLock;
use prometheus::{Histogram, HistogramVec, IntGauge, IntGaugeVec};

use crate::identity::Kind;

/// Route labels at most, [`UNKNOWN`] among them.
const MAX_LABELS: usize = 1024;
/// The label of every route beyond [`MAX_LABELS`].
const UNKNOWN: &str = "/unknown";
/// Bytes in a route label at most.
const MAX_LABEL_BYTES: usize = 512;
/// Read locks that requests of different routes spread over.
const SHARDS: usize = 16;

/// Every series that has a route.
pub(super) struct Routes {
    requests: HistogramVec,
    open: IntGaugeVec,
    /// The keys of the labels that have been given out.
    labels: RwLock<AHashSet<u64>>,
    known: [RwLock<AHashMap<(u64, &'static str), RouteMetrics>>; SHARDS],
    /// The handles of [`UNKNOWN`], one per method.
    unknown: RwLock<AHashMap<&'static str, RouteMetrics>>,
}

impl Routes {
    /// No series yet; they come into the two given families as routes are seen.
    pub(super) fn new(requests: HistogramVec, open: IntGaugeVec) -> Self {
        Self {
            requests,
            open,
            labels: RwLock::default(),
            known: std::array::from_fn(|_| RwLock::default()),
            unknown: RwLock::default(),
        }
    }

    /// The series of a method and a route's label, which is asked for the first time only.
    pub(super) fn series(&self, method: &Method, label_key: u64, label: impl FnOnce() -> String) -> RouteMetrics {
        let method = method_label(method);
        let shard = &self.known[label_key as usize % SHARDS];
        if let Some(series) = shard.read().get(&(label_key, method)) {
            return series.clone();
        }
        if !self.admits(label_key) {
            if let Some(series) = self.unknown.read().get(method) {
                return series.clone();
            }
            return self.unknown.write().entry(method).or_insert_with(|| self.create(method, UNKNOWN)).clone();
        }
        let label = label();
        let label = &label[..label.floor_char_boundary(MAX_LABEL_BYTES)];
        shard.write().entry((label_key, method)).or_insert_with(|| self.create(method, label)).clone()
    }

    /// Whether the label has a place of its own, taking one if there is room.
    fn admits(&self, label_key: u64) -> bool {
        let full = |labels: &AHashSet<u64>| labels.len() >= MAX_LABELS - 1;
        {
            let labels = self.labels.read();
            if labels.contains(&label_key) || full(&labels) {
                return labels.contains(&label_key);
            }
        }
        let mut labels = self.labels.write();
        if full(&labels) {
            labels.contains(&label_key)
        } else {
            labels.insert(label_key) || labels.contains(&label_key)
        }
    }

    fn create(&self, method: &'static str, label: &str) -> RouteMetrics {
        RouteMetrics {
            series: Arc::new(Series {
                method,
                label: label.to_owned(),
                open: self.open.with_label_values(&[method, label]),
                requests: self.requests.clone(),
                answers: RwLock::default(),
            }),
        }
    }
}

/// The series of one method and route. Cheap to clone.
#[derive(Clone)]
pub struct RouteMetrics {
    series: Arc<Series>,
}

struct Series {
    method: &'static str,
    label: String,
    open: IntGauge,
    requests: HistogramVec,
    /// The histograms met so far: a handful, so a walk over them beats hashing their labels.
    answers: RwLock<Vec<(Answer, Histogram)>>,
}

/// What tells the histograms of one method and route apart.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Answer {
    status: StatusCode,
    shared_429: bool,
    kind: Kind,
}

impl RouteMetrics {
    /// Counts a request as being handled until the guard is dropped.
    pub fn open(&self) -> OpenGuard {
        self.series.open.inc();
        OpenGuard { open: self.series.open.clone() }
    }

    /// Records an attempt that got response headers after `seconds`; `shared_429` says that the limit's scope was `shared`.
    pub fn observe(&self, status: StatusCode, shared_429: bool, kind: Kind, seconds: f64) {
        let answer = Answer { status, shared_429: shared_429 && status == StatusCode::TOO_MANY_REQUESTS, kind };
        let find = |answers: &[(Answer, Histogram)]| answers.iter().position(|(known, _)| *known == answer);
        {
            let answers = self.series.answers.read();
            if let Some(index) = find(&answers) {
                return answers[index].1.observe(seconds);
            }
        }
        let mut answers = self.series.answers.write();
        if let Some(index) = find(&answers) {
            return answers[index].1.observe(seconds);
        }
        let labels = [self.series.method, &self.series.label, &answer.status_label(), kind_label(kind)];
        let histogram = self.series.requests.with_label_values(&labels);
        histogram.observe(seconds);
        answers.push((answer, histogram));
    }
}

impl Answer {
    fn status_label(self) -> String {
        if self.shared_429 {
            return "429 Shared".to_owned();
        }
        format!("{} {}", self.status.as_u16(), self.status.canonical_reason().unwrap_or("Unknown"))
    }
}

/// Takes the request out of `nirn_proxy_open_connections` when it is dropped.
#[derive(Debug)]
pub struct OpenGuard {
    open: IntGauge,
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.open.dec();
    }
}

fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::CONNECT => "CONNECT",
        Method::OPTIONS => "OPTIONS",
        Method::TRACE => "TRACE",
        Method::PATCH => "PATCH",
        _ => "OTHER",
    }
}

fn kind_label(kind: Kind) -> &'static str {
    match kind {
        Kind::Bot => "Bot",
        Kind::Bearer => "Bearer",
        Kind::Unauthenticated => "NoAuth",
    }
}

#[cfg(test)]
mod tests {
    use prometheus::core::Collector;
    use prometheus::{HistogramOpts, Opts};

    use super::*;

    fn routes() -> Routes {
        let requests = HistogramOpts::new("requests", "help");
        Routes::new(
            HistogramVec::new(requests, &["method", "route", "status", "clientId"]).unwrap(),
            IntGaugeVec::new(Opts::new("open", "help"), &["method", "route"]).unwrap(),
        )
    }

    /// The label values of every series in a family, each as `a|b|c`, sorted.
    fn labels(family: &impl Collector) -> Vec<String> {
        let families = family.collect();
        let series = families.iter().flat_map(|family| family.get_metric());
        let mut labels: Vec<String> = series
            .map(|series| series.get_label().iter().map(|pair| pair.value()).collect::<Vec<_>>().join("|"))
            .collect();
        labels.sort();
        labels
    }

    #[test]
    fn an_answer_is_labelled_by_status_text_and_kind() {
        let routes = routes();
        let series = routes.series(&Method::GET, 1, || "/users/@me".to_owned());
        series.observe(StatusCode::OK, false, Kind::Bot, 0.01);
        series.observe(StatusCode::OK, false, Kind::Bot, 0.01);
        series.observe(StatusCode::OK, false, Kind::Unauthenticated, 0.01);
        series.observe(StatusCode::TOO_MANY_REQUESTS, false, Kind::Bearer, 0.01);
        series.observe(StatusCode::TOO_MANY_REQUESTS, true, Kind::Bearer, 0.01);
        series.observe(StatusCode::from_u16(599).unwrap(), true, Kind::Bot, 0.01);
        // The crate sorts label names: clientId, method, route, status.
        let expected = [
            "Bearer|GET|/users/@me|429 Shared",
            "Bearer|GET|/users/@me|429 Too Many Requests",
            "Bot|GET|/users/@me|200 OK",
            "Bot|GET|/users/@me|599 Unknown",
            "NoAuth|GET|/users/@me|200 OK",
        ];
        assert_eq!(labels(&routes.requests), expected);
        assert_eq!(routes.requests.with_label_values(&["GET", "/users/@me", "200 OK", "Bot"]).get_sample_count(), 2);
    }

    #[test]
    fn a_guard_counts_a_request_until_it_is_dropped() {
        let routes = routes();
        let series = routes.series(&Method::POST, 1, || "/channels/!/messages".to_owned());
        let gauge = routes.open.with_label_values(&["POST", "/channels/!/messages"]);
        let guards = (series.open(), series.open());
        assert_eq!(gauge.get(), 2);
        drop(guards);
        assert_eq!(gauge.get(), 0);
    }

    #[test]
    fn the_label_is_built_once() {
        let routes = routes();
        let first = routes.series(&Method::GET, 1, || "/a".to_owned());
        let again = routes.series(&Method::GET, 1, || unreachable!("the label is known"));
        assert!(Arc::ptr_eq(&first.series, &again.series));
        let other = routes.series(&Method::HEAD, 1, || "/a".to_owned());
        assert!(!Arc::ptr_eq(&first.series, &other.series));
    }

    #[test]
    fn unusual_methods_are_one_label() {
        let routes = routes();
        for method in ["PURGE", "get", "PROPFIND", "TRACE"] {
            drop(routes.series(&Method::from_bytes(method.as_bytes()).unwrap(), 1, || "/a".to_owned()).open());
        }
        assert_eq!(labels(&routes.open), ["OTHER|/a", "TRACE|/a"]);
    }

    #[test]
    fn routes_beyond_the_limit_share_one_label() {
        let routes = routes();
        for key in 0..5000 {
            drop(routes.series(&Method::GET, key, || format!("/route{key}")).open());
        }
        let seen = labels(&routes.open);
        assert_eq!(seen.len(), MAX_LABELS);
        assert!(seen.contains(&"GET|/unknown".to_owned()));
        // A known route may still come with another method.
        drop(routes.series(&Method::PUT, 0, || "/route0".to_owned()).open());
        drop(routes.series(&Method::PUT, 4999, || "/route4999".to_owned()).open());
        let seen = labels(&routes.open);
        assert!(seen.contains(&"PUT|/route0".to_owned()) && seen.contains(&"PUT|/unknown".to_owned()));
    }

    #[test]
    fn a_long_label_is_cut_at_a_character() {
        let routes = routes();
        drop(routes.series(&Method::GET, 1, || format!("/{}", "é".repeat(400))).open());
        assert_eq!(labels(&routes.open), [format!("GET|/{}", "é".repeat(255))]);
    }
}
