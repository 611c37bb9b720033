//! Bodies kept for a retry: the room they may take, and what happens to those that find none.

use fake_discord::{Gate, Reply, Script};

use crate::support::calls::*;
use crate::support::client::Client;
use crate::support::process::Process;
use crate::support::{PATIENCE, eventually};

/// A POST with a body of so many bytes, its length told or not.
fn upload(bytes: usize, chunked: bool) -> String {
    let body = "x".repeat(bytes);
    if !chunked {
        return request("Bot A", "POST", &channel(1), &body);
    }
    let head = request("Bot A", "POST", &channel(1), "").replace("Content-Length: 0", "Transfer-Encoding: chunked");
    format!("{head}{bytes:x}\r\n{body}\r\n0\r\n\r\n")
}

#[tokio::test]
async fn a_body_that_finds_no_room_is_503_until_another_gives_its_room_back() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_retry_capture_bytes = 1000).await;
    warm_up(&fake, &node, "Bot A").await;
    let gate = Gate::default();
    fake.on("POST", "/channels/**", vec![Reply::status(200).held(&gate)]);
    let mut first = Client::connect(node.address()).await;
    first.send(upload(600, false)).await;
    fake.wait_for(2, PATIENCE).await;
    let mut second = Client::connect(node.address()).await;
    for bytes in [600, 2000] {
        second.send(upload(bytes, false)).await;
        let answer = second.answer().await;
        assert_unavailable(&answer, &node, "retry_capture_limit");
        assert!(answer.text().contains("MAX_RETRY_CAPTURE_BYTES"), "{}", answer.text());
    }
    // What has no body needs no room.
    assert_eq!(ask(node.address(), "Bot A", "GET", &channel(2)).await.status, 200);
    gate.open(1);
    assert_eq!(first.answer().await.status, 200);
    second.send(upload(600, false)).await;
    assert_eq!(second.answer().await.status, 200);
    assert_eq!(fake.arrivals_at("POST", "**").len(), 2, "what found no room was never sent");
    eventually("nothing is kept", || node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn a_body_is_not_asked_for_while_its_request_waits() {
    let (fake, node) = setup(Script::default(), |_| {}).await;
    fake.on("POST", "/channels/**", vec![Reply::status(200).bucket("abcd0001", "5", "0", "1.5")]);
    assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
    let mut client = Client::connect(node.address()).await;
    let asking = upload(600, false).replace("\r\n\r\n", "\r\nExpect: 100-continue\r\n\r\n");
    let (head, body) = asking.split_once("\r\n\r\n").unwrap();
    client.send(format!("{head}\r\n\r\n")).await;
    assert!(client.head().await.unwrap().starts_with("HTTP/1.1 100 "));
    let closed = fake.arrivals()[0].judged_at.unwrap();
    assert_within(closed.elapsed(), ms(1500), ms(2000));
    client.send(body).await;
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(fake.arrivals()[1].body_len, 600);
}

#[tokio::test]
async fn what_cannot_be_sent_again_gets_discords_429() {
    let limits = |body: u64, all: u64| {
        setup(Script::default(), move |config| {
            config.scheduling.max_retry_body_bytes = body;
            config.scheduling.max_retry_capture_bytes = all;
        })
    };
    for (body, all, chunked, attempts) in [
        // Larger than a kept body may be, or than there is room; and no keeping at all.
        (500, 10_000, false, 1),
        (500, 10_000, true, 1),
        (5000, 500, true, 1),
        (5000, 0, false, 1),
        (5000, 0, true, 1),
        // With room for it, it is sent again.
        (600, 600, false, 2),
        (600, 600, true, 2),
    ] {
        let (fake, node) = limits(body, all).await;
        warm_up(&fake, &node, "Bot A").await;
        let refusal = Reply::limited("user", 0.3);
        let words = String::from_utf8(refusal.body.to_vec()).unwrap();
        fake.on("POST", "/channels/**", vec![refusal]);
        let mut client = Client::connect(node.address()).await;
        client.send(upload(600, chunked)).await;
        let answer = client.answer().await;
        let case = format!("{body} {all} {chunked}");
        assert_eq!(answer.status, if attempts == 1 { 429 } else { 200 }, "{case}");
        if attempts == 1 {
            assert_eq!((answer.text(), is_local(&answer)), (&*words, false), "{case}");
        }
        let seen = fake.arrivals_at("POST", "**");
        assert_eq!(seen.len(), attempts, "{case}");
        assert!(seen.iter().all(|arrival| arrival.body_len == 600), "{case}");
        eventually("nothing is kept", || node.scheduler.is_quiet()).await;
    }
}

#[tokio::test]
async fn a_body_that_cannot_be_written_down_is_503_and_smaller_ones_pass() {
    let (fake, _node) = setup(Script::default(), |_| {}).await;
    let folder = tempfile::tempdir().unwrap();
    // An eighth of the room is memory's, and this body is larger.
    let settings = [("TMPDIR", folder.path().to_str().unwrap()), ("MAX_RETRY_CAPTURE_BYTES", "1048576")];
    let process = Process::start_with(fake.addr, &settings).await;
    folder.close().unwrap();
    let mut client = Client::connect(process.address).await;
    client.send(upload(300 * 1024, false)).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert!(answer.text().contains("TMPDIR"), "{}", answer.text());
    assert_eq!(fake.counts().arrivals, 0);
    let mut client = Client::connect(process.address).await;
    client.send(upload(200 * 1024, false)).await;
    assert_eq!(client.answer().await.status, 200);
}
