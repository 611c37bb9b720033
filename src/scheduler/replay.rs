//! Keeping a body while it is first sent, so that a 429 can be answered by sending it again.
//!
//! A body is a log that grows at its end as the client's bytes come in, and that each attempt reads from its start.
//! What an attempt finds missing it pulls from the client, so a first attempt answered before the client was through
//! is repeated whole: the log first, then the client's remainder. A log of known length stays in memory if the share of
//! memory has room for all of it; of any other up to [`MEMORY_PER_BODY`] do, and what is beyond goes to an unlinked
//! temporary file; no more is read from the client while a write is under way.
//! A body that is not kept is the same log, forgetting what was read.

use std::fmt;
use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, SizeHint};
use parking_lot::Mutex;

use self::store::Store;
use crate::error::{ProxyError, Reason};
use crate::upstream::{BodyError, RequestBody};

mod spill;
mod store;
#[cfg(test)]
mod tests;

/// Bytes of one body kept in memory whatever the others take; beyond it a file takes them, unless the share has room.
pub const MEMORY_PER_BODY: usize = 256 * 1024;
/// This part of the room may be taken by bodies that stay in memory although they are larger: writing a file and waiting
/// for it would cost an upload half its speed.
const MEMORY_SHARE: u64 = 8;

/// The room for kept bodies in this process. Cheap to clone.
#[derive(Clone)]
pub struct Vault {
    room: Arc<Room>,
    max_body: u64,
}

/// What all bodies of the process share.
struct Room {
    folder: PathBuf,
    max_total: u64,
    used: AtomicU64,
    /// Taken of the share of memory.
    shared: AtomicU64,
    in_memory: AtomicU64,
}

/// A part of the room; its drop gives it back.
struct Reservation {
    room: Arc<Room>,
    bytes: u64,
    /// Of the share of memory.
    shared: u64,
}

impl Vault {
    /// Room for bodies of up to `max_body` bytes each and `max_total` together; a `max_total` of 0 keeps none.
    pub fn new(max_body: u64, max_total: u64) -> Self {
        Self::in_folder(std::env::temp_dir(), max_body, max_total)
    }

    fn in_folder(folder: PathBuf, max_body: u64, max_total: u64) -> Self {
        let [used, shared, in_memory] = std::array::from_fn(|_| AtomicU64::new(0));
        let room = Room { folder, max_total, used, shared, in_memory };
        Self { room: Arc::new(room), max_body }
    }

    /// Checks at the start that the spill folder can be written to. Needless when no body can be large enough.
    pub fn check(&self) -> Result<(), String> {
        if self.max_body.min(self.room.max_total) <= MEMORY_PER_BODY as u64 {
            return Ok(());
        }
        spill::check(&self.room.folder)
    }

    /// Takes a body of `declared` bytes, if the client said how many, and keeps it if the settings allow.
    ///
    /// Fails before anything is read: [`Reason::RetryCaptureLimit`] when a declared length does not fit the room that
    /// is left, [`Reason::RetryPreparation`] when no temporary file can be made for it.
    pub async fn keep<B>(&self, body: B, declared: Option<u64>) -> Result<Kept, ProxyError>
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
    {
        let declared = declared.or_else(|| body.size_hint().exact());
        if declared == Some(0) || body.is_end_stream() {
            return Ok(Kept::empty());
        }
        let keeping = self.room.max_total > 0 && declared.unwrap_or(1) <= self.max_body;
        let mut reservation = Reservation { room: Arc::clone(&self.room), bytes: 0, shared: 0 };
        let (mut file, mut memory) = (None, MEMORY_PER_BODY as u64);
        if let Some(length) = declared.filter(|_| keeping) {
            if !reservation.grow(length) {
                return Err(ProxyError::Unavailable(Reason::RetryCaptureLimit));
            }
            if length > memory && reservation.stay_in_memory(length) {
                memory = length;
            }
            if length > memory {
                let made = spill::create(&self.room.folder)
                    .await
                    .map_err(|_| ProxyError::Unavailable(Reason::RetryPreparation))?;
                file = Some(Arc::new(made));
            }
        }
        let limit = keeping.then_some(self.max_body);
        let store = Store::new(store::source(body), declared, limit, memory, reservation, file);
        Ok(Kept { shared: Some(Arc::new(Mutex::new(store))) })
    }

    /// Bytes reserved for kept bodies.
    pub fn used(&self) -> u64 {
        self.room.used.load(Ordering::Relaxed)
    }

    /// Bytes of bodies held in memory, kept or not.
    pub fn in_memory(&self) -> u64 {
        self.room.in_memory.load(Ordering::Relaxed)
    }
}

impl Reservation {
    /// Takes `bytes` more; false, and nothing taken, when there is no room.
    fn grow(&mut self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.room.max_total);
        let taken = self.room.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        if taken {
            self.bytes += bytes;
        }
        taken
    }

    /// Takes `bytes` of the share of memory; false, and nothing taken, when there is no room.
    fn stay_in_memory(&mut self, bytes: u64) -> bool {
        let share = self.room.max_total / MEMORY_SHARE;
        let fits = |shared: u64| shared.checked_add(bytes).filter(|sum| *sum <= share);
        let taken = self.room.shared.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        if taken {
            self.shared += bytes;
        }
        taken
    }

    /// Gives everything back.
    fn clear(&mut self) {
        self.room.shared.fetch_sub(std::mem::take(&mut self.shared), Ordering::Relaxed);
        self.room.used.fetch_sub(std::mem::take(&mut self.bytes), Ordering::Relaxed);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A request's body, over all its attempts. Its drop releases what is kept.
pub struct Kept {
    /// `None` for a request without a body.
    shared: Option<Arc<Mutex<Store>>>,
}

impl Kept {
    /// The body of a request that has none; it can always be repeated.
    pub fn empty() -> Self {
        Self { shared: None }
    }

    /// Whether it is known to have no bytes.
    pub fn is_empty(&self) -> bool {
        self.shared.is_none()
    }

    /// The body for the next attempt; it ends the one before, if that still runs. `None` when it cannot be repeated.
    pub fn attempt(&mut self) -> Option<RequestBody> {
        let Some(shared) = &self.shared else { return Some(RequestBody::empty()) };
        let (number, waker) = shared.lock().begin()?;
        if let Some(waker) = waker {
            waker.wake();
        }
        let cursor = Cursor { shared: Arc::clone(shared), attempt: number, reading: None };
        Some(RequestBody::kept(cursor))
    }

    /// Whether another attempt could send the whole body, as far as is known.
    pub fn repeatable(&self) -> bool {
        self.shared.as_ref().is_none_or(|shared| shared.lock().repeatable())
    }

    /// Why it cannot be sent whole, if that is known.
    pub fn broken(&self) -> Option<BodyError> {
        self.shared.as_ref().and_then(|shared| shared.lock().broken())
    }

    /// Frees what is kept: no attempt follows. One that is still sending goes on to its end.
    pub fn release(&mut self) {
        if let Some(shared) = &self.shared {
            shared.lock().stop_keeping();
        }
    }

    /// Reads a body of at most `limit` bytes whole, before the first attempt. `None` if it is larger or broken; what
    /// was read is sent all the same.
    pub async fn peek(&mut self, limit: usize) -> Option<Bytes> {
        let Some(shared) = &self.shared else { return Some(Bytes::new()) };
        let whole = poll_fn(|cx| shared.lock().poll_peek(cx, limit)).await;
        whole.then(|| shared.lock().front())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.release();
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("repeatable", &self.repeatable()).finish_non_exhaustive()
    }
}

/// One attempt's place in a kept body.
pub(crate) struct Cursor {
    shared: Arc<Mutex<Store>>,
    attempt: u64,
    reading: Option<spill::Reading>,
}

impl Cursor {
    /// The next bytes; `None` at the end.
    pub(crate) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BodyError>>> {
        self.shared.lock().poll_data(cx, self.attempt, &mut self.reading)
    }

    /// Whether everything was read.
    pub(crate) fn is_end(&self) -> bool {
        self.shared.lock().is_end(self.attempt)
    }

    /// What is left to read: exact once the length is known.
    pub(crate) fn size_hint(&self) -> SizeHint {
        self.shared.lock().size_hint(self.attempt)
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        self.shared.lock().end(self.attempt);
    }
}
