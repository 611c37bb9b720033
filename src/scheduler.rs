//! Dispatch: one request through its bucket, its credential's limits, to Discord and back.

pub mod bucket;
pub mod budget;
pub mod client;
pub mod key;
pub mod line;
pub mod pacer;
pub mod profile;
pub mod replay;
pub mod room;
pub mod routes;
pub mod signal;
