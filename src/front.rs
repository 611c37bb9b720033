//! The front listener.

pub mod admission;
pub mod body;
pub mod handler;
pub mod headers;
