//! An upstream whose every answer is written by the test, byte for byte.

use std::net::SocketAddr;

use tokio::io::{AsyncBufReadExt, AsyncReadExt};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::PATIENCE;

pub struct Upstream {
    pub address: SocketAddr,
    arrivals: mpsc::Receiver<Arrival>,
}

/// One request as it came, and the way to answer it.
pub struct Arrival {
    /// Request line and header lines.
    pub head: String,
    pub body: Vec<u8>,
    answer: mpsc::Sender<Vec<u8>>,
}

impl Upstream {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, arrivals) = mpsc::channel(1024);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, sender.clone()));
            }
        });
        Self { address, arrivals }
    }

    /// One that answers everything 200 with the request line as its body.
    pub async fn echo() -> SocketAddr {
        let mut upstream = Self::start().await;
        let address = upstream.address;
        tokio::spawn(async move {
            while let Some(arrival) = upstream.arrivals.recv().await {
                let line = arrival.line().to_owned();
                arrival.ok(&line).await;
            }
        });
        address
    }

    /// The next request that arrives.
    pub async fn next(&mut self) -> Arrival {
        timeout(PATIENCE, self.arrivals.recv()).await.expect("a request in time").expect("an upstream that runs")
    }

    /// Whether a request has arrived that nobody took.
    pub fn is_untouched(&mut self) -> bool {
        self.arrivals.try_recv().is_err()
    }
}

impl Arrival {
    pub fn line(&self) -> &str {
        self.head.lines().next().unwrap()
    }

    /// Writes a piece of the answer; false when the connection is gone.
    pub async fn write(&self, bytes: impl AsRef<[u8]>) -> bool {
        self.answer.send(bytes.as_ref().to_vec()).await.is_ok()
    }

    /// A whole 200.
    pub async fn ok(self, body: &str) {
        self.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
    }

    /// Closes the connection as it is.
    pub async fn cut(self) {
        self.write([]).await;
    }

    /// Waits until the proxy has given the connection up.
    pub async fn given_up(&self) {
        timeout(PATIENCE, self.answer.closed()).await.expect("the proxy to give up the attempt in time");
    }
}

async fn serve(stream: TcpStream, arrivals: mpsc::Sender<Arrival>) -> Option<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).await.ok()? == 0 {
                return None;
            }
        }
        let body = body(&mut reader, &head).await?;
        let (answer, mut pieces) = mpsc::channel::<Vec<u8>>(64);
        arrivals.send(Arrival { head, body, answer }).await.ok()?;
        loop {
            tokio::select! {
                piece = pieces.recv() => match piece {
                    None => break,
                    Some(piece) if piece.is_empty() => return None,
                    Some(piece) => writer.write_all(&piece).await.ok()?,
                },
                // The next request, if it is not the end: this answer was complete then.
                next = reader.fill_buf() => if next.ok()?.is_empty() { return None } else { break },
            }
        }
    }
}

async fn body(reader: &mut (impl AsyncBufReadExt + Unpin), head: &str) -> Option<Vec<u8>> {
    let lower = head.to_lowercase();
    let mut body = Vec::new();
    if let Some(length) = lower.lines().find_map(|line| line.strip_prefix("content-length:")) {
        body.resize(length.trim().parse().unwrap(), 0);
        reader.read_exact(&mut body).await.ok()?;
    } else if lower.contains("\ntransfer-encoding: chunked") {
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).await.ok()?;
            let size = usize::from_str_radix(line.trim(), 16).ok()?;
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).await.ok()?;
            body.extend(&chunk[..size]);
            if size == 0 {
                break;
            }
        }
    }
    Some(body)
}
