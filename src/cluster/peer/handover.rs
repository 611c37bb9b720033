//! One message from a node that leaves to one that stays, on a connection of its own: its length in four bytes, then
//! itself. One byte back says that it was taken in.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::scheduler::handover::MAX_MESSAGE;

/// For a whole message, its answer included.
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

/// Whatever is not a whole message in time says nothing.
pub(super) async fn hear(mut stream: impl AsyncRead + AsyncWrite + Unpin, take: impl FnOnce(&[u8])) -> io::Result<()> {
    let heard = async {
        let length = stream.read_u32().await? as usize;
        if length > MAX_MESSAGE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut message = Vec::new();
        // Grows as it arrives: what is announced costs nothing.
        (&mut stream).take(length as u64).read_to_end(&mut message).await?;
        if message.len() < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        take(&message);
        stream.write_u8(TAKEN).await?;
        stream.flush().await?;
        stream.shutdown().await
    };
    timeout(PATIENCE, heard).await?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_message_arrives_whole_or_not_at_all() {
        let (near, far) = tokio::io::duplex(64);
        let message = vec![7; 10_000];
        let mut taken = Vec::new();
        let heard = hear(far, |message| taken = message.to_vec());
        let (told, heard) = tokio::join!(tell(near, &message), heard);
        told.unwrap();
        heard.unwrap();
        assert_eq!(taken, message);
        for broken in [&[0, 0, 0, 9, 1, 2][..], &[255, 255, 255, 255, 1], &[0, 0]] {
            let (mut near, far) = tokio::io::duplex(64);
            near.write_all(broken).await.unwrap();
            drop(near);
            hear(far, |_| panic!("not a message")).await.unwrap_err();
        }
    }
}
