//! Keys of routes, major parameters and buckets: 128 bits that are hashes already.

use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use super::signal::BucketHash;
use crate::agreed;

/// A 128-bit hash, see [`agreed`]: equal keys mean equal things.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(u64, u64);

impl Key {
    /// The key of one of Discord's buckets: its hash and the major parameter.
    pub fn bucket(hash: BucketHash, major: Self) -> Self {
        let parts = [hash.0, major.0, major.1].map(u64::to_le_bytes);
        agreed::hash(b"bucket", &[&parts[0], &parts[1], &parts[2]]).into()
    }

    /// A part of it, to remember whose something is.
    pub fn short(self) -> u32 {
        self.0 as u32
    }
}

impl From<u128> for Key {
    fn from(value: u128) -> Self {
        Self((value >> 64) as u64, value as u64)
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0);
    }
}

/// Passes a [`Key`] through: it is a hash already.
#[derive(Debug, Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}
