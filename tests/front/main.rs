//! The front listener as clients meet it, over real sockets.

mod drain;
mod gone;
mod heads;
mod http2;
mod protocol;
#[path = "../support/mod.rs"]
mod support;
