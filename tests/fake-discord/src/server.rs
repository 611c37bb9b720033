//! Starting, scripting and asking a running fake.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::arrivals::{Arrival, Counts};
use crate::http1::{self, Socket};
use crate::http2;
use crate::judge::Judge;
use crate::paths::Pattern;
use crate::reply::Reply;
use crate::script::Script;

/// A running fake Discord; it stops when this is dropped.
#[derive(Debug)]
pub struct FakeDiscord {
    /// Where it listens.
    pub addr: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
    hang_up: watch::Sender<u64>,
}

/// What makes an answer from an arrival (its body not read yet); `None` leaves it to the next in line.
pub(crate) type Answerer = Box<dyn FnMut(&Arrival) -> Option<Reply> + Send>;

pub(crate) struct Scripted {
    pub(crate) pattern: Pattern,
    pub(crate) answerer: Answerer,
}

/// What connections share.
pub(crate) struct Shared {
    pub(crate) script: Script,
    pub(crate) start: Instant,
    pub(crate) judge: Mutex<Judge>,
    pub(crate) scripted: Mutex<Vec<Scripted>>,
    pub(crate) record: Mutex<Record>,
    pub(crate) changed: Notify,
    pub(crate) connections: AtomicU64,
    pub(crate) open: AtomicU64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// Arrivals that are remembered, and totals.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) first: u64,
    pub(crate) kept: VecDeque<Arrival>,
    pub(crate) counts: Counts,
}

impl FakeDiscord {
    /// Starts on a free port of 127.0.0.1.
    ///
    /// # Panics
    /// If no port can be bound.
    pub async fn start(script: Script) -> Self {
        let bound = Self::listen(script, SocketAddr::from(([127, 0, 0, 1], 0))).await;
        bound.unwrap_or_else(|error| panic!("binding 127.0.0.1:0: {error}"))
    }

    /// Starts on a given address.
    ///
    /// # Errors
    /// If it cannot be bound.
    pub async fn listen(script: Script, addr: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared {
            judge: Mutex::new(Judge::new(script.clone())),
            script,
            start: Instant::now(),
            scripted: Mutex::default(),
            record: Mutex::default(),
            changed: Notify::new(),
            connections: AtomicU64::new(0),
            open: AtomicU64::new(0),
        });
        let (hang_up, hung_up) = watch::channel(0);
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared), hung_up));
        Ok(Self { addr, shared, accepting, hang_up })
    }

    /// `http://` (or `https://`) and the address.
    pub fn url(&self) -> String {
        let scheme = if self.shared.script.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.addr)
    }

    /// Answers the next requests of a method (`*` for any) and path (a pattern, without `/api` and version) with these, in
    /// order of arrival; after the last, with what was scripted later for it, or by the rules.
    pub fn on(&self, method: &str, path: &str, replies: Vec<Reply>) {
        let mut replies = VecDeque::from(replies);
        self.on_each(method, path, move |_| replies.pop_front());
    }

    /// Answers every request of a method and path with the same.
    pub fn always(&self, method: &str, path: &str, reply: Reply) {
        self.on_each(method, path, move |_| Some(reply.clone()));
    }

    /// Asks a closure for the answer as soon as the head is read; on `None` the next scripted answer, or the rules, decide.
    pub fn on_each(&self, method: &str, path: &str, answerer: impl FnMut(&Arrival) -> Option<Reply> + Send + 'static) {
        let pattern = Pattern::of(method, path);
        self.shared.scripted.lock().push(Scripted { pattern, answerer: Box::new(answerer) });
    }

    /// Forgets every scripted answer.
    pub fn forget_scripted(&self) {
        self.shared.scripted.lock().clear();
    }

    /// Every arrival that is remembered, in order.
    pub fn arrivals(&self) -> Vec<Arrival> {
        self.shared.record.lock().kept.iter().cloned().collect()
    }

    /// The arrivals of a method (`*` for any) and path pattern.
    pub fn arrivals_at(&self, method: &str, path: &str) -> Vec<Arrival> {
        let pattern = Pattern::of(method, path);
        let at = |arrival: &&Arrival| pattern.matches(&arrival.method, &crate::paths::Place::of(&arrival.target));
        self.shared.record.lock().kept.iter().filter(at).cloned().collect()
    }

    /// Totals since the start.
    pub fn counts(&self) -> Counts {
        let mut counts = self.shared.record.lock().counts.clone();
        let judge = self.shared.judge.lock();
        counts.peaks = judge.peaks();
        counts.invalid = judge.invalid();
        drop(judge);
        counts.connections = self.shared.connections.load(Ordering::Relaxed);
        counts.open_connections = self.shared.open.load(Ordering::Relaxed);
        counts
    }

    /// When it started: the origin of times in JSON.
    pub fn started(&self) -> Instant {
        self.shared.start
    }

    /// Waits until so many requests have arrived.
    ///
    /// # Panics
    /// If that takes longer than `patience`.
    pub async fn wait_for(&self, arrivals: u64, patience: Duration) -> Vec<Arrival> {
        self.wait_until(patience, |fake| fake.shared.record.lock().counts.arrivals >= arrivals).await;
        self.arrivals()
    }

    /// Waits until a condition holds; it is asked again whenever anything has arrived, been judged or answered.
    ///
    /// # Panics
    /// If that takes longer than `patience`.
    pub async fn wait_until(&self, patience: Duration, condition: impl Fn(&Self) -> bool) {
        let until = tokio::time::Instant::now() + patience;
        loop {
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if condition(self) {
                return;
            }
            if tokio::time::timeout_at(until, changed).await.is_err() && !condition(self) {
                panic!("the fake waited {patience:?} in vain; its counts: {}", self.counts().to_json());
            }
        }
    }

    /// Answers every call of a token (`None`: without one), interactions aside, with a global 429 for a time.
    pub fn block_globally(&self, token: Option<&str>, length: Duration) {
        self.shared.judge.lock().block(token, Instant::now(), length);
    }

    /// Bans the loopback address for a time.
    pub fn ban(&self, length: Duration) {
        self.shared.judge.lock().ban(self.addr.ip(), Instant::now(), length);
    }

    /// Replaces the list of valid tokens; `None` accepts all.
    pub fn set_tokens(&self, tokens: Option<Vec<String>>) {
        self.shared.judge.lock().set_tokens(tokens);
    }

    /// Deletes a webhook: an id, or `id/token`.
    pub fn delete_webhook(&self, webhook: &str) {
        self.shared.judge.lock().delete_webhook(webhook);
    }

    /// Closes every connection there is, busy or not; new ones are accepted.
    pub fn close_connections(&self) {
        self.hang_up.send_modify(|times| *times += 1);
    }

    /// Refuses new connections from now on; those there are go on.
    pub fn stop_listening(&self) {
        self.accepting.abort();
    }
}

impl Drop for FakeDiscord {
    fn drop(&mut self) {
        self.accepting.abort();
        self.close_connections();
    }
}

/// Counts an open connection while it lives.
struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        self.0.changed.notify_waiters();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, hung_up: watch::Receiver<u64>) {
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            // Out of descriptors, or the peer is gone already: neither is a reason to stop or to spin.
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        };
        let number = shared.connections.fetch_add(1, Ordering::Relaxed);
        shared.open.fetch_add(1, Ordering::Relaxed);
        let open = Open(Arc::clone(&shared));
        let mut hung_up = hung_up.clone();
        hung_up.mark_unchanged();
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let _open = open;
            tokio::select! {
                () = connection(shared, stream, peer, number) => {}
                _ = hung_up.changed() => {}
            }
        });
    }
}

async fn connection(shared: Arc<Shared>, stream: TcpStream, peer: SocketAddr, number: u64) {
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let Some(tls) = shared.script.tls.clone() else {
        return serve(shared, stream, peer, number, false).await;
    };
    if let Ok(stream) = tokio_rustls::TlsAcceptor::from(tls).accept(stream).await {
        let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        serve(shared, stream, peer, number, h2).await;
    }
}

/// Tells HTTP/2 from HTTP/1 by its first bytes, and serves either.
async fn serve<S: Socket>(shared: Arc<Shared>, mut stream: S, peer: SocketAddr, number: u64, h2: bool) {
    let mut first = bytes::BytesMut::with_capacity(16 * 1024);
    while !h2 && first.len() < 3 {
        match stream.read_buf(&mut first).await {
            Ok(0) | Err(_) => return,
            Ok(_) if !b"PRI".starts_with(&first[..first.len().min(3)]) => break,
            Ok(_) => {}
        }
    }
    if h2 || first.starts_with(b"PRI ") {
        http2::serve(shared, http2::Prefixed::new(first, stream), peer.ip(), number).await;
    } else {
        http1::serve(shared, &mut stream, first, peer.ip(), number).await;
        // What failed to be shut down is closed by the drop all the same.
        stream.shutdown().await.ok();
    }
}
