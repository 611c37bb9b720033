//! What Discord, or the edge before it, says once and must not be asked for again.

use fake_discord::{Reply, Script};
use serde_json::json;

use super::*;

const WEBHOOK: &str = "/api/v10/webhooks/500000000000000001/WHTOKEN-A";

#[tokio::test]
async fn c53_one_404_of_a_deleted_webhook_is_enough() {
    let (fake, node) = setup(Script::default()).await;
    fake.delete_webhook("500000000000000001/WHTOKEN-A");
    let unauthenticated = |path: &str| (String::new(), "POST", path.to_owned());
    let first = calls::ask(node.address(), "", "POST", WEBHOOK).await;
    assert_eq!((first.status, is_local(&first)), (404, false), "{}", first.head);
    let endings = ["", "?wait=true", "?thread_id=800000000000000001&wait=true", "/slack", "/github"];
    let more = (0..100).map(|n| unauthenticated(&format!("{WEBHOOK}{}", endings[n % endings.len()]))).collect();
    for answer in calls::ask_all(node.address(), ms(0), more).await {
        assert_eq!((answer.status, is_local(&answer)), (404, true), "{}", answer.head);
        let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((&body["code"], &body["message"]), (&json!(10015), &json!("Unknown Webhook")));
    }
    assert_eq!((fake.arrivals().len(), node.failures("unknown_webhook")), (1, 100.0));
    // Another token of it may be good, and so is another webhook; a 404 of something else says nothing.
    fake.on("POST", "/webhooks/500000000000000001/WHTOKEN-B", vec![Reply::status(204)]);
    fake.on("POST", "/webhooks/500000000000000002/WHTOKEN-A", vec![Reply::status(204)]);
    let unknown = json!({"message": "Unknown Message", "code": 10008});
    fake.on(
        "GET",
        "/webhooks/500000000000000002/WHTOKEN-A/messages/600000000000000001",
        vec![Reply::json(404, &unknown)],
    );
    for (method, path, status) in [
        ("POST", "/api/v10/webhooks/500000000000000001/WHTOKEN-B", 204),
        ("GET", "/api/v10/webhooks/500000000000000002/WHTOKEN-A/messages/600000000000000001", 404),
        ("POST", "/api/v10/webhooks/500000000000000002/WHTOKEN-A", 204),
    ] {
        let answer = calls::ask(node.address(), "", method, path).await;
        assert_eq!((answer.status, is_local(&answer)), (status, false), "{path}: {}", answer.head);
    }
}

#[tokio::test]
async fn c53_those_that_wait_for_a_deleted_webhook_get_its_404_too() {
    let (fake, node) = setup(Script::default()).await;
    fake.delete_webhook("500000000000000001/WHTOKEN-A");
    let calls = (0..50).map(|_| (String::new(), "POST", WEBHOOK.to_owned())).collect();
    let answers = calls::ask_all(node.address(), ms(0), calls).await;
    assert_eq!(calls::with_status(&answers, 404), 50);
    assert_eq!(answers.iter().filter(|answer| is_local(answer)).count(), 49);
    assert_eq!(fake.arrivals().len(), 1);
}

#[tokio::test]
async fn an_interaction_that_discord_does_not_know_yet_is_asked_for_again() {
    let (fake, node) = setup(Script::default()).await;
    let path = "/webhooks/700000000000000001/aW50ZXJhY3Rpb246TOKEN/messages/@original";
    let unknown = json!({"message": "Unknown Webhook", "code": 10015});
    fake.on("PATCH", path, vec![Reply::json(404, &unknown), Reply::status(200)]);
    for status in [404, 200] {
        let answer = calls::ask(node.address(), "", "PATCH", &format!("/api/v10{path}")).await;
        assert_eq!((answer.status, is_local(&answer)), (status, false), "{}", answer.head);
    }
}

#[tokio::test]
async fn c56_the_edges_html_429_reaches_the_client_and_its_route_stays_closed() {
    let page = format!("<!doctype html><title>Error 1015</title>{}", "rate limited ".repeat(300));
    let html = |retry: Option<&str>| {
        let mut reply =
            Reply::status(429).with("Content-Type", "text/html; charset=UTF-8").with("Server", "cloudflare");
        if let Some(retry) = retry {
            reply = reply.with("Retry-After", retry);
        }
        reply.body = page.clone().into_bytes().into();
        reply
    };
    let (fake, node) = setup(Script::default()).await;
    fake.on("GET", "/users/@me/guilds", vec![html(Some("1500"))]);
    let answer = ask(&node, "GET", "/api/v10/users/@me/guilds").await;
    assert_eq!((answer.status, is_local(&answer), retry_after(&answer)), (429, false, 1500), "{}", answer.head);
    assert_eq!(answer.header("content-type"), Some("text/html; charset=UTF-8"));
    assert_eq!(answer.text(), page);
    for _ in 0..20 {
        let answer = ask(&node, "GET", "/api/v10/users/@me/guilds").await;
        assert_eq!((answer.status, is_local(&answer)), (429, true), "{}", answer.head);
        assert!((1495..=1516).contains(&retry_after(&answer)), "{}", answer.head);
    }
    assert_eq!(fake.arrivals().len(), 1);
    // Without a time there are three attempts, further and further apart.
    fake.on("GET", "/users/@me", vec![html(None); 4]);
    let answer = ask(&node, "GET", "/api/v10/users/@me").await;
    assert_eq!((answer.status, is_local(&answer), answer.text()), (429, false, page.as_str()));
    let arrivals = fake.arrivals();
    let at: Vec<_> = arrivals.iter().skip(1).map(|arrival| arrival.at).collect();
    assert_eq!(at.len(), 3);
    assert!(at[1] - at[0] >= ms(1000) && at[2] - at[1] >= ms(4000), "{at:?}");
}
