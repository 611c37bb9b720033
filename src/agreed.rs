//! Hashes whose keys the nodes of a cluster agree on, so that what one has learned under them means the same to another.
//!
//! They name routes, major parameters and Discord's buckets. The key is random for each process that is alone, and derived
//! from CLUSTER_SECRET otherwise: no client can aim at another's state. SipHash and not `ahash`, which is not the same on
//! every processor.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;

use aws_lc_rs::hmac;
use siphasher::sip128::{Hasher128, SipHasher13};

/// Bytes that are hashed at once; the usual names fit.
const GATHERED: usize = 128;

static KEY: OnceLock<[u8; 16]> = OnceLock::new();

/// Makes this process agree with all that know `secret`. Before the first hash, or it has no effect.
pub fn on(secret: &[u8]) {
    KEY.get_or_init(|| derive(secret));
}

/// The hash of `parts` in a namespace.
pub fn hash(namespace: &[u8], parts: &[&[u8]]) -> u128 {
    let key = KEY.get_or_init(|| {
        let random = RandomState::new();
        (u128::from(random.hash_one(0_u8)) << 64 | u128::from(random.hash_one(1_u8))).to_le_bytes()
    });
    hash_with(key, namespace, parts)
}

fn derive(secret: &[u8]) -> [u8; 16] {
    let secret = hmac::Key::new(hmac::HMAC_SHA256, secret);
    let tag = hmac::sign(&secret, b"nirn-proxy: the key of names, version 1");
    let mut key = [0; 16];
    key.copy_from_slice(&tag.as_ref()[..16]);
    key
}

fn hash_with(key: &[u8; 16], namespace: &[u8], parts: &[&[u8]]) -> u128 {
    let mut hasher = SipHasher13::new_with_key(key);
    // With its length before each, or what stands on the border of two parts could belong to either.
    let all = || std::iter::once(namespace).chain(parts.iter().copied());
    let length = all().map(|part| size_of::<u64>() + part.len()).sum();
    let mut gathered = [0; GATHERED];
    let Some(gathered) = gathered.get_mut(..length) else {
        for part in all() {
            hasher.write(&(part.len() as u64).to_le_bytes());
            hasher.write(part);
        }
        return hasher.finish128().as_u128();
    };
    // Taking one piece is much cheaper than taking many.
    let mut rest = &mut *gathered;
    all().for_each(|part| {
        let (length, after) = std::mem::take(&mut rest).split_at_mut(size_of::<u64>());
        length.copy_from_slice(&(part.len() as u64).to_le_bytes());
        let (room, after) = after.split_at_mut(part.len());
        room.copy_from_slice(part);
        rest = after;
    });
    hasher.hash(gathered).as_u128()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_secrets_give_equal_names_on_every_machine() {
        let key = derive(b"the secret of all nodes of this test");
        let name = hash_with(&key, b"channel", &[b"100000000000000001"]);
        assert_eq!(name, 0xb27c_d064_e41c_f69f_73e5_03c0_cc3c_eab5, "{name:#x}");
        assert_ne!(name, hash_with(&derive(b"another"), b"channel", &[b"100000000000000001"]));
        assert_ne!(hash_with(&key, b"a", &[b"bc", b"d"]), hash_with(&key, b"a", &[b"b", b"cd"]));
    }

    #[test]
    fn parts_of_any_length_are_hashed_as_one_stream() {
        let key = derive(b"the secret of all nodes of this test");
        let bytes = [7; 3 * GATHERED];
        for first in (0..bytes.len()).step_by(5) {
            for second in [0, 1, GATHERED - 8, GATHERED, GATHERED + 1, bytes.len()] {
                let parts = [&bytes[..first], &bytes[..second]];
                let mut whole = SipHasher13::new_with_key(&key);
                for part in [&b"n"[..], parts[0], parts[1]] {
                    whole.write(&(part.len() as u64).to_le_bytes());
                    whole.write(part);
                }
                assert_eq!(hash_with(&key, b"n", &parts), whole.finish128().as_u128(), "{first} {second}");
            }
        }
    }
}
