//! The unlinked temporary file behind a large body. Every call of the file system runs off the runtime's threads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use tokio::task::JoinHandle;

/// A read under way: the bytes wanted, all of them.
pub(super) type Reading = JoinHandle<io::Result<Bytes>>;
/// A write under way: the file, in case it was made for this write.
pub(super) type Writing = JoinHandle<io::Result<Arc<File>>>;

/// Makes sure that a file can be made, written and read where TMPDIR says.
pub(super) fn check(folder: &Path) -> Result<(), String> {
    let probe = || -> io::Result<()> {
        let file = tempfile::tempfile_in(folder)?;
        file.write_all_at(b"nirn", 0)?;
        file.read_exact_at(&mut [0; 4], 0)
    };
    probe().map_err(|error| format!("TMPDIR must name a folder where bodies kept for a retry can be stored: {error}"))
}

/// Makes a file that is gone with its last handle.
pub(super) async fn create(folder: &Path) -> io::Result<File> {
    let folder = folder.to_owned();
    tokio::task::spawn_blocking(move || tempfile::tempfile_in(folder)).await.map_err(io::Error::other)?
}

/// Starts to write `chunks` at `offset`, to a new file in `folder` if there is none.
pub(super) fn write(file: Option<Arc<File>>, folder: &Path, mut offset: u64, chunks: Vec<Bytes>) -> Writing {
    let folder = folder.to_owned();
    tokio::task::spawn_blocking(move || {
        let file = match file {
            Some(file) => file,
            None => Arc::new(tempfile::tempfile_in(folder)?),
        };
        for chunk in chunks {
            file.write_all_at(&chunk, offset)?;
            offset += chunk.len() as u64;
        }
        Ok(file)
    })
}

/// Starts to read `length` bytes at `offset`.
pub(super) fn read(file: Arc<File>, offset: u64, length: usize) -> Reading {
    tokio::task::spawn_blocking(move || {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes.into())
    })
}
