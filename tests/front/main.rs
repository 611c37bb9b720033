//! The front listener as clients meet it, over real sockets.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod drain;
mod gone;
mod heads;
mod http2;
mod protocol;
#[path = "../support/mod.rs"]
mod support;
