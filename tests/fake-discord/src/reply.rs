//! One answer: what is sent, when, and how it goes wrong.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use tokio::sync::Semaphore;

/// An answer, scripted or made by the rules.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The status; 0 counts as 200.
    pub status: u16,
    /// Headers as they are to appear, in order, repeats included.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Bytes,
    /// Leaves out `Date`, `Via`, `Server` and the default `Content-Type`.
    pub bare: bool,
    /// How the body is framed on HTTP/1.
    pub framing: Framing,
    /// Waits so long before answering.
    pub delay: Duration,
    /// Waits until the gate lets one through.
    pub gate: Option<Gate>,
    /// What is done, or goes wrong.
    pub action: Action,
    /// Bytes written ahead of the answer (HTTP/1): a 103, for instance.
    pub ahead: Bytes,
}

/// How a body's length is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Framing {
    /// `Content-Length`; none for 204 and 304.
    #[default]
    Length,
    /// Chunked.
    Chunked,
    /// By the connection's end.
    Close,
    /// By nothing: the headers given are all there is.
    AsGiven,
}

/// What happens in place of a plain answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// The answer, once the request's body was read.
    #[default]
    Answer,
    /// The answer once so many bytes of the request's body were read; the rest is read afterwards and dropped.
    AnswerEarly(usize),
    /// The answer once so many bytes of the request's body were read; then the connection is closed.
    AnswerEarlyAndClose(usize),
    /// Reads the request and closes without an answer.
    Close,
    /// Reads the head and closes without reading the body.
    CloseAtHead,
    /// Reads the request and resets the connection.
    Reset,
    /// Reads the request and says nothing until the client has gone.
    Stall,
    /// Sends the head and so many bytes of the body, then nothing until the client has gone.
    StallBody(usize),
    /// Sends the head and so many bytes of the body, then closes.
    CutBody(usize),
    /// Sends the head and so many bytes of the body, then resets the connection.
    ResetBody(usize),
    /// Sends the body in pieces of so many bytes with a pause before each.
    Trickle(usize, Duration),
    /// Sends these bytes in place of an answer and closes.
    Raw(Bytes),
}

/// Holds answers back until the test lets them go.
#[derive(Clone, Debug)]
pub struct Gate(Arc<Semaphore>);

impl Default for Gate {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }
}

impl Gate {
    /// Lets so many answers go.
    pub fn open(&self, answers: usize) {
        self.0.add_permits(answers);
    }

    /// Waits for one's turn.
    pub(crate) async fn pass(&self) {
        if let Ok(permit) = self.0.acquire().await {
            permit.forget();
        }
    }
}

impl Reply {
    /// A status with an empty JSON object, or without a body for 204 and 304.
    pub fn status(status: u16) -> Self {
        let body = if matches!(status, 204 | 304) { Bytes::new() } else { Bytes::from_static(b"{}") };
        Self { status, body, ..Self::default() }
    }

    /// A status with a JSON body.
    pub fn json(status: u16, body: &serde_json::Value) -> Self {
        Self { status, body: body.to_string().into(), ..Self::default() }
    }

    /// An action in place of an answer.
    pub fn action(action: Action) -> Self {
        Self { action, ..Self::status(200) }
    }

    /// The same with one header more.
    pub fn with(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.into(), value.as_ref().to_vec()));
        self
    }

    /// The same with the five bucket headers, values as they are to appear.
    pub fn bucket(self, hash: &str, limit: &str, remaining: &str, reset_after: &str) -> Self {
        self.with("X-RateLimit-Bucket", hash)
            .with("X-RateLimit-Limit", limit)
            .with("X-RateLimit-Remaining", remaining)
            .with("X-RateLimit-Reset-After", reset_after)
    }

    /// A 429 of the given scope: `Retry-After` is the body's seconds rounded up.
    pub fn limited(scope: &str, retry_after: f64) -> Self {
        let global = scope == "global";
        let body = json!({"message": "You are being rate limited.", "retry_after": retry_after, "global": global});
        let reply = Self::json(429, &body)
            .with("Retry-After", format!("{:.0}", retry_after.ceil()))
            .with("X-RateLimit-Scope", scope);
        if global { reply.with("X-RateLimit-Global", "true") } else { reply }
    }

    /// The same after a delay.
    pub fn after(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// The same, held until the gate lets it go.
    pub fn held(self, gate: &Gate) -> Self {
        Self { gate: Some(gate.clone()), ..self }
    }

    /// The first value of a header, in any case.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|(given, _)| given.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_slice())
    }
}
