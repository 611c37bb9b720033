//! One large upload over loopback: its throughput kept and not kept, a replay's, and the memory it takes.
//!
//! `cargo bench --bench upload`. Fails when more of the body is in memory than its share allows.

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use nirn_proxy::config::{self, Proxy};
use nirn_proxy::scheduler::replay::{Kept, MEMORY_PER_BODY, Vault};
use nirn_proxy::upstream::{SendError, Upstream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What the client sends at once.
const PIECE: usize = 64 * 1024;
/// The least throughput of kept uploads of 8 MiB, as a part of what they have when they are not kept.
const KEPT_AGAINST_NOT: f64 = 0.7;
const HEAD_END: &[u8] = b"\r\n\r\n";

/// A client that is never slow; it notes how much of its body is in memory.
struct Client {
    left: u64,
    piece: Bytes,
    vault: Vault,
    most: Arc<AtomicU64>,
}

impl Body for Client {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.most.fetch_max(self.vault.in_memory(), Ordering::Relaxed);
        let bytes = self.left.min(PIECE as u64);
        self.left -= bytes;
        let piece = self.piece.slice(..usize::try_from(bytes).unwrap_or(PIECE));
        Poll::Ready((bytes > 0).then_some(Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    // anything but `cargo bench` only wants to know that it runs
    let part = if std::env::args().any(|argument| argument == "--bench") { 1 } else { 100 };
    let length = (200 << 20) / part;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let upstream = client(listener.local_addr()?)?;
    let server = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(swallow(stream, length));
        }
    });
    println!("| {} MiB | MiB/s | most of it in memory, KiB |\n|---|---|---|", length >> 20);
    let mut most = 0;
    for (name, room) in [("not kept", 0), ("kept", length)] {
        let vault = Vault::new(length, room);
        let peak = Arc::default();
        let body =
            Client { left: length, piece: vec![b'x'; PIECE].into(), vault: vault.clone(), most: Arc::clone(&peak) };
        let mut kept = vault.keep(body, Some(length)).await.map_err(|error| format!("{error:?}"))?;
        let took = send(&upstream, &mut kept, length).await?;
        most = peak.load(Ordering::Relaxed).max(most);
        print(name, length, took, most);
        if room > 0 {
            print("sent again", length, send(&upstream, &mut kept, length).await?, 0);
        }
    }
    server.abort();
    usual(part).await?;
    let share = (MEMORY_PER_BODY + PIECE) as u64;
    if most > share { Err(format!("{most} bytes in memory, more than {share}").into()) } else { Ok(()) }
}

/// Uploads of 8 MiB with the usual settings, kept and not, in turn: one after the other, so that the share of memory has
/// room for them.
async fn usual(part: u64) -> Result<(), Box<dyn Error>> {
    const LENGTH: u64 = 8 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let upstream = client(listener.local_addr()?)?;
    let server = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(swallow(stream, LENGTH));
        }
    });
    let usual = config::Config::from_vars([]).map_err(|problems| format!("{problems:?}"))?.scheduling;
    let vaults = [0, usual.max_retry_capture_bytes].map(|room| Vault::new(usual.max_retry_body_bytes, room));
    let mut took = [Duration::ZERO; 2];
    for round in 0..100 / part {
        for (vault, took) in vaults.iter().zip(&mut took) {
            let piece = vec![b'x'; PIECE].into();
            let body = Client { left: LENGTH, piece, vault: vault.clone(), most: Arc::default() };
            let mut kept = vault.keep(body, Some(LENGTH)).await.map_err(|error| format!("{error:?}"))?;
            let each = send(&upstream, &mut kept, LENGTH).await?;
            // The first opens the connection.
            if round > 0 {
                *took += each;
            }
        }
    }
    server.abort();
    let ratio = took[0].as_secs_f64() / took[1].as_secs_f64();
    println!("uploads of 8 MiB that are kept have {ratio:.2} of the throughput of those that are not");
    if ratio < KEPT_AGAINST_NOT { Err("less than what is promised".into()) } else { Ok(()) }
}

fn print(name: &str, length: u64, took: Duration, most: u64) {
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let rate = (length >> 20) as f64 / took.as_secs_f64();
    println!("| {name} | {rate:.0} | {} |", most >> 10);
}

fn client(address: SocketAddr) -> Result<Upstream, Box<dyn Error>> {
    let settings = config::Upstream {
        https: false,
        authority: address.to_string().parse()?,
        outbound_ip: None,
        request_timeout: Duration::from_secs(60),
        http2: false,
        proxy: Proxy::default(),
        extra_roots: Vec::new(),
    };
    Ok(Upstream::new(&settings)?)
}

async fn send(upstream: &Upstream, kept: &mut Kept, length: u64) -> Result<Duration, Box<dyn Error>> {
    let body = kept.attempt().ok_or("the body cannot be sent again")?;
    let request = Request::builder().method(Method::POST).uri("/").header("host", "x").header("content-length", length);
    let started = Instant::now();
    let (mut parts, ()) = request.body(())?.into_parts();
    let lease = upstream.connect().await.map_err(told)?;
    let answer = upstream.send(lease, &mut parts, body, started.into()).await.map_err(told)?;
    answer.response.into_body().collect().await?;
    Ok(started.elapsed())
}

fn told(error: SendError) -> String {
    match error {
        SendError::Timeout => "timed out".to_owned(),
        SendError::Body(error) => error.to_string(),
        SendError::Failed { message, .. } => message,
    }
}

/// Reads bodies of `length` bytes and answers each.
async fn swallow(mut stream: TcpStream, length: u64) -> std::io::Result<()> {
    let mut buffer = vec![0; 256 * 1024];
    loop {
        let (mut head, mut read) = (Vec::new(), 0);
        while read < length {
            let bytes = stream.read(&mut buffer).await?;
            if bytes == 0 {
                return Ok(());
            }
            if head.ends_with(HEAD_END) {
                read += bytes as u64;
                continue;
            }
            head.extend_from_slice(&buffer[..bytes]);
            if let Some(end) = head.windows(HEAD_END.len()).position(|window| window == HEAD_END) {
                let end = end + HEAD_END.len();
                read += (head.len() - end) as u64;
                head.truncate(end);
            }
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await?;
    }
}
