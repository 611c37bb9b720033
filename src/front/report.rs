//! Failed requests, told where an operator looks: each is counted, and some are logged now and then.

use std::time::Instant;

use parking_lot::Mutex;

use crate::error::{ProxyError, Reason, Throttle};
use crate::observe::metrics::Metrics;

/// Counts failures and logs those that somebody must act on, each reason at most once in 30 s.
pub struct Report {
    metrics: Metrics,
    throttles: Mutex<[Throttle; Reason::ALL.len()]>,
}

impl Report {
    /// Counts into the given metrics.
    pub fn new(metrics: Metrics) -> Self {
        Self { metrics, throttles: Mutex::default() }
    }

    /// Counts a request that was answered with this error. Errors carry nothing a client sent, so they may be logged.
    pub fn failed(&self, error: &ProxyError) {
        let reason = error.reason();
        self.metrics.failed(reason);
        if !reason.needs_operator() {
            return;
        }
        let told = self.throttles.lock()[reason as usize].record(Instant::now());
        if let Some(left_out) = told {
            let (reason, message) = (reason.as_str(), error.message());
            tracing::warn!(reason, left_out, "request failed: {message}");
        }
    }
}
