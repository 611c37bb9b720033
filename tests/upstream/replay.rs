//! A kept body over several attempts, at the socket.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use nirn_proxy::scheduler::replay::{MEMORY_PER_BODY, Vault};
use nirn_proxy::upstream::{BodyError, SendError, read_limited};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use crate::support::*;

const REFUSAL: &[u8] = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}";

#[tokio::test]
async fn a_body_refused_after_it_was_read_is_sent_again_whole_on_the_same_connection() {
    for length in [1, 300, MEMORY_PER_BODY, 3 << 20] {
        for declared in [Some(length as u64), None] {
            let (server, mut seen) = recorder().await;
            let upstream = client(&settings(server.address));
            let vault = vault();
            let (pieces, body) = Fed::new();
            let mut kept = vault.keep(body, declared).await.expect("room");
            let feeding = tokio::spawn(async move {
                for piece in pattern(length).chunks(100_000) {
                    pieces.send(Ok(Bytes::copy_from_slice(piece))).await.expect("read on");
                }
            });
            for _ in 0..3 {
                let body = kept.attempt().expect("another attempt");
                let answer = upstream.send(request(Method::POST, "/", "x", body)).await.expect("an answer");
                read_limited(answer.response.into_body(), 1000, Instant::now() + PATIENCE).await;
                assert!(seen.recv().await.expect("a request").1 == pattern(length), "{length} {declared:?}");
            }
            assert_eq!(server.connections(), 1);
            feeding.await.expect("fed");
            drop(kept);
            assert_eq!((vault.used(), vault.in_memory()), (0, 0));
        }
    }
}

#[tokio::test]
async fn a_body_refused_early_is_sent_again_whole() {
    let refused = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&refused);
    let (bodies, mut seen) = tokio::sync::mpsc::channel(1);
    let server = Server::start(move |number, mut stream| {
        let (count, bodies) = (Arc::clone(&count), bodies.clone());
        async move {
            let head = read_head(&mut stream).await?;
            if number < 2 {
                stream.read_exact(&mut vec![0; 64 * 1024]).await?;
                stream.write_all(REFUSAL).await?;
                count.fetch_add(1, Ordering::SeqCst);
                return stream.read(&mut [0]).await.map(drop);
            }
            bodies.send(read_body(&mut stream, &head).await?).await.map_err(std::io::Error::other)?;
            answer_ok(&mut stream).await
        }
    })
    .await;
    let upstream = client(&settings(server.address));
    let vault = vault();
    let whole = Bytes::from(pattern(3 << 20));
    let (pieces, body) = Fed::new();
    let (upload, progress) = (whole.clone(), Arc::clone(&refused));
    let feeding = tokio::spawn(async move {
        let (early, late) = upload.split_at(128 * 1024);
        pieces.send(Ok(Bytes::copy_from_slice(early))).await.expect("read on");
        eventually("two refusals", || progress.load(Ordering::SeqCst) == 2).await;
        for piece in late.chunks(50_000) {
            pieces.send(Ok(Bytes::copy_from_slice(piece))).await.expect("read on");
        }
    });
    let mut kept = vault.keep(body, Some(whole.len() as u64)).await.expect("room");
    for expected in [429, 429, 200] {
        let body = kept.attempt().expect("another attempt");
        let answer = upstream.send(request(Method::POST, "/", "x", body)).await.expect("an answer");
        assert_eq!(answer.response.status(), expected);
        read_limited(answer.response.into_body(), 1000, Instant::now() + PATIENCE).await;
        assert!(kept.repeatable());
    }
    assert!(seen.recv().await.expect("a body") == whole);
    feeding.await.expect("fed");
    drop(kept);
    eventually("nothing is kept", || (vault.used(), vault.in_memory()) == (0, 0)).await;
}

#[tokio::test]
async fn a_client_that_breaks_off_never_looks_complete() {
    for (declared, end) in [(Some(200_000), None), (None, Some("reset")), (Some(200_000), Some("reset"))] {
        let whole = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&whole);
        let server = Server::start(move |_, mut stream| {
            let count = Arc::clone(&count);
            async move {
                let head = read_head(&mut stream).await?;
                if head.is_empty() {
                    return Ok(());
                }
                read_body(&mut stream, &head).await?;
                count.fetch_add(1, Ordering::SeqCst);
                answer_ok(&mut stream).await
            }
        })
        .await;
        let (pieces, body) = Fed::new();
        let mut kept = vault().keep(body, declared).await.expect("room");
        let feeding = tokio::spawn(async move {
            pieces.send(Ok(Bytes::from(pattern(100_000)))).await.expect("read on");
            if let Some(error) = end {
                pieces.send(Err(error)).await.expect("read on");
            }
        });
        let body = kept.attempt().expect("a first attempt");
        let request = request(Method::POST, "/", "x", body);
        let error = client(&settings(server.address)).send(request).await.expect_err("half a body");
        assert!(matches!(error, SendError::Body(BodyError::Client(_))));
        assert!(!kept.repeatable() && kept.attempt().is_none());
        feeding.await.expect("fed");
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(whole.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test]
async fn a_large_upload_is_kept_in_bounded_memory() {
    const LENGTH: usize = 50 << 20;
    let received = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&received);
    let server = Server::start(move |_, mut stream| {
        let count = Arc::clone(&count);
        async move {
            loop {
                if read_head(&mut stream).await?.is_empty() {
                    return Ok(());
                }
                let (mut left, mut buffer) = (LENGTH, vec![0; 128 * 1024]);
                while left > 0 {
                    let bytes = stream.read(&mut buffer).await?;
                    assert!(bytes > 0 && bytes <= left);
                    left -= bytes;
                    count.fetch_add(bytes, Ordering::SeqCst);
                }
                answer_ok(&mut stream).await?;
            }
        }
    })
    .await;
    let upstream = client(&settings(server.address));
    let vault = Vault::new(LENGTH as u64, LENGTH as u64);
    let (pieces, body) = Fed::new();
    let (watched, piece) = (vault.clone(), Bytes::from(vec![1; 64 * 1024]));
    let feeding = tokio::spawn(async move {
        let mut most = 0;
        for _ in 0..LENGTH / piece.len() {
            pieces.send(Ok(piece.clone())).await.expect("read on");
            most = watched.in_memory().max(most);
        }
        most
    });
    let mut kept = vault.keep(body, Some(LENGTH as u64)).await.expect("room");
    assert_eq!(vault.used(), LENGTH as u64);
    for attempt in 1..=2 {
        let mut post = request(Method::POST, "/", "x", kept.attempt().expect("another attempt"));
        post.headers_mut().insert("content-length", LENGTH.into());
        let answer = upstream.send(post).await.expect("an answer");
        assert_eq!(text(answer).await, "ok");
        assert_eq!(received.load(Ordering::SeqCst), attempt * LENGTH);
    }
    let most = feeding.await.expect("fed");
    assert!(most > 0 && most <= (MEMORY_PER_BODY + 64 * 1024) as u64, "{most}");
    kept.release();
    assert_eq!((vault.used(), vault.in_memory()), (0, 0));
}
