//! Labels: a template without anything that a client chose beyond route words.
//!
//! There is no list of endpoints here, only of places: after some words of Discord's reference comes a code, a name or
//! an identifier whatever it looks like. Elsewhere a segment is shown if it looks like a route word.

use std::hash::Hasher;

use ahash::AHasher;

use super::key;

/// Bytes in a label at most.
const MAX_LABEL: usize = 512;
/// Bytes in a route word at most; the longest of Discord's has 25.
const MAX_WORD: usize = 32;
/// Route words that do not look like one.
const ODD_WORDS: [&str; 3] = ["oauth2", "widget.json", "widget.png"];
/// What templates have in place of what clients chose.
const MARKS: [&str; 4] = ["!", "!modify", "!old", "!new"];

/// The label of a template.
pub(super) fn of(template: &str) -> String {
    let mut label = String::with_capacity(template.len().min(MAX_LABEL));
    let mut place = Place::first();
    for segment in template.split('/').filter(|segment| !segment.is_empty()).map_while(|segment| place.show(segment)) {
        label.push('/');
        label.push_str(segment);
    }
    if label.is_empty() {
        label.push('/');
    }
    label
}

/// The hash of a template's label, made while the template is.
pub(super) struct Key {
    place: Place,
    hasher: AHasher,
}

impl Key {
    pub(super) fn new() -> Self {
        Self { place: Place::first(), hasher: key::hasher() }
    }

    /// Takes the template's next segment.
    pub(super) fn push(&mut self, segment: &str) {
        if let Some(shown) = self.place.show(segment) {
            self.hasher.write(shown.as_bytes());
            self.hasher.write_u8(b'/');
        }
    }

    pub(super) fn finish(&self) -> u64 {
        self.hasher.finish()
    }
}

/// Where in a template the next segment stands, as far as its label depends on it.
struct Place {
    index: usize,
    /// The only route word that can come second, if not all can. Empty if none can.
    second: Option<&'static str>,
    /// How many segments from here are no route words.
    chosen: u8,
    /// Bytes that are left in the label.
    room: usize,
}

impl Place {
    fn first() -> Self {
        Self { index: 0, second: None, chosen: 0, room: MAX_LABEL }
    }

    /// The next segment as it stands in a label, or nothing from the first on that does not fit.
    fn show<'a>(&mut self, segment: &'a str) -> Option<&'a str> {
        let is_chosen = self.chosen > 0 || self.index == 1 && self.second.is_some_and(|only| segment != only);
        self.chosen = if is_chosen { self.chosen.saturating_sub(1) } else { chosen_after(self.index, segment) };
        if self.index == 0 {
            self.second = second_word(segment);
        }
        self.index += 1;
        let shown = if MARKS.contains(&segment) || !is_chosen && is_word(segment) { segment } else { "!" };
        let room = self.room.checked_sub(1 + shown.len());
        self.room = room.unwrap_or(0);
        room.map(|_| shown)
    }
}

/// The only route word that can come after a first resource, if not all can. Empty if none can.
fn second_word(resource: &str) -> Option<&'static str> {
    match resource {
        "users" | "applications" => Some("@me"),
        "guilds" => Some("templates"),
        "channels" | "webhooks" | "interactions" | "invites" | "invite" | "lobbies" | "skus" | "stickers" => Some(""),
        "sticker-packs" | "stage-instances" | "teams" | "games" | "gifts" => Some(""),
        _ => None,
    }
}

/// How many segments after this one are no route words.
fn chosen_after(index: usize, segment: &str) -> u8 {
    match segment {
        // an identifier and a token
        "webhooks" | "interactions" => 2,
        // the kind of an account elsewhere, and the account
        "connections" => 2,
        "templates" | "gift-codes" | "activity-instances" => 1,
        "invites" if index == 0 => 1,
        _ => 0,
    }
}

/// Lower-case words with `-` and `_` in them, or `@me` and its like.
fn is_word(segment: &str) -> bool {
    let name = segment.strip_prefix('@').unwrap_or(segment);
    let word = name.len() <= MAX_WORD
        && name.starts_with(|letter: char| letter.is_ascii_lowercase())
        && name.bytes().fold(true, |all, byte| all & matches!(byte, b'a'..=b'z' | b'-' | b'_'));
    word || ODD_WORDS.contains(&segment)
}
