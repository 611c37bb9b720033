//! What a request is for: (method, path, time) to a route, on a copy of the path.
//!
//! Nothing about a particular endpoint is needed for it to work: what is known here parts or joins queues until Discord
//! names their buckets, and keeps what clients chose out of labels. The rules follow Discord's documentation of rate
//! limits: limits count for a method, a path's shape and its top-level resource.

use std::borrow::Cow;

use http::Method;
use memchr::memchr;
use percent_encoding::percent_decode_str;

mod key;
mod label;
#[cfg(test)]
mod tests;

/// Milliseconds between the Unix epoch and the one that snowflakes count from, the first second of 2015.
const DISCORD_EPOCH: u64 = 1_420_070_400_000;
/// Messages older than this are deleted from a bucket of their own.
const OLD_MS: u64 = 14 * 24 * 60 * 60 * 1000;
/// So are messages younger than this.
const NEW_MS: u64 = 10 * 1000;
/// A segment of this length or more is no word.
const LONG_SEGMENT: usize = 64;
/// What the token of every interaction starts with: base64 of `interaction:`.
const INTERACTION_TOKEN: &[u8] = b"aW50ZXJhY3Rpb246";

/// A classified request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Method, template and major parameter as one 128-bit key, equal in one process for equal routes only.
    pub key: u128,
    /// The major parameter (tokens hashed) as a key; 0 when there is none. A bucket is (Discord's hash, this).
    pub major: u128,
    /// The key of the bucket used until Discord names one: `key`, or one per interaction, by its token's hash.
    pub provisional: u128,
    /// A hash of `label()`, so that metrics can find a route's handles without building the text.
    pub label_key: u64,
    /// The template: route words and `!`, never a token.
    pub template: String,
    /// Exempt from the global limit; everything of one interaction shares one queue.
    pub interaction: bool,
    /// Discord authenticates by a token in the path: a 401 says nothing about the credential.
    pub path_token: bool,
    /// `PATCH /channels/{id}`: its sub-limits depend on the body's `name` and `topic`.
    pub channel_edit: bool,
}

/// The path's first resource, if it is one that Discord treats specially.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resource {
    Channels,
    Guilds,
    Webhooks,
    Interactions,
    Users,
    Invites,
    Other,
}

/// One segment of a path.
struct Segment<'a> {
    /// Decoded.
    bytes: Cow<'a, [u8]>,
    /// How it stands in a template, if it is the same as in the path.
    word: Option<&'a str>,
}

/// The segments of a path that are not empty, without the `/api` and `/api/v<digits>` before them.
#[derive(Clone, Copy)]
struct Segments<'a> {
    /// Starts with a segment.
    rest: &'a str,
    /// Whether anything in the path is percent-encoded.
    encoded: bool,
}

/// What the pass over the segments has seen.
struct Seen<'a> {
    template: String,
    label: label::Key,
    segments: usize,
    resource: Resource,
    /// The second segment, if it is an identifier.
    id: Option<Cow<'a, [u8]>>,
    /// The third segment of webhooks and interactions.
    token: Option<Cow<'a, [u8]>>,
    third_is_messages: bool,
    /// The fourth segment is `callback`.
    callback: bool,
    /// Segments to go until one that is a token, as they are counted from a word that announces one.
    token_in: Option<u8>,
}

impl Route {
    /// Classifies any method and raw path (without the query), at a time in Unix milliseconds.
    pub fn classify(method: &Method, path: &str, unix_ms: u64) -> Self {
        let mut seen = Seen::new(path.len());
        let mut rest = Segments::of(path);
        while let Some(segment) = rest.next() {
            if !seen.push(segment, rest.is_empty(), method, unix_ms) {
                break;
            }
        }
        let Seen { mut template, label, segments, resource, id, token, callback, .. } = seen;
        if template.is_empty() {
            template.push('/');
        }
        let interaction = match (resource, &id, &token) {
            (Resource::Interactions, Some(_), Some(_)) => callback && segments == 4,
            (Resource::Webhooks, Some(_), Some(token)) => token.starts_with(INTERACTION_TOKEN),
            _ => false,
        };
        let major = match (resource, &id, &token) {
            (_, _, Some(token)) if interaction => key::of(b"interaction", &[token]),
            (Resource::Channels, Some(id), _) => key::of(b"channel", &[id]),
            (Resource::Guilds, Some(id), _) => key::of(b"guild", &[id]),
            (Resource::Webhooks, Some(id), None) => key::of(b"webhook", &[id]),
            (Resource::Webhooks, Some(id), Some(token)) => key::of(b"webhook", &[id, token]),
            _ => 0,
        };
        let key = key::of(method.as_str().as_bytes(), &[template.as_bytes(), &major.to_le_bytes()]);
        Self {
            key,
            major,
            provisional: if interaction { major } else { key },
            label_key: label.finish(),
            template,
            interaction,
            path_token: interaction || (resource == Resource::Webhooks && id.is_some() && token.is_some()),
            channel_edit: resource == Resource::Channels && id.is_some() && segments == 2 && *method == Method::PATCH,
        }
    }

    /// The label for metrics and logs: the template with every identifier as `!`, at most 512 bytes.
    pub fn label(&self) -> String {
        label::of(&self.template)
    }
}

/// The token in the path of a request that [`Route::interaction`] is true for.
pub fn interaction_token(path: &str) -> Option<Cow<'_, [u8]>> {
    Segments::of(path).nth(2).map(|segment| segment.bytes)
}

impl<'a> Segment<'a> {
    fn new(raw: &'a str, encoded: bool) -> Self {
        if encoded {
            return Self { bytes: Cow::from(percent_decode_str(raw)), word: None };
        }
        Self { bytes: Cow::Borrowed(raw.as_bytes()), word: (raw.len() < LONG_SEGMENT).then_some(raw) }
    }
}

impl<'a> Segments<'a> {
    fn of(path: &'a str) -> Self {
        // one look at the whole path spares each segment its own
        let encoded = memchr(b'%', path.as_bytes()).is_some();
        let mut segments = Self { rest: without_slashes(path), encoded };
        let mut after = segments;
        if after.next().is_some_and(|first| *first.bytes == *b"api") {
            segments = after;
            if after.next().is_some_and(|second| is_version(&second.bytes)) {
                segments = after;
            }
        }
        segments
    }

    fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    fn next(&mut self) -> Option<Segment<'a>> {
        if self.is_empty() {
            return None;
        }
        // segments are short: calling anything cleverer costs more than it finds
        let length = self.rest.bytes().position(|byte| byte == b'/').unwrap_or(self.rest.len());
        let (raw, after) = self.rest.split_at(length);
        self.rest = without_slashes(after);
        Some(Segment::new(raw, self.encoded))
    }
}

impl<'a> Seen<'a> {
    fn new(length: usize) -> Self {
        Self {
            // the longest thing a segment becomes is `!modify` for `reactions`' rest
            template: String::with_capacity(length + 8),
            label: label::Key::new(),
            segments: 0,
            resource: Resource::Other,
            id: None,
            token: None,
            third_is_messages: false,
            callback: false,
            token_in: None,
        }
    }

    /// Takes the next segment, and says whether the ones after it matter.
    fn push(&mut self, segment: Segment<'a>, is_last: bool, method: &Method, unix_ms: u64) -> bool {
        let Segment { word, bytes: segment } = segment;
        let index = self.segments;
        self.segments += 1;
        let is_token = self.token_in == Some(0);
        self.token_in = match &*segment {
            // wherever they stand, so that an unusual prefix does not bring a token into a template
            word if word.eq_ignore_ascii_case(b"webhooks") || word.eq_ignore_ascii_case(b"interactions") => Some(1),
            _ => self.token_in.and_then(|segments| segments.checked_sub(1)),
        };
        let identifier = is_identifier(&segment);
        if index == 0 {
            self.resource = Resource::of(&segment);
        } else if self.resource == Resource::Channels && index >= 2 && *segment == *b"reactions" {
            let modifies = matches!(*method, Method::PUT | Method::DELETE);
            self.add("reactions");
            if modifies {
                self.add("!modify");
            } else {
                self.add("!");
                self.add("!");
            }
            return false;
        }
        match index {
            2 => self.third_is_messages = *segment == *b"messages",
            3 => self.callback = *segment == *b"callback",
            _ => {}
        }
        let is_message = index == 3 && identifier && self.third_is_messages;
        let shown = match (index, self.resource) {
            (_, Resource::Channels) if is_message && is_last && *method == Method::DELETE => age(&segment, unix_ms),
            _ if is_token => "!",
            (1, Resource::Users) if *segment != *b"@me" => "!",
            (1, Resource::Invites) => "!",
            (2.., _) if identifier => "!",
            _ => word.unwrap_or_else(|| self::word(&segment)),
        };
        self.add(shown);
        match index {
            1 if identifier => self.id = Some(segment),
            2 if matches!(self.resource, Resource::Webhooks | Resource::Interactions) => self.token = Some(segment),
            _ => {}
        }
        true
    }

    /// Adds a segment to the template, and to its label's key.
    fn add(&mut self, shown: &str) {
        self.template.push('/');
        self.template.push_str(shown);
        self.label.push(shown);
    }
}

impl Resource {
    fn of(segment: &[u8]) -> Self {
        match segment {
            b"channels" => Self::Channels,
            b"guilds" => Self::Guilds,
            b"webhooks" => Self::Webhooks,
            b"interactions" => Self::Interactions,
            b"users" => Self::Users,
            b"invites" => Self::Invites,
            _ => Self::Other,
        }
    }
}

/// A path from its first segment on.
fn without_slashes(mut path: &str) -> &str {
    while let Some(rest) = path.strip_prefix('/') {
        path = rest;
    }
    path
}

fn is_version(segment: &[u8]) -> bool {
    segment.strip_prefix(b"v").is_some_and(|digits| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit))
}

/// Discord's identifiers are snowflakes: 17 to 20 digits.
fn is_identifier(segment: &[u8]) -> bool {
    // all of them at once, as far as the processor can, and not up to the first that is none
    (17..=20).contains(&segment.len()) && segment.iter().fold(true, |all, byte| all & byte.is_ascii_digit())
}

/// A segment as it stands in a template. What could be taken for something else there (more than one segment, text that
/// is not UTF-8) and what is too long becomes `!`.
fn word(segment: &[u8]) -> &str {
    match std::str::from_utf8(segment) {
        Ok(word) if segment.len() < LONG_SEGMENT && !segment.contains(&b'/') => word,
        _ => "!",
    }
}

/// Which of its three buckets a deleted message counts in.
fn age(message: &[u8], unix_ms: u64) -> &'static str {
    let digits = message.iter().map(|digit| u64::from(digit - b'0'));
    let id = digits.fold(0_u64, |id, digit| id.saturating_mul(10).saturating_add(digit));
    let age = unix_ms.saturating_sub((id >> 22) + DISCORD_EPOCH);
    if age > OLD_MS {
        "!old"
    } else if age < NEW_MS {
        "!new"
    } else {
        "!"
    }
}
