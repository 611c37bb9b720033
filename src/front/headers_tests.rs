use http::Request;
use http::request::Parts;
use proptest::prelude::*;

use super::*;

fn parts(method: &str, target: &str, lines: &[(&str, &str)]) -> Parts {
    let mut request = Request::builder().method(method).uri(target);
    for (name, value) in lines {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap().into_parts().0
}

fn sent(method: &str, lines: &[(&str, &str)], empty: bool) -> HeaderMap {
    let mut parts = parts(method, "/x", lines);
    outgoing().apply(&mut parts, empty).unwrap();
    parts.headers
}

fn outgoing() -> Outgoing {
    Outgoing::new(&Authority::from_static("discord.com")).unwrap()
}

fn target(method: &str, target: &str) -> Option<String> {
    let mut uri = Uri::try_from(target).ok()?;
    to_origin_form(&method.parse().unwrap(), &mut uri).ok()?;
    Some(uri.to_string())
}

#[test]
fn hop_by_hop_and_forwarding_fields_go_and_the_rest_stays_in_order() {
    let headers = sent(
        "GET",
        &[
            ("host", "proxy"),
            ("connection", "keep-alive, X-Secret"),
            ("connection", "x-Other ,, x-bad name"),
            ("x-secret", "1"),
            ("x-other", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("proxy-authorization", "Basic x"),
            ("te", "trailers"),
            ("trailer", "x"),
            ("x-nirn-hop", "1"),
            ("forwarded", "for=1"),
            ("x-forwarded-for", "1"),
            ("x-forwarded-whatever", "1"),
            ("x-real-ip", "1"),
            ("expect", "100-continue"),
            ("x-kept", "b"),
            ("x-kept", "a"),
            ("user-agent", "DiscordBot (https://example.test, 1.2) mylib/3"),
            ("authorization", "Bot  x"),
            ("x-forward", "kept"),
        ],
        true,
    );
    let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["authorization", "host", "user-agent", "x-forward", "x-kept"]);
    assert_eq!(headers[HOST], "discord.com");
    assert_eq!(headers[USER_AGENT], "DiscordBot (https://example.test, 1.2) mylib/3");
    assert_eq!(headers["authorization"], "Bot  x");
    assert_eq!(headers.get_all("x-kept").iter().collect::<Vec<_>>(), ["b", "a"]);
}

#[test]
fn what_frames_a_message_stays_though_connection_names_it() {
    let lines =
        [("connection", "content-length, host, authorization"), ("content-length", "5"), ("authorization", "x")];
    let headers = sent("POST", &lines, false);
    assert_eq!((&headers[CONTENT_LENGTH], &headers[HOST]), (&"5".parse().unwrap(), &"discord.com".parse().unwrap()));
    assert!(!headers.contains_key("authorization"));
}

#[test]
fn a_missing_agent_is_supplied_and_a_strange_one_is_not_touched() {
    let agent = sent("GET", &[], true)[USER_AGENT].to_str().unwrap().to_owned();
    let expected = format!("DiscordBot (https://github.com/germanoeich/nirn-proxy, {})", env!("CARGO_PKG_VERSION"));
    assert_eq!(agent, expected);
    assert_eq!(sent("GET", &[("user-agent", "python-requests/2.31")], true)[USER_AGENT], "python-requests/2.31");
    assert_eq!(sent("GET", &[("user-agent", "")], true)[USER_AGENT], "");
}

#[test]
fn a_body_has_exactly_one_statement_of_its_length() {
    for (method, length) in [("PUT", true), ("POST", true), ("PATCH", true), ("GET", false), ("DELETE", false)] {
        let headers = sent(method, &[], true);
        assert_eq!(headers.get(CONTENT_LENGTH).is_some_and(|value| value == "0"), length, "{method}");
        assert!(!headers.contains_key(TRANSFER_ENCODING));
        let chunked = sent(method, &[("transfer-encoding", "chunked")], false);
        assert_eq!(chunked.get(TRANSFER_ENCODING).unwrap(), "chunked");
        assert!(!chunked.contains_key(CONTENT_LENGTH));
        let known = sent(method, &[("content-length", "5")], false);
        assert_eq!(known.get(CONTENT_LENGTH).unwrap(), "5");
        assert!(!known.contains_key(TRANSFER_ENCODING));
    }
}

#[test]
fn paths_and_queries_stay_byte_for_byte() {
    for same in [
        "/",
        "/a?",
        "/?",
        "/a?b=1&b=2&q=a%20b+c",
        "//a///b/",
        "/a/../b/./c",
        "/%23%EF%B8%8F%E2%83%A3",
        "/%2f%2F%zz%",
        "/a?b?c",
        "/a{b}|^[]\"",
        "/\\..\\",
        "/caf\u{e9}?\u{e9}",
        "/a:b@c;d,e!$&'()*+=~",
    ] {
        assert_eq!(target("GET", same).as_deref(), Some(same));
        assert_eq!(target("GET", &format!("http://evil.test:81{same}")).as_deref(), Some(same), "absolute {same}");
    }
    assert_eq!(target("OPTIONS", "*").as_deref(), Some("*"));
    assert_eq!(target("GET", "http://discord.com").as_deref(), Some("/"));
    assert_eq!(target("GET", "http://discord.com?a=b").as_deref(), Some("/?a=b"));
}

#[test]
fn what_is_no_path_is_refused() {
    for refused in ["*", "discord.com", "discord.com:443", "ftp://discord.com/x", "x"] {
        assert_eq!(target("GET", refused), None, "{refused}");
    }
    // what the HTTP library does not take at all, and hyper answers by itself
    for refused in ["/a b", "/a\u{7f}", "/a<b>", "/a`", "/a?<"] {
        assert_eq!(target("GET", refused), None, "{refused}");
    }
}

/// The HTTP library cuts a fragment off without a word, so it must be found in the bytes as they arrive.
#[test]
fn a_fragment_cannot_be_seen_once_a_target_is_parsed() {
    assert_eq!(target("GET", "/a?b#c").as_deref(), Some("/a?b"));
}

#[test]
fn upgrades_are_told_by_method_field_and_option() {
    for (method, lines) in [
        ("CONNECT", &[][..]),
        ("GET", &[("upgrade", "h2c")]),
        ("GET", &[("connection", "keep-alive"), ("connection", "a,UPGRADE ")]),
    ] {
        let parts = parts(method, "/x", lines);
        assert!(is_upgrade(&parts.method, &parts.headers), "{method} {lines:?}");
    }
    assert!(!is_upgrade(&Method::GET, &parts("GET", "/", &[("connection", "upgrades")]).headers));
}

#[test]
fn responses_lose_hop_by_hop_fields_and_a_length_beside_a_coding() {
    let mut headers = parts(
        "GET",
        "/",
        &[
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("upgrade", "h2"),
            ("via", "1.1 google"),
            ("x-forwarded-for", "kept"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
        ],
    )
    .headers;
    incoming(&mut headers);
    let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["set-cookie", "via", "x-forwarded-for"]);
    assert_eq!(headers.get_all("set-cookie").iter().collect::<Vec<_>>(), ["a=1", "b=2"]);
    headers.insert(CONTENT_LENGTH, ZERO);
    incoming(&mut headers);
    assert_eq!(headers[CONTENT_LENGTH], "0");
}

#[test]
fn cookies_that_http2_split_are_one_line_again() {
    let mut parts = parts("GET", "/", &[("cookie", "a=1"), ("cookie", "b=2"), ("cookie", "c=3")]);
    parts.version = Version::HTTP_2;
    outgoing().apply(&mut parts, true).unwrap();
    assert_eq!(parts.headers.get_all(COOKIE).iter().collect::<Vec<_>>(), ["a=1; b=2; c=3"]);
}

proptest! {
    #[test]
    fn a_target_is_kept_or_refused(path in "[!-~\u{e9}\u{4e2d}]{0,60}") {
        prop_assume!(!path.contains('#'));
        let path = format!("/{path}");
        if let Some(kept) = target("GET", &path) {
            prop_assert_eq!(kept, path);
        }
    }

    #[test]
    fn no_connection_value_is_too_odd(value in proptest::collection::vec(32_u8..127, 0..60)) {
        let Ok(value) = HeaderValue::from_bytes(&value) else { return Ok(()) };
        let mut parts = parts("GET", "/", &[]);
        parts.headers.insert(CONNECTION, value);
        if outgoing().apply(&mut parts, true).is_ok() {
            prop_assert!(!parts.headers.contains_key(CONNECTION));
        }
    }
}
