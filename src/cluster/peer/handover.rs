//! One message from the former owner of credentials to the next, on a connection of its own: its length in four bytes,
//! then itself. One byte back says that it was taken in, and passed on if it is not for who took it.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::scheduler::handover::MAX_MESSAGE;

/// For a whole message: at the teller with its answer, at the taker for either of the two.
const PATIENCE: Duration = Duration::from_secs(2);
const TAKEN: u8 = 1;

pub(super) async fn tell(mut stream: impl AsyncRead + AsyncWrite + Unpin, message: &[u8]) -> io::Result<()> {
    let length = u32::try_from(message.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let told = async {
        stream.write_all(&length.to_be_bytes()).await?;
        stream.write_all(message).await?;
        stream.flush().await?;
        if stream.read_u8().await? == TAKEN { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    };
    timeout(PATIENCE, told).await?
}

/// Reads a message. Whatever is not a whole one in time says nothing.
pub(super) async fn hear(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let heard = async {
        let length = stream.read_u32().await? as usize;
        if length > MAX_MESSAGE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut message = Vec::new();
        // Grows as it arrives: what is announced costs nothing.
        stream.take(length as u64).read_to_end(&mut message).await?;
        if message.len() < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(message)
    };
    timeout(PATIENCE, heard).await?
}

/// Says that a message was taken in.
pub(super) async fn acknowledge(mut stream: impl AsyncWrite + Unpin) -> io::Result<()> {
    let said = async {
        stream.write_u8(TAKEN).await?;
        stream.flush().await?;
        stream.shutdown().await
    };
    timeout(PATIENCE, said).await?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_message_arrives_whole_or_not_at_all() {
        let (near, mut far) = tokio::io::duplex(64);
        let message = vec![7; 10_000];
        let heard = async {
            let heard = hear(&mut far).await;
            acknowledge(far).await.unwrap();
            heard
        };
        let (told, heard) = tokio::join!(tell(near, &message), heard);
        told.unwrap();
        assert_eq!(heard.unwrap(), message);
        for broken in [&[0, 0, 0, 9, 1, 2][..], &[255, 255, 255, 255, 1], &[0, 0]] {
            let (mut near, mut far) = tokio::io::duplex(64);
            near.write_all(broken).await.unwrap();
            drop(near);
            hear(&mut far).await.unwrap_err();
        }
    }
}
