//! The life of a queue: who waits, for how long, what is said to those who cannot, and that nobody who leaves is missed.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod bodies;
mod gone;
mod refusals;
mod rounds;
#[path = "../support/mod.rs"]
mod support;
mod waits;
