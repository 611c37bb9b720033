//! What goes on the wire, and how often.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use http::Method;
use nirn_proxy::upstream::{RequestBody, SendError, read_limited};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use crate::support::*;

fn failed(error: SendError) -> String {
    match error {
        SendError::Failed { message, .. } => message,
        SendError::Timeout => panic!("timed out"),
        SendError::Body(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn targets_go_out_byte_for_byte() {
    let (server, mut seen) = recorder().await;
    let client = client(&settings(server.address));
    for target in [
        "/",
        "/api/v10/channels/1/messages",
        "/api//v10///x/",
        "/a?",
        "/a??b",
        "/a?b=c&b=c&",
        "/a%23b?x=%23%2f%2F",
        "/a/../b/./c",
        "/%2e%2e/%5C",
        "/a{b}|c^d\"e",
        "/a?q={}|^`[]\\",
        "/reactions/\u{1f525}/@me",
        "/?x",
        "*",
    ] {
        let request = request(Method::GET, target, &server.host(), RequestBody::empty());
        let answer = client.send(request).await.expect("an answer");
        assert_eq!(text(answer).await, "ok");
        let (head, _) = seen.recv().await.expect("a request");
        assert_eq!(head.lines().next(), Some(format!("GET {target} HTTP/1.1").as_str()));
    }
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn nothing_is_added_to_the_headers() {
    let (server, mut seen) = recorder().await;
    let client = client(&settings(server.address));
    let mut get = request(Method::GET, "/x", "discord.example", RequestBody::empty());
    *get.version_mut() = http::Version::HTTP_2;
    get.headers_mut().append("x-one", "a".parse().expect("a value"));
    get.headers_mut().append("x-one", "b".parse().expect("a value"));
    client.send(get).await.expect("an answer");
    let (head, _) = seen.recv().await.expect("a request");
    assert_eq!(head, "GET /x HTTP/1.1\r\nhost: discord.example\r\nx-one: a\r\nx-one: b\r\n\r\n");

    let body = kept(&vault(), "{}").await.attempt().expect("a first attempt");
    let mut post = request(Method::POST, "/x", "discord.example", body);
    post.headers_mut().append("content-length", "2".parse().expect("a value"));
    client.send(post).await.expect("an answer");
    let (head, body) = seen.recv().await.expect("a request");
    assert_eq!(head, "POST /x HTTP/1.1\r\nhost: discord.example\r\ncontent-length: 2\r\n\r\n");
    assert_eq!(body, b"{}");
}

#[tokio::test]
async fn a_connection_closed_while_idle_is_replaced() {
    let server = Server::start(|_, mut stream| async move {
        read_head(&mut stream).await?;
        answer_ok(&mut stream).await
    })
    .await;
    let client = client(&settings(server.address));
    for round in 1..=20 {
        let request = request(Method::GET, "/", &server.host(), RequestBody::empty());
        assert_eq!(text(client.send(request).await.expect("an answer")).await, "ok");
        assert_eq!(server.connections(), round);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_crosses_the_close_is_executed_at_most_once() {
    let executed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&executed);
    // closes right after its answer, so that the next request meets the FIN anywhere on its way
    let server = Server::start(move |_, mut stream| {
        let count = Arc::clone(&count);
        async move {
            let head = read_head(&mut stream).await?;
            read_body(&mut stream, &head).await?;
            count.fetch_add(1, Ordering::SeqCst);
            answer_ok(&mut stream).await?;
            tokio::task::yield_now().await;
            Ok(())
        }
    })
    .await;
    let client = client(&settings(server.address));
    let mut answered = 0;
    for round in 1..=300 {
        let body = kept(&vault(), pattern(5000)).await.attempt().expect("a first attempt");
        let request = request(Method::POST, "/messages", &server.host(), body);
        if let Ok(answer) = client.send(request).await {
            text(answer).await;
            answered += 1;
        }
        assert!(executed.load(Ordering::SeqCst) <= round);
    }
    assert_eq!(executed.load(Ordering::SeqCst), answered);
}

#[tokio::test]
async fn a_request_that_was_read_and_reset_is_not_sent_again() {
    let read = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&read);
    let server = Server::start(move |_, mut stream| {
        let count = Arc::clone(&count);
        async move {
            read_head(&mut stream).await?;
            answer_ok(&mut stream).await?;
            let head = read_head(&mut stream).await?;
            read_body(&mut stream, &head).await?;
            count.fetch_add(1, Ordering::SeqCst);
            stream.set_zero_linger()
        }
    })
    .await;
    let client = client(&settings(server.address));
    let first = request(Method::GET, "/", &server.host(), RequestBody::empty());
    assert_eq!(text(client.send(first).await.expect("an answer")).await, "ok");
    let body = kept(&vault(), "{}").await.attempt().expect("a first attempt");
    let second = request(Method::POST, "/", &server.host(), body);
    let message = failed(client.send(second).await.expect_err("a reset"));
    assert!(message == "connection reset" || message == "connection closed before an answer", "{message}");
    assert_eq!((read.load(Ordering::SeqCst), server.connections()), (1, 1));
}

#[tokio::test]
async fn interim_answers_are_passed_over() {
    let server = Server::start(|_, mut stream| async move {
        read_head(&mut stream).await?;
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n").await?;
        answer_ok(&mut stream).await
    })
    .await;
    let request = request(Method::GET, "/", &server.host(), RequestBody::empty());
    let answer = client(&settings(server.address)).send(request).await.expect("an answer");
    assert_eq!(answer.response.status(), 200);
    assert!(!answer.response.headers().contains_key("link"));
    assert_eq!(text(answer).await, "ok");
}

#[tokio::test]
async fn unusable_answers_fail_without_words_of_the_request() {
    for (answer, expected) in [
        ("", "connection closed before an answer"),
        ("HTTP/1.1 200 OK\r\ncontent-le", "connection closed before an answer"),
        ("SSH-2.0-OpenSSH_9.6\r\n\r\n", "the answer is not valid HTTP"),
        ("HTTP/1.1 two OK\r\n\r\n", "the answer is not valid HTTP"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", "the answer is not valid HTTP"),
        ("HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "the answer is not valid HTTP"),
        (
            "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            "the answer switches protocols without being asked to",
        ),
    ] {
        let server = Server::start(move |_, mut stream| async move {
            read_head(&mut stream).await?;
            stream.write_all(answer.as_bytes()).await
        })
        .await;
        let request = request(Method::GET, "/secret?token=x", &server.host(), RequestBody::empty());
        let error = client(&settings(server.address)).send(request).await.expect_err("an unusable answer");
        assert_eq!(failed(error), expected, "{answer:?}");
        assert_eq!(server.connections(), 1);
    }
}

#[tokio::test]
async fn an_address_where_nobody_listens_is_refused() {
    let address = Server::start(|_, _| async { Ok(()) }).await.address;
    let request = request(Method::GET, "/", "x", RequestBody::empty());
    // the listener is gone a moment after its server
    let error = loop {
        let again = request_again(&request);
        match client(&settings(address)).send(again).await.expect_err("nobody there") {
            SendError::Failed { message, .. } if message == "connection refused" => break message,
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    assert_eq!(error, "connection refused");
}

fn request_again(first: &http::Request<RequestBody>) -> http::Request<RequestBody> {
    request(first.method().clone(), &first.uri().to_string(), "x", RequestBody::empty())
}

#[tokio::test]
async fn a_host_that_does_not_resolve_says_dns() {
    let mut settings = settings(([127, 0, 0, 1], 1).into());
    settings.authority = "nowhere.invalid".parse().expect("an authority");
    let request = request(Method::GET, "/", "x", RequestBody::empty());
    let error = client(&settings).send(request).await.expect_err("no such host");
    assert!(failed(error).starts_with("dns: "));
}

#[tokio::test]
async fn a_limited_read_leaves_the_rest_and_frees_a_connection_read_to_its_end() {
    let server = Server::start(|_, mut stream| async move {
        loop {
            if read_head(&mut stream).await?.is_empty() {
                return Ok(());
            }
            stream.write_all(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 100000\r\n\r\n").await?;
            stream.write_all(&pattern(100_000)).await?;
        }
    })
    .await;
    let client = client(&settings(server.address));
    let deadline = Instant::now() + PATIENCE;
    let get = || request(Method::GET, "/", &server.host(), RequestBody::empty());

    let answer = client.send(get()).await.expect("an answer");
    let part = read_limited(answer.response.into_body(), 1000, deadline).await;
    assert!(!part.complete && part.bytes.len() >= 1000);
    let rest = http_body_util::BodyExt::collect(part.rest.expect("a rest")).await.expect("whole").to_bytes();
    assert_eq!([part.bytes, rest].concat(), pattern(100_000));

    for _ in 0..10 {
        let answer = client.send(get()).await.expect("an answer");
        let whole = read_limited(answer.response.into_body(), 100_000, deadline).await;
        assert!(whole.complete && whole.rest.is_none());
        assert_eq!(whole.bytes, pattern(100_000));
    }
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn a_limited_read_ends_at_its_deadline() {
    let server = Server::start(|_, mut stream| async move {
        read_head(&mut stream).await?;
        stream.write_all(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 9\r\n\r\nab").await?;
        stream.read_u8().await.map(drop)
    })
    .await;
    let get = request(Method::GET, "/", &server.host(), RequestBody::empty());
    let answer = client(&settings(server.address)).send(get).await.expect("an answer");
    let part = read_limited(answer.response.into_body(), 100, Instant::now() + Duration::from_millis(50)).await;
    assert_eq!((&part.bytes[..], part.complete, part.rest.is_some()), (&b"ab"[..], false, true));
}

#[tokio::test]
async fn answers_that_close_their_connection_leave_no_socket_behind() {
    let open = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&open);
    let server = Server::start(move |_, mut stream| {
        let count = Arc::clone(&count);
        async move {
            count.fetch_add(1, Ordering::SeqCst);
            read_head(&mut stream).await?;
            stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok").await?;
            let end = stream.read(&mut [0]).await;
            count.fetch_sub(1, Ordering::SeqCst);
            end.map(drop)
        }
    })
    .await;
    let client = client(&settings(server.address));
    for _ in 0..20 {
        let request = request(Method::GET, "/", &server.host(), RequestBody::empty());
        assert_eq!(text(client.send(request).await.expect("an answer")).await, "ok");
    }
    eventually("all connections closed", || open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn connections_leave_from_the_outbound_address() {
    let (peers, mut seen) = tokio::sync::mpsc::channel(1);
    let server = Server::start(move |_, mut stream| {
        let peers = peers.clone();
        async move {
            read_head(&mut stream).await?;
            peers.send(stream.peer_addr()?.ip()).await.map_err(std::io::Error::other)?;
            answer_ok(&mut stream).await
        }
    })
    .await;
    let outbound = "127.0.0.2".parse().expect("an address");
    let mut settings = settings(server.address);
    settings.outbound_ip = Some(outbound);
    let get = || request(Method::GET, "/", "x", RequestBody::empty());
    client(&settings).send(get()).await.expect("an answer");
    assert_eq!(seen.recv().await, Some(outbound));

    settings.outbound_ip = Some("192.0.2.1".parse().expect("an address"));
    let message = failed(client(&settings).send(get()).await.expect_err("not ours"));
    assert_eq!(message, "no free local port, or OUTBOUND_IP is no address of this machine");
}

#[tokio::test]
async fn an_answer_says_when_its_request_left_and_not_when_it_was_handed_over() {
    let pause = Duration::from_millis(40);
    let server = Server::start(move |_, mut stream| async move {
        loop {
            read_head(&mut stream).await?;
            tokio::time::sleep(pause).await;
            answer_ok(&mut stream).await?;
        }
    })
    .await;
    let client = client(&settings(server.address));
    let get = || request(Method::GET, "/x", &server.host(), RequestBody::empty());
    let first = client.send(get()).await.expect("an answer");
    assert_eq!(first.written, None, "it had to wait for its connection");
    assert_eq!(text(first).await, "ok");
    for _ in 0..2 {
        let mut sending = pin!(client.send(get()));
        let handed = Instant::now();
        assert!(sending.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        // The only thread there is stands still before the connection's task can write.
        while handed.elapsed() < pause {
            std::hint::spin_loop();
        }
        let answer = sending.await.expect("an answer");
        let written = answer.written.expect("a connection that was open");
        assert!(written >= handed + pause, "{:?}", written - handed);
        assert!(written.elapsed() >= pause, "it is no later than that: {:?}", written.elapsed());
        assert_eq!(text(answer).await, "ok");
    }
    assert_eq!(server.connections(), 1);
}
