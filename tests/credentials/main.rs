//! Credentials: which are stopped and which are not, how many have state, and what invalid requests may cost.

mod bounds;
mod budget;
mod lock;
#[path = "../support/mod.rs"]
mod support;
