//! The process that is measured, an upstream that answers at once, and clients that speak raw HTTP.

use std::any::Any;
use std::fs;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Empty;
use hyper::Request;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// What the bot's token starts with: the base64 of the ID below.
const TOKEN: &str = "MTIzNDU2Nzg5MDEyMzQ1Njc4.bench.bench";
const BOT_ID: &str = "123456789012345678";
/// Channels from here on have buckets that their first answer closes.
pub(crate) const CLOSING: usize = 1_000_000;
const FIRST_CHANNEL: usize = 100_000_000_000_000_000;
/// Streams of one HTTP/2 connection.
const STREAMS: usize = 250;
/// For one answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Answers everything at once.
pub(crate) struct Upstream {
    address: SocketAddr,
}

/// nirn-proxy, killed when dropped.
pub(crate) struct Proxy {
    child: Child,
    address: SocketAddr,
    metrics: SocketAddr,
}

/// One connection to it.
pub(crate) struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Upstream {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap_or_else(|error| panic!("{error}"));
        let address = listener.local_addr().unwrap_or_else(|error| panic!("{error}"));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream));
            }
        });
        Self { address }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

async fn answer(mut stream: TcpStream) -> Option<()> {
    let respond = |remaining: u32, reset: &str| {
        format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 741\r\n\
             X-RateLimit-Bucket: 0123456789abcdef\r\nX-RateLimit-Limit: 1000000\r\nX-RateLimit-Remaining: {remaining}\r\n\
             X-RateLimit-Reset-After: {reset}\r\n\r\n{}",
            "x".repeat(741)
        )
    };
    let (open, closed) = (respond(999_999, "1.000"), respond(0, "50.000"));
    let first_closing = format!("/channels/{}", (FIRST_CHANNEL + CLOSING) / 1_000_000);
    let mut head = Vec::new();
    loop {
        while !head.ends_with(b"\r\n\r\n") {
            let mut piece = [0; 2048];
            let read = stream.read(&mut piece).await.ok().filter(|read| *read > 0)?;
            head.extend_from_slice(&piece[..read]);
        }
        let closes = head.windows(first_closing.len()).any(|part| part == first_closing.as_bytes());
        stream.write_all(if closes { &closed } else { &open }.as_bytes()).await.ok()?;
        head.clear();
    }
}

impl Proxy {
    pub(crate) async fn start(upstream: SocketAddr) -> Self {
        let (port, metrics) = (free_port(), free_port());
        let given = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
        let child = Command::new(given.as_deref().unwrap_or(env!("CARGO_BIN_EXE_nirn-proxy")))
            .env_clear()
            .env("BIND_IP", "127.0.0.1")
            .env("PORT", port.to_string())
            .env("METRICS_PORT", metrics.to_string())
            .env("DISCORD_API_URL", format!("http://{upstream}"))
            .env("BOT_RATELIMIT_OVERRIDES", format!("{BOT_ID}:1000000"))
            .env("MAX_IN_FLIGHT_REQUESTS", "20000")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = child.unwrap_or_else(|error| panic!("nirn-proxy: {error}"));
        let address = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let proxy = Self { child, address: address(port), metrics: address(metrics) };
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect(proxy.address).await.is_err() {
            assert!(Instant::now() < until, "it does not listen");
            sleep(Duration::from_millis(20)).await;
        }
        proxy
    }

    /// Resident memory in MiB.
    pub(crate) fn resident(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
        line.split_whitespace().next().and_then(|text| text.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
    }

    /// Requests being handled, as its metrics tell.
    pub(crate) async fn open(&self) -> usize {
        let mut stream = TcpStream::connect(self.metrics).await.unwrap_or_else(|error| panic!("{error}"));
        let request = "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let mut text = String::new();
        let asked = async {
            stream.write_all(request.as_bytes()).await?;
            stream.read_to_string(&mut text).await
        };
        asked.await.unwrap_or_else(|error| panic!("the metrics: {error}"));
        let lines = text.lines().filter(|line| line.starts_with("nirn_proxy_open_connections{"));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok()).sum()
    }

    pub(crate) async fn connect(&self, count: usize) -> Vec<Client> {
        let mut clients = Vec::with_capacity(count);
        for _ in 0..count {
            let stream = TcpStream::connect(self.address).await.unwrap_or_else(|error| panic!("{error}"));
            clients.push(Client { stream, buffer: Vec::new() });
        }
        clients
    }

    /// Requests that are not answered, each on a connection of its own, for as long as the result lives.
    pub(crate) async fn wait(&self, count: usize, channel: impl Fn(usize) -> usize) -> Box<dyn Any> {
        let mut clients = self.connect(count).await;
        for (index, client) in clients.iter_mut().enumerate() {
            client.send(channel(index)).await;
        }
        Box::new(clients)
    }

    /// The same over HTTP/2, as many on a connection as it takes.
    pub(crate) async fn wait_http2(&self, count: usize, channel: impl Fn(usize) -> usize) -> Box<dyn Any> {
        let mut waiting = JoinSet::new();
        for start in (0..count).step_by(STREAMS) {
            let stream = TcpStream::connect(self.address).await.unwrap_or_else(|error| panic!("{error}"));
            let made = http2::handshake::<_, _, Empty<Bytes>>(TokioExecutor::new(), TokioIo::new(stream)).await;
            let (sender, connection) = made.unwrap_or_else(|error| panic!("{error}"));
            waiting.spawn(async move { drop(connection.await) });
            for index in start..count.min(start + STREAMS) {
                let request = Request::get(format!("http://{}{}", self.address, path(channel(index))))
                    .header("authorization", format!("Bot {TOKEN}"))
                    .header("user-agent", "DiscordBot (https://example.test, 1.0)")
                    .body(Empty::new());
                let request = request.unwrap_or_else(|error| panic!("{error}"));
                let mut sender = sender.clone();
                waiting.spawn(async move { drop(sender.send_request(request).await) });
            }
        }
        Box::new(waiting)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        assert!(self.child.kill().and_then(|()| self.child.wait()).is_ok(), "the process did not stop");
    }
}

impl Client {
    async fn send(&mut self, channel: usize) {
        let head = format!(
            "GET {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bot {TOKEN}\r\n\
             User-Agent: DiscordBot (https://example.test, 1.0)\r\n\r\n",
            path(channel)
        );
        self.stream.write_all(head.as_bytes()).await.unwrap_or_else(|error| panic!("a request: {error}"));
    }

    /// Asks and waits for the answer.
    async fn ask(&mut self, channel: usize) {
        self.send(channel).await;
        self.buffer.clear();
        let body = loop {
            let read = timeout(PATIENCE, self.stream.read_buf(&mut self.buffer)).await;
            assert!(matches!(read, Ok(Ok(1..))), "an answer: {read:?}");
            if let Some(at) = self.buffer.windows(4).position(|part| part == b"\r\n\r\n") {
                break at + 4;
            }
        };
        assert!(self.buffer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&self.buffer[..body]));
        while self.buffer.len() < body + 741 {
            let read = timeout(PATIENCE, self.stream.read_buf(&mut self.buffer)).await;
            assert!(matches!(read, Ok(Ok(1..))), "a body: {read:?}");
        }
    }
}

/// Every client asks so many times in a row, all of them beside each other; `channel` chooses by client and round.
pub(crate) async fn all_at_once(clients: &mut Vec<Client>, rounds: usize, channel: impl Fn(usize, usize) -> usize) {
    let mut asking = JoinSet::new();
    for (index, mut client) in clients.drain(..).enumerate() {
        let channels: Vec<usize> = (0..rounds).map(|round| channel(index, round)).collect();
        asking.spawn(async move {
            for channel in channels {
                client.ask(channel).await;
            }
            client
        });
    }
    *clients = asking.join_all().await;
}

fn path(channel: usize) -> String {
    format!("/api/v10/channels/{}/messages?limit=1", FIRST_CHANNEL + channel)
}

fn free_port() -> u16 {
    let bound = StdListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    bound.unwrap_or_else(|error| panic!("no free port: {error}")).port()
}
