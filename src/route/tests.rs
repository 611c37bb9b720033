use proptest::prelude::*;

use super::*;

/// 2026-01-01.
const NOW: u64 = 1_767_225_600_000;
const CHANNEL: &str = "/channels/100000000000000001";

fn route(method: &str, path: &str) -> Route {
    Route::classify(&method.parse().unwrap(), path, NOW)
}

fn get(path: &str) -> Route {
    route("GET", path)
}

fn message(age_ms: u64) -> u64 {
    (NOW - age_ms - DISCORD_EPOCH) << 22
}

#[test]
fn templates_and_labels_are_what_the_contract_says() {
    let table = [
        ("GET", "", "/", "/"),
        ("GET", "/", "/", "/"),
        ("GET", "*", "/*", "/!"),
        ("GET", "/api", "/", "/"),
        ("GET", "/api/v10", "/", "/"),
        ("GET", "/api/v/gateway", "/v/gateway", "/v/gateway"),
        ("GET", "/api/gateway/bot", "/gateway/bot", "/gateway/bot"),
        ("GET", "//api//v10///gateway//bot/", "/gateway/bot", "/gateway/bot"),
        ("GET", "/v10/gateway", "/v10/gateway", "/!/gateway"),
        ("GET", "/api/v10/channels/100000000000000001", CHANNEL, "/channels/!"),
        (
            "GET",
            "/channels/100000000000000001/messages",
            "/channels/100000000000000001/messages",
            "/channels/!/messages",
        ),
        (
            "GET",
            "/channels/100000000000000001/messages/600000000000000001",
            "/channels/100000000000000001/messages/!",
            "/channels/!/messages/!",
        ),
        (
            "PUT",
            "/guilds/200000000000000001/members/300000000000000001/roles/400000000000000001",
            "/guilds/200000000000000001/members/!/roles/!",
            "/guilds/!/members/!/roles/!",
        ),
        (
            "GET",
            "/guilds/200000000000000001/members/@me",
            "/guilds/200000000000000001/members/@me",
            "/guilds/!/members/@me",
        ),
        ("GET", "/users/@me", "/users/@me", "/users/@me"),
        ("GET", "/users/%40me/guilds", "/users/@me/guilds", "/users/@me/guilds"),
        ("GET", "/users/300000000000000001", "/users/!", "/users/!"),
        ("GET", "/invites/discord-testers", "/invites/!", "/invites/!"),
        ("POST", "/brand-new/900000000000000001/thing", "/brand-new/900000000000000001/thing", "/brand-new/!/thing"),
        ("GET", "/webhooks/500000000000000001", "/webhooks/500000000000000001", "/webhooks/!"),
        ("POST", "/webhooks/500000000000000001/token", "/webhooks/500000000000000001/!", "/webhooks/!/!"),
        (
            "POST",
            "/webhooks/500000000000000001/token/slack",
            "/webhooks/500000000000000001/!/slack",
            "/webhooks/!/!/slack",
        ),
        (
            "PATCH",
            "/webhooks/700000000000000001/token/messages/@original",
            "/webhooks/700000000000000001/!/messages/@original",
            "/webhooks/!/!/messages/@original",
        ),
        (
            "POST",
            "/interactions/700000000000000001/token/callback",
            "/interactions/700000000000000001/!/callback",
            "/interactions/!/!/callback",
        ),
        ("GET", "/oauth2/applications/@me", "/oauth2/applications/@me", "/oauth2/applications/@me"),
    ];
    for (method, path, template, label) in table {
        let route = route(method, path);
        assert_eq!((&*route.template, &*route.label()), (template, label), "{method} {path}");
    }
}

#[test]
fn everything_from_reactions_on_is_one_route_for_changes_and_one_for_the_rest() {
    let base = format!("{CHANNEL}/messages/600000000000000001/reactions");
    for rest in ["", "/%F0%9F%91%8D/@me", "/name:400000000000000001/300000000000000001", "/%23%EF%B8%8F%E2%83%A3"] {
        for method in ["PUT", "DELETE"] {
            let route = route(method, &format!("{base}{rest}"));
            assert_eq!(route.template, format!("{CHANNEL}/messages/!/reactions/!modify"));
            assert_eq!(route.label(), "/channels/!/messages/!/reactions/!modify");
        }
        for method in ["GET", "POST", "HEAD", "PURGE"] {
            let route = route(method, &format!("{base}{rest}"));
            assert_eq!(route.template, format!("{CHANNEL}/messages/!/reactions/!/!"));
            assert_eq!(route.label(), "/channels/!/messages/!/reactions/!/!");
        }
    }
    assert_eq!(get("/guilds/200000000000000001/reactions/x").template, "/guilds/200000000000000001/reactions/x");
}

#[test]
fn a_message_is_deleted_from_a_bucket_of_its_age() {
    let fortnight = 14 * 24 * 3_600_000;
    let table = [(0, "!new"), (9_999, "!new"), (10_000, "!"), (fortnight, "!"), (fortnight + 1, "!old")];
    for (age, name) in table {
        let path = format!("{CHANNEL}/messages/{}", message(age));
        assert_eq!(route("DELETE", &path).template, format!("{CHANNEL}/messages/{name}"), "{age} ms");
        assert_eq!(route("PATCH", &path).template, format!("{CHANNEL}/messages/!"));
    }
    // beyond the clock, and beyond 64 bits
    for id in ["9223372036854775807", "99999999999999999999"] {
        assert!(route("DELETE", &format!("{CHANNEL}/messages/{id}")).template.ends_with("/!new"));
    }
    let others = ["/messages/600000000000000001/x", "/pins/600000000000000001", "/messages/bulk-delete"];
    for other in others {
        let route = route("DELETE", &format!("{CHANNEL}{other}"));
        assert!(!route.template.contains("!old") && !route.template.contains("!new"), "{other}");
    }
}

#[test]
fn identifiers_are_17_to_20_digits_and_long_segments_are_hidden() {
    for (segment, shown) in [
        ("1234567890123456", "1234567890123456"),
        ("12345678901234567", "!"),
        ("12345678901234567890", "!"),
        ("123456789012345678901", "123456789012345678901"),
        ("%31234567890123456%37", "!"),
        ("1234567890123456x", "1234567890123456x"),
    ] {
        let route = get(&format!("/a/b/{segment}"));
        assert_eq!(route.template, format!("/a/b/{shown}"));
        assert_eq!(route.label(), "/a/b/!");
    }
    assert_eq!(get(&format!("/a/{}", "b".repeat(64))).template, "/a/!");
    assert_eq!(get(&format!("/a/{}", "b".repeat(63))).template, format!("/a/{}", "b".repeat(63)));
    assert_eq!(get("/a/%FF/b%2Fc/d").template, "/a/!/!/d", "neither text nor one segment");
}

#[test]
fn labels_show_no_code_name_or_address_wherever_one_can_stand() {
    for (path, label) in [
        ("/guilds/templates/abcdef", "/guilds/templates/!"),
        ("/guilds/200000000000000001/templates/abcdef", "/guilds/!/templates/!"),
        ("/guilds/somename", "/guilds/!"),
        ("/channels/somename/messages", "/channels/!/messages"),
        ("/invites/abcdef/target-users/job-status", "/invites/!/target-users/job-status"),
        ("/users/somename/profile", "/users/!/profile"),
        ("/users/@me/connections/github/somename", "/users/@me/connections/!/!"),
        ("/users/@me/applications/700000000000000001/role-connection", "/users/@me/applications/!/role-connection"),
        ("/entitlements/gift-codes/abcdef/redeem", "/entitlements/gift-codes/!/redeem"),
        ("/applications/700000000000000001/activity-instances/abc", "/applications/!/activity-instances/!"),
        ("/v10/webhooks/500000000000000001/secret", "/!/webhooks/!/!"),
        ("/Webhooks/500000000000000001/Secret", "/!/!/!"),
        ("/guilds/200000000000000001/emojis/Smile", "/guilds/!/emojis/!"),
        ("/a/some.one@example.com/x", "/a/!/x"),
        ("/a/%C3%A9t%C3%A9", "/a/!"),
        ("/guilds/200000000000000001/widget.png", "/guilds/!/widget.png"),
        ("/guilds/200000000000000001/vanity-url", "/guilds/!/vanity-url"),
        ("/soundboard-default-sounds", "/soundboard-default-sounds"),
        ("/channels/100000000000000001/polls/600000000000000001/answers/1", "/channels/!/polls/!/answers/!"),
    ] {
        assert_eq!(get(path).label(), label, "{path}");
    }
}

#[test]
fn labels_are_cut_between_segments_at_512_bytes() {
    let label = get(&"/abcdefghij".repeat(60)).label();
    assert_eq!(label, "/abcdefghij".repeat(46));
    assert_eq!(get(&"/a".repeat(30_000)).label().len(), 512);
}

#[test]
fn major_parameters_part_buckets_and_nothing_else_does() {
    for (one, other) in [
        ("/channels/100000000000000001/messages", "/channels/100000000000000002/messages"),
        ("/guilds/100000000000000001/x", "/channels/100000000000000001/x"),
        ("/webhooks/100000000000000001", "/webhooks/100000000000000002"),
        ("/webhooks/100000000000000001/a", "/webhooks/100000000000000001/b"),
        ("/webhooks/100000000000000001", "/webhooks/100000000000000001/b"),
    ] {
        let (one, other) = (get(one), get(other));
        assert_ne!(one.major, other.major);
        assert_ne!(one.key, other.key);
        assert_eq!((one.key, other.key), (one.provisional, other.provisional));
    }
    for (one, other) in [
        (
            "/channels/100000000000000001/messages/600000000000000001",
            "/channels/100000000000000001/messages/600000000000000002",
        ),
        ("/api/v9/users/300000000000000001", "/users/300000000000000002"),
        ("/webhooks/500000000000000001/A", "/api/v10/webhooks/500000000000000001//%41/"),
        (
            "/guilds/200000000000000001/members/300000000000000001",
            "/guilds/200000000000000001/members/300000000000000002",
        ),
    ] {
        assert_eq!(get(one), get(other));
    }
    assert_ne!(get("/gateway").key, route("POST", "/gateway").key, "the method is part of a route");
    for none in
        ["/channels", "/channels/abc", "/users/@me/guilds/200000000000000001", "/a/guilds/200000000000000001", "/"]
    {
        assert_eq!(get(none).major, 0, "{none}");
    }
}

#[test]
fn everything_of_one_interaction_shares_one_queue() {
    let token = "aW50ZXJhY3Rpb246NzAwMDAwMDAwMDAwMDAwMDAxOnNlY3JldA";
    let callback = route("POST", &format!("/api/v10/interactions/700000000000000002/{token}/callback"));
    let base = format!("/api/v10/webhooks/700000000000000001/{token}");
    let original = route("PATCH", &format!("{base}/messages/@original"));
    let follow_up = route("POST", &base);
    let other = route("POST", &format!("{base}x"));
    for part in [&callback, &original, &follow_up] {
        assert!(part.interaction && part.path_token);
        assert_eq!((part.major, part.provisional), (callback.major, callback.provisional));
        assert!(!part.template.contains("aW50"));
    }
    assert_ne!(original.key, follow_up.key);
    assert_ne!(other.provisional, follow_up.provisional);
    for plain in [
        "/interactions/700000000000000001/x",
        "/interactions/700000000000000001/x/callback/y",
        "/interactions/x/y/callback",
    ] {
        let plain = get(plain);
        assert!(!plain.interaction && !plain.path_token);
    }
}

#[test]
fn tokens_in_paths_and_channel_edits_are_told() {
    let webhook = get("/webhooks/500000000000000001/t/messages/600000000000000001");
    assert!(webhook.path_token && !webhook.interaction);
    assert!(!get("/webhooks/500000000000000001").path_token);
    assert!(!get("/channels/100000000000000001/webhooks").path_token);
    assert!(route("PATCH", CHANNEL).channel_edit);
    assert!(route("PATCH", "/api/v10/channels/100000000000000001/").channel_edit);
    assert!(!route("PATCH", "/channels/100000000000000001/x").channel_edit);
    assert!(!route("PUT", CHANNEL).channel_edit);
}

fn methods() -> impl Strategy<Value = Method> {
    "[A-Za-z!#$%&'*+.^_`|~0-9-]{1,20}".prop_map(|method| method.parse().unwrap())
}

fn paths() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        Just("channels"),
        Just("guilds"),
        Just("webhooks"),
        Just("interactions"),
        Just("users"),
        Just("api"),
        Just("v10"),
        Just("reactions"),
        Just("messages"),
        Just("callback"),
        Just("100000000000000001"),
        Just(""),
        Just("%2F"),
    ];
    let segment = prop_oneof![word.prop_map(str::to_owned), "\\PC{0,80}", "(%[0-9A-F]{2}){0,30}"];
    proptest::collection::vec(segment, 0..9).prop_map(|segments| segments.join("/"))
}

proptest! {
    #[test]
    fn any_method_and_path_has_a_route(method in methods(), path in paths(), now in any::<u64>()) {
        let route = Route::classify(&method, &path, now);
        prop_assert_eq!(&route, &Route::classify(&method, &path, now));
        let label = route.label();
        prop_assert!(label.len() <= 512 && label.starts_with('/'));
        prop_assert!(label.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'2' | b'!' | b'/' | b'-' | b'_' | b'@' | b'.')));
        prop_assert_eq!(Route::classify(&method, &format!("/api/v1{label}"), now).label_key, route.label_key, "{}", label);
        prop_assert_ne!(route.key, 0);
        prop_assert_eq!(route.provisional == route.key, !route.interaction);
    }

    #[test]
    fn equal_labels_have_equal_keys(one in paths(), other in paths()) {
        let (one, other) = (get(&one), get(&other));
        prop_assert_eq!(one.label() == other.label(), one.label_key == other.label_key);
    }

    #[test]
    fn a_token_in_a_path_is_in_no_template_and_no_label(
        method in methods(), prefix in "(/api)?(/v[0-9]{1,2})?", kind in "webhooks|interactions",
        id in "[0-9]{17,20}|[a-z]{1,9}", token in "[A-Z][A-Za-z0-9_-]{11,99}", rest in paths(),
    ) {
        prop_assume!(!id.contains(&token) && !rest.contains(&token));
        let route = Route::classify(&method, &format!("{prefix}/{kind}/{id}/{token}/{rest}"), NOW);
        prop_assert!(!route.template.contains(&token));
        prop_assert!(!route.label().contains(&token));
        let shown = format!("{route:?}");
        prop_assert!(!shown.contains(&token));
    }
}
