//! The only place that reads the wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since the Unix epoch, 0 if the clock stands before it.
#[expect(clippy::disallowed_methods, reason = "this is the one wall-clock read")]
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_millis().try_into().unwrap_or(u64::MAX))
}
