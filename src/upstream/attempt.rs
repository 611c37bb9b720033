//! The clock of one attempt: REQUEST_TIMEOUT, started anew by each 64 KiB of a request body and by its end.
//!
//! A request without a body has one deadline and one timer. An upload moves its deadline as it gets on; the one timer
//! looks at it when it fires, so that progress costs no timer.

use std::error::Error;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use super::body::{BodyError, RequestBody};
use super::{SendError, failure};

/// The progress that starts the clock anew.
const PROGRESS_BYTES: u64 = 64 * 1024;

/// Further away than any deadline of a request.
const UNKNOWN: Duration = Duration::from_secs(48 * 60 * 60);

/// What is known of an upload; shared by the attempt and the body that hyper reads.
pub(super) struct Upload {
    state: Mutex<State>,
}

struct State {
    /// When the clock was last started.
    since: Instant,
    sent: u64,
    /// `sent` at that time.
    marked: u64,
    ended: bool,
    broke: Option<BodyError>,
    /// Set when nobody waits for this upload any more.
    stalled: bool,
    waker: Option<Waker>,
}

impl Upload {
    /// An upload that begins now.
    pub(super) fn start() -> Self {
        let state =
            State { since: Instant::now(), sent: 0, marked: 0, ended: false, broke: None, stalled: false, waker: None };
        Self { state: Mutex::new(state) }
    }

    /// Called before the body is read on: fails once the upload has been given up.
    pub(super) fn permit(&self, cx: &Context<'_>) -> Result<(), BodyError> {
        let mut state = self.state.lock();
        if state.stalled {
            return Err(BodyError::Over("the upload made no progress within REQUEST_TIMEOUT"));
        }
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            state.waker = Some(cx.waker().clone());
        }
        Ok(())
    }

    /// Called with each piece of the body that goes out.
    pub(super) fn progress(&self, bytes: usize, end: bool) {
        let mut state = self.state.lock();
        state.sent = state.sent.saturating_add(bytes as u64);
        if state.ended {
            return;
        }
        if end || state.sent - state.marked >= PROGRESS_BYTES {
            state.marked = state.sent;
            state.since = Instant::now();
            state.ended = end;
        }
        if end {
            state.waker = None;
        }
    }

    /// Called when the body cannot be read to its end.
    pub(super) fn broke(&self, error: BodyError) {
        let mut state = self.state.lock();
        state.broke = Some(error);
        state.waker = None;
    }

    fn over(&self) -> bool {
        let state = self.state.lock();
        state.ended || state.broke.is_some()
    }

    fn since(&self) -> Instant {
        self.state.lock().since
    }

    fn give_up(&self) {
        let waker = {
            let mut state = self.state.lock();
            state.stalled = true;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The clock of one attempt.
pub(super) struct Clock {
    timeout: Duration,
    started: Instant,
    upload: Option<Arc<Upload>>,
}

impl Clock {
    /// Starts the clock `now` and has it follow `body`.
    pub(super) fn start(timeout: Duration, body: &mut RequestBody, now: Instant) -> Self {
        Self { timeout, started: now, upload: body.watch() }
    }

    /// Whether an upload moves its deadline.
    pub(super) fn follows_upload(&self) -> bool {
        self.upload.is_some()
    }

    /// Waits for `work` as long as the clock allows.
    pub(super) async fn bound<F: Future>(&self, work: F) -> Result<F::Output, SendError> {
        let mut work = pin!(work);
        let mut timer = pin!(sleep_until(self.deadline()));
        loop {
            tokio::select! {
                biased;
                output = &mut work => return Ok(output),
                () = &mut timer => {
                    let deadline = self.deadline();
                    if deadline <= Instant::now() {
                        return Err(SendError::Timeout);
                    }
                    timer.as_mut().reset(deadline);
                }
            }
        }
    }

    /// Says when the response's body has to be there. When the answer came early and the upload still runs, that is not
    /// known yet: the upload stays bounded by its progress, and its connection with it.
    pub(super) fn answered(self) -> Instant {
        if let Some(upload) = &self.upload
            && !upload.over()
        {
            let (upload, timeout) = (Arc::downgrade(upload), self.timeout);
            // ends with the upload, which is dropped with its connection
            drop(tokio::spawn(async move {
                while let Some(running) = upload.upgrade().filter(|upload| !upload.over()) {
                    let deadline = running.since() + timeout;
                    if deadline <= Instant::now() {
                        running.give_up();
                        return;
                    }
                    drop(running);
                    sleep_until(deadline).await;
                }
            }));
            return Instant::now() + UNKNOWN;
        }
        self.deadline()
    }

    /// Turns the client's error into ours. A body that broke is the better explanation.
    pub(super) fn explain(&self, error: &(dyn Error + 'static)) -> SendError {
        let broke = self.upload.as_ref().and_then(|upload| upload.state.lock().broke);
        broke.map_or_else(|| failure::of(error), SendError::Body)
    }

    /// When it ends, as far as is known now.
    pub(super) fn deadline(&self) -> Instant {
        self.upload.as_ref().map_or(self.started, |upload| upload.since()) + self.timeout
    }
}
