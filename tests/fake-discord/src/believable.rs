//! A believable Discord: its families of routes, and objects that libraries can parse.

use crate::paths::Place;
use crate::reply::Reply;
use crate::script::Rule;

/// What an answer is made from.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The method.
    pub method: &'a str,
    /// The target, taken apart.
    pub place: &'a Place,
    /// The query, without its `?`.
    pub query: &'a str,
    /// `Content-Type`.
    pub content_type: &'a str,
    /// The body.
    pub body: &'a [u8],
}

/// The families of routes of the built-in Discord.
pub fn rules() -> Vec<Rule> {
    Vec::new()
}

/// The answer to an allowed request.
pub fn answer(_request: &Request<'_>, status: Option<u16>, _strict: bool) -> Reply {
    Reply::status(status.unwrap_or(200))
}
