//! What one node tells another of the credentials that move to it: one self-contained, versioned message.
//!
//! It names things by their hashes under keys the cluster agrees on ([`crate::agreed`]) and carries durations, never
//! instants: clocks of two machines do not meet, and what the way took only makes waits longer.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::client::handover::ClientState;
use crate::identity::Kind;

/// Changes with every change of what is told: another version says nothing.
const VERSION: u8 = 2;
/// A message is never longer: 65,536 buckets take some 6 MiB.
pub const MAX_MESSAGE: usize = 64 * 1024 * 1024;

/// Everything one node tells another.
#[derive(Serialize, Deserialize, Debug, Default, PartialEq)]
pub struct Handover {
    /// NODE_NAME of the teller.
    pub from: String,
    /// Whether with this the teller has said all it knew itself; not of what it was told and passes on.
    pub own: bool,
    /// Those that have left, as far as the teller was told, and itself if it has: what they are told comes back.
    pub gone: Vec<Gone>,
    /// Its share of the teller's invalid requests: how long ago each was.
    pub invalid: Vec<Duration>,
    /// What moves.
    pub credentials: Vec<Credential>,
}

/// A node that has left.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Gone {
    /// NODE_NAME.
    pub name: String,
    /// Another node may have come under the same name, with a younger generation.
    pub generation: u64,
}

/// One credential, by its SHA-256.
#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Credential {
    /// Bot, bearer or all that is unauthenticated.
    pub kind: Kind,
    /// See [`crate::identity::Identity`].
    pub key: [u8; 32],
    /// A bot's user ID.
    pub bot_id: Option<u64>,
    /// Its state.
    pub client: ClientState,
}

impl Handover {
    /// To bytes; none if it would be too long.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let bytes = postcard::to_extend(self, vec![VERSION]).ok()?;
        (bytes.len() <= MAX_MESSAGE).then_some(bytes)
    }

    /// From bytes; none if they are not such a message, or one of another version.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (version, message) = bytes.split_first()?;
        if *version != VERSION {
            return None;
        }
        postcard::from_bytes(message).ok()
    }
}
