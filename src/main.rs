//! The binary: arguments, settings, logging, the runtime, signals and the exit code.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::thread::available_parallelism;
use std::time::Duration;

use nirn_proxy::config::Config;
use nirn_proxy::observe::logging;
use nirn_proxy::observe::metrics::Metrics;
use nirn_proxy::{Addresses, bind, probe};
use tokio::runtime::{self, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Gives memory back after a burst of clients, where glibc's allocator would keep it.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Heap profiling is there and off until it is asked for; what is free goes back to the system within a second.
#[expect(unsafe_code, reason = "jemalloc reads its settings from a symbol of this name before main")]
#[unsafe(export_name = "_rjem_malloc_conf")]
static MALLOC_CONF: &[u8; 71] = b"prof:true,prof_active:false,background_thread:true,dirty_decay_ms:1000\0";

/// Signals closer together than this are one: a terminal and a supervisor may both send theirs.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

const HELP: &str = "\
Usage: nirn-proxy [--healthcheck | --version | --help]

Without an argument, serves until SIGTERM or SIGINT. Settings are environment
variables, or lines of a .env file in the working directory; CONFIG.md lists them.

  --healthcheck  ask the nirn-proxy with these settings on this host for its health;
                 the exit code is 0 if it is healthy and 1 if not
  --version      print the version
  --help         print this
";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(|argument| argument.to_str()).collect();
    match arguments[..] {
        [] => exit(serve()),
        [Some("--healthcheck")] => exit(healthcheck()),
        [Some("--version")] => {
            println!("nirn-proxy {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        [Some("--help")] => {
            print!("{HELP}");
            ExitCode::SUCCESS
        }
        _ => {
            eprint!("nirn-proxy: unknown argument\n\n{HELP}");
            ExitCode::from(2)
        }
    }
}

/// Whether it went well. Whoever failed has said why.
struct Failed;

fn exit(outcome: Result<(), Failed>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failed) => ExitCode::FAILURE,
    }
}

fn settings() -> Result<Config, Failed> {
    Config::load().map_err(|problems| {
        for problem in problems {
            complain(problem);
        }
        Failed
    })
}

/// For what goes wrong while there is no logging.
fn complain(problem: impl std::fmt::Display) -> Failed {
    eprintln!("nirn-proxy: {problem}");
    Failed
}

fn healthcheck() -> Result<(), Failed> {
    let config = settings()?;
    let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(complain)?;
    runtime.block_on(probe::healthcheck(config.bind_ip, config.port)).map_err(complain)?;
    println!("healthy");
    Ok(())
}

fn serve() -> Result<(), Failed> {
    let config = settings()?;
    // What fails before there are metrics ends the process, so nobody would scrape it.
    let metrics: Arc<OnceLock<Metrics>> = Arc::default();
    let counted = metrics.clone();
    let count = move || {
        if let Some(metrics) = counted.get() {
            metrics.error_record();
        }
    };
    logging::start(config.log, count).map_err(complain)?;
    let runtime = runtime().map_err(fatal)?;
    let outcome = runtime.block_on(run(config, &metrics)).map_err(fatal);
    // What still runs has had its time; a thread in a blocking call must not hold the exit up.
    runtime.shutdown_background();
    outcome
}

fn fatal(problem: impl std::fmt::Display) -> Failed {
    tracing::error!("{problem}");
    Failed
}

fn runtime() -> std::io::Result<Runtime> {
    let workers = available_parallelism().map_or(1, usize::from);
    runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build()
}

async fn run(config: Config, metrics: &OnceLock<Metrics>) -> Result<(), String> {
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let signals = Signals::listen().map_err(|error| format!("cannot listen for signals: {error}"))?;
    let daemon = bind(config.clone())?;
    metrics.get_or_init(|| daemon.metrics());
    announce(&config, daemon.addresses());
    let (stop, stopped) = oneshot::channel();
    let (hurry, hurried) = oneshot::channel();
    let shutdown = async {
        _ = stopped.await;
    };
    let at_once = async {
        _ = hurried.await;
    };
    tokio::select! {
        outcome = daemon.run(shutdown, at_once) => outcome,
        () = signals.pass_on(stop, hurry) => Ok(()),
    }
}

/// The one line that says what is in force.
fn announce(config: &Config, addresses: Addresses) {
    let or_off =
        |address: Option<std::net::SocketAddr>| address.map_or("off".to_owned(), |address| address.to_string());
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let scheme = if config.upstream.https { "https" } else { "http" };
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        proxy = %addresses.proxy,
        metrics = or_off(addresses.metrics),
        pprof = or_off(addresses.pprof),
        upstream = format!("{scheme}://{}", config.upstream.authority),
        request_timeout_ms = milliseconds(config.upstream.request_timeout),
        queue_timeout_ms = milliseconds(config.scheduling.queue_timeout),
        cluster = addresses.cluster.map_or("off".to_owned(), |(gossip, peer)| format!("gossip {gossip}, peers {peer}")),
        overrides = config.scheduling.overrides.len(),
        "nirn-proxy is ready"
    );
}

/// SIGTERM and SIGINT, which mean the same.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Tells the first signal, and one that comes a second or more later. Never completes.
    async fn pass_on(mut self, stop: oneshot::Sender<()>, hurry: oneshot::Sender<()>) {
        self.next().await;
        _ = stop.send(());
        let first = Instant::now();
        loop {
            self.next().await;
            if first.elapsed() >= ONE_SIGNAL {
                break;
            }
        }
        tracing::warn!("stopping at once");
        _ = hurry.send(());
        std::future::pending().await
    }
}
