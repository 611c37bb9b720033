//! What is sent again, and what never is.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::support::client::Client;
use crate::support::upstream::Upstream;
use crate::support::{Node, PATIENCE, eventually};

const REFUSAL: &str = "HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nx-ratelimit-scope: user\r\n\
    content-type: application/json\r\ncontent-length: 45\r\n\r\n{\"message\":\"x\",\"retry_after\":1,\"global\":false}";
const MESSAGES: &str = "/api/v10/channels/100000000000000001/messages";

/// A multipart body with two files that no compression or pattern would hide a fault in.
fn multipart() -> Vec<u8> {
    let mut body = b"--b\r\ncontent-disposition: form-data; name=\"payload_json\"\r\n\r\n{}\r\n".to_vec();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for file in 0..2 {
        let head =
            format!("--b\r\ncontent-disposition: form-data; name=\"files[{file}]\"; filename=\"{file}\"\r\n\r\n");
        body.extend(head.as_bytes());
        for _ in 0..(3 << 20) / 8 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            body.extend(state.to_ne_bytes());
        }
        body.extend(b"\r\n");
    }
    body.extend(b"--b--\r\n");
    body
}

fn chunked(body: &[u8]) -> Vec<u8> {
    let mut framed = Vec::new();
    for piece in body.chunks(50_000) {
        framed.extend(format!("{:x}\r\n", piece.len()).as_bytes());
        framed.extend(piece);
        framed.extend(b"\r\n");
    }
    framed.extend(b"0\r\n\r\n");
    framed
}

fn upload(body: &[u8], is_chunked: bool) -> Vec<u8> {
    let framing =
        if is_chunked { "transfer-encoding: chunked".into() } else { format!("content-length: {}", body.len()) };
    let mut request = format!(
        "POST {MESSAGES} HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=b\r\n{framing}\r\n\r\n"
    )
    .into_bytes();
    request.extend(if is_chunked { chunked(body) } else { body.to_vec() });
    request
}

#[tokio::test]
async fn c76_a_multipart_body_is_sent_again_whole_after_a_429() {
    let body = multipart();
    for is_chunked in [false, true] {
        let mut upstream = Upstream::start().await;
        let node = Node::start(upstream.address);
        let mut client = Client::connect(node.address()).await;
        client.send(upload(&body, is_chunked)).await;
        let first = upstream.next().await;
        assert!(first.body == body, "the first attempt, chunked: {is_chunked}");
        let refused = Instant::now();
        first.write(REFUSAL).await;
        let second = upstream.next().await;
        assert!(refused.elapsed() >= Duration::from_secs(1), "{:?}", refused.elapsed());
        assert!(second.body == body, "the second attempt, chunked: {is_chunked}");
        second.ok("sent").await;
        assert_eq!(client.answer().await.text(), "sent");
        assert!(upstream.is_untouched());
        eventually("nothing kept", || node.scheduler.is_quiet() && node.open() == 0.0).await;
    }
}

/// The refusal comes while most of the body is still on its way: the whole body follows, or the client gets the 429.
#[tokio::test]
async fn c76_a_429_during_the_upload_leads_to_a_whole_body_or_to_the_429() {
    let body = multipart();
    for is_chunked in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let node = Node::start(listener.local_addr().unwrap());
        let address = node.address();
        let request = upload(&body, is_chunked);
        let client = tokio::spawn(async move {
            let mut client = Client::connect(address).await;
            // An answer that comes early may end the upload.
            _ = client.stream.write_all(&request).await;
            client.answer().await
        });
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut part = vec![0; 64 * 1024];
        stream.read_exact(&mut part).await.unwrap();
        stream.write_all(REFUSAL.as_bytes()).await.unwrap();
        let drain = tokio::spawn(async move { while matches!(stream.read(&mut part).await, Ok(1..)) {} });
        let second = timeout(Duration::from_secs(5), listener.accept()).await;
        if let Ok(Ok((mut stream, _))) = second {
            let mut all = Vec::new();
            let whole = async {
                let end: &[u8] = if is_chunked { b"--b--\r\n\r\n0\r\n\r\n" } else { b"--b--\r\n" };
                while !all.ends_with(end) {
                    assert_ne!(stream.read_buf(&mut all).await.unwrap(), 0, "a short body");
                }
            };
            timeout(PATIENCE, whole).await.expect("the whole body");
            assert!(all.len() >= body.len(), "{} of {}", all.len(), body.len());
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nsent").await.unwrap();
            assert_eq!(timeout(PATIENCE, client).await.unwrap().unwrap().text(), "sent");
        } else {
            assert_eq!(timeout(PATIENCE, client).await.unwrap().unwrap().status, 429);
        }
        drain.abort();
        eventually("nothing kept", || node.scheduler.is_quiet() && node.open() == 0.0).await;
    }
}

#[tokio::test]
async fn c77_failures_of_a_post_are_not_retried() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    let body = r#"{"content":"x","nonce":"1","enforce_nonce":true}"#;
    for (path, status) in [(MESSAGES, 500), ("/guilds/200000000000000001/channels", 504)] {
        client.send(format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
        upstream.next().await.write(format!("HTTP/1.1 {status} Oops\r\ncontent-length: 3\r\n\r\nbad")).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text(), answer.header("generated-by-proxy")), (status, "bad", None));
    }
    client.send(format!("POST {MESSAGES} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
    upstream.next().await.cut().await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("generated-by-proxy")), (502, Some("true")));
    // What would be sent again would come before this.
    client.send("GET /gateway HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let next = upstream.next().await;
    assert_eq!(next.line(), "GET /gateway HTTP/1.1");
    next.ok("").await;
}

#[tokio::test]
async fn c78_a_header_free_502_leaves_a_known_block_as_it_is() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    // Reads, because writes of one bucket go one after the other.
    let get = format!("GET {MESSAGES} HTTP/1.1\r\nhost: a\r\nauthorization: Bot t\r\n\r\n");
    let limited = |status: &str, remaining: u32, after: f64| {
        format!(
            "HTTP/1.1 {status}\r\nx-ratelimit-bucket: b\r\nx-ratelimit-limit: 5\r\nx-ratelimit-remaining: {remaining}\r\n\
             x-ratelimit-reset-after: {after}\r\ncontent-length: 0\r\n\r\n"
        )
    };
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(Client::connect(node.address()).await);
    }
    clients[0].send(&get).await;
    upstream.next().await.write(limited("200 OK", 4, 3.0)).await;
    assert_eq!(clients[0].answer().await.status, 200);
    clients[1].send(&get).await;
    let one = upstream.next().await;
    clients[2].send(&get).await;
    let other = upstream.next().await;
    let closed = Instant::now();
    one.write(limited("200 OK", 0, 2.0)).await;
    assert_eq!(clients[1].answer().await.status, 200);
    other.write("HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(clients[2].answer().await.status, 502);
    clients[3].send(&get).await;
    let last = upstream.next().await;
    assert!(closed.elapsed() >= Duration::from_secs(2), "{:?}", closed.elapsed());
    // A 5xx that has the headers is believed.
    let closed = Instant::now();
    last.write(limited("503 Service Unavailable", 0, 1.0)).await;
    assert_eq!(clients[3].answer().await.status, 503);
    clients[0].send(&get).await;
    upstream.next().await.ok("").await;
    assert!(closed.elapsed() >= Duration::from_secs(1), "{:?}", closed.elapsed());
}

#[tokio::test]
async fn c78_an_endless_502_is_not_retried_without_end() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    for _ in 0..5 {
        client.send("GET /gateway HTTP/1.1\r\nhost: a\r\n\r\n").await;
        upstream.next().await.write("HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(client.answer().await.status, 502);
    }
    assert!(upstream.is_untouched());
}

#[tokio::test]
async fn c79_a_connection_closed_while_idle_is_replaced() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    for round in 0..20 {
        client.send("GET /gateway HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let arrival = upstream.next().await;
        arrival.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
        assert_eq!(client.answer().await.text(), "ok", "round {round}");
        arrival.cut().await;
        // Long enough for the end to be seen; the next test is for when it is not.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(node.failures("upstream_error"), 0.0);
}

/// Serves one request on its first connection. What follows on it is read or not, and the connection is reset; later
/// connections are served. Counts the requests read.
async fn resets_after_the_first(reads: bool) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&count);
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        serve(&mut stream, &counter).await;
        if reads {
            let mut request = [0; 4096];
            let length = stream.read(&mut request).await.unwrap();
            counter.fetch_add(usize::from(length > 0), Ordering::SeqCst);
        } else {
            stream.readable().await.unwrap();
        }
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        drop(stream);
        while let Ok((mut stream, _)) = listener.accept().await {
            serve(&mut stream, &counter).await;
        }
    });
    (address, count)
}

async fn serve(stream: &mut TcpStream, count: &AtomicUsize) {
    let mut request = [0; 4096];
    if stream.read(&mut request).await.unwrap() > 0 {
        count.fetch_add(1, Ordering::SeqCst);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    }
}

#[tokio::test]
async fn c79_a_post_on_a_connection_that_dies_is_executed_at_most_once() {
    for reads in [false, true] {
        let (address, count) = resets_after_the_first(reads).await;
        let node = Node::start(address);
        let mut client = Client::connect(node.address()).await;
        let post = "POST /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}";
        client.send(post).await;
        assert_eq!(client.answer().await.status, 200);
        client.send(post).await;
        let second = client.answer().await;
        let own = second.header("generated-by-proxy") == Some("true");
        assert!(second.status == 502 && own || second.status == 200 && !reads, "{}", second.head);
        let before = count.load(Ordering::SeqCst);
        assert!(before <= 2, "{before}");
        client.send(post).await;
        assert_eq!(client.answer().await.status, 200, "the next call works");
        assert_eq!(count.load(Ordering::SeqCst), before + 1);
        eventually("nothing open", || node.scheduler.is_quiet() && node.open() == 0.0).await;
    }
}
