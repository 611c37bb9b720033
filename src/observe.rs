//! What operators see: metrics, logs, profiles.

pub mod admin;
mod flamegraph;
pub mod logging;
pub mod metrics;
mod profile;
