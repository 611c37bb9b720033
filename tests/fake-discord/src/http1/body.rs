//! Reading a request's body off the wire.

use std::io;

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncReadExt;

use super::{LARGEST_HEAD, Socket, has};

/// Where in a body the reading stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyReader {
    /// So many bytes to go.
    Length(u64),
    /// At a chunk's size line.
    ChunkSize,
    /// So many bytes to go in a chunk, its line end not counted.
    Chunk(u64),
    /// In the trailer.
    Trailer,
    /// At the end.
    Ended,
}

impl BodyReader {
    /// From a request's headers; `None` when they contradict each other.
    pub(super) fn of(headers: &[(String, Vec<u8>)]) -> Option<Self> {
        let named = |name: &'static str| headers.iter().filter(move |(given, _)| given.eq_ignore_ascii_case(name));
        let chunked = named("transfer-encoding").next().is_some();
        let mut length = None;
        for (_, value) in named("content-length") {
            let value = std::str::from_utf8(value).ok()?.parse::<u64>().ok()?;
            if chunked || length.is_some_and(|known| known != value) {
                return None;
            }
            length = Some(value);
        }
        match (chunked, length) {
            (true, _) => has(headers, "transfer-encoding", "chunked").then_some(Self::ChunkSize),
            (false, None | Some(0)) => Some(Self::Ended),
            (false, Some(length)) => Some(Self::Length(length)),
        }
    }

    /// Whether there is nothing more to read.
    pub(super) fn ended(self) -> bool {
        self == Self::Ended
    }

    /// The next piece; `None` at the end.
    pub(super) async fn next<S: Socket>(&mut self, stream: &mut S, buffer: &mut BytesMut) -> io::Result<Option<Bytes>> {
        loop {
            match *self {
                Self::Ended => return Ok(None),
                Self::Length(0) => *self = Self::Ended,
                Self::Length(left) => {
                    let piece = piece(stream, buffer, left).await?;
                    *self = Self::Length(left - piece.len() as u64);
                    return Ok(Some(piece));
                }
                Self::ChunkSize => {
                    let line = line(stream, buffer).await?;
                    let size = line.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
                    let size = std::str::from_utf8(size).ok().and_then(|size| u64::from_str_radix(size, 16).ok());
                    match size.ok_or(io::ErrorKind::InvalidData)? {
                        0 => *self = Self::Trailer,
                        size => *self = Self::Chunk(size),
                    }
                }
                Self::Chunk(0) => {
                    if !line(stream, buffer).await?.is_empty() {
                        return Err(io::ErrorKind::InvalidData.into());
                    }
                    *self = Self::ChunkSize;
                }
                Self::Chunk(left) => {
                    let piece = piece(stream, buffer, left).await?;
                    *self = Self::Chunk(left - piece.len() as u64);
                    return Ok(Some(piece));
                }
                Self::Trailer => {
                    if line(stream, buffer).await?.is_empty() {
                        *self = Self::Ended;
                    }
                }
            }
        }
    }
}

async fn fill<S: Socket>(stream: &mut S, buffer: &mut BytesMut) -> io::Result<()> {
    buffer.reserve(64 * 1024);
    if stream.read_buf(buffer).await? == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

async fn piece<S: Socket>(stream: &mut S, buffer: &mut BytesMut, most: u64) -> io::Result<Bytes> {
    if buffer.is_empty() {
        fill(stream, buffer).await?;
    }
    let length = usize::try_from(most).unwrap_or(usize::MAX).min(buffer.len());
    Ok(buffer.split_to(length).freeze())
}

async fn line<S: Socket>(stream: &mut S, buffer: &mut BytesMut) -> io::Result<Bytes> {
    loop {
        if let Some(end) = buffer.windows(2).position(|two| two == b"\r\n") {
            let mut line = buffer.split_to(end + 2);
            line.truncate(end);
            return Ok(line.freeze());
        }
        if buffer.len() > LARGEST_HEAD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        fill(stream, buffer).await?;
    }
}
