//! Labels: a template without anything that a client chose beyond route words.
//!
//! There is no list of endpoints here, only of places: after some words of Discord's reference comes a code, a name or
//! an identifier whatever it looks like. Elsewhere a segment is shown if it looks like a route word.

use std::hash::Hasher;

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
    for segment in segments(template) {
        label.push('/');
        label.push_str(segment);
    }
    if label.is_empty() {
        label.push('/');
    }
    label
}

/// The hash of a template's label.
pub(super) fn key(template: &str) -> u64 {
    let mut hasher = key::hasher();
    for segment in segments(template) {
        hasher.write(segment.as_bytes());
        hasher.write_u8(b'/');
    }
    hasher.finish()
}

/// The segments of a label, as many as fit.
fn segments(template: &str) -> impl Iterator<Item = &str> {
    let (mut resource, mut chosen, mut room) = ("", 0_u8, MAX_LABEL);
    super::pieces(template).enumerate().map_while(move |(index, segment)| {
        if index == 0 {
            resource = segment;
        }
        let is_chosen = chosen > 0 || index == 1 && !is_second_word(resource, segment);
        chosen = if is_chosen { chosen.saturating_sub(1) } else { chosen_after(index, segment) };
        let shown = if MARKS.contains(&segment) || !is_chosen && is_word(segment) { segment } else { "!" };
        room = room.checked_sub(1 + shown.len())?;
        Some(shown)
    })
}

/// Whether a first resource's second segment can be a route word.
fn is_second_word(resource: &str, segment: &str) -> bool {
    match resource {
        "users" | "applications" => segment == "@me",
        "guilds" => segment == "templates",
        "channels" | "webhooks" | "interactions" | "invites" | "invite" | "lobbies" | "skus" | "stickers" => false,
        "sticker-packs" | "stage-instances" | "teams" | "games" | "gifts" => false,
        _ => true,
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
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'-' | b'_'));
    word || ODD_WORDS.contains(&segment)
}
