//! What a request is for: (method, path, time) to a route, on a copy of the path.

use http::Method;

/// A classified request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Method, template and major parameter as one 128-bit key, equal in one process for equal routes only.
    pub key: u128,
    /// The major parameter (tokens hashed) as a key; 0 when there is none. A bucket is (Discord's hash, this).
    pub major: u128,
    /// The key of the bucket used until Discord names one: `key`, or one per interaction, by its token's hash.
    pub provisional: u128,
    /// A hash of `label()`, so that metrics can find a route's handles without building the text.
    pub label_key: u64,
    /// The template: route words and `!`, never a token.
    pub template: String,
    /// Exempt from the global limit; everything of one interaction shares one queue.
    pub interaction: bool,
    /// Discord authenticates by a token in the path: a 401 says nothing about the credential.
    pub path_token: bool,
    /// `PATCH /channels/{id}`: its sub-limits depend on the body's `name` and `topic`.
    pub channel_edit: bool,
}

impl Route {
    /// Classifies any method and raw path (without the query), at a time in Unix milliseconds.
    pub fn classify(_method: &Method, _path: &str, _unix_ms: u64) -> Self {
        todo!()
    }

    /// The label for metrics and logs: the template with every identifier as `!`, at most 512 bytes.
    pub fn label(&self) -> String {
        todo!()
    }
}
