//! How many bucket states the process may keep (`MAX_BUCKET_STATES`), over all credentials.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A bounded count.
#[derive(Debug)]
pub struct Room {
    taken: AtomicUsize,
    max: usize,
}

impl Room {
    /// Room for `max`.
    pub fn new(max: usize) -> Self {
        Self { taken: AtomicUsize::new(0), max }
    }

    /// Takes a place, if there is one.
    pub fn take(&self) -> bool {
        self.taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| (taken < self.max).then_some(taken + 1))
            .is_ok()
    }

    /// Gives `count` places back.
    pub fn give_back(&self, count: usize) {
        self.taken.fetch_sub(count, Ordering::Relaxed);
    }

    /// Places taken.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}
