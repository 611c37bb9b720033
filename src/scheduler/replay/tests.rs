//! Bodies over their attempts, without a socket.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::Waker;

use http::HeaderMap;
use http_body::Frame;
use http_body_util::{BodyExt, Full};
use proptest::prelude::*;
use tokio::sync::mpsc;

use super::*;

/// A body that a test feeds; dropping the sender ends it.
struct Fed(mpsc::Receiver<Result<Frame<Bytes>, &'static str>>);

impl Body for Fed {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        self.0.poll_recv(cx)
    }
}

fn fed(pieces: impl IntoIterator<Item = Vec<u8>>) -> Fed {
    let (sender, body) = mpsc::channel(2000);
    for piece in pieces {
        sender.try_send(Ok(Frame::data(piece.into()))).unwrap();
    }
    Fed(body)
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// A body of `length` bytes in pieces of `piece`.
fn pieces(length: usize, piece: usize) -> Fed {
    fed(pattern(length).chunks(piece).map(<[u8]>::to_vec))
}

const CUT: BodyError = BodyError::Client("the request's body broke off, or its chunks are malformed");

async fn read(body: RequestBody) -> Result<Bytes, BodyError> {
    body.collect().await.map(|body| body.to_bytes())
}

fn poll_once(body: &mut RequestBody) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
    Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test]
async fn no_body_can_always_be_repeated() {
    let vault = Vault::new(0, 0);
    for mut kept in [Kept::empty(), vault.keep(Full::<Bytes>::default(), None).await.unwrap()] {
        for _ in 0..3 {
            let body = kept.attempt().unwrap();
            assert!(body.is_end_stream() && body.size_hint().exact() == Some(0) && kept.repeatable());
            assert_eq!(read(body).await.unwrap(), "");
        }
        assert_eq!(kept.peek(10).await.unwrap(), "");
    }
}

#[tokio::test]
async fn a_declared_body_that_finds_no_room_is_refused_before_it_is_read() {
    let vault = Vault::new(1000, 1500);
    let first = vault.keep(pieces(1000, 10), Some(1000)).await.unwrap();
    let second = pieces(501, 10);
    let error = vault.keep(second, Some(501)).await.unwrap_err();
    assert_eq!(error, ProxyError::Unavailable(Reason::RetryCaptureLimit));
    assert!(vault.keep(pieces(500, 10), Some(500)).await.is_ok());
    drop(first);
    assert!(vault.keep(pieces(501, 10), Some(501)).await.is_ok());
    assert_eq!(vault.used(), 0);
}

#[tokio::test]
async fn a_body_that_is_not_kept_passes_through_once() {
    for (max_body, max_total, declared) in
        [(999, 5000, Some(1000)), (5000, 0, Some(1000)), (5000, 0, None), (0, 5000, None)]
    {
        let vault = Vault::new(max_body, max_total);
        let mut kept = vault.keep(pieces(1000, 7), declared).await.unwrap();
        let body = kept.attempt().unwrap();
        assert_eq!(body.size_hint().exact(), declared);
        assert_eq!(read(body).await.unwrap(), pattern(1000));
        assert!(!kept.repeatable() && kept.attempt().is_none());
        assert_eq!((vault.used(), vault.in_memory()), (0, 0));
    }
}

#[tokio::test]
async fn an_undeclared_body_that_outgrows_its_room_goes_on_unkept() {
    for (max_body, max_total) in [(600, 5000), (5000, 600)] {
        let vault = Vault::new(max_body, max_total);
        let mut kept = vault.keep(pieces(1000, 100), None).await.unwrap();
        let mut body = kept.attempt().unwrap();
        let mut seen = Vec::new();
        for _ in 0..6 {
            seen.extend(body.frame().await.unwrap().unwrap().into_data().unwrap());
        }
        assert!(kept.repeatable() && vault.used() == 600);
        seen.extend(body.frame().await.unwrap().unwrap().into_data().unwrap());
        assert_eq!((kept.repeatable(), vault.used(), vault.in_memory()), (false, 0, 0));
        seen.extend(read(body).await.unwrap());
        assert_eq!(seen, pattern(1000));
        assert!(kept.attempt().is_none());
    }
}

#[tokio::test]
async fn a_peek_reads_a_small_body_whole_and_leaves_it_to_be_sent() {
    for (max_total, declared) in [(5000, Some(1000)), (5000, None), (0, Some(1000)), (0, None)] {
        let vault = Vault::new(5000, max_total);
        let mut kept = vault.keep(pieces(1000, 300), declared).await.unwrap();
        assert_eq!(kept.peek(1000).await.unwrap(), pattern(1000));
        assert_eq!(read(kept.attempt().unwrap()).await.unwrap(), pattern(1000));
        assert_eq!(kept.repeatable(), max_total > 0);
        let mut kept = vault.keep(pieces(1000, 300), declared).await.unwrap();
        assert_eq!(kept.peek(999).await, None);
        assert_eq!(read(kept.attempt().unwrap()).await.unwrap(), pattern(1000));
    }
    let (sender, body) = mpsc::channel(2);
    sender.try_send(Ok(Frame::data("half".into()))).unwrap();
    sender.try_send(Err("reset")).unwrap();
    let mut kept = Vault::new(5000, 5000).keep(Fed(body), None).await.unwrap();
    assert_eq!(kept.peek(1000).await, None);
    assert!(!kept.repeatable());
    assert_eq!(read(kept.attempt().unwrap()).await.unwrap_err(), CUT);
}

#[tokio::test]
async fn a_release_frees_at_once_what_was_sent_and_the_rest_as_it_goes() {
    for length in [100_000, 3 * MEMORY_PER_BODY] {
        let vault = Vault::new(1 << 20, 1 << 20);
        let mut kept = vault.keep(pieces(length, 10_000), None).await.unwrap();
        let mut body = kept.attempt().unwrap();
        let mut seen = body.frame().await.unwrap().unwrap().into_data().unwrap().to_vec();
        assert_eq!(vault.used(), 10_000);
        kept.release();
        assert_eq!((vault.used(), vault.in_memory()), (0, 0));
        seen.extend(read(body).await.unwrap());
        assert!(seen == pattern(length));

        let mut kept = vault.keep(pieces(length, 10_000), Some(length as u64)).await.unwrap();
        read(kept.attempt().unwrap()).await.unwrap();
        let mut body = kept.attempt().unwrap();
        let mut seen = body.frame().await.unwrap().unwrap().into_data().unwrap().to_vec();
        drop(kept);
        seen.extend(read(body).await.unwrap());
        assert!(seen == pattern(length));
        assert_eq!((vault.used(), vault.in_memory()), (0, 0));
    }
}

#[tokio::test]
async fn an_attempt_ends_the_one_before() {
    let vault = Vault::new(5000, 5000);
    let mut kept = vault.keep(pieces(1000, 300), Some(1000)).await.unwrap();
    let mut first = kept.attempt().unwrap();
    first.frame().await.unwrap().unwrap();
    let second = kept.attempt().unwrap();
    assert!(first.frame().await.unwrap().is_err());
    drop(first);
    assert_eq!(read(second).await.unwrap(), pattern(1000));
    assert_eq!(read(kept.attempt().unwrap()).await.unwrap(), pattern(1000));
}

#[tokio::test]
async fn a_body_of_another_length_than_declared_fails() {
    for (declared, words) in [
        (999, "the request's body is longer than its Content-Length"),
        (1001, "the request's body is shorter than its Content-Length"),
    ] {
        let mut kept = Vault::new(5000, 5000).keep(pieces(1000, 300), Some(declared)).await.unwrap();
        assert_eq!(read(kept.attempt().unwrap()).await.unwrap_err(), BodyError::Client(words));
        assert!(!kept.repeatable());
    }
}

#[tokio::test]
async fn trailers_are_dropped_and_the_end_is_known_with_the_last_piece() {
    let (sender, body) = mpsc::channel(2);
    sender.try_send(Ok(Frame::data("all".into()))).unwrap();
    sender.try_send(Ok(Frame::trailers(HeaderMap::new()))).unwrap();
    drop(sender);
    let mut kept = Vault::new(5000, 5000).keep(Fed(body), None).await.unwrap();
    assert_eq!(kept.attempt().unwrap().collect().await.unwrap().trailers(), None);
    let mut body = kept.attempt().unwrap();
    assert_eq!(body.size_hint().exact(), Some(3));
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "all");
    assert!(body.is_end_stream());

    let full: Full<Bytes> = Full::from("all");
    let mut body = Vault::new(5000, 5000).keep(full, None).await.unwrap().attempt().unwrap();
    assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(3), false));
    body.frame().await.unwrap().unwrap();
    assert!(body.is_end_stream());
}

#[tokio::test]
async fn a_folder_that_cannot_be_used_is_named_refused_or_done_without() {
    let vault = Vault::in_folder("/nonexistent/folder".into(), 1 << 20, 1 << 20);
    assert!(vault.check().unwrap_err().contains("TMPDIR"));
    assert_eq!(Vault::in_folder("/nonexistent/folder".into(), 1 << 20, 0).check(), Ok(()));
    let length = 3 * MEMORY_PER_BODY;
    let error = vault.keep(pieces(length, 10_000), Some(length as u64)).await.unwrap_err();
    assert_eq!(error, ProxyError::Unavailable(Reason::RetryPreparation));
    assert_eq!(vault.used(), 0);

    let mut kept = vault.keep(pieces(length, 10_000), None).await.unwrap();
    assert!(read(kept.attempt().unwrap()).await.unwrap() == pattern(length));
    assert!(!kept.repeatable());
    assert_eq!((vault.used(), vault.in_memory()), (0, 0));
    assert_eq!(Vault::new(1 << 20, 1 << 20).check(), Ok(()));
}

#[tokio::test]
async fn a_large_body_of_known_length_stays_in_memory_while_the_share_has_room_for_all_of_it() {
    let length = 1 << 20;
    // No file can be made, and the share has room for two.
    let vault = Vault::in_folder("/nonexistent/folder".into(), 1 << 20, MEMORY_SHARE * 2 * length);
    let keep = || vault.keep(pieces(1 << 20, 10_000), Some(length));
    let (mut first, mut second) = (keep().await.unwrap(), keep().await.unwrap());
    assert_eq!(keep().await.unwrap_err(), ProxyError::Unavailable(Reason::RetryPreparation));
    for _ in 0..2 {
        assert!(read(first.attempt().unwrap()).await.unwrap() == pattern(1 << 20));
    }
    assert_eq!(vault.in_memory(), length);
    assert!(poll_once(&mut second.attempt().unwrap()).is_ready() && second.repeatable());
    drop(first);
    let third = keep().await.unwrap();
    drop((second, third));
    assert_eq!((vault.used(), vault.in_memory(), vault.room.shared.load(Ordering::Relaxed)), (0, 0, 0));
}

#[tokio::test]
async fn a_body_in_many_tiny_pieces_costs_no_more_than_its_bytes() {
    let vault = Vault::new(1 << 20, 1 << 20);
    let length = 100_000;
    let mut kept = vault.keep(Trickle(pattern(length).into_iter()), None).await.unwrap();
    for _ in 0..2 {
        assert!(read(kept.attempt().unwrap()).await.unwrap() == pattern(length));
    }
    let shared = kept.shared.as_ref().unwrap().lock();
    assert!(shared.segments() <= length / 4096 + 2, "{}", shared.segments());
}

/// A body whose every piece is one byte.
struct Trickle(std::vec::IntoIter<u8>);

impl Body for Trickle {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.next().map(|byte| Ok(Frame::data(vec![byte].into()))))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever is read of the attempts before, and whenever they end, an attempt that reads to the end sends the body.
    #[test]
    fn an_attempt_that_gets_to_the_end_sent_the_whole_body(
        length in 1_usize..900_000,
        piece in 500_usize..200_000,
        declared: bool,
        max_body in prop_oneof![Just(1_u64 << 20), 1_u64..900_000],
        polls in proptest::collection::vec(0_usize..40, 0..5),
        release in proptest::option::of(0_usize..40),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let vault = Vault::new(max_body, 1 << 20);
            let mut kept = vault.keep(pieces(length, piece), declared.then_some(length as u64)).await.unwrap();
            let mut before = None;
            for polls in polls {
                let Some(mut body) = kept.attempt() else { break };
                let mut seen = Vec::new();
                for _ in 0..polls {
                    match poll_once(&mut body) {
                        Poll::Ready(Some(frame)) => seen.extend(frame.unwrap().into_data().unwrap()),
                        Poll::Ready(None) => break,
                        Poll::Pending => tokio::task::yield_now().await,
                    }
                }
                assert!(pattern(length).starts_with(&seen));
                // dropped only once the next attempt has begun
                before = Some(body);
            }
            let last = kept.attempt();
            drop(before);
            if let Some(mut body) = last {
                let mut seen = Vec::new();
                for _ in 0..release.unwrap_or(0) {
                    if let Poll::Ready(Some(frame)) = poll_once(&mut body) {
                        seen.extend(frame.unwrap().into_data().unwrap());
                    }
                }
                if release.is_some() {
                    kept.release();
                }
                seen.extend(read(body).await.unwrap());
                assert!(seen == pattern(length));
            }
            drop(kept);
            assert_eq!((vault.used(), vault.in_memory()), (0, 0));
        });
    }
}
