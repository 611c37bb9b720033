//! Taking profiles of this process: the CPU by signal, the heap by jemalloc's sampling.

use std::time::Duration;

use pprof::protos::Message;
use pprof::{ProfilerGuard, ProfilerGuardBuilder, Report};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use super::flamegraph;

/// The longest CPU profile.
pub(super) const MAX_SECONDS: u16 = 300;
/// The length of a CPU profile that names none, as `go tool pprof` expects.
const DEFAULT_SECONDS: u16 = 30;
/// Samples a second of CPU time; off the round number, so as not to run in step with timers.
const FREQUENCY: i32 = 99;

/// The CPU profiler belongs to the process: one profile at a time.
static PROFILER: Mutex<()> = Mutex::const_new(());

/// A CPU profile as it was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CpuRequest {
    seconds: u16,
    flamegraph: bool,
}

/// A finished profile.
pub(super) enum Profile {
    /// For `go tool pprof`.
    Pprof(Vec<u8>),
    /// For a browser.
    Svg(String),
}

/// Why there is no profile.
pub(super) enum Refusal {
    /// Another CPU profile is being taken.
    Busy,
    /// This build or start of the process cannot.
    Unavailable(String),
    /// It should have worked.
    Failed(String),
}

impl CpuRequest {
    /// Reads `seconds` and `format` from a query, and ignores what else is there.
    pub(super) fn from_query(query: &str) -> Result<Self, String> {
        let mut wanted = Self { seconds: DEFAULT_SECONDS, flamegraph: false };
        for pair in query.split('&') {
            match pair.split_once('=').unwrap_or((pair, "")) {
                ("seconds", value) => match value.parse() {
                    Ok(seconds @ 1..=MAX_SECONDS) => wanted.seconds = seconds,
                    _ => return Err(format!("seconds accepts 1 to {MAX_SECONDS}")),
                },
                ("format", "flamegraph") => wanted.flamegraph = true,
                ("format", "pprof") => wanted.flamegraph = false,
                ("format", _) => return Err("format accepts pprof and flamegraph".to_owned()),
                _ => {}
            }
        }
        Ok(wanted)
    }
}

/// Samples the CPU for the time asked for. Dropping the future ends the sampling.
pub(super) async fn cpu(wanted: CpuRequest) -> Result<Profile, Refusal> {
    let Ok(_turn) = PROFILER.try_lock() else { return Err(Refusal::Busy) };
    // No blocklist: the crate drops every sample whose stack touches a listed library, which is most of them here.
    let guard = ProfilerGuardBuilder::default().frequency(FREQUENCY).build();
    let guard = guard.map_err(|error| Refusal::Failed(format!("the CPU profiler did not start: {error}")))?;
    tokio::time::sleep(Duration::from_secs(wanted.seconds.into())).await;
    // Names are looked up in the debug information, which takes a while.
    let finished = spawn_blocking(move || finish(&guard, wanted.flamegraph)).await;
    finished.unwrap_or_else(|error| Err(error.to_string())).map_err(Refusal::Failed)
}

fn finish(guard: &ProfilerGuard<'_>, as_flamegraph: bool) -> Result<Profile, String> {
    let failed = |error| format!("the CPU profile could not be put together: {error}");
    let report = guard.report().build().map_err(failed)?;
    if as_flamegraph {
        return Ok(Profile::Svg(flamegraph::svg("nirn-proxy: samples of CPU time", stacks(&report))));
    }
    Ok(Profile::Pprof(report.pprof().map_err(failed)?.encode_to_vec()))
}

/// The report's stacks, outermost function first, under their thread's name.
fn stacks(report: &Report) -> impl Iterator<Item = (Vec<String>, u64)> {
    report.data.iter().map(|(stack, count)| {
        let functions = stack.frames.iter().rev().flat_map(|frame| frame.iter().rev().map(ToString::to_string));
        let names = std::iter::once(stack.thread_name_or_id()).chain(functions).collect();
        (names, u64::try_from(*count).unwrap_or_default())
    })
}

/// What lives on the heap, extrapolated from the allocations sampled since the pprof listener was bound.
pub(super) async fn heap() -> Result<Profile, Refusal> {
    let Some(profiler) = jemalloc_pprof::PROF_CTL.as_ref() else {
        return Err(Refusal::Unavailable("this process was started without heap profiling".to_owned()));
    };
    let mut profiler = profiler.clone().lock_owned().await;
    let dumped = spawn_blocking(move || profiler.dump_pprof()).await;
    match dumped {
        Ok(Ok(bytes)) => Ok(Profile::Pprof(bytes)),
        Ok(Err(error)) => Err(Refusal::Failed(format!("the heap profile could not be written: {error}"))),
        Err(error) => Err(Refusal::Failed(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_says_how_long_and_in_which_form() {
        let cases = [
            ("", Ok((30, false))),
            ("seconds=1", Ok((1, false))),
            ("debug=0&seconds=300&format=flamegraph", Ok((300, true))),
            ("format=pprof", Ok((30, false))),
            ("seconds=0", Err(())),
            ("seconds=301", Err(())),
            ("seconds=", Err(())),
            ("seconds=-1", Err(())),
            ("seconds=1e2", Err(())),
            ("format=svg", Err(())),
        ];
        for (query, expected) in cases {
            let read = CpuRequest::from_query(query);
            assert_eq!(read.map(|wanted| (wanted.seconds, wanted.flamegraph)).map_err(drop), expected, "{query}");
        }
    }
}
