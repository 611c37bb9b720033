//! Logs: one line a record, as text or JSON, on standard error.
//!
//! Only this crate's own records are written. Libraries log what they handle (hyper's and h2's debug records hold
//! headers, a client's may hold URLs), so nothing of theirs gets through at any level; what they fail with comes back
//! as an error, and is told by whoever called them in words that carry nothing a client sent.

use std::io::{self, IsTerminal, Write};
use std::panic::{self, PanicHookInfo};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::Log;

/// The one target whose records are written. Its modules count as well.
const TARGET: &str = "nirn_proxy";

/// Sets logging up for the process, panics included, and calls `on_error` for each record of level error.
///
/// # Errors
///
/// When it was set up before.
pub fn start(log: Log, on_error: impl Fn() + Send + Sync + 'static) -> Result<(), String> {
    let ansi = io::stderr().is_terminal();
    subscriber(log, ansi, io::stderr, on_error).try_init().map_err(|error| error.to_string())?;
    panic::set_hook(Box::new(panicked));
    Ok(())
}

fn subscriber<W>(
    log: Log,
    ansi: bool,
    writer: W,
    on_error: impl Fn() + Send + Sync + 'static,
) -> impl Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    // Where standard error is closed there is nobody to tell that a record could not be written.
    let lines = tracing_subscriber::fmt::layer().log_internal_errors(false).with_writer(OneLine(writer));
    let lines = if log.json {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
    } else {
        lines.with_ansi(ansi).boxed()
    };
    tracing_subscriber::registry()
        .with(Targets::new().with_target(TARGET, log.level))
        .with(lines)
        .with(OnError(on_error))
}

/// Tells where the process panicked, and not why: a message of the standard library may quote what was being read.
fn panicked(info: &PanicHookInfo<'_>) {
    let location = info.location().map(ToString::to_string).unwrap_or_default();
    let thread = std::thread::current();
    tracing::error!(location, thread = thread.name().unwrap_or_default(), "panicked");
}

/// Calls a function for each record of level error.
struct OnError<F>(F);

impl<S: Subscriber, F: Fn() + 'static> Layer<S> for OnError<F> {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        if *event.metadata().level() == Level::ERROR {
            (self.0)();
        }
    }
}

/// Keeps each record on one line. A record arrives as one buffer that ends with the only line break it may have.
struct OneLine<W>(W);

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for OneLine<W> {
    type Writer = OneLine<W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        OneLine(self.0.make_writer())
    }
}

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let text = record.strip_suffix(b"\n").unwrap_or(record);
        if text.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
            let mut line = text.to_vec();
            line.iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
            line.push(b'\n');
            self.0.write_all(&line)?;
        } else {
            self.0.write_all(record)?;
        }
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use parking_lot::Mutex;

    use super::*;
    use crate::error::{ProxyError, Reason};
    use crate::front::report::Report;
    use crate::observe::metrics::Metrics;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is written while `work` runs, and how many errors were counted.
    fn logged(level: Level, json: bool, work: impl FnOnce()) -> (Vec<String>, usize) {
        let sink = Sink::default();
        let errors = Arc::new(AtomicUsize::new(0));
        let (writer, counter) = (sink.clone(), errors.clone());
        let subscriber = subscriber(
            Log { level, json },
            false,
            move || writer.clone(),
            move || {
                counter.fetch_add(1, Ordering::Relaxed);
            },
        );
        tracing::subscriber::with_default(subscriber, work);
        let text = String::from_utf8(sink.0.lock().clone()).unwrap();
        (text.lines().map(str::to_owned).collect(), errors.load(Ordering::Relaxed))
    }

    #[test]
    fn a_record_is_one_line_whatever_is_in_it() {
        for json in [false, true] {
            let (lines, _) = logged(Level::INFO, json, || tracing::info!(name = %"a\r\nb", "one\ntwo"));
            assert_eq!(lines.len(), 1, "{lines:?}");
            assert!(!lines[0].contains('\u{1b}'));
        }
    }

    #[test]
    fn json_records_are_objects() {
        let (lines, _) = logged(Level::INFO, true, || tracing::warn!(reason = "queue_full", left_out = 3, "failed"));
        let record: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!(record["level"], "WARN");
        assert_eq!(record["message"], "failed");
        assert_eq!(record["reason"], "queue_full");
        assert_eq!(record["left_out"], 3);
        assert!(record["timestamp"].is_string());
    }

    #[test]
    fn the_level_is_kept_and_errors_are_counted() {
        let work = || {
            tracing::error!("one");
            tracing::warn!("two");
            tracing::info!("three");
            tracing::debug!("four");
        };
        for (level, expected) in [(Level::ERROR, 1), (Level::WARN, 2), (Level::INFO, 3), (Level::TRACE, 4)] {
            let (lines, errors) = logged(level, false, work);
            assert_eq!((lines.len(), errors), (expected, 1));
        }
    }

    #[test]
    fn libraries_are_not_heard_at_any_level() {
        let (lines, errors) = logged(Level::TRACE, false, || {
            tracing::error!(target: "h2::codec", "authorization: Bot hunter2");
            tracing::warn!(target: "hyper_util::client::legacy", "/api/webhooks/1/hunter2");
            tracing::debug!(target: "hyper::proto::h1::role", "?query=hunter2");
            tracing::trace!(target: "rustls::client", "hunter2");
            tracing::debug!(target: "foca", "hunter2");
        });
        assert_eq!((lines, errors), (Vec::new(), 0));
    }

    #[test]
    fn a_panic_is_told_by_its_place_alone() {
        let (lines, errors) = logged(Level::ERROR, false, || {
            let hook = panic::take_hook();
            panic::set_hook(Box::new(panicked));
            let unwound = panic::catch_unwind(|| panic!("hunter2"));
            panic::set_hook(hook);
            assert!(unwound.is_err());
        });
        assert_eq!(errors, 1);
        assert!(lines[0].contains("src/observe/logging.rs") && !lines[0].contains("hunter2"), "{lines:?}");
    }

    #[test]
    fn failures_are_told_once_in_a_while_and_only_those_to_act_on() {
        let report = Report::new(Metrics::new());
        let (lines, _) = logged(Level::INFO, false, || {
            for _ in 0..5 {
                report.failed(&ProxyError::Unavailable(Reason::QueueFull));
                report.failed(&ProxyError::Upstream("connection refused".into()));
                report.failed(&ProxyError::QueueTimeout);
            }
        });
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("MAX_QUEUE_DEPTH") && lines[0].contains("queue_full"), "{lines:?}");
        assert!(lines[1].contains("connection refused"), "{lines:?}");
    }
}
