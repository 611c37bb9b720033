//! What of a request reaches Discord.

use crate::pair::Pair;
use crate::support::eventually;
use crate::support::upstream::Arrival;

/// Lines of a head but the first, as they came.
fn lines(arrival: &Arrival) -> Vec<&str> {
    arrival.head.trim_end().split("\r\n").skip(1).collect()
}

fn values<'a>(arrival: &'a Arrival, name: &str) -> Vec<&'a str> {
    let fields = lines(arrival).into_iter().filter_map(|line| line.split_once(':'));
    fields.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).collect()
}

#[tokio::test]
async fn c61_a_keycap_emoji_in_a_path_stays_encoded() {
    let mut pair = Pair::start().await;
    for emoji in ["%23%EF%B8%8F%E2%83%A3", "%2A%EF%B8%8F%E2%83%A3"] {
        let target = format!("/api/v10/channels/100000000000000001/messages/600000000000000001/reactions/{emoji}/@me");
        let request = format!("PUT {target} HTTP/1.1\r\nhost: proxy\r\n\r\n");
        assert_eq!(pair.pass(request).await.line(), format!("PUT {target} HTTP/1.1"));
    }
}

#[tokio::test]
async fn c64_queries_stay_verbatim_and_none_is_added() {
    let mut pair = Pair::start().await;
    for target in [
        "/api/v10/webhooks/500000000000000001/WHTOKEN-A?wait=true&thread_id=800000000000000001",
        "/api/v10/x?id=1&id=2&q=a%20b+c",
        "/api/v10/gateway/bot",
        "/api/v10/gateway?",
        "/?",
        "/",
    ] {
        assert_eq!(pair.target(target).await, target);
    }
}

#[tokio::test]
async fn odd_targets_pass_byte_for_byte_or_are_refused() {
    let mut pair = Pair::start().await;
    for target in [
        "//api//v10///gateway/",
        "/a/../b/./c",
        "/a/%2e%2e/%2F%zz%",
        "/\\..\\x",
        "/a{b}|^[]\"c",
        "/caf\u{e9}?\u{e9}",
        "/a;b:c@d,e!$&'()*+=~?f?g/h",
    ] {
        assert_eq!(pair.target(target).await, target);
    }
    for target in ["/a#b", "/a?b#c", "*", "discord.com", "ftp://discord.com/x", "/a<b>", "/a`b"] {
        let answer = pair.refused(&format!("GET {target} HTTP/1.1\r\nhost: proxy\r\n\r\n")).await;
        assert_eq!(answer.status, 400, "{target}");
    }
    assert_eq!(pair.pass("OPTIONS * HTTP/1.1\r\nhost: proxy\r\n\r\n").await.line(), "OPTIONS * HTTP/1.1");
}

#[tokio::test]
async fn c65_requests_without_a_body_say_so_where_discord_wants_it() {
    let mut pair = Pair::start().await;
    for lines in ["", "content-length: 0\r\n", "content-type: application/json\r\n"] {
        for method in ["PUT", "POST", "PATCH"] {
            let arrival = pair.pass(format!("{method} /x HTTP/1.1\r\nhost: proxy\r\n{lines}\r\n")).await;
            assert_eq!(values(&arrival, "content-length"), ["0"], "{method} {lines}");
            assert!(values(&arrival, "transfer-encoding").is_empty());
        }
    }
    for method in ["GET", "DELETE", "HEAD", "OPTIONS"] {
        let arrival = pair.pass(format!("{method} /x HTTP/1.1\r\nhost: proxy\r\n\r\n")).await;
        assert!(values(&arrival, "content-length").is_empty(), "{method}");
        assert!(values(&arrival, "transfer-encoding").is_empty(), "{method}");
    }
}

#[tokio::test]
async fn c65_a_body_of_unknown_length_that_turns_out_empty_is_no_body() {
    let mut pair = Pair::start().await;
    for method in ["PUT", "POST", "PATCH", "GET", "DELETE"] {
        let head = format!("{method} /x HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n\r\n");
        let length = if matches!(method, "GET" | "DELETE") { &[][..] } else { &["0"] };
        // At once, a little later, and with a trailer.
        for end in ["0\r\n\r\n", "0\r\nx-sum: 1\r\n\r\n"] {
            let arrival = pair.pass(format!("{head}{end}")).await;
            assert_eq!(values(&arrival, "content-length"), length, "{method}");
            assert!(values(&arrival, "transfer-encoding").is_empty(), "{method}");
        }
        pair.client.send(&head).await;
        eventually("it is admitted", || pair.node.open() == 1.0).await;
        assert!(pair.upstream.is_untouched(), "what it is cannot be said yet");
        let arrival = pair.pass("0\r\n\r\n").await;
        assert_eq!(values(&arrival, "content-length"), length, "{method}");
        assert!(arrival.head.starts_with(&format!("{method} /x ")));
        // One byte makes it a body.
        pair.client.send(format!("{head}1\r\nx\r\n")).await;
        pair.client.send("0\r\n\r\n").await;
        let arrival = pair.pass("").await;
        assert_eq!((values(&arrival, "transfer-encoding"), &*arrival.body), (vec!["chunked"], &b"x"[..]), "{method}");
    }
}

#[tokio::test]
async fn c65_a_411_of_discord_reaches_the_client() {
    let mut pair = Pair::start().await;
    pair.client.send("POST /x HTTP/1.1\r\nhost: proxy\r\n\r\n").await;
    let answer = "HTTP/1.1 411 Length Required\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>";
    pair.upstream.next().await.write(answer).await;
    let answer = pair.client.answer().await;
    assert_eq!((answer.status, answer.text(), answer.header("generated-by-proxy")), (411, "<html>", None));
}

#[tokio::test]
async fn c66_hop_by_hop_headers_stay_on_their_hop_and_a_body_has_one_length() {
    let mut pair = Pair::start().await;
    let arrival = pair
        .pass(
            "POST /x HTTP/1.1\r\nHost: proxy\r\nConnection: keep-alive, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: timeout=5\r\n\
             Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic eA==\r\nTE: trailers\r\nTrailer: X-Sum\r\n\
             X-Nirn-Hop: 1\r\nForwarded: for=192.0.2.1\r\nX-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: https\r\n\
             X-Real-IP: 192.0.2.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nX-Sum: 1\r\n\r\n",
        )
        .await;
    assert_eq!(arrival.body, b"hello");
    let mut names: Vec<_> = lines(&arrival).iter().map(|line| line.split(':').next().unwrap().to_lowercase()).collect();
    names.sort();
    assert_eq!(names, ["host", "transfer-encoding", "user-agent"]);
    for lengths in ["content-length: 5\r\ntransfer-encoding: chunked", "content-length: 5\r\ncontent-length: 6"] {
        let answer = pair.refused(&format!("POST /x HTTP/1.1\r\nhost: a\r\n{lengths}\r\n\r\n")).await;
        assert_eq!(answer.status, 400, "{lengths}");
    }
    // The same length twice is one length.
    let twice = "POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello";
    let arrival = pair.pass(twice).await;
    assert_eq!((values(&arrival, "content-length"), &*arrival.body), (vec!["5"], &b"hello"[..]));
}

#[tokio::test]
async fn bodies_reach_discord_whatever_their_method_and_framing() {
    let mut pair = Pair::start().await;
    for method in ["GET", "DELETE", "POST", "PUT", "PATCH", "OPTIONS", "PURGE"] {
        let head = format!("{method} /{method} HTTP/1.1\r\nhost: a\r\n");
        let known = pair.pass(format!("{head}content-length: 5\r\n\r\nhello")).await;
        assert_eq!((values(&known, "content-length"), &*known.body), (vec!["5"], &b"hello"[..]), "{method}");
        let chunked = pair.pass(format!("{head}transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")).await;
        assert_eq!(chunked.body, b"hello", "{method}");
        assert!(chunked.line().starts_with(&format!("{method} /{method} ")));
    }
}

#[tokio::test]
async fn a_body_that_is_not_what_its_head_says_is_refused_and_never_whole_at_discord() {
    let mut pair = Pair::start().await;
    let head = "POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: ";
    // Nothing of these has gone out when it is seen what they are.
    for (number, rest) in [
        "chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        "chunked\r\n\r\nffffffffffffffffff\r\nhello",
        "gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "gzip\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ]
    .into_iter()
    .enumerate()
    {
        let answer = pair.refused(&format!("{head}{rest}")).await;
        assert_eq!((answer.status, answer.header("x-nirn-proxy-error")), (400, Some("true")), "{rest}");
        assert!(answer.text().contains("chunk"), "{}", answer.text());
        assert_eq!(pair.node.failures("bad_request"), (number + 1) as f64);
    }
    // Of this one something has.
    let answer = pair.refused(&format!("{head}chunked\r\n\r\n5\r\nhello\r\nzz\r\n\r\n")).await;
    assert_eq!((answer.status, pair.node.failures("bad_request")), (400, 5.0));
    assert_eq!(pair.node.failures("upstream_error"), 0.0);
    eventually("nothing is held", || pair.node.open() == 0.0 && pair.node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn c69_audit_log_reasons_pass_byte_for_byte() {
    let mut pair = Pair::start().await;
    let long = "%F0%9F%91%8D".repeat(512);
    for reason in ["%28example%29%20%E2%9C%B0", "100% sure", &long, "caf\u{e9}"] {
        let arrival = pair
            .pass(format!(
                "PUT /api/v10/guilds/200000000000000001/bans/300000000000000001 HTTP/1.1\r\nhost: proxy\r\n\
                 X-Audit-Log-Reason: {reason}\r\n\r\n"
            ))
            .await;
        assert_eq!(values(&arrival, "x-audit-log-reason"), [reason]);
    }
}

#[tokio::test]
async fn application_headers_pass_whatever_their_case_and_repeats_keep_their_order() {
    let mut pair = Pair::start().await;
    let arrival = pair
        .pass(
            "GET /x HTTP/1.1\r\nHOST: proxy\r\nX-Discord-Locale:de\r\nx-super-properties: \t eyJ9 \t\r\nX-UNKNOWN: b\r\n\
             x-unknown: a\r\nCookie: __dcfduid=1; locale=de\r\nAuthorization:   Bot   abc  \r\nContent-Encoding: br\r\n\
             User-Agent: DiscordBot (https://example.test, 1.2) mylib/3\r\nX-Empty:\r\nX-Forward: kept\r\n\r\n",
        )
        .await;
    for (name, expected) in [
        ("x-discord-locale", &["de"][..]),
        ("x-super-properties", &["eyJ9"]),
        ("x-unknown", &["b", "a"]),
        ("cookie", &["__dcfduid=1; locale=de"]),
        ("authorization", &["Bot   abc"]),
        ("content-encoding", &["br"]),
        ("user-agent", &["DiscordBot (https://example.test, 1.2) mylib/3"]),
        ("x-empty", &[""]),
        ("x-forward", &["kept"]),
        ("accept-encoding", &[]),
        ("accept", &[]),
        ("via", &[]),
    ] {
        assert_eq!(values(&arrival, name), expected, "{name}");
    }
    let authority = pair.upstream.address.to_string();
    assert_eq!(values(&arrival, "host"), [authority]);
}

#[tokio::test]
async fn a_missing_user_agent_is_supplied() {
    let mut pair = Pair::start().await;
    let arrival = pair.pass("GET /x HTTP/1.1\r\nhost: proxy\r\n\r\n").await;
    let expected = format!("DiscordBot (https://github.com/germanoeich/nirn-proxy, {})", env!("CARGO_PKG_VERSION"));
    assert_eq!(values(&arrival, "user-agent"), [expected]);
}

#[tokio::test]
async fn c75_only_the_configured_upstream_is_ever_contacted() {
    let mut pair = Pair::start().await;
    for request in [
        "CONNECT discord.com:443 HTTP/1.1\r\nhost: discord.com\r\n\r\n",
        "GET /api/v10/gateway HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n",
    ] {
        let answer = pair.refused(request).await;
        assert_eq!((answer.status, answer.header("x-nirn-proxy-error")), (400, Some("true")));
        assert!(answer.text().contains("protocol upgrades are not proxied"));
    }
    let authority = pair.upstream.address.to_string();
    for (target, sent) in [
        ("http://evil.test/api/v10/gateway", "/api/v10/gateway"),
        ("https://evil.test:444/api/v10/gateway?a=//b?", "/api/v10/gateway?a=//b?"),
        ("http://evil.test", "/"),
        ("http://evil.test?a", "/?a"),
        ("/api/v10/gateway", "/api/v10/gateway"),
    ] {
        let arrival = pair.pass(format!("GET {target} HTTP/1.1\r\nhost: evil.test\r\n\r\n")).await;
        assert_eq!(arrival.line(), format!("GET {sent} HTTP/1.1"));
        assert_eq!(values(&arrival, "host"), [&*authority]);
    }
}
