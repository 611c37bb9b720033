//! Sealing of gossip datagrams: what a stranger sends, or sends again, is dropped without a sound.
//!
//! A datagram is a version byte, a random 96-bit nonce, and the ciphertext of the sender's Unix milliseconds and the
//! message, under AES-256-GCM-SIV keyed by SHA-256 of CLUSTER_SECRET. The key lives as long as the secret and every
//! node draws its own nonces, so the nonce-misuse-resistant mode is used: should two datagrams ever share a nonce,
//! nothing is lost but that equal ones can be told.
//!
//! Gossip itself bears repetition badly at its edges (an old announce makes a node answer, an old life sign can bring
//! a forgotten member back for some seconds). So each node opens a datagram once, and only within [`WINDOW_MS`] of its
//! own clock: the clocks of a cluster's nodes must agree to within that. A datagram replayed to another node than the
//! one it was sent to is addressed to somebody else and ignored by gossip; one replayed to a restarted node is
//! addressed to its former generation. What is left is an announce, which goes by the address alone: whoever recorded one
//! can show it to a seed that has been restarted since, for [`WINDOW_MS`], and if its sender has died meanwhile the
//! cluster takes it for alive until it is found dead again.

use std::collections::{HashSet, VecDeque};

use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand;

/// How far a datagram's time may be from the clock of the node that opens it: 30 s.
pub const WINDOW_MS: u64 = 30_000;

/// Bytes a sealed datagram has more than its message.
pub const OVERHEAD: usize = 1 + NONCE_LEN + TIME_LEN + TAG_LEN;

const VERSION: u8 = 1;
const TIME_LEN: usize = 8;
const TAG_LEN: usize = 16;

/// Nonces remembered at once: 32 nodes send some 20,000 datagrams to one of them in two windows at the very most.
const REMEMBERED: usize = 65_536;

/// What became of a datagram.
#[derive(Debug, PartialEq, Eq)]
pub enum Opened {
    /// A message of another member, seen for the first time.
    Message(Vec<u8>),
    /// Sealed with this secret, but by a clock that is off by more than the window (or an old one sent again).
    OutOfTime,
    /// Not sealed with this secret, cut, changed, or opened before.
    Foreign,
}

/// Seals and opens the datagrams of one cluster.
pub struct Seal {
    key: LessSafeKey,
    seen: HashSet<[u8; NONCE_LEN]>,
    order: VecDeque<(u64, [u8; NONCE_LEN])>,
    /// Nothing sent up to then is opened: nonces of that time may have been forgotten.
    floor_ms: u64,
}

impl Seal {
    /// A seal for CLUSTER_SECRET.
    ///
    /// # Errors
    ///
    /// When the cipher refuses the key, which it has no reason to.
    pub fn new(secret: &[u8]) -> Result<Self, String> {
        let key = UnboundKey::new(&AES_256_GCM_SIV, digest(&SHA256, secret).as_ref())
            .map_err(|_| "CLUSTER_SECRET cannot be made a key".to_owned())?;
        Ok(Self { key: LessSafeKey::new(key), seen: HashSet::new(), order: VecDeque::new(), floor_ms: 0 })
    }

    /// Seals a message at a time in Unix milliseconds. None if the system has no randomness to give.
    pub fn seal(&self, message: &[u8], unix_ms: u64) -> Option<Vec<u8>> {
        let mut nonce = [0; NONCE_LEN];
        rand::fill(&mut nonce).ok()?;
        let mut body = Vec::with_capacity(TIME_LEN + message.len() + TAG_LEN);
        body.extend_from_slice(&unix_ms.to_be_bytes());
        body.extend_from_slice(message);
        self.key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from([VERSION]), &mut body).ok()?;
        let mut datagram = Vec::with_capacity(1 + NONCE_LEN + body.len());
        datagram.push(VERSION);
        datagram.extend_from_slice(&nonce);
        datagram.extend_from_slice(&body);
        Some(datagram)
    }

    /// Opens a datagram at a time in Unix milliseconds.
    pub fn open(&mut self, datagram: &[u8], unix_ms: u64) -> Opened {
        let Some((nonce, mut body)) = split(datagram) else { return Opened::Foreign };
        let Ok(plain) = self.key.open_in_place(Nonce::assume_unique_for_key(nonce), Aad::from([VERSION]), &mut body)
        else {
            return Opened::Foreign;
        };
        let Some((sent, message)) = plain.split_first_chunk::<TIME_LEN>() else { return Opened::Foreign };
        let sent_ms = u64::from_be_bytes(*sent);
        let message = message.to_vec();
        if sent_ms.abs_diff(unix_ms) > WINDOW_MS {
            return Opened::OutOfTime;
        }
        if sent_ms <= self.floor_ms || !self.remember(sent_ms, nonce, unix_ms) {
            return Opened::Foreign;
        }
        Opened::Message(message)
    }

    /// False if the nonce was seen before.
    fn remember(&mut self, sent_ms: u64, nonce: [u8; NONCE_LEN], unix_ms: u64) -> bool {
        if !self.seen.insert(nonce) {
            return false;
        }
        self.order.push_back((sent_ms, nonce));
        while let Some(&(oldest_ms, oldest)) = self.order.front() {
            let expired = oldest_ms.saturating_add(WINDOW_MS) < unix_ms;
            if !expired && self.order.len() <= REMEMBERED {
                break;
            }
            // By order of arrival, not of sending: what follows may be older, and is kept until it comes to the front.
            self.floor_ms = if expired { self.floor_ms } else { self.floor_ms.max(oldest_ms) };
            self.order.pop_front();
            self.seen.remove(&oldest);
        }
        true
    }
}

fn split(datagram: &[u8]) -> Option<([u8; NONCE_LEN], Vec<u8>)> {
    let (&version, rest) = datagram.split_first()?;
    let (nonce, body) = rest.split_first_chunk::<NONCE_LEN>()?;
    (version == VERSION).then(|| (*nonce, body.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000;

    fn seal() -> Seal {
        Seal::new(b"a secret of at least 32 characters").unwrap()
    }

    #[test]
    fn a_message_is_opened_once_by_whoever_has_the_secret() {
        let datagram = seal().seal(b"hello", NOW).unwrap();
        assert_eq!(datagram.len(), 5 + OVERHEAD);
        assert!(!datagram.windows(5).any(|window| window == b"hello"));
        let mut other = seal();
        assert_eq!(other.open(&datagram, NOW + 10), Opened::Message(b"hello".to_vec()));
        assert_eq!(other.open(&datagram, NOW + 20), Opened::Foreign);
    }

    #[test]
    fn anything_changed_cut_or_foreign_is_dropped() {
        let datagram = seal().seal(b"hello", NOW).unwrap();
        let mut other = seal();
        for at in 0..datagram.len() {
            let mut changed = datagram.clone();
            changed[at] ^= 1;
            assert_eq!(other.open(&changed, NOW), Opened::Foreign);
            assert_eq!(other.open(&datagram[..at], NOW), Opened::Foreign);
        }
        let foreign = Seal::new(b"another secret of 32 characters..").unwrap().seal(b"hello", NOW).unwrap();
        assert_eq!(other.open(&foreign, NOW), Opened::Foreign);
        assert_eq!(other.open(&datagram, NOW), Opened::Message(b"hello".to_vec()));
    }

    #[test]
    fn a_datagram_out_of_its_time_is_not_opened_even_if_its_nonce_is_forgotten() {
        let datagram = seal().seal(b"hello", NOW).unwrap();
        let mut other = seal();
        assert_eq!(other.open(&datagram, NOW - WINDOW_MS - 1), Opened::OutOfTime);
        assert_eq!(other.open(&datagram, NOW), Opened::Message(b"hello".to_vec()));
        let later = seal().seal(b"later", NOW + 2 * WINDOW_MS).unwrap();
        assert!(matches!(other.open(&later, NOW + 2 * WINDOW_MS), Opened::Message(_)));
        assert_eq!(other.order.len(), 1, "the first nonce is forgotten");
        assert_eq!(other.open(&datagram, NOW + 2 * WINDOW_MS), Opened::OutOfTime);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_what_is_forgotten_cannot_be_sent_again() {
        let mut other = seal();
        let first = seal().seal(b"first", NOW).unwrap();
        assert!(matches!(other.open(&first, NOW), Opened::Message(_)));
        for number in 0..REMEMBERED {
            let mut nonce = [0; NONCE_LEN];
            nonce[..8].copy_from_slice(&(number as u64).to_be_bytes());
            assert!(other.remember(NOW + 1, nonce, NOW + 1));
        }
        assert_eq!(other.order.len(), REMEMBERED);
        assert_eq!(other.seen.len(), REMEMBERED);
        assert_eq!(other.open(&first, NOW + 1), Opened::Foreign);
    }
}
