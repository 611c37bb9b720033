//! What operators see: metrics, logs, profiles.

pub mod admin;
pub mod logging;
pub mod metrics;
