//! HTTP/1.1 by hand: what was sent is recorded byte for byte, and answers go wrong as scripted.

use std::borrow::Cow;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use crate::clock;
use crate::exchange::{Exchange, Head};
use crate::http1::body::BodyReader;
use crate::reply::{Action, Framing, Reply};
use crate::server::Shared;

mod body;

/// The largest header block that is read.
const LARGEST_HEAD: usize = 1024 * 1024;

/// The most that is buffered of a client that goes on sending while it waits.
const LARGEST_AHEAD: usize = 1024 * 1024;

/// A stream that can be reset.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Makes the coming close a reset.
    fn reset(&self);
}

impl Socket for TcpStream {
    fn reset(&self) {
        // On failure the close is an ordinary one.
        self.set_zero_linger().ok();
    }
}

impl Socket for TlsStream<TcpStream> {
    fn reset(&self) {
        self.get_ref().0.reset();
    }
}

/// Serves one connection until it ends.
pub(crate) async fn serve<S: Socket>(
    shared: Arc<Shared>,
    stream: &mut S,
    mut buffer: BytesMut,
    ip: IpAddr,
    number: u64,
) {
    let mut answers = 0;
    loop {
        let idle = shared.script.idle_ms.map(Duration::from_millis);
        let length = match idle {
            None => head_length(stream, &mut buffer).await,
            Some(idle) => match tokio::time::timeout(idle, head_length(stream, &mut buffer)).await {
                Ok(length) => length,
                Err(_) => return,
            },
        };
        let Some(length) = length else {
            if !buffer.is_empty() {
                malformed(&shared, stream, ip, number, buffer.to_vec()).await;
            }
            return;
        };
        let raw = buffer.split_to(length);
        let Some(head) = parse(&raw) else {
            return malformed(&shared, stream, ip, number, raw.to_vec()).await;
        };
        let Some(body) = BodyReader::of(&head.headers) else {
            return malformed(&shared, stream, ip, number, raw.to_vec()).await;
        };
        let mut turn = Turn {
            keep_alive: head.version == "HTTP/1.1" && !has(&head.headers, "connection", "close"),
            expects_continue: has(&head.headers, "expect", "100-continue"),
            head_only: head.method == "HEAD",
            exchange: Exchange::begin(&shared, ip, number, head),
            stream,
            buffer: &mut buffer,
            body,
        };
        let outcome = turn.run().await;
        answers += 1;
        if outcome.is_err() || shared.script.close_after.is_some_and(|most| answers >= most) {
            return;
        }
    }
}

/// Records what is no HTTP, and refuses it.
async fn malformed<S: Socket>(shared: &Arc<Shared>, stream: &mut S, ip: IpAddr, number: u64, raw: Vec<u8>) {
    let head = Head { version: "", target: raw, ..Head::default() };
    Exchange::begin(shared, ip, number, head).broken();
    let answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    // Whoever sends garbage may be gone.
    stream.write_all(answer).await.ok();
}

/// Reads until a whole header block is buffered; its length with the empty line. `None` at the end or when it is too long.
async fn head_length<S: Socket>(stream: &mut S, buffer: &mut BytesMut) -> Option<usize> {
    let mut seen = 0;
    loop {
        if let Some(at) = buffer[seen..].windows(4).position(|four| four == b"\r\n\r\n") {
            return Some(seen + at + 4);
        }
        seen = buffer.len().saturating_sub(3);
        if buffer.len() > LARGEST_HEAD || stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

fn parse(raw: &[u8]) -> Option<Head> {
    let mut lines =
        raw[..raw.len() - 4].split(|&byte| byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let line = lines.next()?;
    let first = line.iter().position(|&byte| byte == b' ')?;
    let last = line.iter().rposition(|&byte| byte == b' ').filter(|&last| last > first)?;
    let version = match &line[last + 1..] {
        b"HTTP/1.1" => "HTTP/1.1",
        b"HTTP/1.0" => "HTTP/1.0",
        _ => return None,
    };
    let mut headers = Vec::with_capacity(16);
    for line in lines {
        let colon = line.iter().position(|&byte| byte == b':').filter(|&colon| colon > 0)?;
        let name = std::str::from_utf8(&line[..colon]).ok()?;
        headers.push((name.to_owned(), line[colon + 1..].trim_ascii().to_vec()));
    }
    let method = std::str::from_utf8(&line[..first]).ok()?.to_owned();
    Some(Head { version, method, target: line[first + 1..last].to_vec(), headers })
}

fn has(headers: &[(String, Vec<u8>)], name: &str, word: &str) -> bool {
    let named = headers.iter().filter(|(given, _)| given.eq_ignore_ascii_case(name));
    named
        .flat_map(|(_, value)| value.split(|&byte| byte == b','))
        .any(|part| part.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
}

/// The connection cannot be used any further.
struct Over;

impl From<io::Error> for Over {
    fn from(_: io::Error) -> Self {
        Self
    }
}

/// One request and its answer.
struct Turn<'a, S> {
    keep_alive: bool,
    expects_continue: bool,
    head_only: bool,
    exchange: Exchange,
    stream: &'a mut S,
    buffer: &'a mut BytesMut,
    body: BodyReader,
}

impl<S: Socket> Turn<'_, S> {
    async fn run(&mut self) -> Result<(), Over> {
        let stop_at = match self.exchange.scripted.as_ref().map(|reply| &reply.action) {
            Some(Action::AnswerEarly(bytes) | Action::AnswerEarlyAndClose(bytes)) => Some(*bytes),
            Some(Action::CloseAtHead) => Some(0),
            _ => None,
        };
        if self.read_body(stop_at).await.is_err() {
            self.exchange.broken();
            return Err(Over);
        }
        let (before, after) = self.exchange.latency();
        let waited = self.pause(before).await;
        if waited.is_err() {
            self.exchange.done(false, true);
            return waited;
        }
        let reply = self.exchange.judge();
        let mut waited = self.pause(after + reply.delay).await;
        if let (Ok(()), Some(gate)) = (&waited, &reply.gate) {
            waited = self.watched(gate.pass()).await;
        }
        if waited.is_err() {
            self.exchange.done(false, true);
            return waited;
        }
        let mut sent = false;
        let delivered = self.deliver(&reply, &mut sent).await;
        self.exchange.done(sent, false);
        delivered?;
        if stop_at.is_some() {
            self.read_body(None).await?;
        }
        if self.keep_alive && reply.framing != Framing::Close && !has(&reply.headers, "connection", "close") {
            Ok(())
        } else {
            Err(Over)
        }
    }

    /// Reads the request's body, to its end or to the piece that reaches `stop_at`.
    async fn read_body(&mut self, stop_at: Option<usize>) -> Result<(), Over> {
        let mut read = 0;
        while stop_at.is_none_or(|stop| read < stop) {
            if self.expects_continue && self.buffer.is_empty() && !self.body.ended() {
                self.expects_continue = false;
                self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
            }
            let Some(piece) = self.body.next(self.stream, self.buffer).await? else {
                self.exchange.body_end();
                return Ok(());
            };
            read += piece.len();
            self.exchange.body_piece(&piece);
        }
        Ok(())
    }

    async fn pause(&mut self, length: Duration) -> Result<(), Over> {
        if length.is_zero() { Ok(()) } else { self.watched(tokio::time::sleep(length)).await }
    }

    /// Waits for something, or for the client to leave.
    async fn watched(&mut self, wait: impl Future<Output = ()>) -> Result<(), Over> {
        tokio::pin!(wait);
        loop {
            tokio::select! {
                () = &mut wait => return Ok(()),
                read = self.stream.read_buf(self.buffer), if self.buffer.len() < LARGEST_AHEAD => {
                    if read? == 0 {
                        return Err(Over);
                    }
                }
            }
        }
    }

    async fn deliver(&mut self, reply: &Reply, sent: &mut bool) -> Result<(), Over> {
        let head = self.head(reply);
        let body = if self.head_only || matches!(reply.status, 204 | 304) { Bytes::new() } else { framed(reply) };
        match &reply.action {
            Action::Answer | Action::AnswerEarly(_) | Action::AnswerEarlyAndClose(_) => {
                let mut whole = head;
                whole.extend_from_slice(&body);
                self.stream.write_all(&whole).await?;
                self.stream.flush().await?;
                *sent = true;
                if matches!(reply.action, Action::AnswerEarlyAndClose(_)) {
                    // Closing with unread input resets: give the answer a moment to be read.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    return Err(Over);
                }
                Ok(())
            }
            Action::Close | Action::CloseAtHead => Err(Over),
            Action::Reset => {
                self.stream.reset();
                Err(Over)
            }
            Action::Stall => self.watched(std::future::pending()).await,
            Action::StallBody(length) | Action::CutBody(length) | Action::ResetBody(length) => {
                let mut part = head;
                part.extend_from_slice(&body[..body.len().min(*length)]);
                self.stream.write_all(&part).await?;
                self.stream.flush().await?;
                *sent = true;
                match reply.action {
                    Action::StallBody(_) => self.watched(std::future::pending()).await?,
                    Action::ResetBody(_) => {
                        // Or the reset overtakes what was written.
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        self.stream.reset();
                    }
                    _ => {}
                }
                Err(Over)
            }
            Action::Trickle(length, pause) => {
                self.stream.write_all(&head).await?;
                *sent = true;
                for piece in body.chunks((*length).max(1)) {
                    self.stream.flush().await?;
                    tokio::time::sleep(*pause).await;
                    self.stream.write_all(piece).await?;
                }
                Ok(self.stream.flush().await?)
            }
            Action::Raw(bytes) => {
                self.stream.write_all(bytes).await?;
                self.stream.flush().await?;
                Err(Over)
            }
        }
    }

    fn head(&self, reply: &Reply) -> Vec<u8> {
        let reason = http::StatusCode::from_u16(reply.status).ok().and_then(|status| status.canonical_reason());
        let mut head = Vec::with_capacity(512 + reply.body.len());
        head.extend_from_slice(&reply.ahead);
        head.extend_from_slice(format!("HTTP/1.1 {} {}\r\n", reply.status, reason.unwrap_or("Unknown")).as_bytes());
        let mut line = |name: &str, value: &[u8]| {
            for part in [name.as_bytes(), b": ", value, b"\r\n"] {
                head.extend_from_slice(part);
            }
        };
        for (name, value) in all_headers(reply) {
            line(name, &value);
        }
        let told = reply.header("content-length").is_some() || reply.header("transfer-encoding").is_some();
        match reply.framing {
            Framing::Length if !told && !matches!(reply.status, 204 | 304) => {
                line("Content-Length", reply.body.len().to_string().as_bytes());
            }
            Framing::Chunked if !told => line("Transfer-Encoding", b"chunked"),
            _ => {}
        }
        if (!self.keep_alive || reply.framing == Framing::Close) && reply.header("connection").is_none() {
            line("Connection", b"close");
        }
        head.extend_from_slice(b"\r\n");
        head
    }
}

/// The body as it goes over the wire.
fn framed(reply: &Reply) -> Bytes {
    if reply.framing != Framing::Chunked {
        return reply.body.clone();
    }
    let mut framed = BytesMut::new();
    // Two chunks, so that whoever copies one chunk only is found out.
    for part in [&reply.body[..reply.body.len() / 2], &reply.body[reply.body.len() / 2..]] {
        if !part.is_empty() {
            framed.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
            framed.extend_from_slice(part);
            framed.extend_from_slice(b"\r\n");
        }
    }
    framed.extend_from_slice(b"0\r\n\r\n");
    framed.freeze()
}

/// The reply's headers with those that every answer of Discord's carries.
pub(crate) fn all_headers(reply: &Reply) -> impl Iterator<Item = (&str, Cow<'_, [u8]>)> {
    let own = |name: &str| reply.bare || reply.header(name).is_some();
    let json = !own("content-type") && !reply.body.is_empty();
    let usual = [
        (!own("date")).then(|| ("Date", Cow::Owned(clock::http_date().into_bytes()))),
        json.then_some(("Content-Type", Cow::Borrowed(&b"application/json"[..]))),
        (!own("via")).then_some(("Via", Cow::Borrowed(&b"1.1 google"[..]))),
        (!own("server")).then_some(("Server", Cow::Borrowed(&b"cloudflare"[..]))),
    ];
    let given = reply.headers.iter().map(|(name, value)| (name.as_str(), Cow::Borrowed(value.as_slice())));
    usual.into_iter().flatten().chain(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_and_the_headers_stay_as_they_were_sent() {
        let raw = b"PUT //a/%23/\xc3\xa9/.././x\\{}?? HTTP/1.1\r\nX-oDD:  a b \r\nx-odd:\r\n\r\n";
        let head = parse(raw).unwrap();
        assert_eq!(head.target, b"//a/%23/\xc3\xa9/.././x\\{}??");
        assert_eq!(head.headers, [("X-oDD".into(), b"a b".to_vec()), ("x-odd".into(), Vec::new())]);
        assert_eq!(parse(b"GET /x? HTTP/1.1\r\n\r\n").unwrap().target, b"/x?");
        assert!(parse(b"GET HTTP/1.1\r\n\r\n").is_none());
    }

    #[test]
    fn a_chunked_body_comes_in_two_chunks_and_ends() {
        let reply = Reply { body: "abc".into(), framing: Framing::Chunked, ..Reply::default() };
        assert_eq!(&framed(&reply)[..], b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n");
    }
}
