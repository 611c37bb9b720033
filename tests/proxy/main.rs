//! What a reverse proxy promises about the messages that pass through it, byte for byte on both sides.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test")]

#[path = "../support/mod.rs"]
mod support;

mod broken;
mod pair;
mod requests;
mod responses;
mod retries;
