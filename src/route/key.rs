//! Keys: 128 bits under hashes whose keys no client knows, so that none can aim at another's.

use std::hash::BuildHasher;
use std::sync::OnceLock;

use ahash::{AHasher, RandomState};

use crate::agreed;

/// The key of `parts` in a namespace; never 0.
pub(super) fn of(namespace: &[u8], parts: &[&[u8]]) -> u128 {
    agreed::hash(namespace, parts).max(1)
}

/// A hasher for labels, which takes them piece by piece and means something in this process only.
pub(super) fn hasher() -> AHasher {
    static STATE: OnceLock<RandomState> = OnceLock::new();
    STATE.get_or_init(RandomState::new).build_hasher()
}
