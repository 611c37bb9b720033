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

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn every_failure_is_counted_and_what_needs_an_operator_is_told_once_in_a_while() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
        let metrics = Metrics::new();
        let report = Report::new(metrics.clone());
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..3 {
                report.failed(&ProxyError::Unavailable(Reason::QueueFull));
                report.failed(&ProxyError::ClientClosed);
            }
            report.failed(&ProxyError::Upstream("connection refused".into()));
        });
        let text = String::from_utf8(lines.0.lock().clone()).unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("queue_full") && text.contains("connection refused"), "{text}");
        let rendered = String::from_utf8(metrics.render().unwrap().1).unwrap();
        for (reason, count) in [("queue_full", 3), ("client_closed", 3), ("upstream_error", 1)] {
            let line = format!("nirn_proxy_failures_total{{reason=\"{reason}\"}} {count}");
            assert!(rendered.contains(&line), "{line}");
        }
    }
}
