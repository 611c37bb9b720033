//! A line of waiting requests in the order of their arrival.

use std::collections::VecDeque;

/// A waiting request's place in its client's table.
pub type Ticket = usize;

/// First come, first served; one that comes back (a retry, one whose hold ended) takes its old place again.
#[derive(Debug, Default)]
pub struct Line {
    entries: VecDeque<(u64, Ticket)>,
}

impl Line {
    /// Takes the place that `seq`, the number of arrival, gives.
    pub fn join(&mut self, seq: u64, ticket: Ticket) {
        let at = match self.entries.back() {
            Some((last, _)) if *last > seq => self.entries.partition_point(|(other, _)| *other < seq),
            _ => self.entries.len(),
        };
        self.entries.insert(at, (seq, ticket));
    }

    /// Leaves the line; whether it stood at the head.
    pub fn leave(&mut self, seq: u64) -> bool {
        match self.entries.binary_search_by_key(&seq, |(other, _)| *other) {
            Ok(at) => {
                self.entries.remove(at);
                at == 0
            }
            Err(_) => false,
        }
    }

    /// Whether the one of this number stands in it.
    pub fn contains(&self, seq: u64) -> bool {
        self.entries.binary_search_by_key(&seq, |(other, _)| *other).is_ok()
    }

    /// Who is next.
    pub fn head(&self) -> Option<Ticket> {
        self.entries.front().map(|(_, ticket)| *ticket)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Everybody, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Ticket)> {
        self.entries.iter().copied()
    }

    /// Takes out everybody of whom `moves` says so, in order.
    pub fn take_if(&mut self, mut moves: impl FnMut(Ticket) -> bool) -> Vec<(u64, Ticket)> {
        let mut taken = Vec::new();
        self.entries.retain(|entry| {
            let go = moves(entry.1);
            if go {
                taken.push(*entry);
            }
            !go
        });
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_line_is_always_in_order_of_arrival(steps in prop::collection::vec((0u64..60, any::<bool>()), 0..200)) {
            let mut line = Line::default();
            let mut inside = std::collections::BTreeSet::new();
            for (seq, join) in steps {
                if join && inside.insert(seq) {
                    line.join(seq, seq as usize);
                } else if !join {
                    let head = inside.first() == Some(&seq);
                    prop_assert_eq!(line.leave(seq), inside.remove(&seq) && head);
                }
                let order: Vec<_> = line.iter().map(|(seq, _)| seq).collect();
                prop_assert_eq!(order, inside.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(line.head(), inside.first().map(|seq| *seq as usize));
            }
        }
    }
}
