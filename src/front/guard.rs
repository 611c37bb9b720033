//! What an admitted request holds, from its slot to the last byte of its answer.

use std::sync::Arc;

use super::admission::Slot;
use super::link::{End, Link};
use crate::error::Reason;
use crate::observe::metrics::{Metrics, OpenGuard};

/// The slot, the gauge and the connection's bookkeeping of one admitted request. Its drop gives everything back; dropped
/// before [`Guard::settle`], it counts the request as left by its client.
pub struct Guard {
    _slot: Slot,
    _open: OpenGuard,
    metrics: Metrics,
    link: Arc<Link>,
    settled: bool,
}

impl Guard {
    /// Holds the given things from now on.
    pub fn new(slot: Slot, open: OpenGuard, metrics: Metrics, link: Arc<Link>) -> Self {
        link.busy();
        Self { _slot: slot, _open: open, metrics, link, settled: false }
    }

    /// The connection the answer goes out on.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// The request is answered in full, or its failure is counted elsewhere.
    pub fn settle(&mut self) {
        self.settled = true;
    }

    /// Counts a failure, unless the request is settled.
    pub fn fail(&mut self, reason: Reason) {
        if !self.settled {
            self.settled = true;
            self.metrics.failed(reason);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.fail(match self.link.has_ended() {
            Some(End::Stopped) => Reason::ShuttingDown,
            Some(End::ClientGone) | None => Reason::ClientClosed,
        });
        self.link.done();
    }
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Guard").field("settled", &self.settled).finish_non_exhaustive()
    }
}
