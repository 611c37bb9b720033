//! HTTP/1.1 as bytes: libraries tidy a request up before a proxy sees it.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::PATIENCE;

pub struct Client {
    pub stream: TcpStream,
    /// How long it waits for an answer's head.
    pub patience: Duration,
    read: Vec<u8>,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Status line and header lines as they came.
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.all(name).next()
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let lines = self.head.lines().skip(1).filter_map(|line| line.split_once(':'));
        lines.filter(move |(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap())
    }

    pub fn over(stream: TcpStream) -> Self {
        Self { stream, patience: PATIENCE, read: Vec::new() }
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Asks for a path and waits for the answer.
    pub async fn get(&mut self, path: &str) -> Answer {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: proxy\r\n\r\n")).await;
        self.answer().await
    }

    /// The next answer, whole.
    pub async fn answer(&mut self) -> Answer {
        self.answer_to("GET").await
    }

    pub async fn answer_to(&mut self, method: &str) -> Answer {
        self.answer_if_any(method).await.expect("a whole head")
    }

    /// The next answer; none if the connection ends without one.
    pub async fn answer_if_any(&mut self, method: &str) -> Option<Answer> {
        let head = timeout(self.patience, self.head()).await.expect("an answer's head in time")?;
        let status = head[9..12].parse().unwrap();
        let mut answer = Answer { status, head, body: Vec::new() };
        if method == "HEAD" || matches!(status, 204 | 304) {
            return Some(answer);
        }
        let body = timeout(PATIENCE, self.body(&answer)).await.expect("an answer's body in time");
        answer.body = body.expect("a whole body");
        Some(answer)
    }

    /// A head alone; `None` if the connection ends before it does.
    pub async fn head(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.read.windows(4).position(|window| window == b"\r\n\r\n") {
                let head = self.read.drain(..end + 4).collect();
                return Some(String::from_utf8(head).unwrap());
            }
            self.more().await?;
        }
    }

    async fn body(&mut self, answer: &Answer) -> Option<Vec<u8>> {
        if let Some(length) = answer.header("content-length") {
            return self.take(length.parse().unwrap()).await;
        }
        assert_eq!(answer.header("transfer-encoding"), Some("chunked"), "{}", answer.head);
        let mut body = Vec::new();
        loop {
            let size = self.line().await?;
            let size = usize::from_str_radix(size.trim(), 16).unwrap();
            body.extend(self.take(size).await?);
            self.line().await?;
            if size == 0 {
                return Some(body);
            }
        }
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.read.iter().position(|&byte| byte == b'\n') {
                return Some(String::from_utf8(self.read.drain(..=end).collect()).unwrap());
            }
            self.more().await?;
        }
    }

    /// So many bytes; `None` if the connection ends before.
    pub async fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.read.len() < length {
            self.more().await?;
        }
        Some(self.read.drain(..length).collect())
    }

    async fn more(&mut self) -> Option<()> {
        match self.stream.read_buf(&mut self.read).await {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(()),
        }
    }

    /// What is left until the connection ends, if it does so within `limit`.
    pub async fn rest_within(&mut self, limit: Duration) -> Option<Vec<u8>> {
        let all = async { while self.more().await.is_some() {} };
        timeout(limit, all).await.ok().map(|()| std::mem::take(&mut self.read))
    }
}
