//! What many requests write at once to a connection that they share, in one piece.
//!
//! Each request that is ready wakes the connection, which would write its few bytes by themselves: a TLS record, a system
//! call and a packet for each. Here a flush lets whatever else is ready to run have its turn first, so that what all of it
//! writes goes out together. That costs no timer; and where nobody else writes anything, it is rarely tried.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, BufWriter, ReadBuf};

/// What is gathered at most: a TLS record. Larger pieces go out as they are.
const CAPACITY: usize = 16 * 1024;
/// After so many flushes in a row that waited for nothing, so many go out at once before the next tries it again.
const IN_VAIN: u8 = 4;
const AT_ONCE: u8 = 31;

/// A connection whose writes are gathered.
pub(super) struct Gather<S> {
    io: BufWriter<S>,
    /// What was there when the others were given their turn.
    yielded: Option<usize>,
    /// Flushes in a row that waited for nothing.
    in_vain: u8,
    /// Flushes that go out at once.
    at_once: u8,
}

impl<S: AsyncWrite> Gather<S> {
    pub(super) fn new(io: S) -> Self {
        Self { io: BufWriter::with_capacity(CAPACITY, io), yielded: None, in_vain: 0, at_once: 0 }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Gather<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gather<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let gathered = self.io.buffer().len();
        match self.yielded {
            _ if gathered == 0 => {}
            None if self.at_once > 0 => self.at_once -= 1,
            None => {
                self.yielded = Some(gathered);
                // Woken while it runs, a task is queued behind the others.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Some(before) if before == gathered => {
                self.in_vain = IN_VAIN.min(self.in_vain + 1);
                self.at_once = if self.in_vain == IN_VAIN { AT_ONCE } else { 0 };
            }
            Some(_) => self.in_vain = 0,
        }
        self.yielded = None;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, slices)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::Mutex;

    use super::*;

    /// Counts the writes that reach it.
    struct Counted(Arc<AtomicUsize>, tokio::io::DuplexStream);

    impl AsyncWrite for Counted {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Pin::new(&mut self.1).poll_write(cx, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.1).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.1).poll_shutdown(cx)
        }
    }

    #[tokio::test]
    async fn where_nobody_else_writes_a_flush_rarely_waits() {
        let mut io = Gather::new(tokio::io::sink());
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let mut waits = Vec::new();
        for _ in 0..IN_VAIN + AT_ONCE + 2 {
            io.write_all(b"alone").await.unwrap();
            waits.push(Pin::new(&mut io).poll_flush(&mut cx).is_pending());
            assert!(!waits[waits.len() - 1] || Pin::new(&mut io).poll_flush(&mut cx).is_ready());
        }
        let expected = |at| at < IN_VAIN || at == IN_VAIN + AT_ONCE;
        assert_eq!(waits, (0..IN_VAIN + AT_ONCE + 2).map(expected).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn what_ready_tasks_write_goes_out_in_one_piece_and_whole() {
        let (near, mut far) = tokio::io::duplex(1024);
        let writes = Arc::new(AtomicUsize::new(0));
        let io = Arc::new(Mutex::new(Gather::new(Counted(writes.clone(), near))));
        io.lock().await.write_all(b"first").await.unwrap();
        let flushed = tokio::spawn({
            let io = io.clone();
            async move { std::future::poll_fn(|cx| Pin::new(&mut *io.try_lock().unwrap()).poll_flush(cx)).await }
        });
        let late = tokio::spawn({
            let io = io.clone();
            async move { io.lock().await.write_all(b", second").await }
        });
        flushed.await.unwrap().unwrap();
        late.await.unwrap().unwrap();
        let mut read = [0; 13];
        far.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"first, second");
        assert_eq!(writes.load(Ordering::Relaxed), 1);
        let (mut io, mut read) = (io.lock().await, vec![0; 3 * CAPACITY]);
        let written = async {
            io.write_all(&vec![7; 3 * CAPACITY]).await.unwrap();
            io.flush().await.unwrap();
        };
        let ((), length) = tokio::join!(written, far.read_exact(&mut read));
        assert_eq!((length.unwrap(), read), (3 * CAPACITY, vec![7; 3 * CAPACITY]));
    }
}
