//! Keys: 128 bits under two hash functions that are random for each process, so that no client can aim at another's.

use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;

use ahash::RandomState;

fn states() -> &'static [RandomState; 2] {
    static STATES: OnceLock<[RandomState; 2]> = OnceLock::new();
    STATES.get_or_init(|| [RandomState::new(), RandomState::new()])
}

/// The key of `parts` in a namespace; never 0.
pub(super) fn of(namespace: &[u8], parts: &[&[u8]]) -> u128 {
    let half = |state: &RandomState| {
        let mut hasher = state.build_hasher();
        for part in std::iter::once(&namespace).chain(parts) {
            // with its length, or what stands on the border of two parts could belong to either
            hasher.write_usize(part.len());
            hasher.write(part);
        }
        hasher.finish()
    };
    let [high, low] = states();
    (u128::from(half(high)) << 64 | u128::from(half(low))).max(1)
}

/// A hasher for labels, which takes them piece by piece.
pub(super) fn hasher() -> impl Hasher {
    states()[0].build_hasher()
}
