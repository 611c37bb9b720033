//! The daemon's own small requests.
