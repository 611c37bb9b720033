//! The fake as its clients meet it.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::time::{Duration, Instant};

use fake_discord::{Action, FakeDiscord, Framing, Gate, Reply, Rule, Script, SubLimit, Verdict};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PATIENCE: Duration = Duration::from_secs(10);

/// Sends bytes on a connection of their own and reads all that comes until the fake closes.
async fn exchange(fake: &FakeDiscord, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(fake.addr).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap().ok();
    String::from_utf8_lossy(&answer).into_owned()
}

async fn get(fake: &FakeDiscord, token: &str, path: &str) -> String {
    let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\nConnection: close\r\n\r\n");
    exchange(fake, head.as_bytes()).await
}

fn header<'a>(answer: &'a str, name: &str) -> Option<&'a str> {
    let lines = answer.split("\r\n\r\n").next()?.lines();
    lines.filter_map(|line| line.split_once(": ")).find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

#[tokio::test]
async fn a_window_refuses_what_is_over_it_and_says_for_how_long() {
    let rule = Rule::window("GET /channels/{}/messages, GET /channels/{}/pins", "abcd", 2, Duration::from_secs(30));
    let fake = FakeDiscord::start(Script { rules: vec![rule], ..Script::default() }).await;
    let first = get(&fake, "Bot a", "/api/v10/channels/1/messages").await;
    assert!(first.starts_with("HTTP/1.1 200 OK"), "{first}");
    assert_eq!(header(&first, "x-ratelimit-remaining"), Some("1"));
    assert_eq!(header(&first, "x-ratelimit-bucket"), Some("abcd"));
    assert_eq!(header(&first, "via"), Some("1.1 google"));
    assert!(get(&fake, "Bot a", "/api/channels/1/pins").await.starts_with("HTTP/1.1 200"), "a family is one bucket");
    let third = get(&fake, "Bot a", "/channels/1/messages").await;
    assert!(third.starts_with("HTTP/1.1 429"), "{third}");
    assert_eq!(header(&third, "x-ratelimit-scope"), Some("user"));
    assert_eq!(header(&third, "retry-after"), Some("30"));
    assert!(get(&fake, "Bot a", "/channels/2/messages").await.starts_with("HTTP/1.1 200"), "another channel");
    assert!(get(&fake, "Bot b", "/channels/1/messages").await.starts_with("HTTP/1.1 200"), "another bot");
    let counts = fake.counts();
    assert_eq!((counts.limited(), counts.verdict("bucket_limited"), counts.status(200), counts.invalid), (1, 1, 4, 1));
    assert_eq!(fake.arrivals_at("GET", "/channels/{}/pins").len(), 1);
}

#[tokio::test]
async fn a_reset_is_announced_early_by_the_amount_set() {
    let mut rule = Rule::window("GET /x", "abcd", 1, Duration::from_secs(10));
    rule.early_ms = Some((300, 300));
    let fake = FakeDiscord::start(Script { rules: vec![rule], ..Script::default() }).await;
    let told: f64 = header(&get(&fake, "Bot a", "/x").await, "x-ratelimit-reset-after").unwrap().parse().unwrap();
    assert!((9.6..=9.7).contains(&told), "{told}");
    let refused = get(&fake, "Bot a", "/x").await;
    let body: serde_json::Value = serde_json::from_str(refused.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert!(body["retry_after"].as_f64().unwrap() > told, "the 429 itself tells the truth: {refused}");
}

#[tokio::test]
async fn the_rolling_second_is_per_token_and_spares_interactions() {
    let script = Script { global_limit: Some(3), global_window_ms: 60_000, ..Script::default() };
    let fake = FakeDiscord::start(script).await;
    for n in 0..3 {
        assert!(get(&fake, "Bot a", &format!("/guilds/{n}")).await.starts_with("HTTP/1.1 200"));
    }
    let refused = get(&fake, "Bot a", "/guilds/4").await;
    assert_eq!(header(&refused, "x-ratelimit-global"), Some("true"));
    assert_eq!(header(&refused, "x-ratelimit-scope"), Some("global"));
    assert_eq!(header(&refused, "retry-after"), Some("60"));
    assert_eq!(header(&refused, "x-ratelimit-bucket"), None);
    assert!(get(&fake, "Bot b", "/guilds/4").await.starts_with("HTTP/1.1 200"));
    let callback = "/api/v10/interactions/9/aW50ZXJhY3Rpb246x/callback";
    assert!(get(&fake, "Bot a", callback).await.starts_with("HTTP/1.1 200"));
    assert_eq!(fake.counts().peaks, [0, 4, 1]);
}

#[tokio::test]
async fn a_hidden_limit_shows_only_in_its_429() {
    let mut rule = Rule::window("PATCH /channels/{}", "abcd", 5, Duration::from_secs(15));
    rule.sub_limits = vec![SubLimit { fields: vec!["name".into()], ..SubLimit::default() }];
    let fake = FakeDiscord::start(Script { rules: vec![rule], ..Script::default() }).await;
    let patch = async |body: &str| {
        let length = body.len();
        let head = format!("PATCH /channels/1 HTTP/1.1\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
        exchange(&fake, head.as_bytes()).await
    };
    for _ in 0..2 {
        assert!(patch("{\"name\":\"x\"}").await.starts_with("HTTP/1.1 200"));
    }
    let refused = patch("{\"name\":\"x\"}").await;
    assert_eq!((header(&refused, "x-ratelimit-remaining"), header(&refused, "retry-after")), (Some("3"), Some("600")));
    assert!(patch("{\"nsfw\":true}").await.starts_with("HTTP/1.1 200"));
    assert_eq!(fake.counts().verdict("sub_limited"), 1);
}

#[tokio::test]
async fn too_many_invalid_requests_meet_a_page_of_the_edge() {
    let script = Script { tokens: Some(vec!["good".into()]), invalid_limit: 2, ..Script::default() };
    let fake = FakeDiscord::start(script).await;
    for _ in 0..3 {
        assert!(get(&fake, "Bot bad", "/users/@me").await.starts_with("HTTP/1.1 401"));
    }
    let banned = get(&fake, "Bot good", "/users/@me").await;
    assert!(banned.starts_with("HTTP/1.1 429") && banned.contains("<html>"), "{banned}");
    assert_eq!((header(&banned, "via"), header(&banned, "server")), (None, Some("cloudflare")));
    assert_eq!(header(&banned, "retry-after"), Some("600"));
}

#[tokio::test]
async fn a_deleted_webhook_is_unknown_and_its_neighbour_is_not() {
    let fake = FakeDiscord::start(Script { deleted_webhooks: vec!["5/gone".into()], ..Script::default() }).await;
    let gone = get(&fake, "", "/api/v10/webhooks/5/gone?wait=true").await;
    assert!(gone.starts_with("HTTP/1.1 404") && gone.contains("10015"), "{gone}");
    assert!(get(&fake, "", "/api/v10/webhooks/5/here").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn scripted_answers_come_in_order_and_then_the_rules() {
    let fake = FakeDiscord::start(Script::default()).await;
    let odd = Reply::status(429).with("X-A", "1").with("x-a", "2").with("Retry-After", "NaN");
    fake.on("GET", "/channels/{}", vec![odd, Reply::status(502)]);
    let first = get(&fake, "Bot a", "/api/v10/channels/1").await;
    assert!(first.contains("X-A: 1\r\nx-a: 2\r\nRetry-After: NaN\r\n"), "{first}");
    assert!(get(&fake, "Bot a", "/channels/2").await.starts_with("HTTP/1.1 502 Bad Gateway"));
    assert!(get(&fake, "Bot a", "/channels/1").await.starts_with("HTTP/1.1 200"));
    let verdicts: Vec<Verdict> = fake.arrivals().iter().map(|arrival| arrival.verdict).collect();
    assert_eq!(verdicts, [Verdict::Scripted(429), Verdict::Scripted(502), Verdict::Ok]);
}

#[tokio::test]
async fn an_arrival_is_what_was_on_the_wire() {
    let fake = FakeDiscord::start(Script { keep_bodies: true, ..Script::default() }).await;
    let sent = b"PUT //api/v10//%23/\xc3\xa9/../x? HTTP/1.1\r\nX-OdD: 1\r\nx-odd:  2 \r\nAuthorization: Bot  t\r\n\
        Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    exchange(&fake, sent).await;
    let arrival = fake.arrivals().remove(0);
    assert_eq!(arrival.target, b"//api/v10//%23/\xc3\xa9/../x?");
    assert_eq!(arrival.headers[..2], [("X-OdD".into(), b"1".to_vec()), ("x-odd".into(), b"2".to_vec())]);
    assert_eq!((arrival.token.as_deref(), arrival.body_len), (Some("t"), 3));
    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(fake_discord::arrivals::hex(&arrival.body_sha256.unwrap()), abc);
    assert_eq!(arrival.body.as_deref(), Some(&b"abc"[..]));
}

#[tokio::test]
async fn answers_go_wrong_as_scripted() {
    let fake = FakeDiscord::start(Script::default()).await;
    let body = Reply { body: "0123456789".into(), ..Reply::status(200) };
    let cut = Reply { action: Action::CutBody(4), ..body.clone() };
    fake.on("GET", "/cut", vec![cut]);
    let answer = get(&fake, "", "/cut").await;
    assert!(answer.contains("Content-Length: 10") && answer.ends_with("\r\n\r\n0123"), "{answer}");
    fake.on("GET", "/raw", vec![Reply::action(Action::Raw("SSH-2.0\r\n".into()))]);
    assert_eq!(get(&fake, "", "/raw").await, "SSH-2.0\r\n");
    fake.on("GET", "/close", vec![Reply::action(Action::Close), Reply::action(Action::Reset)]);
    assert_eq!(get(&fake, "", "/close").await, "");
    assert_eq!(get(&fake, "", "/close").await, "");
    fake.on("GET", "/chunks", vec![Reply { framing: Framing::Chunked, ..body }]);
    assert!(get(&fake, "", "/chunks").await.ends_with("5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n"));
    assert_eq!(fake.counts().status(0), 3, "three were left without an answer");
}

#[tokio::test]
async fn an_early_answer_does_not_wait_for_the_body() {
    let fake = FakeDiscord::start(Script::default()).await;
    fake.on("POST", "/x", vec![Reply { action: Action::AnswerEarly(0), ..Reply::limited("user", 1.0) }]);
    let mut stream = TcpStream::connect(fake.addr).await.unwrap();
    stream.write_all(b"POST /x HTTP/1.1\r\nContent-Length: 6\r\n\r\nabc").await.unwrap();
    let mut answer = [0; 12];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 429");
    stream.write_all(b"def").await.unwrap();
}

#[tokio::test]
async fn a_gate_holds_an_answer_and_a_client_that_leaves_is_noticed() {
    let fake = FakeDiscord::start(Script::default()).await;
    let gate = Gate::default();
    fake.on("GET", "/held", vec![Reply::status(200).held(&gate), Reply::action(Action::Stall)]);
    let waiting = get(&fake, "", "/held");
    let opening = async {
        fake.wait_for(1, PATIENCE).await;
        gate.open(1);
    };
    assert!(tokio::join!(waiting, opening).0.starts_with("HTTP/1.1 200"));
    let mut stream = TcpStream::connect(fake.addr).await.unwrap();
    stream.write_all(b"GET /held HTTP/1.1\r\n\r\n").await.unwrap();
    fake.wait_for(2, PATIENCE).await;
    assert!(!fake.arrivals()[1].client_left);
    drop(stream);
    fake.wait_until(PATIENCE, |fake| fake.counts().open_connections == 0).await;
}

#[tokio::test]
async fn latency_lies_on_both_sides_of_the_judgement() {
    let latency = fake_discord::Latency { before_ms: (40, 50), after_ms: (30, 35) };
    let fake = FakeDiscord::start(Script { latency, ..Script::default() }).await;
    let start = Instant::now();
    get(&fake, "", "/x").await;
    assert!(start.elapsed() >= Duration::from_millis(70));
    let arrival = fake.arrivals().remove(0);
    assert!(arrival.judged_at.unwrap() - arrival.at >= Duration::from_millis(40));
}

#[tokio::test]
async fn hashes_alternate_and_buckets_take_turns() {
    let mut rule = Rule::window("GET /x", "one", 9, Duration::from_secs(9));
    rule.buckets[0].hashes.push("two".into());
    let mut other = Rule::window("GET /y", "three", 9, Duration::from_secs(9));
    other.buckets.push(fake_discord::Bucket { hashes: vec!["four".into()], limit: 7, ..Default::default() });
    let fake = FakeDiscord::start(Script { rules: vec![rule, other], ..Script::default() }).await;
    let mut seen = Vec::new();
    for path in ["/x", "/x", "/x", "/y", "/y", "/y"] {
        let answer = get(&fake, "", path).await;
        seen.push(header(&answer, "x-ratelimit-bucket").unwrap().to_owned());
    }
    assert_eq!(seen, ["one", "two", "one", "three", "four", "three"]);
}

#[tokio::test]
async fn headers_can_be_dropped_and_lie() {
    let mut rule = Rule::window("GET /x", "abcd", 9, Duration::from_secs(9));
    rule.drop_headers = vec!["X-RateLimit-Remaining".into(), "X-RateLimit-Reset".into()];
    rule.add_headers = vec![("X-RateLimit-Remaining".into(), "banana".into())];
    let fake = FakeDiscord::start(Script { rules: vec![rule], ..Script::default() }).await;
    let answer = get(&fake, "", "/x").await;
    assert_eq!(header(&answer, "x-ratelimit-remaining"), Some("banana"));
    assert_eq!(header(&answer, "x-ratelimit-reset"), None);
}

#[tokio::test]
async fn the_built_in_discord_sends_messages_as_libraries_expect_them() {
    let fake = FakeDiscord::start(Script { believable: true, ..Script::default() }).await;
    let body = "--B\r\nContent-Disposition: form-data; name=\"payload_json\"\r\n\r\n{\"content\":\"hi\"}\r\n\
        --B\r\nContent-Disposition: form-data; name=\"files[0]\"; filename=\"a.txt\"\r\n\r\nabc\r\n--B--\r\n";
    let head = format!(
        "POST /api/v10/channels/100000000000000001/messages HTTP/1.1\r\nConnection: close\r\n\
        Content-Type: multipart/form-data; boundary=B\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = exchange(&fake, head.as_bytes()).await;
    assert_eq!(header(&answer, "x-ratelimit-remaining"), Some("4"), "{answer}");
    let message: serde_json::Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!((message["content"].as_str(), message["channel_id"].as_str()), (Some("hi"), Some("100000000000000001")));
    assert_eq!(
        (&message["attachments"][0]["filename"], &message["attachments"][0]["size"]),
        (&"a.txt".into(), &3.into())
    );
    assert!(get(&fake, "Bot a", "/api/v10/nothing").await.starts_with("HTTP/1.1 404"));
    assert!(get(&fake, "Bot a", "/api/v10/users/404000000000000001").await.contains("10013"));
    let webhook = "POST /api/webhooks/500000000000000001/x HTTP/1.1\r\nConnection: close\r\nContent-Length: 15\r\n\r\n";
    assert!(exchange(&fake, format!("{webhook}{{\"content\":\"x\"}}").as_bytes()).await.starts_with("HTTP/1.1 204"));
}
