//! Who is asking: `Authorization` to a credential, without keeping the token.

use std::fmt;
use std::hash::{Hash, Hasher};

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use serde::{Deserialize, Serialize};

/// How bots' tokens carry their user ID. The two alphabets differ in no letter that encodes a digit, so one reads both.
const USER_ID: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
/// Digits of the longest user ID.
const MAX_ID: usize = 20;
/// Its base64, padding included.
const MAX_ENCODED_ID: usize = MAX_ID.div_ceil(3) * 4;

/// The kind of credential a request carries.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `Bot X`, or a bare `X`.
    Bot,
    /// `Bearer X`.
    Bearer,
    /// `Basic`, an unknown scheme, or no header.
    Unauthenticated,
}

/// A credential: its kind and the SHA-256 of its token. The token itself is kept nowhere.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The kind of credential.
    pub kind: Kind,
    /// SHA-256 of the token without its scheme; all zero when unauthenticated.
    pub key: [u8; 32],
    /// The bot's user ID, if the token's first part names one.
    pub bot_id: Option<u64>,
}

impl Identity {
    /// Who a request without a credential comes from.
    pub const UNAUTHENTICATED: Self = Self { kind: Kind::Unauthenticated, key: [0; 32], bot_id: None };

    /// Reads the value of an `Authorization` header. A scheme without a token authenticates nobody.
    pub fn from_authorization(value: Option<&[u8]>) -> Self {
        let value = value.unwrap_or_default().trim_ascii();
        let end = value.iter().position(|byte| matches!(byte, b' ' | b'\t'));
        let (first, rest) = value.split_at(end.unwrap_or(value.len()));
        let token = rest.trim_ascii_start();
        if first.eq_ignore_ascii_case(b"bot") && !token.is_empty() {
            return Self::bot(token);
        }
        if first.eq_ignore_ascii_case(b"bearer") && !token.is_empty() {
            return Self { kind: Kind::Bearer, key: sha256(token), bot_id: None };
        }
        let scheme = [&b"bot"[..], b"bearer", b"basic"].iter().any(|scheme| first.eq_ignore_ascii_case(scheme));
        if first.is_empty() || scheme || !token.is_empty() {
            return Self::UNAUTHENTICATED;
        }
        Self::bot(first)
    }

    /// The `clientId` label of metrics.
    pub fn metric_label(&self) -> &'static str {
        match self.kind {
            Kind::Bot => "Bot",
            Kind::Bearer => "Bearer",
            Kind::Unauthenticated => "NoAuth",
        }
    }

    fn bot(token: &[u8]) -> Self {
        Self { kind: Kind::Bot, key: sha256(token), bot_id: bot_id(token) }
    }
}

impl fmt::Debug for Identity {
    /// The kind and four bytes of the key: enough to tell credentials apart in a log, useless to anyone else.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.key;
        write!(formatter, "{:?}({a:02x}{b:02x}{c:02x}{d:02x})", self.kind)
    }
}

impl Hash for Identity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [a, b, c, d, e, f, g, h, ..] = self.key;
        // eight bytes of a SHA-256 spread as well as all of it
        state.write_u64(u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
        state.write_u8(self.kind as u8);
    }
}

fn sha256(token: &[u8]) -> [u8; 32] {
    let mut key = [0; 32];
    key.copy_from_slice(digest(&SHA256, token).as_ref());
    key
}

/// The user ID in a bot's token: the base64 up to its first dot, if that is 1 to 20 digits.
fn bot_id(token: &[u8]) -> Option<u64> {
    let encoded = token.split(|&byte| byte == b'.').next().filter(|encoded| encoded.len() <= MAX_ENCODED_ID)?;
    // room for what the decoder estimates
    let mut decoded = [0; MAX_ID + 4];
    let length = USER_ID.decode_slice(encoded, &mut decoded).ok()?;
    let digits = decoded.get(..length).filter(|digits| (1..=MAX_ID).contains(&digits.len()))?;
    let all_digits = digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| all_digits)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use base64::prelude::*;
    use proptest::prelude::*;

    use super::*;

    fn of(value: &str) -> Identity {
        Identity::from_authorization(Some(value.as_bytes()))
    }

    #[test]
    fn schemes_in_any_case_and_with_any_blanks_name_the_same_credential() {
        let bot = of("Bot abc.def.ghi");
        for same in ["abc.def.ghi", "bot abc.def.ghi", "BOT \t  abc.def.ghi", "  Bot abc.def.ghi\t ", "\tabc.def.ghi "]
        {
            assert_eq!(of(same), bot, "{same:?}");
        }
        assert_eq!((bot.kind, bot.metric_label()), (Kind::Bot, "Bot"));
        let bearer = of("Bearer abc.def.ghi");
        for same in ["bearer abc.def.ghi", "bEaReR\t\tabc.def.ghi "] {
            assert_eq!(of(same), bearer, "{same:?}");
        }
        assert_eq!((bearer.kind, bearer.metric_label()), (Kind::Bearer, "Bearer"));
        assert_eq!(bot.key, bearer.key);
        assert_ne!(bot, bearer, "the kind parts them");
        assert_ne!(of("Bot abc.def.ghI").key, bot.key);
    }

    #[test]
    fn other_schemes_and_empty_values_authenticate_nobody() {
        let others = ["", " ", "\t", "Basic YTpi", "basic", "Digest x", "Foo bar", "Bot", "Bot ", " bearer\t", "a b c"];
        for value in others {
            assert_eq!(of(value), Identity::UNAUTHENTICATED, "{value:?}");
        }
        assert_eq!(Identity::from_authorization(None), Identity::UNAUTHENTICATED);
        assert_eq!(Identity::UNAUTHENTICATED.metric_label(), "NoAuth");
    }

    #[test]
    fn the_key_is_the_sha_256_of_the_token_alone() {
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let hex: String = of("Bot abc").key.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
        assert_eq!(format!("{:?}", of("Bot abc")), "Bot(ba7816bf)");
    }

    #[test]
    fn a_bots_user_id_is_read_from_either_alphabet_padded_or_not() {
        for id in ["1", "22", "333", "123456789012345678", "18446744073709551615"] {
            for encoded in [
                BASE64_STANDARD.encode(id),
                BASE64_STANDARD_NO_PAD.encode(id),
                BASE64_URL_SAFE.encode(id),
                BASE64_URL_SAFE_NO_PAD.encode(id),
            ] {
                assert_eq!(of(&format!("Bot {encoded}.x.y")).bot_id, id.parse().ok());
                assert_eq!(of(&encoded).bot_id, id.parse().ok());
            }
        }
        assert_eq!(of(&format!("Bearer {}.x", BASE64_STANDARD.encode("123"))).bot_id, None);
    }

    #[test]
    fn what_is_not_1_to_20_digits_is_no_user_id() {
        for id in ["", "abc", "12a", "-1", "+1", " 1", "123456789012345678901", "99999999999999999999"] {
            assert_eq!(of(&format!("Bot {}.x", BASE64_STANDARD.encode(id))).bot_id, None, "{id:?}");
        }
        for token in ["Bot .x", "Bot M*.x", "Bot =.x", "Bot MQ=x.y"] {
            assert_eq!(of(token).bot_id, None, "{token:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_and_never_shown(token in proptest::collection::vec(any::<u8>(), 0..200)) {
            let identity = Identity::from_authorization(Some(&token));
            prop_assert_eq!(identity, Identity::from_authorization(Some(&token)));
            let shown = format!("{identity:?}");
            if token.len() > 16 {
                prop_assert!(!shown.contains(&*String::from_utf8_lossy(&token)));
            }
        }
    }
}
