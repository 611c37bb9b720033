//! The numbers operators see: every name, label and bucket of `/metrics`, in one registry of its own.
//!
//! Names and labels are those of nirn-proxy 1.x, so that existing dashboards and alerts go on working. Cardinality is a
//! security matter: whatever a client sends, the number of series stays bounded, which `routes` sees to.

mod routes;

use std::sync::Arc;

use http::Method;
use prometheus::core::Collector;
use prometheus::process_collector::ProcessCollector;
use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::error::Reason;
use crate::route::Route;

use routes::Routes;
pub use routes::{OpenGuard, RouteMetrics};

/// Seconds to Discord's response headers that the histogram tells apart.
const BUCKETS: [f64; 6] = [0.1, 0.25, 1.0, 2.5, 5.0, 20.0];

/// The process's metrics. Cheap to clone: all clones count into the same registry.
#[derive(Clone)]
pub struct Metrics {
    inner: Arc<Inner>,
}

struct Inner {
    registry: Registry,
    routes: Routes,
    /// By [`Reason`], in the order of its enum.
    failures: Vec<IntCounter>,
    errors: IntCounter,
    routed_sent: IntCounter,
    routed_received: IntCounter,
    routed_error: IntCounter,
    members: IntGauge,
}

impl Metrics {
    /// A fresh registry with every metric at zero.
    pub fn new() -> Self {
        let registry = Registry::new();
        // Two labels that hold free text never stand side by side: the prometheus crate hashes label values without
        // separators, so `("a", "bc")` and `("ab", "c")` would be one series. Method and status are from closed sets.
        let requests = registered(&registry, {
            let options =
                HistogramOpts::new("nirn_proxy_requests", "Seconds to Discord's response headers, per attempt");
            HistogramVec::new(options.buckets(BUCKETS.to_vec()), &["method", "route", "status", "clientId"])
        });
        let open = registered(&registry, {
            let options = Opts::new("nirn_proxy_open_connections", "Requests being handled");
            IntGaugeVec::new(options, &["method", "route"])
        });
        let failures = registered(&registry, {
            let options =
                Opts::new("nirn_proxy_failures_total", "Requests that Discord did not answer in full, by reason");
            IntCounterVec::new(options, &["reason"])
        });
        let counter = |name, help| registered(&registry, IntCounter::new(name, help));
        let inner = Inner {
            routes: Routes::new(requests, open),
            failures: Reason::ALL.iter().map(|reason| failures.with_label_values(&[reason.as_str()])).collect(),
            errors: counter("nirn_proxy_error", "Error-level log records"),
            routed_sent: counter("nirn_proxy_requests_routed_sent", "Requests forwarded to the peer that owns them"),
            routed_received: counter("nirn_proxy_requests_routed_received", "Requests that a peer forwarded here"),
            routed_error: counter("nirn_proxy_requests_routed_error", "Requests that could not be forwarded to a peer"),
            members: {
                let gauge = IntGauge::new(
                    "nirn_proxy_cluster_members",
                    "Nodes of the cluster as this one sees it, itself included",
                );
                registered(&registry, gauge)
            },
            registry: registry.clone(),
        };
        inner.members.set(1);
        let process = registry.register(Box::new(ProcessCollector::for_self()));
        process.expect("the process metrics have names of their own");
        Self { inner: Arc::new(inner) }
    }

    /// Counts a failed request.
    pub fn failed(&self, reason: Reason) {
        self.inner.failures[reason as usize].inc();
    }

    /// The series of a method and a route's label: one look-up, and no text is built after the first time.
    pub fn route(&self, method: &Method, route: &Route) -> RouteMetrics {
        self.inner.routes.series(method, route.label_key, || route.label())
    }

    /// Counts an error-level log record.
    pub fn error_record(&self) {
        self.inner.errors.inc();
    }

    /// Counts a request forwarded to the peer that owns it.
    pub fn routed_sent(&self) {
        self.inner.routed_sent.inc();
    }

    /// Counts a request that a peer forwarded here.
    pub fn routed_received(&self) {
        self.inner.routed_received.inc();
    }

    /// Counts a request that could not be forwarded to a peer.
    pub fn routed_error(&self) {
        self.inner.routed_error.inc();
    }

    /// Tells how many nodes the cluster has, this one included.
    pub fn members(&self, count: usize) {
        self.inner.members.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The content type and the body of a scrape.
    pub fn render(&self) -> Result<(String, Vec<u8>), String> {
        let encoder = TextEncoder::new();
        let mut text = Vec::with_capacity(16 * 1024);
        let encoded = encoder.encode(&self.inner.registry.gather(), &mut text);
        encoded.map_err(|error| format!("metrics could not be written as text: {error}"))?;
        Ok((encoder.format_type().to_owned(), text))
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Metrics")
    }
}

/// Registers a collector whose name and labels are constants of this file, so that failing is a mistake in it.
fn registered<C: Collector + Clone + 'static>(registry: &Registry, collector: prometheus::Result<C>) -> C {
    let collector = collector.expect("metric names and labels are valid");
    registry.register(Box::new(collector.clone())).expect("metric names are unique");
    collector
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(metrics: &Metrics) -> String {
        String::from_utf8(metrics.render().unwrap().1).unwrap()
    }

    #[test]
    fn the_reasons_are_in_the_order_of_their_enum() {
        for (index, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, index);
        }
    }

    #[test]
    fn every_failure_reason_is_exported_from_the_start() {
        let metrics = Metrics::new();
        let start = text(&metrics);
        for reason in Reason::ALL {
            let label = reason.as_str();
            assert!(start.contains(&format!("nirn_proxy_failures_total{{reason=\"{label}\"}} 0\n")), "{label}");
        }
        metrics.failed(Reason::ClientClosed);
        assert!(text(&metrics).contains("nirn_proxy_failures_total{reason=\"client_closed\"} 1\n"));
    }

    #[test]
    fn counters_and_process_metrics_are_exported_from_the_start() {
        let metrics = Metrics::new();
        metrics.error_record();
        metrics.routed_sent();
        metrics.routed_received();
        metrics.routed_error();
        let text = text(&metrics);
        for name in ["error", "requests_routed_sent", "requests_routed_received", "requests_routed_error"] {
            assert!(text.contains(&format!("# TYPE nirn_proxy_{name} counter\nnirn_proxy_{name} 1\n")), "{name}");
        }
        for name in ["cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"] {
            assert!(text.contains(&format!("\nprocess_{name} ")), "{name}");
        }
    }
}
