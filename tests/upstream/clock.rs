//! REQUEST_TIMEOUT: one attempt, renewed by an upload's progress.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use nirn_proxy::upstream::{Answer, RequestBody, SendError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate::support::*;

const PIECE: usize = 64 * 1024;

fn hasty(address: SocketAddr, request_timeout: Duration) -> Direct {
    let mut settings = settings(address);
    settings.request_timeout = request_timeout;
    client(&settings)
}

async fn send_fed(upstream: &Direct, body: Fed) -> Result<Answer, SendError> {
    let body = vault().keep(body, None).await.expect("room").attempt().expect("a first attempt");
    let request = request(Method::POST, "/", "x", body);
    timeout(PATIENCE, upstream.send(request)).await.expect("an end")
}

/// A listener whose connections take little that nobody reads.
fn cramped() -> (TcpListener, SocketAddr) {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(32 * 1024).expect("a small buffer");
    socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
    let listener = socket.listen(8).expect("listening");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

/// Reads a request whole, then says nothing.
async fn silent(_: usize, mut stream: TcpStream) -> std::io::Result<()> {
    let head = read_head(&mut stream).await?;
    read_body(&mut stream, &head).await?;
    stream.read_u8().await.map(drop)
}

#[tokio::test]
async fn a_silent_server_is_given_up_after_the_request_timeout() {
    let server = Server::start(silent).await;
    let limit = Duration::from_millis(150);
    let upstream = hasty(server.address, limit);
    let started = Instant::now();
    let request = request(Method::GET, "/", "x", RequestBody::empty());
    assert_eq!(upstream.send(request).await.expect_err("no answer"), SendError::Timeout);
    assert!((limit..limit * 4).contains(&started.elapsed()), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_server_that_never_accepts_is_given_up_too() {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
    let listener = socket.listen(1).expect("listening");
    let address = listener.local_addr().expect("bound");
    let upstream = hasty(address, Duration::from_millis(150));
    // what the backlog takes is connected and silent, the rest not even connected
    for _ in 0..4 {
        let request = request(Method::GET, "/", "x", RequestBody::empty());
        assert_eq!(upstream.send(request).await.expect_err("no answer"), SendError::Timeout);
    }
}

#[tokio::test]
async fn an_upload_that_makes_progress_outlives_the_request_timeout() {
    let (server, mut seen) = recorder().await;
    let upstream = hasty(server.address, Duration::from_millis(400));
    let (pieces, body) = Fed::new();
    let started = Instant::now();
    let feeding = tokio::spawn(async move {
        for _ in 0..8 {
            pieces.send(Ok(Bytes::from(vec![7; PIECE]))).await.expect("read on");
            sleep(Duration::from_millis(150)).await;
        }
    });
    let answer = send_fed(&upstream, body).await.expect("an answer");
    assert!(started.elapsed() > Duration::from_millis(1000));
    assert!(answer.body_deadline > Instant::now());
    feeding.await.expect("fed");
    assert_eq!(seen.recv().await.expect("a request").1, vec![7; 8 * PIECE]);
}

#[tokio::test]
async fn a_server_that_reads_slowly_counts_as_progress() {
    let (listener, address) = cramped();
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        read_head(&mut stream).await?;
        let mut buffer = vec![0; PIECE];
        for _ in 0..32 {
            stream.read_exact(&mut buffer).await?;
            sleep(Duration::from_millis(40)).await;
        }
        answer_ok(&mut stream).await
    });
    let upstream = hasty(address, Duration::from_millis(500));
    let body = kept(&vault(), pattern(32 * PIECE)).await.attempt().expect("a first attempt");
    let started = Instant::now();
    let answer = upstream.send(request(Method::POST, "/", "x", body)).await.expect("an answer");
    assert!(started.elapsed() > Duration::from_millis(1200));
    assert_eq!(text(answer).await, "ok");
    serving.await.expect("served").expect("no I/O error");
}

#[tokio::test]
async fn an_upload_without_enough_progress_is_given_up() {
    for pause in [Duration::from_millis(40), PATIENCE * 2] {
        let server = Server::start(silent).await;
        let upstream = hasty(server.address, Duration::from_millis(200));
        let (pieces, body) = Fed::new();
        let feeding = tokio::spawn(async move {
            while pieces.send(Ok(Bytes::from(vec![7; 1000]))).await.is_ok() {
                sleep(pause).await;
            }
        });
        let started = Instant::now();
        assert_eq!(send_fed(&upstream, body).await.expect_err("no answer"), SendError::Timeout);
        assert!(started.elapsed() < Duration::from_secs(2));
        feeding.abort();
    }
}

#[tokio::test]
async fn the_clock_starts_anew_at_the_end_of_an_upload() {
    let server = Server::start(silent).await;
    let limit = Duration::from_millis(300);
    let upstream = hasty(server.address, limit);
    let (pieces, body) = Fed::new();
    let feeding = tokio::spawn(async move {
        pieces.send(Ok(Bytes::from_static(b"a"))).await.expect("read on");
        sleep(Duration::from_millis(200)).await;
    });
    let started = Instant::now();
    assert_eq!(send_fed(&upstream, body).await.expect_err("no answer"), SendError::Timeout);
    assert!(started.elapsed() >= limit + Duration::from_millis(200));
    feeding.await.expect("fed");
}

#[tokio::test]
async fn the_bodys_deadline_is_that_of_the_attempt() {
    let (server, _seen) = recorder().await;
    let limit = Duration::from_secs(3);
    let upstream = hasty(server.address, limit);
    let before = Instant::now();
    let answer = upstream.send(request(Method::GET, "/", "x", RequestBody::empty())).await.expect("an answer");
    assert!(answer.body_deadline >= before + limit && answer.body_deadline <= Instant::now() + limit);
}

#[tokio::test]
async fn an_answer_that_comes_early_is_passed_on_while_the_upload_goes_on() {
    let (received, whole) = oneshot::channel();
    let received = Arc::new(parking_lot::Mutex::new(Some(received)));
    let server = Server::start(move |_, mut stream| {
        let received = received.lock().take();
        async move {
            let head = read_head(&mut stream).await?;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n").await?;
            let body = read_body(&mut stream, &head).await?;
            stream.write_all(b"ok").await?;
            received.expect("one connection").send(body).map_err(|_| std::io::ErrorKind::Other.into())
        }
    })
    .await;
    let (pieces, body) = Fed::new();
    let upstream = hasty(server.address, Duration::from_secs(5));
    pieces.send(Ok(Bytes::from_static(b"first "))).await.expect("room");
    let answer = send_fed(&upstream, body).await.expect("an early answer");
    pieces.send(Ok(Bytes::from_static(b"second"))).await.expect("read on");
    drop(pieces);
    assert_eq!(whole.await.expect("a body"), b"first second");
    assert_eq!(text(answer).await, "ok");
}

#[tokio::test]
async fn an_upload_that_stalls_after_its_answer_is_given_up() {
    let closed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&closed);
    let server = Server::start(move |_, mut stream| {
        let count = Arc::clone(&count);
        async move {
            read_head(&mut stream).await?;
            answer_ok(&mut stream).await?;
            while stream.read(&mut [0; 1024]).await.is_ok_and(|bytes| bytes > 0) {}
            count.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    })
    .await;
    let (pieces, body) = Fed::new();
    let upstream = hasty(server.address, Duration::from_millis(200));
    pieces.send(Ok(Bytes::from_static(b"first"))).await.expect("room");
    let answer = send_fed(&upstream, body).await.expect("an early answer");
    assert_eq!(text(answer).await, "ok");
    eventually("the connection is closed", || closed.load(Ordering::SeqCst) == 1).await;
    eventually("the client's body is let go", || pieces.is_closed()).await;
}

#[tokio::test]
async fn a_dropped_attempt_closes_its_connection_and_frees_its_body() {
    let closed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&closed);
    let server = Server::start(move |_, stream| {
        let count = Arc::clone(&count);
        async move {
            _ = silent(0, stream).await;
            count.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    })
    .await;
    let vault = vault();
    let upstream = hasty(server.address, Duration::from_secs(60));
    let mut body = kept(&vault, pattern(1 << 20)).await;
    let attempt = upstream.send(request(Method::POST, "/", "x", body.attempt().expect("a first attempt")));
    assert!(timeout(Duration::from_millis(100), attempt).await.is_err());
    assert_eq!(vault.used(), 1 << 20);
    drop(body);
    eventually("the connection is closed", || closed.load(Ordering::SeqCst) == 1).await;
    eventually("nothing is kept", || vault.used() == 0 && vault.in_memory() == 0).await;
}

#[tokio::test]
async fn a_server_that_stops_reading_after_its_answer_is_given_up() {
    let (listener, address) = cramped();
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        read_head(&mut stream).await?;
        answer_ok(&mut stream).await?;
        std::future::pending::<std::io::Result<()>>().await
    });
    let vault = vault();
    let mut body = kept(&vault, pattern(8 << 20)).await;
    let upstream = hasty(address, Duration::from_millis(500));
    let answer = upstream.send(request(Method::POST, "/", "x", body.attempt().expect("a first attempt"))).await;
    assert_eq!(text(answer.expect("an early answer")).await, "ok");
    drop(body);
    eventually("the body is let go", || (vault.used(), vault.in_memory()) == (0, 0)).await;
    serving.abort();
}

#[tokio::test]
async fn an_early_answers_body_may_follow_a_long_upload() {
    let server = Server::start(|_, mut stream| async move {
        let head = read_head(&mut stream).await?;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n").await?;
        read_body(&mut stream, &head).await?;
        stream.write_all(b"ok").await
    })
    .await;
    let limit = Duration::from_millis(300);
    let upstream = hasty(server.address, limit);
    let (pieces, body) = Fed::new();
    let feeding = tokio::spawn(async move {
        for _ in 0..8 {
            pieces.send(Ok(Bytes::from(vec![7; PIECE]))).await.expect("read on");
            sleep(Duration::from_millis(100)).await;
        }
    });
    let answer = send_fed(&upstream, body).await.expect("an early answer");
    assert!(answer.body_deadline > Instant::now() + limit);
    assert_eq!(text(answer).await, "ok");
    feeding.await.expect("fed");
}
