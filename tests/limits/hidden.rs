//! Sub-limits and limits of resources: those no header speaks of until they are met.

use std::time::Instant;

use fake_discord::{Reply, Rule, Script, SubLimit};
use serde_json::json;

use super::*;

const RENAME: &str = "{\"name\":\"new\"}";

async fn rename(node: &Node, channel: &str) -> Answer {
    ask_with(node.address(), "Bot A", "PATCH", channel, RENAME).await
}

/// PATCH channel: 5 in 15 s, and so many renames in so long.
fn renames(limit: u32, period_ms: u64) -> Script {
    let mut rule = Rule::window("PATCH /channels/{}", "cccc1010", 5, ms(15_000));
    rule.sub_limits = vec![SubLimit { fields: vec!["name".into()], limit, period_ms, ..SubLimit::default() }];
    Script { rules: vec![rule], ..Script::default() }
}

#[tokio::test]
async fn c10_a_rename_block_of_minutes_reaches_the_client_and_holds_nothing_else() {
    let (fake, node) = setup(renames(2, 583_000)).await;
    for _ in 0..2 {
        assert_eq!(rename(&node, CHANNEL_1).await.status, 200);
    }
    let start = Instant::now();
    let refused = rename(&node, CHANNEL_1).await;
    assert_eq!((refused.status, is_local(&refused)), (429, false), "{}", refused.head);
    assert_eq!(retry_after(&refused), 583);
    assert!(start.elapsed() < AT_ONCE, "at once");
    assert_eq!(fake.arrivals().len(), 3, "and no second attempt");
    let start = Instant::now();
    assert_eq!(ask(&node, "POST", &format!("{CHANNEL_1}/messages")).await.status, 200);
    assert_eq!(rename(&node, CHANNEL_2).await.status, 200);
    let other = ask_with(node.address(), "Bot A", "PATCH", CHANNEL_1, "{\"nsfw\":true}").await;
    assert!(matches!(other.status, 200 | 429), "{}", other.head);
    assert!(start.elapsed() < AT_ONCE + SLACK, "nothing else waits: {:?}", start.elapsed());
    assert_eq!(fake.counts().limited(), 1);
}

#[tokio::test]
async fn c11_a_sub_limit_once_met_is_remembered_until_its_end() {
    let (fake, node) = setup_with(renames(1, 8000), impatient).await;
    assert_eq!(rename(&node, CHANNEL_1).await.status, 200);
    let met = rename(&node, CHANNEL_1).await;
    assert_eq!((met.status, is_local(&met)), (429, false), "{}", met.head);
    let first = fake.arrivals()[0].judged_at.unwrap();
    for _ in 0..10 {
        tokio::time::sleep(ms(350)).await;
        let answer = rename(&node, CHANNEL_1).await;
        let left = ms(8000).saturating_sub(first.elapsed()).as_secs_f64();
        assert_eq!((answer.status, is_local(&answer)), (429, true), "{}", answer.head);
        let told = retry_after(&answer);
        assert!(told as f64 >= left.floor() && told as f64 <= left + 2.0, "told {told} s with {left} s left");
    }
    assert_eq!(fake.arrivals().len(), 2, "Discord saw none of the ten");
    tokio::time::sleep(ms(8050).saturating_sub(first.elapsed())).await;
    assert_eq!(rename(&node, CHANNEL_1).await.status, 200, "and at its end the next goes through");
    assert_eq!(fake.counts().limited(), 1);
}

#[tokio::test]
async fn c12_the_longer_wait_of_a_shared_429_rules_and_costs_no_budget() {
    let (fake, node) = setup_with(Script::default(), |config| {
        config.scheduling.queue_timeout = Duration::from_secs(20);
        config.scheduling.invalid_request_limit = 1;
    })
    .await;
    let path = "/api/v10/webhooks/500000000000000001/WHTOKEN-A?wait=true";
    let shared = Reply::limited("shared", 40.6).bucket("dddd1212", "5", "3", "2.000");
    fake.on("POST", "/webhooks/500000000000000001/WHTOKEN-A", vec![shared]);
    let start = Instant::now();
    let refused = ask(&node, "POST", path).await;
    assert_eq!((refused.status, is_local(&refused), retry_after(&refused)), (429, false, 41));
    let again = ask(&node, "POST", path).await;
    assert_eq!((again.status, is_local(&again)), (429, true), "{}", again.head);
    assert!((39..=41).contains(&retry_after(&again)), "{}", again.head);
    let other = ask(&node, "POST", "/api/v10/webhooks/500000000000000002/WHTOKEN-B?wait=true").await;
    assert_eq!(other.status, 200, "another webhook is not delayed, and the budget of one is not spent: {}", other.head);
    assert!(start.elapsed() < AT_ONCE + SLACK);
    tokio::time::sleep(ms(2200)).await;
    assert_eq!(ask(&node, "POST", path).await.status, 429, "after the bucket's own reset, too");
    assert_eq!(fake.arrivals().len(), 2);
}

#[tokio::test]
async fn c14_a_channel_write_limit_is_waited_out() {
    let (fake, node) = setup(Script::default()).await;
    let path = format!("{CHANNEL_1}/messages");
    let body = json!({"message": "The write action you are performing on the channel has hit the write rate limit.",
        "code": 20028, "retry_after": 0.3, "global": false});
    let refused = Reply::json(429, &body).with("Retry-After", "1").with("X-RateLimit-Scope", "shared");
    fake.on("POST", &path, vec![refused]);
    assert_eq!(ask(&node, "POST", &path).await.status, 200);
    let arrivals = fake.arrivals();
    assert_eq!(arrivals.len(), 2);
    assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(300), ms(1500));
}

#[tokio::test]
async fn c16_a_wait_of_half_an_hour_surfaces_and_stays_local() {
    let (fake, node) = setup(Script::default()).await;
    let path = format!("{GUILD}/emojis");
    let mut replies: Vec<Reply> =
        (0..49).map(|n| Reply::status(201).bucket("eeee1616", "120", &(119 - n).to_string(), "3")).collect();
    replies.push(Reply::limited("user", 1799.2).bucket("eeee1616", "120", "44", "3"));
    fake.on("POST", &path, replies);
    for _ in 0..49 {
        assert_eq!(ask(&node, "POST", &path).await.status, 201);
    }
    let start = Instant::now();
    let refused = ask(&node, "POST", &path).await;
    assert_eq!((refused.status, is_local(&refused), retry_after(&refused)), (429, false, 1800));
    assert!(start.elapsed() < SLACK, "within a second: {:?}", start.elapsed());
    let later = ask(&node, "POST", &path).await;
    assert_eq!((later.status, is_local(&later)), (429, true), "{}", later.head);
    assert!((1795..=1800).contains(&retry_after(&later)));
    assert_eq!(fake.arrivals_at("POST", &path).len(), 50);
    let start = Instant::now();
    assert_eq!(ask(&node, "GET", &format!("{GUILD}/roles")).await.status, 200);
    assert_eq!(ask(&node, "POST", "/api/v10/guilds/200000000000000002/emojis").await.status, 200);
    assert!(start.elapsed() < AT_ONCE);
}

#[tokio::test]
async fn c18_a_400_is_no_rate_limit_whatever_its_words() {
    let (fake, node) = setup_with(Script::default(), |config| config.scheduling.invalid_request_limit = 1).await;
    let body = json!({"message": "Invalid Form Body", "code": 50035, "errors": {"username": {"_errors": [
        {"code": "USERNAME_RATE_LIMIT", "message": "You are changing your username too fast."}]}}});
    fake.on("PATCH", "/users/@me", vec![Reply::json(400, &body)]);
    let start = Instant::now();
    let answer = ask(&node, "PATCH", "/api/v10/users/@me").await;
    assert_eq!((answer.status, answer.text()), (400, body.to_string().as_str()));
    assert_eq!(fake.arrivals().len(), 1, "one attempt");
    assert_eq!(ask(&node, "PATCH", "/api/v10/users/@me").await.status, 200, "nothing closed, nothing counted");
    assert!(start.elapsed() < AT_ONCE);
}
