//! The owners of keys under the membership in force, ranked once and then remembered.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::members::{Key, Owner, View};

/// Owners that are remembered, by the first bytes of the key.
const REMEMBERED: usize = 4_096;

/// Who owns what.
pub struct Owners {
    members: watch::Receiver<Arc<View>>,
    remembered: Box<[Mutex<Remembered>]>,
}

#[derive(Clone, Copy)]
struct Remembered {
    epoch: u64,
    key: Key,
    place: Option<u16>,
}

impl Owners {
    /// By the members as they change.
    pub fn new(members: watch::Receiver<Arc<View>>) -> Self {
        let nothing = Remembered { epoch: 0, key: [0; 32], place: None };
        Self { members, remembered: (0..REMEMBERED).map(|_| Mutex::new(nothing)).collect() }
    }

    /// The members, as they change.
    pub fn members(&self) -> &watch::Receiver<Arc<View>> {
        &self.members
    }

    /// The owner of a key: ranked once for a membership, then remembered until another key takes the place.
    pub fn owner(&self, key: &Key) -> Owner {
        let members = self.members.borrow();
        if members.over_capacity() {
            return Owner::OverCapacity;
        }
        let slot = usize::from(u16::from_le_bytes([key[0], key[1]])) % REMEMBERED;
        let mut slot = self.remembered[slot].lock();
        if slot.epoch != members.epoch() || slot.key != *key {
            *slot = Remembered { epoch: members.epoch(), key: *key, place: members.rank(key) };
        }
        members.at(slot.place)
    }
}
