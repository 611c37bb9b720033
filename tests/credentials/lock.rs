//! A credential that Discord refused is refused here, one that nobody has judged goes carefully, and whatever Discord
//! authenticates by its path has nothing to do with either.

use std::time::Instant;

use fake_discord::{Action, Arrival, FakeDiscord, Gate, Reply, Script};
use serde_json::json;

use crate::support::calls::*;
use crate::support::client::{Answer, Client};
use crate::support::{Node, PATIENCE, eventually};

const ME: &str = "/api/v10/users/@me";
const INTERACTION_TOKEN: &str = "aW50ZXJhY3Rpb246T0xE";

/// A Discord that knows these tokens.
fn knows(tokens: &[&str]) -> Script {
    Script { tokens: Some(tokens.iter().map(|token| (*token).to_owned()).collect()), ..Script::default() }
}

fn arrivals_of(fake: &FakeDiscord, token: &str) -> Vec<Arrival> {
    fake.arrivals().into_iter().filter(|arrival| arrival.token.as_deref() == Some(token)).collect()
}

/// A 401 of the proxy's own, of Discord's shape.
#[track_caller]
fn assert_locked(answer: &Answer) {
    assert_eq!(answer.status, 401);
    assert_eq!(answer.text(), r#"{"message": "401: Unauthorized", "code": 0}"#);
    assert!(is_local(answer));
    assert_eq!(answer.header("via"), Some("1.1 nirn-proxy"));
    assert_eq!(answer.header("x-nirn-proxy-error"), None);
}

#[tokio::test]
async fn c48_a_401_for_a_webhook_token_does_not_condemn_the_bots() {
    // Room for the three 401s here and one more.
    let (fake, node) = setup(knows(&["A"]), |config| config.scheduling.invalid_request_limit = 4).await;
    let dead = json!({"message": "Invalid Webhook Token", "code": 50027});
    let paths = [
        ("PATCH", format!("/api/v10/webhooks/700000000000000001/{INTERACTION_TOKEN}/messages/@original")),
        ("POST", "/api/v10/webhooks/500000000000000001/WHTOKEN-OLD".to_owned()),
        ("POST", format!("/api/v10/interactions/900000000000000001/{INTERACTION_TOKEN}/callback")),
    ];
    for (number, (method, path)) in paths.iter().enumerate() {
        fake.on(method, path.trim_start_matches("/api/v10"), vec![Reply::json(401, &dead)]);
        let answer = ask(node.address(), "Bot A", method, path).await;
        assert_eq!(answer.status, 401);
        assert_eq!(answer.text(), dead.to_string(), "unchanged");
        assert!(!is_local(&answer));
        assert_eq!(fake.counts().invalid, number as u64 + 1, "once");
        let answer = ask(node.address(), "Bot A", "GET", ME).await;
        assert_eq!((answer.status, is_local(&answer)), (200, false), "{path}");
    }
    // Each 401 has counted once: one more is the fourth, and the last.
    assert_eq!(ask(node.address(), "Bot B", "GET", ME).await.status, 401);
    let answer = ask(node.address(), "Bot A", "GET", ME).await;
    assert_unavailable(&answer, &node, "invalid_request_budget");
}

#[tokio::test]
async fn c49_a_really_invalid_token_is_stopped() {
    let (fake, node) = setup(knows(&["B", "MTAwMDAw.new"]), |_| {}).await;
    let first = ask(node.address(), "Bot MTAwMDAw.dead", "GET", ME).await;
    assert_eq!((first.status, is_local(&first)), (401, false));
    let spellings = ["Bot MTAwMDAw.dead", "MTAwMDAw.dead", "bOT   MTAwMDAw.dead "];
    let mut clients = Vec::new();
    for worker in 0..10 {
        let address = node.address();
        clients.push(tokio::spawn(async move {
            let mut client = Client::connect(address).await;
            for call in 0..500 {
                let method = ["GET", "POST", "DELETE"][call % 3];
                let path = channel(worker * 500 + call);
                client.send(request(spellings[call % 3], method, &path, "")).await;
                assert_locked(&client.answer().await);
            }
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    assert_eq!(arrivals_of(&fake, "MTAwMDAw.dead").len(), 1, "Discord sees no more of it");
    assert_eq!(node.failures("invalid_token"), 5000.0);
    assert_eq!(ask(node.address(), "Bot B", "GET", ME).await.status, 200);
    assert_eq!(ask(node.address(), "Bot MTAwMDAw.new", "GET", ME).await.status, 200, "the same bot's new token");
    assert_eq!(fake.counts().invalid, 1);
    assert!(node.scheduler.is_quiet());
}

#[tokio::test]
async fn an_upload_with_a_bad_token_is_refused_before_there_must_be_room_for_it() {
    let (_fake, node) = setup(knows(&[]), |config| config.scheduling.max_retry_capture_bytes = 1024).await;
    assert_eq!(ask(node.address(), "Bot DEAD", "GET", ME).await.status, 401);
    let head = format!("POST {} HTTP/1.1\r\nHost: a\r\nAuthorization: Bot DEAD\r\n", channel(1));
    for lines in
        ["Content-Length: 1000000", "Content-Length: 1000000\r\nExpect: 100-continue", "Transfer-Encoding: chunked"]
    {
        let mut client = Client::connect(node.address()).await;
        client.send(format!("{head}{lines}\r\n\r\n")).await;
        assert_locked(&client.answer().await);
    }
    assert_eq!(node.failures("invalid_token"), 3.0);
}

#[tokio::test]
async fn a_burst_with_a_bad_token_costs_one_401() {
    let (fake, node) = setup(knows(&["B"]), |_| {}).await;
    let calls = (0..100).map(|n| ("Bot DEAD".to_owned(), ["GET", "POST"][n % 2], channel(n))).collect();
    let answers = ask_all(node.address(), ms(0), calls).await;
    assert_eq!(statuses(&answers), [401; 100]);
    assert_eq!(answers.iter().filter(|answer| is_local(answer)).count(), 99);
    assert_eq!(fake.counts().arrivals, 1);
}

#[tokio::test]
async fn a_token_that_was_good_is_stopped_by_its_first_401_too() {
    let (fake, node) = setup(knows(&["A"]), |_| {}).await;
    assert_eq!(ask(node.address(), "Bot A", "GET", ME).await.status, 200);
    // A call is on its way when the token is reset; its answer says nothing of the token as it is now.
    let gate = Gate::default();
    fake.on("GET", "/users/@me/guilds", vec![Reply::status(200).held(&gate)]);
    let address = node.address();
    let early = tokio::spawn(async move { ask(address, "Bot A", "GET", "/api/v10/users/@me/guilds").await });
    fake.wait_for(2, PATIENCE).await;
    fake.set_tokens(Some(Vec::new()));
    assert!(!is_local(&ask(address, "Bot A", "GET", ME).await));
    assert_locked(&ask(address, "Bot A", "GET", ME).await);
    gate.open(1);
    assert_eq!(early.await.unwrap().status, 200);
    assert_locked(&ask(address, "Bot A", "GET", ME).await);
    assert_eq!(fake.counts().arrivals, 3);
}

#[tokio::test]
async fn a_path_with_a_token_of_its_own_is_not_refused_for_a_bad_header() {
    let (fake, node) = setup(knows(&[]), |_| {}).await;
    assert_eq!(ask(node.address(), "Bot DEAD", "GET", ME).await.status, 401);
    for (method, path) in [
        ("POST", "/api/v10/webhooks/500000000000000001/WHTOKEN-A?wait=true".to_owned()),
        ("GET", "/api/v10/webhooks/500000000000000001/WHTOKEN-A".to_owned()),
        ("PATCH", format!("/api/v10/webhooks/700000000000000001/{INTERACTION_TOKEN}/messages/@original")),
        ("POST", format!("/api/v10/interactions/900000000000000001/{INTERACTION_TOKEN}/callback")),
    ] {
        let answer = ask(node.address(), "Bot DEAD", method, &path).await;
        assert_eq!((answer.status, is_local(&answer)), (200, false), "{path}");
    }
    assert_locked(&ask(node.address(), "Bot DEAD", "GET", "/api/v10/webhooks/500000000000000001").await);
    assert_eq!(fake.counts().arrivals, 5);
}

#[tokio::test]
async fn disable_401_lock_leaves_every_401_to_discord() {
    let (fake, node) = setup(knows(&[]), |config| config.scheduling.disable_401_lock = true).await;
    let gate = Gate::default();
    let answer = Reply::json(401, &json!({"message": "401: Unauthorized", "code": 0}));
    fake.always("GET", "/channels/**", answer.held(&gate));
    let calls = (0..10).map(|n| ("Bot DEAD".to_owned(), "GET", channel(n))).collect();
    let (answers, _) = tokio::join!(ask_all(node.address(), ms(0), calls), async {
        fake.wait_for(10, PATIENCE).await;
        gate.open(10);
    });
    assert_eq!(statuses(&answers), [401; 10]);
    assert!(answers.iter().all(|answer| !is_local(answer)));
    assert_eq!(ask(node.address(), "Bot DEAD", "GET", ME).await.status, 401);
    assert_eq!(fake.counts().arrivals, 11);
}

#[tokio::test]
async fn without_a_credential_there_is_nothing_to_lock() {
    let (fake, node) = setup(knows(&[]), |_| {}).await;
    for token in ["", "Basic YTpi", "Digest x"] {
        for _ in 0..3 {
            let answer = ask(node.address(), token, "GET", ME).await;
            assert_eq!((answer.status, is_local(&answer)), (401, false), "{token}");
        }
    }
    assert_eq!(fake.counts().arrivals, 9);
}

#[tokio::test]
async fn a_bot_and_a_bearer_of_the_same_text_are_two_credentials() {
    let (fake, node) = setup(Script::default(), |_| {}).await;
    fake.on_each("GET", "/users/@me", |arrival| {
        let bearer = arrival.header("authorization").is_some_and(|value| value.starts_with(b"Bearer"));
        Some(Reply::status(if bearer { 401 } else { 200 }))
    });
    assert_eq!(ask(node.address(), "Bearer SAME", "GET", ME).await.status, 401);
    assert_locked(&ask(node.address(), "bearer  SAME", "GET", ME).await);
    assert_eq!(ask(node.address(), "Bot SAME", "GET", ME).await.status, 200);
    assert_eq!(ask(node.address(), "SAME", "GET", ME).await.status, 200);
}

#[tokio::test]
async fn a_credential_nobody_has_judged_sends_one_request_at_a_time() {
    let (fake, node) = setup(Script::default(), |_| {}).await;
    let gate = Gate::default();
    fake.always("GET", "/channels/**", Reply::status(200).held(&gate));
    let address = node.address();
    let calls = (0..20).map(|n| ("Bot A".to_owned(), "GET", channel(n))).collect();
    let calls = tokio::spawn(ask_all(address, ms(0), calls));
    eventually("all wait", || node.open() == 20.0).await;
    let start = Instant::now();
    for (method, path) in [
        ("POST", "/api/v10/webhooks/500000000000000001/WHTOKEN-A".to_owned()),
        ("POST", format!("/api/v10/interactions/900000000000000001/{INTERACTION_TOKEN}/callback")),
    ] {
        assert_eq!(ask(address, "Bot A", method, &path).await.status, 200, "{path}");
    }
    assert_eq!(ask(address, "Bot B", "GET", ME).await.status, 200, "another credential");
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    assert_eq!(fake.arrivals_at("GET", "/channels/**").len(), 1);
    gate.open(1);
    fake.wait_until(PATIENCE, |fake| fake.arrivals_at("GET", "/channels/**").len() == 20).await;
    gate.open(19);
    assert_eq!(statuses(&calls.await.unwrap()), [200; 20]);
}

#[tokio::test]
async fn failures_and_429s_prove_nothing_about_a_credential() {
    let (fake, node) = setup(Script::default(), |_| {}).await;
    let gate = Gate::default();
    let proofless = [
        Reply::status(500),
        Reply::status(502),
        Reply::action(Action::Close),
        Reply::action(Action::Reset),
        Reply::limited("user", 100.0),
        Reply::limited("shared", 100.0),
    ];
    let failing = proofless.len();
    for (n, reply) in proofless.into_iter().enumerate() {
        let path = channel(n);
        fake.on("POST", path.trim_start_matches("/api/v10"), vec![reply.held(&gate)]);
    }
    fake.always("POST", "/channels/**", Reply::status(200).held(&gate));
    let calls = (0..failing + 4).map(|n| ("Bot A".to_owned(), "POST", channel(n))).collect();
    let calls = tokio::spawn(ask_all(node.address(), ms(10), calls));
    eventually("all wait", || node.open() == (failing + 4) as f64).await;
    for sent in 1..=failing + 1 {
        let arrivals = fake.wait_for(sent as u64, PATIENCE).await;
        assert_eq!(arrivals.len(), sent, "one at a time");
        gate.open(1);
    }
    fake.wait_for(failing as u64 + 4, PATIENCE).await;
    gate.open(3);
    let answers = calls.await.unwrap();
    assert_eq!(statuses(&answers), [500, 502, 502, 502, 429, 429, 200, 200, 200, 200]);
    assert_eq!(ask_node(&node).await, 200);
}

async fn ask_node(node: &Node) -> u16 {
    ask(node.address(), "Bot A", "GET", ME).await.status
}
