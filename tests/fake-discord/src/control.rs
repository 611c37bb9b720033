//! The control port: counts and arrivals as JSON, without a secret in them.

use std::sync::Arc;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::server::FakeDiscord;

/// Answers `GET /counts` and `GET /arrivals` for ever.
pub async fn serve(listener: TcpListener, fake: Arc<FakeDiscord>) {
    loop {
        if let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, Arc::clone(&fake)));
        }
    }
}

async fn answer(mut stream: TcpStream, fake: Arc<FakeDiscord>) {
    let mut head = Vec::new();
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        match stream.read_buf(&mut head).await {
            Ok(read) if read > 0 && head.len() < 16 * 1024 => {}
            _ => return,
        }
    }
    let path = head.split(|&byte| byte == b' ').nth(1).unwrap_or_default();
    let (status, body) = match path {
        b"/counts" => ("200 OK", fake.counts().to_json()),
        b"/arrivals" => {
            let start = fake.started();
            ("200 OK", Value::Array(fake.arrivals().iter().map(|arrival| arrival.to_json(start)).collect()))
        }
        _ => ("404 Not Found", Value::Null),
    };
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    // The asker may be gone.
    stream.write_all((head + &body).as_bytes()).await.ok();
}
