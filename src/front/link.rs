//! What the requests of one client connection share: whether it still stands, and what its socket was seen to do.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::framing::Fault;

/// Why a connection's requests must stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The client closed it, or its sending half: from a socket the two look the same.
    ClientGone,
    /// The drain's time is up.
    Stopped,
}

const OPEN: u8 = 0;
const GONE: u8 = 1;
const STOPPED: u8 = 2;

/// One client connection as its requests see it.
#[derive(Debug, Default)]
pub struct Link {
    state: AtomicU8,
    ended: Notify,
    requests: AtomicU64,
    fault: OnceLock<(u64, Fault)>,
    active: AtomicUsize,
    /// Its client takes the connection's end for the end of a body that says nothing else (HTTP/1.0).
    closing_ends_bodies: AtomicBool,
    /// A response body was cut off.
    cut: AtomicBool,
    deadlines: Mutex<Vec<Instant>>,
}

impl Link {
    /// Says that the connection's requests must stop; the first reason stays.
    pub fn end(&self, end: End) {
        let state = match end {
            End::ClientGone => GONE,
            End::Stopped => STOPPED,
        };
        if self.state.compare_exchange(OPEN, state, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.ended.notify_waiters();
        }
    }

    /// Whether and why the requests must stop.
    pub fn has_ended(&self) -> Option<End> {
        match self.state.load(Ordering::Acquire) {
            OPEN => None,
            GONE => Some(End::ClientGone),
            _ => Some(End::Stopped),
        }
    }

    /// Waits until the requests must stop.
    pub async fn ended(&self) -> End {
        loop {
            // Created before the look, so that an end between look and wait is not missed.
            let notified = self.ended.notified();
            if let Some(end) = self.has_ended() {
                return end;
            }
            notified.await;
        }
    }

    /// Counts a request in, and tells what its bytes said that hyper did not.
    pub fn request(&self) -> Option<Fault> {
        let ordinal = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        self.fault.get().filter(|(faulty, _)| *faulty == ordinal).map(|(_, fault)| *fault)
    }

    /// How many requests there were.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Notes the first fault and the ordinal, from 1, of the request that has it.
    pub fn faulty(&self, fault: (u64, Fault)) {
        self.fault.get_or_init(|| fault);
    }

    /// Counts a request as being handled until [`Link::done`].
    pub fn busy(&self) {
        self.active.fetch_add(1, Ordering::Relaxed);
    }

    /// The end of what [`Link::busy`] began.
    pub fn done(&self) {
        self.active.fetch_sub(1, Ordering::Relaxed);
    }

    /// No request is being handled.
    pub fn is_idle(&self) -> bool {
        self.active.load(Ordering::Relaxed) == 0
    }

    /// A response body that must be through by then, whoever holds it up.
    pub fn expect_by(&self, deadline: Instant) {
        self.deadlines.lock().push(deadline);
    }

    /// A response body is through, or given up.
    pub fn through(&self, deadline: Instant) {
        let mut deadlines = self.deadlines.lock();
        if let Some(index) = deadlines.iter().position(|known| *known == deadline) {
            deadlines.swap_remove(index);
        }
    }

    /// Whether every request that is being handled is a response body that should have been through by then.
    pub fn is_overdue_since(&self, then: Instant) -> bool {
        let overdue = self.deadlines.lock().iter().filter(|deadline| **deadline < then).count();
        overdue >= self.active.load(Ordering::Relaxed)
    }

    /// A request of HTTP/1.0 has come.
    pub fn ends_bodies_by_closing(&self) {
        self.closing_ends_bodies.store(true, Ordering::Relaxed);
    }

    /// A response body is cut off.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    /// Whether the connection must not end as if a body that was cut off were whole.
    pub fn must_reset(&self) -> bool {
        self.cut.load(Ordering::Relaxed) && self.closing_ends_bodies.load(Ordering::Relaxed)
    }

    /// The earliest instant by which some response body must be through.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.lock().iter().min().copied()
    }
}
