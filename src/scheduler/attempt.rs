//! One attempt: a request goes out, and what its answer says is learned, whether or not its client still waits.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::StatusCode;
use http::request::Parts;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::answer::AnswerBody;
use super::budget::Budget;
use super::coding;
use super::gate::{Permit, Waiting, now};
use super::replay::Kept;
use super::signal::{MIN_RETRY, Signal};
use super::{Dispatched, MAX_REFUSAL_BODY};
use crate::error::{ProxyError, Reason, Scope};
use crate::identity::Kind;
use crate::observe::metrics::RouteMetrics;
use crate::upstream::{Answer, Lease, SendError, Upstream, read_limited};

/// Attempts of one request whose 429s do not say how long to wait.
const MAX_UNTIMED_ATTEMPTS: u32 = 3;
/// From this attempt on each must wait at least twice as long as the one before, whatever Discord says.
const PATIENT_ATTEMPTS: u32 = 4;

/// A request on its way, over all its attempts.
pub(super) struct Outgoing {
    /// Behind a pointer, so that no future that a request passes through keeps room for it.
    pub(super) parts: Box<Parts>,
    pub(super) body: Kept,
    pub(super) deadline: Instant,
    pub(super) request_timeout: Duration,
    pub(super) kind: Kind,
    pub(super) metrics: RouteMetrics,
    /// Attempts made.
    pub(super) attempts: u32,
}

/// A slot of the invalid-request budget; its drop gives it back.
pub(super) struct Reservation {
    budget: Arc<Mutex<Budget>>,
    invalid: bool,
}

/// How an attempt ended.
pub(super) enum Outcome {
    /// With what the client gets.
    Answer(Dispatched),
    /// With a 429 that is tried again once its turn comes.
    Again(Outgoing, Waiting),
    /// Without an answer.
    Failed(ProxyError),
}

impl Reservation {
    /// Reserves a slot, if one is left.
    pub(super) fn take(budget: &Arc<Mutex<Budget>>) -> Option<Self> {
        let reserved = budget.lock().reserve(now());
        reserved.then(|| Self { budget: Arc::clone(budget), invalid: false })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.lock().settle(now(), self.invalid);
    }
}

/// Makes one attempt, which `started` when a connection was wanted, with `permit`, whose turn passes on as soon as the
/// headers have been handled.
pub(super) async fn run(
    upstream: Upstream,
    lease: Lease,
    started: Instant,
    mut outgoing: Outgoing,
    mut permit: Permit,
    mut reservation: Reservation,
) -> Outcome {
    outgoing.attempts += 1;
    let Some(body) = outgoing.body.attempt() else {
        return Outcome::Failed(ProxyError::Unavailable(Reason::RetryPreparation));
    };
    permit.sent();
    let sent = upstream.send(lease, &mut outgoing.parts, body, started);
    let Answer { response, body_deadline, written } = match sent.await {
        Ok(answer) => answer,
        Err(error) => {
            if matches!(error, SendError::Failed { sent: false, .. }) {
                permit.unsent();
            }
            return Outcome::Failed(error.into());
        }
    };
    permit.written(written);
    let deadline = body_deadline.min(outgoing.deadline);
    let signal = Signal::read(response.status(), response.headers());
    let shared = signal.scope == Some(Scope::Shared);
    outgoing.metrics.observe(signal.status, shared, outgoing.kind, started.elapsed().as_secs_f64());
    // The body says what a refusal means.
    let read = signal.refused() || (signal.status == StatusCode::NOT_FOUND && permit.is_webhooks());
    if !read {
        reservation.invalid = signal.invalid();
        drop(reservation);
        _ = permit.answered(&signal, false);
        return Outcome::Answer(Dispatched { response: response.map(AnswerBody::from), deadline });
    }
    if signal.refused() && signal.global {
        permit.blocks();
    }
    let (head, body) = response.into_parts();
    // An upload that still runs moves the attempt's deadline on; the few bytes of a refusal get one REQUEST_TIMEOUT.
    let patience = deadline.min(Instant::now() + outgoing.request_timeout);
    let collected = read_limited(body, MAX_REFUSAL_BODY, patience).await;
    let signal = patient(signal.with_body(&coding::decode(&head.headers, &collected.bytes)), outgoing.attempts);
    reservation.invalid = signal.invalid();
    drop(reservation);
    let hopeless = signal.retry_after.is_none() && outgoing.attempts >= MAX_UNTIMED_ATTEMPTS;
    let retry = signal.refused() && outgoing.body.repeatable() && !hopeless;
    match permit.answered(&signal, retry) {
        Some(Ok(waiting)) => Outcome::Again(outgoing, waiting),
        Some(Err(_)) | None => {
            let response = http::Response::from_parts(head, AnswerBody::from(collected));
            Outcome::Answer(Dispatched { response, deadline })
        }
    }
}

/// Repeated refusals of one request wait longer and longer, so that no answer can make it spin.
fn patient(mut signal: Signal, attempts: u32) -> Signal {
    if attempts >= PATIENT_ATTEMPTS {
        let floor = MIN_RETRY * (1 << (attempts - PATIENT_ATTEMPTS).min(10));
        signal.retry_after = signal.retry_after.map(|wait| wait.max(floor.min(Duration::from_secs(30))));
    }
    signal
}

/// An attempt that goes on to its headers when its client leaves: what Discord counts must be learned.
pub(super) struct RunOn(pub(super) Option<Pin<Box<dyn Future<Output = Outcome> + Send>>>);

impl Future for RunOn {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let Some(attempt) = &mut self.0 else { return Poll::Pending };
        let outcome = attempt.as_mut().poll(cx);
        if outcome.is_ready() {
            self.0 = None;
        }
        outcome
    }
}

impl Drop for RunOn {
    fn drop(&mut self) {
        if let Some(attempt) = self.0.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move { drop(attempt.await) });
        }
    }
}
