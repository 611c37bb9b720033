//! A well-behaved library's own limiter, one per process: what bots have without a proxy.
//!
//! Requests of one route and major parameter go one after the other; a bucket that is used up is waited out; a 429 is
//! waited out and repeated, by the whole process if it is global; and the process spreads its own calls over the global
//! limit, knowing nothing of the others.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hyper::HeaderMap;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};

/// Calls a second of one token.
const GLOBAL: usize = 50;

/// One process's limiter.
#[derive(Default)]
pub(crate) struct Library {
    routes: Mutex<HashMap<String, Arc<tokio::sync::Mutex<Route>>>>,
    recent: tokio::sync::Mutex<VecDeque<Instant>>,
    paused_until: Mutex<Option<Instant>>,
}

/// What a process knows of one route.
#[derive(Default)]
pub(crate) struct Route {
    closed_until: Option<Instant>,
}

impl Library {
    /// The route's place; whoever holds its lock has its turn.
    pub(crate) fn route(&self, key: &str) -> Arc<tokio::sync::Mutex<Route>> {
        Arc::clone(self.routes.lock().entry(key.to_owned()).or_default())
    }

    /// Waits for this process's share of the global limit.
    pub(crate) async fn global(&self) {
        let mut recent = self.recent.lock().await;
        let paused = *self.paused_until.lock();
        if let Some(until) = paused {
            sleep_until(until).await;
        }
        if recent.len() == GLOBAL
            && let Some(first) = recent.pop_front()
        {
            sleep_until(first + Duration::from_secs(1)).await;
        }
        recent.push_back(Instant::now());
    }

    /// A global 429: nobody sends for so long.
    fn pause(&self, wait: Duration) {
        let until = Instant::now() + wait;
        let mut paused = self.paused_until.lock();
        *paused = Some(paused.map_or(until, |known| known.max(until)));
    }
}

impl Route {
    /// Waits until the bucket is open.
    pub(crate) async fn open(&self) {
        if let Some(until) = self.closed_until {
            sleep_until(until).await;
        }
    }

    /// Learns from an answer; whether it was a 429 that was waited out.
    pub(crate) async fn learn(&mut self, library: &Library, status: u16, headers: &HeaderMap) -> bool {
        let seconds = |name: &str| headers.get(name)?.to_str().ok()?.parse::<f64>().ok();
        let wait = |value: Option<f64>| Duration::from_secs_f64(value.unwrap_or(1.0));
        if seconds("x-ratelimit-remaining") == Some(0.0) {
            self.closed_until = Some(Instant::now() + wait(seconds("x-ratelimit-reset-after")));
        }
        if status == 429 {
            let wait = wait(seconds("retry-after"));
            if headers.contains_key("x-ratelimit-global") {
                library.pause(wait);
            }
            sleep(wait).await;
        }
        status == 429
    }
}
