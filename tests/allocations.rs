//! What a request of a kept-alive connection allocates in the whole proxy, counted: sockets, hyper and runtime included,
//! client and upstream not, which have a thread of their own.

#![expect(unsafe_code, reason = "a counting allocator can be written in no other way")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use support::{Node, PATIENCE};

/// What one request allocates. Lower it when it falls; the upstream's connection and the client's are warm.
const CALLS: f64 = 16.0;
const BYTES: f64 = 11.5 * 1024.0;
/// Tables that double now and then are not a request's.
const NOW_AND_THEN: f64 = 0.5;

const TOKEN: &str = "MTIzNDU2Nzg5MDEyMzQ1Njc4.allocations.allocations";
const BOT_ID: u64 = 123_456_789_012_345_678;

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);
static SIZE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this thread is one of the proxy's.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

impl Counting {
    fn count(size: usize) {
        if COUNTED.get() {
            COUNT.fetch_add(1, Ordering::Relaxed);
            SIZE.fetch_add(size, Ordering::Relaxed);
        }
    }
}

// SAFETY: passes every call on to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count(layout.size());
        // SAFETY: the caller's promises are the ones the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::count(size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Answers like Discord, with a body of 741 bytes.
async fn upstream() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nContent-Type: application/json\r\n\
                     Content-Length: 741\r\nX-RateLimit-Bucket: 0123456789abcdef0123456789abcdef\r\n\
                     X-RateLimit-Limit: 1000000\r\nX-RateLimit-Remaining: 999999\r\nX-RateLimit-Reset: 784111778.000\r\n\
                     X-RateLimit-Reset-After: 0.001\r\nVia: 1.1 google\r\nCF-Ray: 0123456789abcdef-FRA\r\n\r\n{}",
                    "x".repeat(741)
                );
                while read_until(&mut stream, b"\r\n\r\n").await.is_some() {
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            });
        }
    });
    address
}

/// None at the end of the stream.
async fn read_until(stream: &mut TcpStream, end: &[u8]) -> Option<()> {
    let mut read = Vec::new();
    while !read.ends_with(end) {
        if timeout(PATIENCE, stream.read_buf(&mut read)).await.unwrap().ok()? == 0 {
            return None;
        }
    }
    Some(())
}

async fn ask(client: &mut TcpStream, times: usize) {
    for _ in 0..times {
        let request = format!(
            "GET /api/v10/channels/100000000000000001/messages?limit=1 HTTP/1.1\r\nHost: localhost\r\n\
             Authorization: Bot {TOKEN}\r\nUser-Agent: DiscordBot (https://example.test, 1.0)\r\nAccept: */*\r\n\r\n"
        );
        client.write_all(request.as_bytes()).await.unwrap();
        read_until(client, &[b'x'; 741]).await.unwrap();
    }
}

#[tokio::test]
async fn a_kept_alive_get_allocates_no_more_than_is_written_down() {
    let proxy = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .on_thread_start(|| COUNTED.set(true))
        .enable_all()
        .build()
        .unwrap();
    let mut config = support::config(upstream().await);
    config.scheduling.overrides.by_bot_id.insert(BOT_ID, 1_000_000);
    let node = {
        let _on_it = proxy.enter();
        Node::start_with(config, |_| {})
    };
    let mut client = TcpStream::connect(node.address()).await.unwrap();
    ask(&mut client, 200).await;
    let before = (COUNT.load(Ordering::Relaxed), SIZE.load(Ordering::Relaxed));
    let times = 1000;
    ask(&mut client, times).await;
    let each = |now: usize, before: usize| (now - before) as f64 / times as f64;
    let calls = each(COUNT.load(Ordering::Relaxed), before.0);
    let bytes = each(SIZE.load(Ordering::Relaxed), before.1);
    println!("a kept-alive GET makes {calls:.2} allocations of {bytes:.0} bytes together");
    assert!(calls <= CALLS + NOW_AND_THEN, "{calls} allocations");
    assert!(bytes <= BYTES, "{bytes} bytes");
    proxy.shutdown_background();
}
