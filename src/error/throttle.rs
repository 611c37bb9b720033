//! How often a thing that keeps happening is told.

use std::time::{Duration, Instant};

/// The least time between two tellings.
const PERIOD: Duration = Duration::from_secs(30);

/// Lets one occurrence in 30 s through and counts the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Throttle {
    last: Option<Instant>,
    left_out: u64,
}

impl Throttle {
    /// Notes an occurrence. If it is to be told, the answer is how many were not told since the last one that was.
    pub fn record(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < PERIOD) {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_thirty_seconds_is_told_with_the_number_left_out() {
        let start = Instant::now();
        let mut throttle = Throttle::default();
        let mut at = |milliseconds| throttle.record(start + Duration::from_millis(milliseconds));
        assert_eq!(at(0), Some(0));
        assert_eq!(at(1), None);
        assert_eq!(at(29_999), None);
        assert_eq!(at(30_000), Some(2));
        assert_eq!(at(30_001), None);
        assert_eq!(at(300_000), Some(1));
        assert_eq!(at(330_000), Some(0));
    }

    #[test]
    fn a_clock_that_steps_back_is_no_reason_to_tell_more() {
        let start = Instant::now() + PERIOD;
        let mut throttle = Throttle::default();
        assert_eq!(throttle.record(start), Some(0));
        assert_eq!(throttle.record(start - Duration::from_secs(1)), None);
    }
}
