//! Details of a body that Discord counts apart, in no header until the 429: a channel's name and topic.
//!
//! "2 per 10 minutes each, while the bucket says 5 per 15 s" (public experiments): a rename that is held must not hold a
//! permission edit. Only `PATCH /channels/{id}` with a JSON body is ever looked at.

use http::HeaderMap;
use http::header::CONTENT_TYPE;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

/// The largest body that is looked at.
pub const MAX_BODY: usize = 64 * 1024;

const NAME: u8 = 1;
const TOPIC: u8 = 2;

#[derive(Default, Deserialize)]
#[serde(default)]
struct ChannelEdit {
    name: Present,
    topic: Present,
}

/// Whether a field is there, with any value (a topic is removed by `null`).
#[derive(Default)]
struct Present(bool);

impl<'de> Deserialize<'de> for Present {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|IgnoredAny| Self(true))
    }
}

/// Whether a channel edit's body can be looked at.
pub fn readable(headers: &HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// The details of a channel edit, as bits; 0 when there is none or the body is not a JSON object.
pub fn of_channel_edit(body: &[u8]) -> u8 {
    // serde would read an array as the fields in their order.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return 0;
    }
    let Ok(edit) = serde_json::from_slice::<ChannelEdit>(body) else { return 0 };
    (u8::from(edit.name.0) * NAME) | (u8::from(edit.topic.0) * TOPIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_and_topic_are_told_apart_and_nothing_else_is() {
        for (body, expected) in [
            (r#"{"name": "general"}"#, NAME),
            (r#"{"topic": "", "nsfw": true}"#, TOPIC),
            (r#"{"topic": null}"#, TOPIC),
            (r#"{"name": "a", "topic": "b"}"#, NAME | TOPIC),
            (r#"{"permission_overwrites": [{"name": "inner"}]}"#, 0),
            (r#"["name"]"#, 0),
            ("name", 0),
            ("", 0),
        ] {
            assert_eq!(of_channel_edit(body.as_bytes()), expected, "{body}");
        }
    }
}
