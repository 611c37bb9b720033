//! The log of one body: a file first, then memory, then what the client has yet to send.

use std::collections::VecDeque;
use std::fs::File;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use http_body::{Body, SizeHint};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;

use super::Reservation;
use super::spill::{self, Reading, Writing};
use crate::inbound::BrokenOff;
use crate::upstream::BodyError;

/// The largest piece an attempt gets at once: the progress that its clock counts in.
const PIECE: usize = 64 * 1024;
/// Smaller pieces from the client are copied together: each on its own may pin a whole read buffer.
const SMALL: usize = 4 * 1024;

/// What the client sends, whatever it came in.
pub(super) type Source = UnsyncBoxBody<Bytes, BodyError>;

/// Makes any body a source. A client's error says nothing but that it broke off.
pub(super) fn source<B>(body: B) -> Source
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    body.map_err(|_| BodyError::Client(BrokenOff::OF_REQUEST)).boxed_unsync()
}

/// The log, and the attempt that reads it.
pub(super) struct Store {
    source: Option<Source>,
    declared: Option<u64>,
    /// Set when the client's body cannot be had whole.
    broken: Option<BodyError>,
    /// The largest body kept; `None` once this one is not kept (any more).
    limit: Option<u64>,
    /// What stays in memory before a file takes it.
    memory: u64,
    reservation: Reservation,
    file: Option<Arc<File>>,
    /// Bytes of the log in the file.
    in_file: u64,
    /// A write of the log in memory to the file; nothing else happens until it is through.
    writing: Option<Writing>,
    chunks: VecDeque<Bytes>,
    /// The log's end, when it is a gathering of small pieces.
    small: BytesMut,
    /// Where the log in memory starts: the file's end, or what was forgotten.
    memory_start: u64,
    /// The log's length.
    length: u64,
    /// The running attempt; 0 before the first.
    attempt: u64,
    /// How far it has read; `None` when it is over.
    position: Option<u64>,
    waker: Option<Waker>,
}

impl Store {
    /// An empty log; `limit` is the largest body to keep, `None` for one that is not kept.
    pub(super) fn new(
        source: Source,
        declared: Option<u64>,
        limit: Option<u64>,
        memory: u64,
        reservation: Reservation,
        file: Option<Arc<File>>,
    ) -> Self {
        Self {
            source: Some(source),
            declared,
            broken: None,
            limit,
            memory,
            reservation,
            file,
            in_file: 0,
            writing: None,
            chunks: VecDeque::new(),
            small: BytesMut::new(),
            memory_start: 0,
            length: 0,
            attempt: 0,
            position: Some(0),
            waker: None,
        }
    }

    /// Starts an attempt, ending the one before; gives its number, and whom to wake of the one before.
    pub(super) fn begin(&mut self) -> Option<(u64, Option<Waker>)> {
        if self.attempt > 0 && !self.repeatable() {
            return None;
        }
        self.attempt += 1;
        self.position = Some(0);
        Some((self.attempt, self.waker.take()))
    }

    /// Ends an attempt, unless another has taken its place.
    pub(super) fn end(&mut self, attempt: u64) {
        if attempt == self.attempt {
            self.position = None;
            self.waker = None;
            if self.limit.is_none() {
                self.forget(self.length);
            }
        }
    }

    pub(super) fn repeatable(&self) -> bool {
        self.limit.is_some() && self.broken.is_none()
    }

    /// Why it cannot be had whole, if that is known.
    pub(super) fn broken(&self) -> Option<BodyError> {
        self.broken
    }

    /// Keeps nothing from here on. What the running attempt has not read yet goes as it is read.
    pub(super) fn stop_keeping(&mut self) {
        self.limit = None;
        self.forget(self.position.unwrap_or(self.length));
    }

    pub(super) fn is_end(&self, attempt: u64) -> bool {
        attempt == self.attempt && self.source.is_none() && self.broken.is_none() && self.position == Some(self.length)
    }

    pub(super) fn size_hint(&self, attempt: u64) -> SizeHint {
        let position = self.position.filter(|_| attempt == self.attempt).unwrap_or(0);
        if let Some(declared) = self.declared {
            return SizeHint::with_exact(declared.saturating_sub(position));
        }
        let there = self.length.saturating_sub(position);
        if self.source.is_none() && self.broken.is_none() {
            return SizeHint::with_exact(there);
        }
        let mut hint = SizeHint::new();
        hint.set_lower(there);
        hint
    }

    /// The next piece for an attempt: from the file, from memory, else from the client.
    pub(super) fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
        attempt: u64,
        reading: &mut Option<Reading>,
    ) -> Poll<Option<Result<Bytes, BodyError>>> {
        if attempt != self.attempt {
            return Poll::Ready(Some(Err(BodyError::Over("another attempt has taken this one's place"))));
        }
        let Some(position) = self.position else { return Poll::Ready(None) };
        if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.waker = Some(cx.waker().clone());
        }
        loop {
            ready!(self.poll_written(cx));
            if position < self.in_file {
                let piece = ready!(self.poll_file(cx, position, reading));
                return Poll::Ready(Some(piece.inspect(|piece| self.advance(position, piece.len()))));
            }
            if let Some(piece) = self.in_memory(position) {
                self.advance(position, piece.len());
                return Poll::Ready(Some(Ok(piece)));
            }
            if let Some(error) = self.broken {
                return Poll::Ready(Some(Err(error)));
            }
            if self.source.is_none() {
                return Poll::Ready(None);
            }
            if self.limit.is_some() && self.length - self.memory_start >= self.memory {
                self.spill();
            } else {
                ready!(self.poll_source(cx));
            }
        }
    }

    /// Reads until the end or past `limit`, before the first attempt; says whether the log is the whole body.
    pub(super) fn poll_peek(&mut self, cx: &mut Context<'_>, limit: usize) -> Poll<bool> {
        let limit = limit as u64;
        loop {
            if self.attempt > 0 || self.broken.is_some() || self.length.max(self.declared.unwrap_or(0)) > limit {
                return Poll::Ready(false);
            }
            if self.source.is_none() {
                return Poll::Ready(true);
            }
            ready!(self.poll_source(cx));
        }
    }

    /// The log's part in memory, in one piece.
    pub(super) fn front(&self) -> Bytes {
        if let (1, true) = (self.chunks.len(), self.small.is_empty()) {
            return self.chunks[0].clone();
        }
        let mut all = BytesMut::with_capacity(self.chunks.iter().map(Bytes::len).sum::<usize>() + self.small.len());
        self.chunks.iter().for_each(|chunk| all.extend_from_slice(chunk));
        all.extend_from_slice(&self.small);
        all.freeze()
    }

    /// Pieces of the log in memory.
    #[cfg(test)]
    pub(super) fn segments(&self) -> usize {
        self.chunks.len() + usize::from(!self.small.is_empty())
    }

    fn advance(&mut self, position: u64, bytes: usize) {
        let position = position + bytes as u64;
        self.position = Some(position);
        if self.limit.is_none() {
            self.forget(position);
        }
    }

    /// Drops the log up to `position`, and the room it took once all of it is dropped.
    fn forget(&mut self, position: u64) {
        if position >= self.length {
            self.forget_memory(self.length - self.memory_start);
            self.chunks.clear();
            self.small = BytesMut::new();
            self.memory_start = self.length;
            self.writing = None;
            self.file = None;
            self.in_file = 0;
            self.reservation.clear();
            return;
        }
        if position >= self.in_file {
            self.file = None;
        }
        while let Some(first) = self.chunks.front()
            && self.memory_start + first.len() as u64 <= position
        {
            let bytes = first.len() as u64;
            self.chunks.pop_front();
            self.memory_start += bytes;
            self.forget_memory(bytes);
        }
    }

    fn forget_memory(&self, bytes: u64) {
        self.reservation.room.in_memory.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A piece of the log in memory, if `position` is there.
    fn in_memory(&self, position: u64) -> Option<Bytes> {
        let offset = usize::try_from(position.checked_sub(self.memory_start)?).ok()?;
        let end = usize::try_from(self.length - self.memory_start).ok()? - self.small.len();
        if offset < end {
            let (index, offset) = self.chunk_at(offset, end)?;
            let chunk = &self.chunks[index];
            return Some(chunk.slice(offset..chunk.len().min(offset + PIECE)));
        }
        let offset = offset - end;
        let rest = self.small.get(offset..).filter(|rest| !rest.is_empty())?;
        Some(Bytes::copy_from_slice(&rest[..rest.len().min(PIECE)]))
    }

    /// The chunk that holds a byte, and its place there, of the `end` bytes in all chunks: looked for from the end, which is
    /// read as it comes in, or from the start, from which a repetition reads.
    fn chunk_at(&self, offset: usize, end: usize) -> Option<(usize, usize)> {
        if offset < end / 2 {
            let mut start = 0;
            let index = self.chunks.iter().position(|chunk| {
                start += chunk.len();
                offset < start
            })?;
            return Some((index, offset + self.chunks[index].len() - start));
        }
        let mut start = end;
        let index = self.chunks.iter().rposition(|chunk| {
            start -= chunk.len();
            offset >= start
        })?;
        Some((index, offset - start))
    }

    fn poll_file(
        &self,
        cx: &mut Context<'_>,
        position: u64,
        reading: &mut Option<Reading>,
    ) -> Poll<Result<Bytes, BodyError>> {
        let Some(file) = &self.file else { return Poll::Ready(Err(BodyError::Keeping("the kept body is gone"))) };
        let length = usize::try_from(self.in_file - position).unwrap_or(PIECE).min(PIECE);
        let task = reading.get_or_insert_with(|| spill::read(Arc::clone(file), position, length));
        let read = ready!(Pin::new(task).poll(cx));
        *reading = None;
        let read = read.ok().and_then(Result::ok);
        Poll::Ready(read.ok_or(BodyError::Keeping("the kept body could not be read back from TMPDIR")))
    }

    /// Sends the log in memory to the file.
    fn spill(&mut self) {
        self.gather();
        let chunks = self.chunks.drain(..).collect();
        let task = spill::write(self.file.clone(), &self.reservation.room.folder, self.in_file, chunks);
        self.writing = Some(task);
    }

    fn poll_written(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(task) = &mut self.writing else { return Poll::Ready(()) };
        let written = ready!(Pin::new(task).poll(cx));
        self.writing = None;
        if let Ok(Ok(file)) = written {
            self.forget_memory(self.length - self.memory_start);
            self.file = Some(file);
            self.in_file = self.length;
            self.memory_start = self.length;
        } else {
            if self.position != Some(self.length) {
                self.broken = Some(BodyError::Keeping("the body could not be kept in TMPDIR"));
            }
            self.position = self.position.map(|_| self.length);
            self.stop_keeping();
        }
        Poll::Ready(())
    }

    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(source) = &mut self.source else { return Poll::Ready(()) };
        match ready!(Pin::new(&mut *source).poll_frame(cx)) {
            Some(Ok(frame)) => {
                let ended = source.is_end_stream();
                // trailers are not forwarded
                if let Ok(data) = frame.into_data() {
                    self.append(data);
                }
                if ended {
                    self.finish();
                }
            }
            Some(Err(error)) => self.fail(error),
            None => self.finish(),
        }
        Poll::Ready(())
    }

    fn append(&mut self, data: Bytes) {
        if data.is_empty() {
            return;
        }
        let bytes = data.len() as u64;
        let length = self.length + bytes;
        if self.declared.is_some_and(|declared| length > declared) {
            return self.fail(BodyError::Client("the request's body is longer than its Content-Length"));
        }
        if let Some(limit) = self.limit
            && self.declared.is_none()
            && (length > limit || !self.reservation.grow(bytes))
        {
            self.stop_keeping();
        }
        self.reservation.room.in_memory.fetch_add(bytes, Ordering::Relaxed);
        self.length = length;
        let first = self.chunks.is_empty() && self.small.is_empty();
        if first || data.len() >= SMALL {
            self.gather();
            self.chunks.push_back(data);
        } else {
            self.small.extend_from_slice(&data);
            if self.small.len() >= SMALL {
                self.gather();
            }
        }
        if self.declared == Some(length) {
            self.source = None;
        }
    }

    /// Closes the gathering of small pieces.
    fn gather(&mut self) {
        if !self.small.is_empty() {
            self.chunks.push_back(self.small.split().freeze());
        }
    }

    fn finish(&mut self) {
        self.source = None;
        if self.broken.is_none() && self.declared.is_some_and(|declared| declared != self.length) {
            self.fail(BodyError::Client("the request's body is shorter than its Content-Length"));
        }
    }

    fn fail(&mut self, error: BodyError) {
        self.source = None;
        self.broken = Some(error);
        self.stop_keeping();
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.forget_memory(self.length - self.memory_start);
    }
}
