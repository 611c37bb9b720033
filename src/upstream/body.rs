//! The body of a request to Discord, as hyper reads it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::SendError;
use super::attempt::Upload;
use crate::error::{ProxyError, Reason};
use crate::scheduler::replay::Cursor;

/// What one attempt sends: nothing, or a kept body from its beginning. Trailers are not forwarded.
#[derive(Default)]
pub struct RequestBody {
    cursor: Option<Cursor>,
    upload: Option<Arc<Upload>>,
}

/// Why a request's body cannot be sent to its end, by whose fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyError {
    /// The client's: its bytes broke off, or are not what its head said.
    Client(&'static str),
    /// The proxy's: what was kept of it cannot be read or written.
    Keeping(&'static str),
    /// Nobody's: the attempt is over.
    Over(&'static str),
}

impl RequestBody {
    /// No body.
    pub fn empty() -> Self {
        Self::default()
    }

    /// A body that `cursor` reads.
    pub(crate) fn kept(cursor: Cursor) -> Self {
        Self { cursor: Some(cursor), upload: None }
    }

    /// Lets an attempt watch the upload; `None` if there is nothing to send.
    pub(super) fn watch(&mut self) -> Option<Arc<Upload>> {
        if self.is_end_stream() {
            return None;
        }
        let upload = Arc::new(Upload::start());
        self.upload = Some(Arc::clone(&upload));
        Some(upload)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Some(cursor) = &mut this.cursor else { return Poll::Ready(None) };
        if let Some(upload) = &this.upload
            && let Err(error) = upload.permit(cx)
        {
            return Poll::Ready(Some(Err(error)));
        }
        let item = std::task::ready!(cursor.poll_data(cx));
        if let Some(upload) = &this.upload {
            match &item {
                Some(Ok(data)) => upload.progress(data.len(), cursor.is_end()),
                Some(Err(error)) => upload.broke(*error),
                None => upload.progress(0, true),
            }
        }
        Poll::Ready(item.map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.cursor.as_ref().is_none_or(Cursor::is_end)
    }

    fn size_hint(&self) -> SizeHint {
        self.cursor.as_ref().map_or_else(|| SizeHint::with_exact(0), Cursor::size_hint)
    }
}

impl fmt::Debug for RequestBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestBody").field("size", &self.size_hint()).finish_non_exhaustive()
    }
}

/// What the client is told whose body cannot be sent.
impl From<BodyError> for ProxyError {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::Client(what) => Self::BadRequest(what),
            BodyError::Keeping(_) => Self::Unavailable(Reason::RetryPreparation),
            BodyError::Over(what) => Self::Upstream(what.to_owned()),
        }
    }
}

impl From<SendError> for ProxyError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Timeout => Self::UpstreamTimeout,
            SendError::Body(error) => error.into(),
            SendError::Failed { message, .. } => Self::Upstream(message),
        }
    }
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Client(what) | Self::Keeping(what) | Self::Over(what)) = self;
        f.write_str(what)
    }
}

impl std::error::Error for BodyError {}
