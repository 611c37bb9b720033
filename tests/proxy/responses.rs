//! What of an answer reaches the client.

use std::io::Write as _;
use std::time::Instant;

use crate::pair::Pair;
use crate::support::calls::{assert_within, ms};
use crate::support::eventually;

#[tokio::test]
async fn c59_edge_errors_pass_unchanged_and_are_not_repeated() {
    let mut pair = Pair::start().await;
    let html = "<html>Web server is returning an unknown error</html>";
    for status in [520, 522, 524, 530] {
        let answer = format!(
            "HTTP/1.1 {status} Edge\r\ncontent-type: text/html\r\ncontent-length: {}\r\n\r\n{html}",
            html.len()
        );
        for request in ["GET /channels/100000000000000001", "POST /channels/100000000000000001/messages"] {
            let answer = pair.ask(request, &answer).await;
            assert_eq!((answer.status, answer.text()), (status, html));
            assert_eq!((answer.header("content-type"), answer.header("generated-by-proxy")), (Some("text/html"), None));
        }
    }
    let fine = pair.ask("GET /channels/100000000000000001", "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(fine.status, 200);
    assert!(pair.upstream.is_untouched());
    eventually("nothing waits", || pair.node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn c67_compressed_bodies_pass_as_they_are() {
    let mut pair = Pair::start().await;
    let body = [0x1f, 0x8b, 8, 0, 0, 0xff, 0, b'\r', b'\n', 0x80];
    for coding in ["gzip", "br", "zstd"] {
        let mut answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-encoding: {coding}\r\nvary: Accept-Encoding\r\ncontent-length: 10\r\n\r\n"
        )
        .into_bytes();
        answer.extend(body);
        let answer = pair.ask("GET /x\r\naccept-encoding: gzip, br", answer).await;
        assert_eq!((answer.header("content-encoding"), &*answer.body), (Some(coding), &body[..]));
        assert_eq!(answer.header("content-length"), Some("10"));
    }
    pair.client.send("GET /x HTTP/1.1\r\nhost: proxy\r\n\r\n").await;
    let arrival = pair.upstream.next().await;
    assert!(!arrival.head.to_lowercase().contains("accept-encoding"));
}

/// A 429's body under each coding that Discord may use.
fn compressed_refusals() -> [(&'static str, Vec<u8>); 4] {
    let body = br#"{"retry_after": 1.5}"#;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(body).unwrap();
    let mut deflate = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
    deflate.write_all(body).unwrap();
    let zstd = ruzstd::encoding::compress_to_vec(&body[..], ruzstd::encoding::CompressionLevel::Uncompressed);
    // Made by Node.js's zlib.
    let brotli = b"\x8b\x09\x80{\"retry_after\": 1.5}\x03".to_vec();
    [("gzip", gzip.finish().unwrap()), ("deflate", deflate.finish().unwrap()), ("br", brotli), ("zstd", zstd)]
}

fn compressed_429(coding: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\ncontent-encoding: {coding}\r\n\
         content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

#[tokio::test]
async fn c67_a_compressed_429_is_waited_out_for_the_time_in_its_body() {
    for (coding, body) in compressed_refusals() {
        let mut pair = Pair::start().await;
        pair.client.send("GET /x HTTP/1.1\r\nhost: proxy\r\naccept-encoding: gzip, deflate, br, zstd\r\n\r\n").await;
        pair.upstream.next().await.write(compressed_429(coding, &body)).await;
        let refused = Instant::now();
        let again = pair.upstream.next().await;
        // Without a time it would have been one second.
        assert_within(refused.elapsed(), ms(1450), ms(2000));
        again.ok("fine").await;
        assert_eq!((pair.client.answer().await.text(), pair.node.failures("rate_limit_deadline")), ("fine", 0.0));
    }
}

#[tokio::test]
async fn c67_a_compressed_429_that_is_passed_on_stays_compressed() {
    for (coding, body) in compressed_refusals() {
        // The second and a half that the body asks for do not fit.
        let mut pair = Pair::start_with(|config| config.scheduling.queue_timeout = ms(6000)).await;
        let answer = pair.ask("GET /x", compressed_429(coding, &body)).await;
        assert_eq!((answer.status, answer.header("content-encoding")), (429, Some(coding)));
        assert_eq!((answer.header("retry-after"), &*answer.body), (None, &*body), "{coding}");
    }
}

#[tokio::test]
async fn c73_every_rate_limit_header_reaches_the_client() {
    let mut pair = Pair::start().await;
    let refusal = r#"{"message": "You are being rate limited.", "retry_after": 64.57, "global": true}"#;
    for names in [
        ["retry-after", "x-ratelimit-global", "x-ratelimit-scope", "content-type", "via", "date"],
        ["Retry-After", "X-RateLimit-Global", "X-RateLimit-Scope", "Content-Type", "Via", "Date"],
    ] {
        let values = ["65", "true", "global", "application/json", "1.1 google", "Tue, 01 Dec 2026 00:00:00 GMT"];
        let fields: String = names.iter().zip(values).map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let answer =
            format!("HTTP/1.1 429 Too Many Requests\r\n{fields}content-length: {}\r\n\r\n{refusal}", refusal.len());
        let token = names[0];
        let answer = pair.ask(&format!("GET /api/v10/users/@me\r\nauthorization: Bot {token}"), answer).await;
        assert_eq!((answer.status, answer.text()), (429, refusal));
        for (name, value) in names.iter().zip(values) {
            assert_eq!(answer.all(name).collect::<Vec<_>>(), [value], "{name}");
        }
        assert_eq!(answer.header("generated-by-proxy"), None);
    }
    let fine = "HTTP/1.1 200 OK\r\nX-RateLimit-Limit: 5\r\nx-ratelimit-remaining: 4\r\nX-RateLimit-Reset: 1470173023.123\r\n\
        X-RateLimit-Reset-After: 64.570\r\nX-RateLimit-Bucket: abcd1234\r\nCF-Ray: 1-FRA\r\nVia: 1.1 google\r\n\
        Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 0\r\n\r\n";
    let answer = pair.ask("GET /x", fine).await;
    for (name, values) in [
        ("x-ratelimit-limit", &["5"][..]),
        ("x-ratelimit-remaining", &["4"]),
        ("x-ratelimit-reset", &["1470173023.123"]),
        ("x-ratelimit-reset-after", &["64.570"]),
        ("x-ratelimit-bucket", &["abcd1234"]),
        ("cf-ray", &["1-FRA"]),
        ("via", &["1.1 google"]),
        ("set-cookie", &["a=1", "b=2"]),
    ] {
        assert_eq!(answer.all(name).collect::<Vec<_>>(), values, "{name}");
    }
}

#[tokio::test]
async fn redirects_are_for_the_client_to_follow() {
    let mut pair = Pair::start().await;
    let redirect = "HTTP/1.1 302 Found\r\nlocation: https://elsewhere.test/\r\ncontent-length: 0\r\n\r\n";
    let answer = pair.ask("GET /x", redirect).await;
    assert_eq!((answer.status, answer.header("location")), (302, Some("https://elsewhere.test/")));
    assert!(pair.upstream.is_untouched());
}

#[tokio::test]
async fn hop_by_hop_headers_of_an_answer_stay_on_their_hop() {
    let mut pair = Pair::start().await;
    let answer = "HTTP/1.1 200 OK\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\n\
        proxy-authenticate: Basic\r\ntrailer: x-sum\r\nx-kept: 1\r\ncontent-length: 2\r\n\r\nok";
    let answer = pair.ask("GET /x", answer).await;
    assert_eq!((answer.text(), answer.header("x-kept")), ("ok", Some("1")));
    for name in ["x-hop", "keep-alive", "proxy-authenticate", "trailer"] {
        assert_eq!(answer.header(name), None, "{name}");
    }
}

#[tokio::test]
async fn an_answer_with_a_length_beside_a_coding_has_one_of_them_left() {
    let mut pair = Pair::start().await;
    let both = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
    let answer = pair.ask("GET /x", both).await;
    assert_eq!((answer.text(), answer.header("content-length")), ("hello", None));
    assert_eq!(answer.header("transfer-encoding"), Some("chunked"));
}

#[tokio::test]
async fn interim_answers_do_not_stand_in_for_the_final_one() {
    let mut pair = Pair::start().await;
    let hints = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    let answer = pair.ask("GET /x", hints).await;
    assert_eq!((answer.status, answer.text()), (200, "ok"));
}

#[tokio::test]
async fn head_and_options_are_forwarded_and_head_has_no_body() {
    let mut pair = Pair::start().await;
    let answer = pair.ask("HEAD /x", "HTTP/1.1 200 OK\r\ncontent-length: 741\r\n\r\n").await;
    assert_eq!((answer.status, answer.header("content-length")), (200, Some("741")));
    let answer = pair.ask("OPTIONS /x", "HTTP/1.1 204 No Content\r\nallow: GET\r\n\r\n").await;
    assert_eq!((answer.status, answer.header("allow")), (204, Some("GET")));
}

#[tokio::test]
async fn an_upstream_that_closes_after_every_answer_costs_nothing() {
    let mut pair = Pair::start().await;
    for round in 0..30 {
        pair.client.send(format!("GET /{round} HTTP/1.1\r\nhost: proxy\r\n\r\n")).await;
        let arrival = pair.upstream.next().await;
        arrival.write("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok").await;
        arrival.cut().await;
        let answer = pair.client.answer().await;
        assert_eq!((answer.text(), answer.header("connection")), ("ok", None));
    }
    eventually("nothing open", || pair.node.open() == 0.0).await;
    assert_eq!(pair.node.sum("nirn_proxy_failures_total", ""), 0.0);
}
