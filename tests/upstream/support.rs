//! Scripted servers on loopback, and requests as the front would hand them in.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use nirn_proxy::config::{self, Proxy};
use nirn_proxy::scheduler::replay::{Kept, Vault};
use nirn_proxy::upstream::{Answer, RequestBody, SendError, Upstream};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// No test waits longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Settings towards a plain http server.
pub(crate) fn settings(address: SocketAddr) -> config::Upstream {
    config::Upstream {
        https: false,
        authority: address.to_string().parse().expect("an address is an authority"),
        outbound_ip: None,
        request_timeout: Duration::from_secs(5),
        http2: false,
        proxy: Proxy::default(),
        extra_roots: Vec::new(),
    }
}

/// Sends requests as the scheduler does.
#[derive(Clone)]
pub(crate) struct Direct(Upstream);

/// A client with those settings.
pub(crate) fn client(settings: &config::Upstream) -> Direct {
    Direct(Upstream::new(settings).expect("usable settings"))
}

impl Direct {
    pub(crate) async fn send(&self, request: Request<RequestBody>) -> Result<Answer, SendError> {
        let started = Instant::now();
        let lease = self.0.connect().await?;
        let (mut parts, body) = request.into_parts();
        self.0.send(lease, &mut parts, body, started).await
    }
}

/// A request as the front leaves it: an origin-form target and its `Host`.
pub(crate) fn request(method: Method, target: &str, host: &str, body: RequestBody) -> Request<RequestBody> {
    Request::builder().method(method).uri(target).header("host", host).body(body).expect("a valid request")
}

/// A server that runs `script` for each connection, counting them.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) connections: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    /// Starts listening on a free port.
    pub(crate) async fn start<F, R>(script: F) -> Self
    where
        F: Fn(usize, TcpStream) -> R + Send + Sync + 'static,
        R: Future<Output = io::Result<()>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let number = count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(script(number, stream));
            }
        });
        Self { address, connections, task }
    }

    pub(crate) fn host(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reads one request's head, its empty line included; what came after it stays in the stream. Empty at the end.
pub(crate) async fn read_head<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).await? == 0 {
            break;
        }
        head.push(byte[0]);
    }
    Ok(String::from_utf8(head).expect("a head in UTF-8"))
}

/// Reads a body by its `Content-Length` or its chunks; fails when it ends early.
pub(crate) async fn read_body<S: AsyncRead + Unpin>(stream: &mut S, head: &str) -> io::Result<Vec<u8>> {
    let lower = head.to_lowercase();
    if let Some(length) = lower.lines().find_map(|line| line.strip_prefix("content-length: ")) {
        let mut body = vec![0; length.trim().parse().expect("a length")];
        stream.read_exact(&mut body).await?;
        return Ok(body);
    }
    let mut body = Vec::new();
    if lower.contains("transfer-encoding: chunked") {
        loop {
            let size = read_line(stream).await?;
            let size = usize::from_str_radix(size.trim(), 16).map_err(io::Error::other)?;
            let mut chunk = vec![0; size + 2];
            stream.read_exact(&mut chunk).await?;
            if size == 0 {
                break;
            }
            body.extend_from_slice(&chunk[..size]);
        }
    }
    Ok(body)
}

async fn read_line<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<String> {
    let mut line = String::new();
    while !line.ends_with('\n') {
        line.push(char::from(stream.read_u8().await?));
    }
    Ok(line)
}

/// Answers 200 with a body that says so.
pub(crate) async fn answer_ok(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await
}

/// A server that answers every request with 200 and reports each head and body.
pub(crate) async fn recorder() -> (Server, mpsc::Receiver<(String, Vec<u8>)>) {
    let (seen, requests) = mpsc::channel(1024);
    let server = Server::start(move |_, mut stream| {
        let seen = seen.clone();
        async move {
            loop {
                let head = read_head(&mut stream).await?;
                if head.is_empty() {
                    return Ok(());
                }
                let body = read_body(&mut stream, &head).await?;
                seen.send((head, body)).await.map_err(io::Error::other)?;
                answer_ok(&mut stream).await?;
            }
        }
    })
    .await;
    (server, requests)
}

/// The whole body of an answer.
pub(crate) async fn text(answer: Answer) -> String {
    let body = answer.response.into_body().collect().await.expect("a whole body").to_bytes();
    String::from_utf8(body.to_vec()).expect("UTF-8")
}

/// Waits until `condition` holds.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// The client's side of an upload: send pieces, drop it to end the body.
pub(crate) type Client = mpsc::Sender<Result<Bytes, &'static str>>;

/// A body that a test feeds.
pub(crate) struct Fed(mpsc::Receiver<Result<Bytes, &'static str>>);

impl Fed {
    pub(crate) fn new() -> (Client, Self) {
        let (client, pieces) = mpsc::channel(1);
        (client, Self(pieces))
    }
}

impl Body for Fed {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}

/// Room enough for any test.
pub(crate) fn vault() -> Vault {
    Vault::new(100 << 20, 400 << 20)
}

/// A kept body, all there already.
pub(crate) async fn kept(vault: &Vault, body: impl Into<Bytes>) -> Kept {
    vault.keep(http_body_util::Full::new(body.into()), None).await.expect("room")
}

/// Bytes that tell when they are out of order.
pub(crate) fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}
