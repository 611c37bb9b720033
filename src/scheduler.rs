//! Dispatch: one request through its bucket, its credential's limits, to Discord and back.

pub mod budget;
pub mod pacer;
pub mod replay;
pub mod signal;
