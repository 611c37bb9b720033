//! Dispatch: one request through its bucket, its credential's limits, to Discord and back.

pub mod replay;
