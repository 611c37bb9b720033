//! Waiting for one's turn, and having it: futures and guards around a [`Client`]. A drop is the whole clean-up.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use parking_lot::Mutex;
use tokio::time::{Sleep, sleep_until};

use super::client::{Ask, Client, Entered, Grant, Step};
use super::line::Ticket;
use super::signal::Signal;
use crate::error::ProxyError;

/// One credential's state behind its lock, held for a decision and never across an await.
#[derive(Debug)]
pub struct Gate {
    client: Mutex<Client>,
    bot_id: Option<u64>,
}

/// A request in its gate.
pub enum Turn {
    /// It may be sent.
    Has(Permit),
    /// It waits.
    Waits(Waiting),
}

/// How a wait ended.
pub enum Pass {
    /// It may be sent.
    Go(Permit),
    /// Its credential has got another owner, where it is to ask for this.
    Move(Ask),
}

/// A place in line. Dropping it leaves the line.
pub struct Waiting {
    gate: Arc<Gate>,
    ticket: Option<Ticket>,
    deadline: Instant,
    sleep: Option<Pin<Box<Sleep>>>,
}

/// A request's permission to be sent. Dropped without an answer it counts, once it was sent, as one that Discord may have
/// seen.
pub struct Permit {
    gate: Arc<Gate>,
    grant: Option<Grant>,
    sent: bool,
}

/// The instant that cores are given; under a paused clock, the paused one.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Gate {
    /// Around a client.
    pub fn new(client: Client) -> Arc<Self> {
        Self::of_bot(client, None)
    }

    /// Around the client of a bot.
    pub fn of_bot(client: Client, bot_id: Option<u64>) -> Arc<Self> {
        Arc::new(Self { client: Mutex::new(client), bot_id })
    }

    /// The bot's user ID, if that is known: overrides of the global limit go by it.
    pub fn bot_id(&self) -> Option<u64> {
        self.bot_id
    }

    /// Runs a decision under the lock and, after it, wakes whom it concerns.
    pub fn with<T>(&self, decide: impl FnOnce(&mut Client) -> T) -> T {
        let mut client = self.client.lock();
        let result = decide(&mut client);
        let wakes = client.take_wakes();
        drop(client);
        for waker in wakes {
            waker.wake();
        }
        result
    }

    /// A request arrives.
    pub fn enter(self: &Arc<Self>, ask: Ask, deadline: Instant) -> Result<Turn, ProxyError> {
        Ok(match self.with(|client| client.enter(now(), ask, deadline))? {
            Entered::Go(grant) => Turn::Has(Permit::new(self, grant)),
            Entered::Waits(ticket) => Turn::Waits(self.waiting(ticket, deadline)),
        })
    }

    fn waiting(self: &Arc<Self>, ticket: Ticket, deadline: Instant) -> Waiting {
        Waiting { gate: Arc::clone(self), ticket: Some(ticket), deadline, sleep: None }
    }
}

impl Future for Waiting {
    type Output = Result<Pass, ProxyError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            let Some(ticket) = this.ticket else { return Poll::Pending };
            let at = match this.gate.with(|client| client.poll(now(), ticket, cx.waker())) {
                Step::Go(grant) => {
                    this.ticket = None;
                    return Poll::Ready(Ok(Pass::Go(Permit::new(&this.gate, grant))));
                }
                Step::Move(ask) => {
                    this.ticket = None;
                    return Poll::Ready(Ok(Pass::Move(ask)));
                }
                Step::Refuse(error) => {
                    this.ticket = None;
                    return Poll::Ready(Err(error));
                }
                // Whoever is ahead may stay there until after this one's deadline.
                Step::Wait => this.deadline,
                Step::At(at) => at,
            };
            let at = at.into();
            let sleep = match &mut this.sleep {
                Some(sleep) => {
                    if sleep.deadline() != at {
                        sleep.as_mut().reset(at);
                    }
                    sleep
                }
                none => none.insert(Box::pin(sleep_until(at))),
            };
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.gate.with(|client| client.leave(now(), ticket));
        }
    }
}

impl Permit {
    fn new(gate: &Arc<Gate>, grant: Grant) -> Self {
        Self { gate: Arc::clone(gate), grant: Some(grant), sent: false }
    }

    /// Discord answered: learns from it and passes the turn on. With `retry`, the request takes its place in line again
    /// (at its head), unless the wait leaves no room for another attempt: then the error says so.
    pub fn answered(mut self, signal: &Signal, retry: bool) -> Option<Result<Waiting, ProxyError>> {
        let grant = self.grant.take()?;
        let again = self.gate.with(|client| client.answered(now(), &grant, signal, retry));
        again.map(|again| again.map(|ticket| self.gate.waiting(ticket, grant.deadline)))
    }

    /// A global 429 has come, and its body is to be read: nothing else goes out until this is answered or dropped.
    pub fn blocks(&mut self) {
        if let Some(grant) = &mut self.grant {
            self.gate.with(|client| client.blocks(grant));
        }
    }

    /// Whether a 404 may say that the request's webhook is gone.
    pub fn is_webhooks(&self) -> bool {
        self.grant.as_ref().is_some_and(|grant| grant.ask.path_token && !grant.ask.interaction)
    }

    /// When the request left; unknown if it had to wait for its connection after the permit was given.
    pub fn written(&mut self, at: Option<tokio::time::Instant>) {
        if let Some(grant) = &mut self.grant {
            grant.written = at.map(tokio::time::Instant::into_std);
        }
    }

    /// The request is about to be sent.
    pub fn sent(&mut self) {
        self.sent = true;
    }

    /// Gives the permit back: nothing was sent after all.
    pub fn unsent(mut self) {
        self.sent = false;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(grant) = self.grant.take() {
            self.gate.with(|client| match self.sent {
                true => client.unanswered(now(), &grant),
                false => client.unsent(now(), &grant),
            });
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").finish_non_exhaustive()
    }
}
