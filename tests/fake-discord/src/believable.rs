//! A believable Discord: its families of routes, and objects that libraries can parse.
//!
//! Identifiers that begin with `404` are unknown to it, and those that begin with `403` are out of the bot's reach.

mod multipart;
mod objects;

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use crate::paths::Place;
use crate::reply::Reply;
use crate::script::{Rule, SubLimit};
use objects::{application, channel, guild, member, merged, message, role, snowflake, user, webhook};

/// What an answer is made from.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The method.
    pub method: &'a str,
    /// The target, taken apart.
    pub place: &'a Place,
    /// The query, without its `?`.
    pub query: &'a str,
    /// `Content-Type`.
    pub content_type: &'a str,
    /// The body.
    pub body: &'a [u8],
}

impl Request<'_> {
    fn asks(&self, name: &str) -> bool {
        let value = self.query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name);
        value.is_some_and(|(_, value)| matches!(value, "true" | "True" | "1"))
    }

    /// The JSON of the body, or of a multipart body's `payload_json`; `None` if it is broken.
    fn json(&self) -> Option<Value> {
        match multipart::boundary(self.content_type) {
            Some(boundary) => {
                let parts = multipart::parts(self.body, boundary);
                let payload = parts.iter().find(|part| part.name == "payload_json");
                payload.map_or(Some(json!({})), |part| serde_json::from_slice(part.data).ok())
            }
            None if self.body.is_empty() => Some(json!({})),
            None => serde_json::from_slice(self.body).ok(),
        }
    }

    fn files(&self) -> Vec<multipart::Part<'_>> {
        let parts = multipart::boundary(self.content_type).map(|boundary| multipart::parts(self.body, boundary));
        parts.unwrap_or_default().into_iter().filter(|part| part.filename.is_some()).collect()
    }
}

/// The families of routes of the built-in Discord.
pub fn rules() -> Vec<Rule> {
    let s = Duration::from_secs;
    let hidden = |field: &str| SubLimit { fields: vec![field.into()], ..SubLimit::default() };
    let mut edit = Rule::window(
        "PATCH /channels/{}, PUT /channels/{}/permissions/{}, DELETE /channels/{}/permissions/{}, PATCH /guilds/{}/channels",
        "b4d0f1a29c3e5768",
        5,
        s(15),
    );
    edit.sub_limits = vec![hidden("name"), hidden("topic")];
    vec![
        Rule::drip("POST /channels/{}/messages", "80c17d2f203122d936070c88c8d10f33", 5, s(1)),
        Rule::drip("PATCH /channels/{}/messages/{}", "9b6d3a1e7f25c840", 5, s(1)),
        Rule::window("DELETE /channels/{}/messages/{}", "59c16d1f04e2a7bb", 5, s(1)),
        Rule::window("GET /channels/{}/messages, GET /channels/{}/messages/{}", "c7b1f2e93d0a4856", 10, s(1)),
        Rule::window(
            "PUT /channels/{}/messages/{}/reactions/**, DELETE /channels/{}/messages/{}/reactions/**",
            "e06815e7ac9d4b32",
            1,
            Duration::from_millis(250),
        ),
        edit,
        Rule::window("GET /guilds/{}/members", "4d7a9c02e8f1b365", 10, s(10)),
        Rule::window("GET /guilds/{}/members/{}", "a1f6c3d85b2e9074", 5, s(1)),
        Rule::window(
            "PUT /guilds/{}/members/{}/roles/{}, DELETE /guilds/{}/members/{}/roles/{}",
            "b0b0f7d1c2e34a59",
            10,
            s(10),
        ),
        Rule::window("PUT /guilds/{}/bans/{}, DELETE /guilds/{}/bans/{}", "2e8c5b7d91f0a346", 5, s(5)),
        Rule::window("GET /guilds/{}/audit-logs", "7f3b6e90d2c1a854", 5, s(5)),
        Rule::drip(
            "POST /guilds/{}/roles, PATCH /guilds/{}/roles, PATCH /guilds/{}/roles/{}, DELETE /guilds/{}/roles/{}",
            "d94e02b7f6a5c183",
            10,
            s(1),
        ),
        Rule::drip("POST /channels/{}/typing", "5c0e7a3d8b2f1964", 5, s(1)),
        Rule::drip(
            "* /webhooks/{}/{}/**, * /interactions/{}/{}/callback",
            "3f9d6b8e20c7a145",
            5,
            Duration::from_millis(500),
        ),
        Rule::drip("GET /users/{}", "6a2d9f7b1e0c8543", 10, Duration::from_millis(500)),
        Rule::drip(
            "* /applications/{}/commands/**, * /applications/{}/guilds/{}/commands/**",
            "1b8f4c6a7d3e9205",
            5,
            s(1),
        ),
        Rule::window("GET /gateway/bot", "41f9a6c3e7b2d058", 2, s(5)),
    ]
}

/// The answer to an allowed request: an object of Discord's when it is to be `believable`, an empty one otherwise.
pub fn answer(request: &Request<'_>, status: Option<u16>, believable: bool) -> Reply {
    if !believable {
        return Reply::status(status.unwrap_or(200));
    }
    let reply = refused(request).unwrap_or_else(|| found(request));
    Reply { status: status.unwrap_or(reply.status), ..reply }
}

fn error(status: u16, code: u64, message: &str) -> Reply {
    Reply::json(status, &json!({"message": message, "code": code}))
}

/// Unknown and forbidden identifiers, and broken JSON.
fn refused(request: &Request<'_>) -> Option<Reply> {
    let segments = &request.place.segments;
    for pair in segments.windows(2) {
        let number = pair[1].len() >= 17 && pair[1].bytes().all(|byte| byte.is_ascii_digit());
        if number && pair[1].starts_with("404") {
            let (code, what) = match pair[0].as_str() {
                "channels" => (10003, "Channel"),
                "guilds" => (10004, "Guild"),
                "members" => (10007, "Member"),
                "messages" => (10008, "Message"),
                "roles" => (10011, "Role"),
                "users" => (10013, "User"),
                "webhooks" => (10015, "Webhook"),
                "interactions" => (10062, "interaction"),
                _ => (0, "Resource"),
            };
            return Some(error(404, code, &format!("Unknown {what}")));
        }
        if number && pair[1].starts_with("403") {
            return Some(error(403, 50013, "Missing Permissions"));
        }
    }
    let broken = request.json().is_none() && !request.content_type.contains("x-www-form-urlencoded");
    broken.then(|| error(400, 50109, "The request body contains invalid JSON."))
}

fn found(request: &Request<'_>) -> Reply {
    let segments: Vec<&str> = request.place.segments.iter().map(String::as_str).collect();
    let given = request.json().unwrap_or_default();
    let ok = |value: &Value| Reply::json(200, value);
    let nothing = || Reply { status: 204, body: Bytes::new(), ..Reply::default() };
    match (request.method, segments.as_slice()) {
        ("GET", ["gateway"]) => ok(&json!({"url": "wss://gateway.discord.gg"})),
        ("GET", ["gateway", "bot"]) => ok(&json!({
            "url": "wss://gateway.discord.gg", "shards": 1,
            "session_start_limit": {"total": 1000, "remaining": 999, "reset_after": 14_400_000, "max_concurrency": 1},
        })),
        ("GET" | "PATCH", ["applications" | "oauth2", "@me"] | ["oauth2", "applications", "@me"]) => ok(&application()),
        (_, ["applications", rest @ ..]) => commands(request.method, rest, given),
        (_, ["channels", rest @ ..]) => in_channel(request, rest, given),
        (_, ["guilds", rest @ ..]) => in_guild(request.method, rest, given),
        (_, ["users", rest @ ..]) => users(request.method, rest, given),
        (_, ["webhooks", rest @ ..]) => webhooks(request, rest, given),
        ("POST", ["interactions", id, _, "callback"]) if request.asks("with_response") => ok(&json!({
            "interaction": {"id": id, "type": 2, "response_message_ephemeral": false},
            "resource": {"type": 4, "message": sent(request, "100000000000000001", given.get("data").cloned().unwrap_or_default())},
        })),
        ("POST", ["interactions", _, _, "callback"]) => nothing(),
        ("GET", ["invites", code]) => ok(&json!({"code": code, "type": 0, "guild": guild("200000000000000001")})),
        _ => error(404, 0, "404: Not Found"),
    }
}

fn in_channel(request: &Request<'_>, rest: &[&str], given: Value) -> Reply {
    let ok = |value: &Value| Reply::json(200, value);
    let nothing = || Reply { status: 204, body: Bytes::new(), ..Reply::default() };
    match (request.method, rest) {
        ("GET" | "DELETE", [id]) => ok(&channel(id)),
        ("PATCH", [id]) => ok(&merged(channel(id), given)),
        ("POST", [id, "messages"]) if empty(request, &given) => {
            let _ = id;
            error(400, 50006, "Cannot send an empty message")
        }
        ("POST", [id, "messages"]) => ok(&sent(request, id, given)),
        ("GET", [id, "messages"]) => ok(&json!([message(id, &snowflake(), json!({"content": "hello"}))])),
        ("GET", [id, "messages", "pins"] | [id, "pins"]) => {
            let _ = id;
            ok(&json!([]))
        }
        ("GET", [id, "messages", message_id]) => ok(&message(id, message_id, json!({"content": "hello"}))),
        ("PATCH", [id, "messages", message_id]) => {
            let mut edited = message(id, message_id, with_files(request, given));
            edited["edited_timestamp"] = crate::clock::iso8601().into();
            ok(&edited)
        }
        ("POST", [id, "messages", message_id, "crosspost"]) => ok(&message(id, message_id, json!({"flags": 1}))),
        ("GET", [_, "messages", _, "reactions", _]) => ok(&json!([user("300000000000000001")])),
        ("POST", [id, "webhooks"]) => ok(&merged(webhook(&snowflake(), id), given)),
        ("GET", [id, "webhooks"]) => ok(&json!([webhook("500000000000000001", id)])),
        ("POST", [id, "invites"]) => Reply::json(
            200,
            &json!({"code": "abcdef", "type": 0, "channel": channel(id), "uses": 0, "max_uses": 0, "max_age": 86400, "temporary": false, "created_at": crate::clock::iso8601()}),
        ),
        ("POST", [id, "threads"] | [id, "messages", _, "threads"]) => {
            let thread = json!({"type": 11, "parent_id": id, "owner_id": objects::BOT, "message_count": 0, "member_count": 1,
                "thread_metadata": {"archived": false, "auto_archive_duration": 1440, "archive_timestamp": crate::clock::iso8601(), "locked": false}});
            Reply::json(201, &merged(merged(channel(&snowflake()), thread), given))
        }
        ("PUT" | "POST" | "DELETE" | "PATCH", [_, ..]) => nothing(),
        _ => error(404, 0, "404: Not Found"),
    }
}

fn in_guild(method: &str, rest: &[&str], given: Value) -> Reply {
    let ok = |value: &Value| Reply::json(200, value);
    let nothing = || Reply { status: 204, body: Bytes::new(), ..Reply::default() };
    match (method, rest) {
        ("GET", [id]) => ok(&guild(id)),
        ("PATCH", [id]) => ok(&merged(guild(id), given)),
        ("GET", [_, "channels"]) => ok(&json!([channel("100000000000000001")])),
        ("POST", [_, "channels"]) => Reply::json(201, &merged(channel(&snowflake()), given)),
        ("GET", [_, "members"]) => {
            let members = (1..=3).map(|n| member(&format!("30000000000000000{n}")));
            ok(&Value::Array(members.collect()))
        }
        ("GET", [_, "members", "search"]) => ok(&json!([member("300000000000000001")])),
        ("GET", [_, "members", id]) => ok(&member(id)),
        ("PATCH", [_, "members", id]) => ok(&merged(member(id), given)),
        ("GET", [id, "roles"]) => ok(&json!([role(id, "@everyone")])),
        ("GET", [_, "roles", id]) => ok(&role(id, "role")),
        ("POST", [_, "roles"]) => ok(&merged(role(&snowflake(), "new role"), given)),
        ("PATCH", [_, "roles", id]) => ok(&merged(role(id, "role"), given)),
        ("GET", [_, "bans"]) => ok(&json!([])),
        ("GET", [_, "bans", id]) => ok(&json!({"reason": null, "user": user(id)})),
        ("GET", [_, "audit-logs"]) => ok(&json!({
            "audit_log_entries": [{"id": snowflake(), "user_id": objects::BOT, "target_id": "300000000000000001", "action_type": 22, "reason": "example", "changes": []}],
            "application_commands": [], "auto_moderation_rules": [], "guild_scheduled_events": [], "integrations": [], "threads": [], "webhooks": [],
            "users": [user("300000000000000001"), user(objects::BOT)],
        })),
        ("GET", [_, "emojis" | "webhooks" | "invites" | "stickers" | "integrations"]) => ok(&json!([])),
        ("POST", [_, "emojis"]) => Reply::json(
            201,
            &merged(
                json!({"id": snowflake(), "roles": [], "require_colons": true, "managed": false, "animated": false, "available": true}),
                given,
            ),
        ),
        ("PUT" | "POST" | "DELETE" | "PATCH", [_, _, ..]) => nothing(),
        _ => error(404, 0, "404: Not Found"),
    }
}

fn users(method: &str, rest: &[&str], given: Value) -> Reply {
    match (method, rest) {
        ("GET", ["@me"]) => Reply::json(200, &user(objects::BOT)),
        ("PATCH", ["@me"]) => Reply::json(200, &merged(user(objects::BOT), given)),
        ("GET", ["@me", "guilds"]) => Reply::json(
            200,
            &json!([{"id": "200000000000000001", "name": "guild", "icon": null, "owner": false, "permissions": "0", "features": []}]),
        ),
        ("POST", ["@me", "channels"]) => {
            let recipient = given.get("recipient_id").and_then(Value::as_str).unwrap_or("300000000000000001");
            let direct = json!({"id": snowflake(), "type": 1, "last_message_id": null, "flags": 0, "recipients": [user(recipient)]});
            Reply::json(200, &direct)
        }
        ("GET", [id]) => Reply::json(200, &user(id)),
        ("DELETE", ["@me", "guilds", _]) => Reply { status: 204, ..Reply::default() },
        _ => error(404, 0, "404: Not Found"),
    }
}

fn webhooks(request: &Request<'_>, rest: &[&str], given: Value) -> Reply {
    const CHANNEL: &str = "100000000000000001";
    let ok = |value: &Value| Reply::json(200, value);
    match (request.method, rest) {
        ("GET", [id] | [id, _]) => ok(&webhook(id, CHANNEL)),
        ("PATCH", [id] | [id, _]) => ok(&merged(webhook(id, CHANNEL), given)),
        ("POST", [_, _]) if empty(request, &given) => error(400, 50006, "Cannot send an empty message"),
        ("POST", [id, _]) if request.place.interaction || request.asks("wait") => {
            let mut message = sent(request, CHANNEL, given);
            message["webhook_id"] = (*id).into();
            ok(&message)
        }
        ("GET", [id, _, "messages", message_id]) | ("PATCH", [id, _, "messages", message_id]) => {
            let real = if message_id.starts_with('@') { snowflake() } else { (*message_id).to_owned() };
            let mut message = message(CHANNEL, &real, with_files(request, given));
            message["webhook_id"] = (*id).into();
            ok(&message)
        }
        ("POST" | "DELETE", [_, ..]) => Reply { status: 204, ..Reply::default() },
        _ => error(404, 0, "404: Not Found"),
    }
}

fn commands(method: &str, rest: &[&str], given: Value) -> Reply {
    let command = |id: &str, application: &str, given: Value| {
        let command = json!({"id": id, "application_id": application, "version": snowflake(), "type": 1, "name": "command",
            "description": "a command", "default_member_permissions": null, "dm_permission": true, "nsfw": false, "options": []});
        merged(command, given)
    };
    match (method, rest) {
        ("GET", [_, "commands"] | [_, "guilds", _, "commands"] | [_, "emojis"]) => Reply::json(200, &json!([])),
        ("PUT", [id, "commands"] | [id, "guilds", _, "commands"]) => {
            let given = given.as_array().cloned().unwrap_or_default();
            let all = given.into_iter().map(|given| command(&snowflake(), id, given));
            Reply::json(200, &Value::Array(all.collect()))
        }
        ("POST", [id, "commands"] | [id, "guilds", _, "commands"]) => {
            Reply::json(201, &command(&snowflake(), id, given))
        }
        ("GET" | "PATCH", [id, "commands", command_id] | [id, "guilds", _, "commands", command_id]) => {
            Reply::json(200, &command(command_id, id, given))
        }
        ("DELETE", [_, ..]) => Reply { status: 204, ..Reply::default() },
        _ => error(404, 0, "404: Not Found"),
    }
}

fn empty(request: &Request<'_>, given: &Value) -> bool {
    let fields = ["content", "embeds", "sticker_ids", "components", "poll", "message_reference"];
    let some = |value: &Value| !value.is_null() && value != "" && value.as_array().is_none_or(|list| !list.is_empty());
    !fields.iter().any(|field| given.get(field).is_some_and(some)) && request.files().is_empty()
}

/// A message just sent to a channel.
fn sent(request: &Request<'_>, channel: &str, given: Value) -> Value {
    message(channel, &snowflake(), with_files(request, given))
}

/// What was given, its uploads as attachments.
fn with_files(request: &Request<'_>, mut given: Value) -> Value {
    let files = request.files();
    if !files.is_empty() && given.is_object() {
        given["attachments"] = Value::Array(files.iter().map(objects::attachment).collect());
    }
    given
}
