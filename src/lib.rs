//! nirn-proxy: a clustered HTTP reverse proxy for Discord's REST API.

pub mod clock;
pub mod cluster;
pub mod config;
pub mod daemon;
pub mod error;
pub mod front;
pub mod identity;
pub mod observe;
pub mod probe;
pub mod route;
pub mod scheduler;
pub mod upstream;

pub use daemon::{Addresses, Daemon, bind};
