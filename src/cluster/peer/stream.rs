//! What both ends of a connection between peers do: send a body as the other takes it, and ask whether it is still there.

use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

use bytes::Bytes;
use h2::{Ping, PingPong, Reason, SendStream};
use http_body::{Body, Frame};
use tokio::time::{sleep, timeout};

use super::{PING_INTERVAL, PING_PATIENCE};

/// So much at the end of a body is sent without asking for room: most answers.
const LITTLE: usize = 8 * 1024;

/// Sends a body, a piece when there is room for it, until its end or until the other side wants no more. A body that
/// breaks off resets the stream, so that it never looks complete, and is the error.
pub(super) async fn send<B: Body<Data = Bytes>>(body: B, mut stream: SendStream<Bytes>) -> Result<(), B::Error> {
    let mut body = pin!(body);
    loop {
        let Some(frame) = next(body.as_mut(), &mut stream).await else { return Ok(()) };
        let (data, last) = match frame {
            // Trailers are not forwarded.
            Some(Ok(frame)) => (frame.into_data().unwrap_or_default(), body.is_end_stream()),
            Some(Err(error)) => {
                stream.send_reset(Reason::INTERNAL_ERROR);
                return Err(error);
            }
            None => (Bytes::new(), true),
        };
        // h2 keeps a little, until there is room for it.
        let is_little = data.is_empty() || (last && data.len() <= LITTLE);
        if !is_little && !has_room(&mut stream).await {
            return Ok(());
        }
        if stream.send_data(data, last).is_err() || last {
            return Ok(());
        }
    }
}

/// The next of a body, or nothing when the other side has reset the stream.
async fn next<B: Body<Data = Bytes>>(
    mut body: Pin<&mut B>,
    stream: &mut SendStream<Bytes>,
) -> Option<Option<Result<Frame<Bytes>, B::Error>>> {
    poll_fn(|cx| match body.as_mut().poll_frame(cx) {
        Poll::Ready(frame) => Poll::Ready(Some(frame)),
        Poll::Pending => stream.poll_reset(cx).map(|_| None),
    })
    .await
}

/// Waits for a byte of room, after which h2 takes a piece of any size; false when the stream is over.
async fn has_room(stream: &mut SendStream<Bytes>) -> bool {
    stream.reserve_capacity(1);
    while stream.capacity() == 0 {
        if !matches!(poll_fn(|cx| stream.poll_capacity(cx)).await, Some(Ok(_))) {
            return false;
        }
    }
    true
}

/// Ends when the other side has not answered a ping in time.
pub(super) async fn silence(pings: Option<PingPong>) {
    // There is one for each connection, and this is its only taker.
    let Some(mut pings) = pings else { return pending().await };
    loop {
        sleep(PING_INTERVAL).await;
        if !matches!(timeout(PING_PATIENCE, pings.ping(Ping::opaque())).await, Ok(Ok(_))) {
            return;
        }
    }
}
