//! Who gets in: the in-flight slots of the process, and its way from serving to stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, watch};

use crate::error::{ProxyError, Reason};

/// How far the daemon is on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Requests are admitted.
    Serving,
    /// Health answers 503, new requests are refused, admitted ones go on.
    Draining,
    /// What is left is answered with 503 or aborted.
    Stopping,
}

/// The slots and the phase, shared by every listener. Clones are the same thing.
#[derive(Clone, Debug)]
pub struct Admission {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    max_in_flight: usize,
    in_flight: AtomicUsize,
    emptied: Notify,
    phase: watch::Sender<Phase>,
}

/// One admitted request. Held until its response has been streamed or its client is gone.
#[derive(Debug)]
pub struct Slot {
    shared: Arc<Shared>,
}

impl Admission {
    /// Admits up to MAX_IN_FLIGHT_REQUESTS at once.
    pub fn new(max_in_flight: usize) -> Self {
        let (phase, _) = watch::channel(Phase::Serving);
        let (in_flight, emptied) = (AtomicUsize::new(0), Notify::new());
        Self { shared: Arc::new(Shared { max_in_flight, in_flight, emptied, phase }) }
    }

    /// The phase now.
    pub fn phase(&self) -> Phase {
        *self.shared.phase.borrow()
    }

    /// Moves on to a later phase; never back.
    pub fn advance(&self, to: Phase) {
        self.shared.phase.send_if_modified(|phase| {
            let later = to > *phase;
            *phase = to.max(*phase);
            later
        });
    }

    /// Follows the phase, as every connection does. The daemon waits for the last follower before it stops.
    pub fn follow(&self) -> watch::Receiver<Phase> {
        self.shared.phase.subscribe()
    }

    /// Waits until nobody follows any more: every connection is closed.
    pub async fn unfollowed(&self) {
        self.shared.phase.closed().await;
    }

    /// Takes a slot.
    ///
    /// # Errors
    ///
    /// 503 while draining and when every slot is taken.
    pub fn admit(&self) -> Result<Slot, ProxyError> {
        self.admit_until(Phase::Serving)
    }

    /// Takes a slot for what a peer sends here: also while draining, since peers go on until they have heard of it.
    ///
    /// # Errors
    ///
    /// 503 while stopping and when every slot is taken.
    pub fn admit_hop(&self) -> Result<Slot, ProxyError> {
        self.admit_until(Phase::Draining)
    }

    fn admit_until(&self, last: Phase) -> Result<Slot, ProxyError> {
        let before = self.shared.in_flight.fetch_add(1, Ordering::AcqRel);
        let slot = Slot { shared: Arc::clone(&self.shared) };
        // The phase is read after the slot is taken: a drain that began earlier is seen here, one that begins later
        // counts this request in.
        if self.phase() > last {
            return Err(ProxyError::Unavailable(Reason::ShuttingDown));
        }
        if before >= self.shared.max_in_flight {
            return Err(ProxyError::Unavailable(Reason::InFlightLimit));
        }
        Ok(slot)
    }

    /// Requests that hold a slot.
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::Acquire)
    }

    /// Waits until no request holds a slot.
    pub async fn emptied(&self) {
        loop {
            // Created before the look, so that a slot given back in between is not missed.
            let emptied = self.shared.emptied.notified();
            if self.in_flight() == 0 {
                return;
            }
            emptied.await;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.shared.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.emptied.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_beyond_the_limit_is_refused_until_one_is_given_back() {
        let admission = Admission::new(2);
        let first = admission.admit().unwrap();
        let _second = admission.admit().unwrap();
        assert_eq!(admission.admit().unwrap_err(), ProxyError::Unavailable(Reason::InFlightLimit));
        assert_eq!(admission.in_flight(), 2, "a refusal takes no slot");
        drop(first);
        assert!(admission.admit().is_ok());
    }

    #[test]
    fn nobody_is_admitted_once_the_drain_began_and_the_phase_never_goes_back() {
        let admission = Admission::new(1);
        admission.advance(Phase::Stopping);
        admission.advance(Phase::Draining);
        assert_eq!(admission.phase(), Phase::Stopping);
        assert_eq!(admission.admit().unwrap_err(), ProxyError::Unavailable(Reason::ShuttingDown));
        assert_eq!(admission.in_flight(), 0);
    }

    #[test]
    fn a_draining_node_still_takes_what_peers_send() {
        let admission = Admission::new(1);
        admission.advance(Phase::Draining);
        assert!(admission.admit().is_err());
        drop(admission.admit_hop().unwrap());
        admission.advance(Phase::Stopping);
        assert_eq!(admission.admit_hop().unwrap_err(), ProxyError::Unavailable(Reason::ShuttingDown));
    }

    #[tokio::test]
    async fn the_last_slot_given_back_wakes_who_waits_for_it() {
        let admission = Admission::new(2);
        let slot = admission.admit().unwrap();
        let waiting = tokio::spawn({
            let admission = admission.clone();
            async move { admission.emptied().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(slot);
        tokio::time::timeout(std::time::Duration::from_secs(5), waiting).await.unwrap().unwrap();
    }
}
