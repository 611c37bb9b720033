//! Dispatch: one request through its bucket and its credential's limits to Discord and back, within one deadline.

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use self::answer::AnswerBody;
use self::attempt::{Outcome, Outgoing, Reservation, RunOn};
use self::budget::Budget;
use self::client::Ask;
use self::clients::{Clients, Departing};
use self::gate::{Pass, Turn};
use self::handover::Handover;
use self::replay::{Kept, Vault};
use crate::config::Scheduling;
use crate::error::{ProxyError, Reason};
use crate::front::headers;
use crate::identity::Identity;
use crate::inbound::Inbound;
use crate::observe::metrics::RouteMetrics;
use crate::upstream::{RequestBody, Upstream};

pub mod answer;
mod attempt;
pub mod bucket;
pub mod budget;
pub mod client;
pub mod clients;
pub mod coding;
pub mod detail;
pub mod gate;
pub mod handover;
pub mod key;
pub mod line;
pub mod pacer;
pub mod profile;
pub mod replay;
pub mod room;
pub mod routes;
pub mod signal;

/// A 429's body is read up to here: for its `retry_after`, and so that its connection can be used again.
const MAX_REFUSAL_BODY: usize = 64 * 1024;
/// How often idle state is looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(30);

/// The scheduler of a node. Cheap to clone.
#[derive(Clone)]
pub struct Scheduler {
    shared: Arc<Shared>,
}

struct Shared {
    upstream: Upstream,
    clients: Clients,
    budget: Arc<Mutex<Budget>>,
    vault: Vault,
    queue_timeout: Duration,
    request_timeout: Duration,
}

/// Discord's answer.
#[derive(Debug)]
pub struct Dispatched {
    /// Its head and its streaming body.
    pub response: Response<AnswerBody>,
    /// Past it the body is aborted.
    pub deadline: Instant,
}

/// What a request wants.
pub struct Want {
    /// Its turn.
    pub ask: Ask,
    /// Whether its body is looked into: it edits a channel.
    pub channel_edit: bool,
    /// By then.
    pub deadline: Instant,
}

/// What became of a request.
pub enum Fate {
    /// Discord answered.
    Answered(Dispatched),
    /// Its credential has got another owner while it waited: nothing of it has been done that counts.
    Moved(Box<Moved>),
}

/// A request that another owner is to bring to Discord.
pub struct Moved {
    outgoing: Outgoing,
    ask: Ask,
}

impl Moved {
    /// The request as it came in; none if its body cannot be had again.
    pub fn into_request(mut self) -> Option<Request<RequestBody>> {
        let body = self.outgoing.body.attempt()?;
        Some(Request::from_parts(*self.outgoing.parts, body))
    }
}

impl Scheduler {
    /// Starts with nothing known.
    pub fn new(config: &Scheduling, upstream: Upstream) -> Self {
        let budget = Budget::new(config.invalid_request_limit, config.invalid_request_window);
        let shared = Shared {
            upstream,
            clients: Clients::new(config),
            budget: Arc::new(Mutex::new(budget)),
            vault: Vault::new(config.max_retry_body_bytes, config.max_retry_capture_bytes),
            queue_timeout: config.queue_timeout,
            request_timeout: config.request_timeout,
        };
        Self { shared: Arc::new(shared) }
    }

    /// The end of QUEUE_TIMEOUT for a request that arrives now.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.shared.queue_timeout
    }

    /// Brings a request, whose headers are final, to Discord when its turn comes, and the answer back, unless its
    /// credential gets another owner first. Dropping the future frees its place; an attempt that was sent still runs to
    /// its headers.
    pub fn dispatch<'a>(
        &'a self,
        mut parts: Box<Parts>,
        body: Inbound,
        identity: &'a Identity,
        want: Want,
        metrics: RouteMetrics,
    ) -> impl Future<Output = Result<Fate, ProxyError>> + Send + 'a {
        // Taken apart before there is a future, which would hold it whole besides.
        let Want { mut ask, channel_edit, deadline } = want;
        async move {
            let shared = &*self.shared;
            if !shared.budget.lock().has_room(gate::now()) {
                return Err(ProxyError::Unavailable(Reason::InvalidRequestBudget));
            }
            let gate = shared.clients.gate(identity, ask.interaction)?;
            let body = if body.is_end_stream() {
                Kept::empty()
            } else {
                // Before its body is taken: what is refused anyway needs no room.
                gate.with(|client| client.foresee(gate::now(), &ask, deadline.into_std()))?;
                let taken = timeout_at(deadline, shared.take(body, &mut parts, &mut ask, channel_edit));
                // On the heap, so that requests without a body keep no room for it.
                Box::pin(taken).await.map_err(|_| ProxyError::QueueTimeout)??
            };
            let pass = match shared.clients.enter(&gate, ask, deadline.into_std())? {
                Turn::Has(permit) => Pass::Go(permit),
                Turn::Waits(waiting) => waiting.await?,
            };
            let outgoing = Outgoing {
                parts,
                body,
                deadline,
                request_timeout: shared.request_timeout,
                kind: identity.kind,
                metrics,
                attempts: 0,
            };
            self.attempt(outgoing, pass).await
        }
    }

    /// Brings a request to Discord that [`Scheduler::dispatch`] gave back: this node is its owner after all.
    pub async fn resume(&self, moved: Box<Moved>, identity: &Identity) -> Result<Fate, ProxyError> {
        let Moved { outgoing, ask } = *moved;
        let gate = self.shared.clients.gate(identity, ask.interaction)?;
        let pass = match self.shared.clients.enter(&gate, ask, outgoing.deadline.into_std())? {
            Turn::Has(permit) => Pass::Go(permit),
            Turn::Waits(waiting) => waiting.await?,
        };
        self.attempt(outgoing, pass).await
    }

    /// Attempts for as long as it may.
    fn attempt(&self, mut outgoing: Outgoing, mut pass: Pass) -> impl Future<Output = Result<Fate, ProxyError>> + Send {
        let (shared, deadline) = (&*self.shared, outgoing.deadline);
        // An upload renews REQUEST_TIMEOUT with its progress.
        let uploads = !outgoing.body.is_empty();
        async move {
            loop {
                let permit = match pass {
                    Pass::Go(permit) => permit,
                    Pass::Move(ask) => return Ok(Fate::Moved(Box::new(Moved { outgoing, ask }))),
                };
                let Some(reservation) = Reservation::take(&shared.budget) else {
                    return Err(ProxyError::Unavailable(Reason::InvalidRequestBudget));
                };
                let started = Instant::now();
                let lease = match shared.upstream.at_rest() {
                    Some(lease) => lease,
                    // Whoever leaves while there is no connection has sent nothing. On the heap, because it is rare.
                    None => {
                        let connecting = timeout_at(deadline, shared.upstream.connect());
                        Box::pin(connecting).await.map_err(|_| ProxyError::QueueTimeout)??
                    }
                };
                let attempt = attempt::run(shared.upstream.clone(), lease, started, outgoing, permit, reservation);
                let attempt = RunOn(Some(Box::pin(attempt)));
                // An attempt that its own REQUEST_TIMEOUT ends before the deadline needs no second timer.
                let outcome = if !uploads && Instant::now() + shared.request_timeout <= deadline {
                    attempt.await
                } else {
                    timeout_at(deadline, attempt).await.map_err(|_| ProxyError::QueueTimeout)?
                };
                match outcome {
                    Outcome::Answer(dispatched) => return Ok(Fate::Answered(dispatched)),
                    Outcome::Failed(error) => return Err(error),
                    Outcome::Again(again, waiting) => {
                        outgoing = again;
                        pass = waiting.await?;
                    }
                }
            }
        }
    }

    /// Credentials have just changed their owners, `gained` are now this node's: what they sent in the last second is not
    /// known here, so that they start evenly.
    pub fn moved(&self, gained: impl Fn(&[u8; 32]) -> bool) {
        self.shared.clients.moved(gained);
    }

    /// Somebody else may have used credentials that are new here until now.
    pub fn doubt(&self) {
        self.moved(|_| false);
    }

    /// Lets the credentials go that are `lost` to other owners, see [`Clients::release`].
    pub fn release(&self, lost: impl Fn(&[u8; 32]) -> bool) -> Departing {
        self.shared.clients.release(lost)
    }

    /// How long ago each invalid request of the budget's window was.
    pub fn invalid_requests(&self) -> Vec<Duration> {
        self.shared.budget.lock().history(gate::now())
    }

    /// Takes over what a former owner knew.
    pub fn unpack(&self, handover: &Handover) {
        self.shared.budget.lock().add(gate::now(), &handover.invalid);
        for credential in &handover.credentials {
            self.shared.clients.unpack(credential);
        }
    }

    /// Drops what nobody uses any more, for as long as it is polled.
    pub async fn sweep(&self) {
        let mut every = tokio::time::interval(SWEEP_EVERY);
        loop {
            every.tick().await;
            self.shared.clients.sweep();
        }
    }

    /// Whether no request waits, is in flight, or holds a slot of the invalid-request budget.
    pub fn is_quiet(&self) -> bool {
        self.shared.clients.is_quiet() && self.shared.budget.lock().reserved() == 0 && self.shared.vault.used() == 0
    }

    /// Checks at the start what a request may need later.
    pub fn check(&self) -> Result<(), String> {
        self.shared.vault.check()
    }
}

impl Shared {
    /// Takes a request's body, and looks into it where that decides something: whether it has any bytes if its length is
    /// not known, and what a channel edit edits.
    async fn take(
        &self,
        body: Inbound,
        parts: &mut Parts,
        ask: &mut Ask,
        channel_edit: bool,
    ) -> Result<Kept, ProxyError> {
        let declared = body.size_hint().exact();
        let mut kept = self.vault.keep(body, declared).await?;
        if declared.is_none() && kept.peek(0).await.is_some() {
            headers::end_at_head(parts);
            return Ok(Kept::empty());
        }
        if let Some(error) = kept.broken() {
            return Err(error.into());
        }
        if channel_edit
            && detail::readable(&parts.headers)
            && let Some(body) = kept.peek(detail::MAX_BODY).await
        {
            ask.detail = detail::of_channel_edit(&body);
        }
        Ok(kept)
    }
}
