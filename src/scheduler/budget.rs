//! The invalid-request budget: Discord restricts an IP that draws 10,000 answers of 401, 403 or 429 (not shared) in
//! ten minutes, so new attempts stop a little before that.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A rolling window of invalid answers, plus the attempts that may still become one.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    window: Duration,
    reserved: usize,
    spent: VecDeque<Instant>,
}

impl Budget {
    /// At most `limit` invalid answers in a rolling `window`.
    pub fn new(limit: usize, window: Duration) -> Self {
        Self { limit, window, reserved: 0, spent: VecDeque::new() }
    }

    /// Whether an attempt could be sent now.
    pub fn has_room(&mut self, now: Instant) -> bool {
        while self.spent.front().is_some_and(|at| now.saturating_duration_since(*at) >= self.window) {
            self.spent.pop_front();
        }
        self.spent.len() + self.reserved < self.limit
    }

    /// Reserves a slot for one attempt; false if none is left. Every reservation is settled exactly once.
    pub fn reserve(&mut self, now: Instant) -> bool {
        let room = self.has_room(now);
        self.reserved += usize::from(room);
        room
    }

    /// Ends a reservation: spent if the answer was invalid, given back if not.
    pub fn settle(&mut self, now: Instant, invalid: bool) {
        self.reserved = self.reserved.saturating_sub(1);
        if invalid {
            self.spent.push_back(now);
        }
    }

    /// How long ago each invalid answer of the window was.
    pub fn history(&self, now: Instant) -> Vec<Duration> {
        let ages = self.spent.iter().map(|at| now.saturating_duration_since(*at));
        ages.filter(|age| *age < self.window).collect()
    }

    /// Adds another node's history, as much of it as matters.
    pub fn add(&mut self, now: Instant, history: &[Duration]) {
        self.spent.extend(history.iter().take(self.limit).filter_map(|age| now.checked_sub(*age)));
        self.spent.make_contiguous().sort_unstable();
    }

    /// Attempts that are not settled yet.
    pub fn reserved(&self) -> usize {
        self.reserved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slots_come_back_one_by_one_as_they_leave_the_window() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut budget = Budget::new(2, Duration::from_secs(60));
        for second in [0, 10] {
            assert!(budget.reserve(at(second)));
            budget.settle(at(second), true);
        }
        assert!(!budget.reserve(at(59)));
        assert!(budget.reserve(at(60)));
        assert!(!budget.has_room(at(60)));
        budget.settle(at(61), false);
        assert!(budget.has_room(at(61)));
    }

    proptest! {
        #[test]
        fn never_more_than_the_limit_in_any_window(steps in prop::collection::vec((0u64..400, 0u8..4), 1..300)) {
            let (limit, window) = (5, Duration::from_millis(1000));
            let mut budget = Budget::new(limit, window);
            let (mut now, mut open, mut invalid) = (Instant::now(), 0usize, Vec::new());
            for (step, action) in steps {
                now += Duration::from_millis(step);
                match action {
                    0 | 1 => open += usize::from(budget.reserve(now)),
                    _ if open > 0 => {
                        open -= 1;
                        budget.settle(now, action == 2);
                        if action == 2 { invalid.push(now); }
                    }
                    _ => {}
                }
                prop_assert_eq!(budget.reserved(), open);
                let recent = invalid.iter().filter(|at| now - **at < window).count();
                prop_assert!(recent + open <= limit);
            }
        }
    }
}
