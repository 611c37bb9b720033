//! Discord's objects, with the fields that libraries insist on.

use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::digest::{SHA256, digest};
use serde_json::{Value, json};

use super::multipart::Part;
use crate::arrivals::hex;
use crate::clock;

/// The bot that asks, whoever asks.
pub(super) const BOT: &str = "700000000000000001";

/// A fresh identifier of now.
pub(super) fn snowflake() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let since_discord = clock::unix_ms().saturating_sub(1_420_070_400_000);
    ((since_discord << 22) | (NEXT.fetch_add(1, Ordering::Relaxed) & 0x3f_ffff)).to_string()
}

/// An object with the fields of another laid over it.
pub(super) fn merged(mut object: Value, over: Value) -> Value {
    if let (Some(object), Value::Object(over)) = (object.as_object_mut(), over) {
        object.extend(over);
    }
    object
}

pub(super) fn user(id: &str) -> Value {
    json!({
        "id": id, "username": "user", "global_name": null, "discriminator": "0", "avatar": null, "banner": null,
        "accent_color": null, "bot": id == BOT, "flags": 0, "public_flags": 0, "avatar_decoration_data": null,
    })
}

pub(super) fn application() -> Value {
    json!({
        "id": BOT, "name": "application", "icon": null, "description": "", "bot_public": true, "summary": "",
        "bot_require_code_grant": false, "verify_key": "0".repeat(64), "flags": 0, "owner": user("300000000000000001"),
        "team": null, "bot": user(BOT), "rpc_origins": [], "tags": [], "redirect_uris": [], "hook": true,
    })
}

pub(super) fn message(channel: &str, id: &str, given: Value) -> Value {
    let mut message = json!({
        "id": id, "channel_id": channel, "author": user(BOT), "content": "", "timestamp": clock::iso8601(),
        "edited_timestamp": null, "tts": false, "mention_everyone": false, "mentions": [], "mention_roles": [],
        "attachments": [], "embeds": [], "pinned": false, "type": 0, "flags": 0, "components": [],
    });
    // Only what a message shows of what was sent, so that what it refuses to show is not echoed.
    for field in ["content", "tts", "nonce", "flags", "attachments", "components", "embeds"] {
        if let Some(value) = given.get(field).filter(|value| !value.is_null()) {
            message[field] = value.clone();
        }
    }
    for embed in message["embeds"].as_array_mut().into_iter().flatten() {
        embed["type"] = "rich".into();
    }
    if let Some(reference) = given.get("message_reference").filter(|value| value.is_object()) {
        message["message_reference"] = merged(json!({"channel_id": channel}), reference.clone());
        message["type"] = 19.into();
    }
    message
}

/// An upload as it is shown; `sha256` is the fake's own, for whoever checks it.
pub(super) fn attachment(part: &Part<'_>) -> Value {
    let name = part.filename.as_deref().unwrap_or("unknown");
    let id = snowflake();
    let url = format!("https://cdn.discordapp.com/attachments/1/{id}/{name}");
    json!({
        "id": id, "filename": name, "size": part.data.len(), "url": url, "proxy_url": url,
        "content_type": part.content_type, "sha256": hex(digest(&SHA256, part.data).as_ref()),
    })
}

pub(super) fn channel(id: &str) -> Value {
    json!({
        "id": id, "type": 0, "guild_id": "200000000000000001", "name": "general", "position": 0, "nsfw": false,
        "permission_overwrites": [], "topic": null, "last_message_id": null, "rate_limit_per_user": 0, "parent_id": null,
        "flags": 0,
    })
}

pub(super) fn role(id: &str, name: &str) -> Value {
    json!({
        "id": id, "name": name, "color": 0, "hoist": false, "icon": null, "unicode_emoji": null, "position": 0,
        "permissions": "104324673", "managed": false, "mentionable": false, "flags": 0,
        "colors": {"primary_color": 0, "secondary_color": null, "tertiary_color": null},
    })
}

pub(super) fn member(id: &str) -> Value {
    json!({
        "user": user(id), "nick": null, "avatar": null, "roles": [], "joined_at": "2020-01-01T00:00:00.000000+00:00",
        "premium_since": null, "deaf": false, "mute": false, "flags": 0, "pending": false,
        "communication_disabled_until": null,
    })
}

pub(super) fn guild(id: &str) -> Value {
    json!({
        "id": id, "name": "guild", "icon": null, "splash": null, "discovery_splash": null, "banner": null,
        "description": null, "owner_id": "300000000000000001", "region": "us-central", "afk_channel_id": null,
        "afk_timeout": 300, "verification_level": 0, "default_message_notifications": 0, "explicit_content_filter": 0,
        "roles": [role(id, "@everyone")], "emojis": [], "stickers": [], "features": [], "mfa_level": 0,
        "application_id": null, "system_channel_id": null, "system_channel_flags": 0, "rules_channel_id": null,
        "public_updates_channel_id": null, "safety_alerts_channel_id": null, "vanity_url_code": null, "premium_tier": 0,
        "premium_subscription_count": 0, "premium_progress_bar_enabled": false, "preferred_locale": "en-US",
        "nsfw_level": 0, "nsfw": false, "widget_enabled": false, "max_members": 500_000, "max_presences": null,
        "approximate_member_count": 3, "approximate_presence_count": 1,
    })
}

pub(super) fn webhook(id: &str, channel: &str) -> Value {
    json!({
        "id": id, "type": 1, "guild_id": "200000000000000001", "channel_id": channel, "name": "webhook", "avatar": null,
        "token": "made-up-webhook-token", "application_id": null, "user": user(BOT),
    })
}
