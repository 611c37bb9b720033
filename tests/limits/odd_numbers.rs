//! Numbers that are none, and clocks that are wrong.

use std::time::Instant;

use fake_discord::{Reply, Script};
use serde_json::json;

use super::*;

#[tokio::test]
async fn c09_values_out_of_this_world_hurt_nobody() {
    let (fake, node) = setup_with(Script::default(), impatient).await;
    for _ in 0..2 {
        let start = Instant::now();
        assert_eq!(ask(&node, "GET", "/api/v10/users/@me").await.status, 200);
        assert!(start.elapsed() < AT_ONCE, "no headers, no delay");
    }
    let odd = [
        ("5", "0", "1e300"),
        ("5", "0", "NaN"),
        ("5", "0", "inf"),
        ("5", "0", "-1"),
        ("Infinity", "1", "1"),
        ("5", "99999999999999999999", "1"),
        ("-5", "-1", "banana"),
        ("", "", ""),
        ("5", "0", "99999999999999999999999999"),
    ];
    for (n, (limit, remaining, reset_after)) in odd.into_iter().enumerate() {
        let path = format!("/api/v10/channels/10000000000000010{n}/messages");
        let body = json!({"probe": n});
        let reply = Reply::json(200, &body).bucket(&format!("odd{n}"), limit, remaining, reset_after);
        fake.on("POST", &path, vec![reply]);
        let answer = ask(&node, "POST", &path).await;
        assert_eq!((answer.status, answer.text()), (200, body.to_string().as_str()), "the answer is intact");
        // A value that is ignored, or a bounded block: the next call is sent or refused, and does not hang.
        let start = Instant::now();
        let next = ask(&node, "POST", &path).await.status;
        assert!(matches!(next, 200 | 429 | 503), "{reset_after}: {next}");
        assert!(start.elapsed() < ms(3000) + SLACK, "{reset_after}: {:?}", start.elapsed());
        let start = Instant::now();
        assert_eq!(ask(&node, "GET", "/api/v10/users/@me").await.status, 200);
        assert!(start.elapsed() < AT_ONCE, "an unrelated route is served as ever");
    }
}

#[tokio::test]
async fn c35_a_wrong_clock_changes_no_wait() {
    let (fake, node) = setup(Script::default()).await;
    let now = fake_discord::clock::unix_seconds();
    let resets = [
        ("Thu, 01 Jan 2015 00:00:00 GMT", [now - 3600.0, now - 3599.0]),
        ("Fri, 01 Jan 2100 00:00:00 GMT", [now + 3600.0, now + 3601.0]),
        ("Thu, 01 Jan 2015 00:00:00 GMT", [now - 0.005, now + 0.005]),
    ];
    for (n, (date, resets)) in resets.into_iter().enumerate() {
        let path = format!("/api/v10/channels/10000000000000020{n}/messages");
        let reply = |reset: f64| {
            let reply = Reply::status(200).bucket(&format!("clock{n}"), "1", "0", "1.0").with("Date", date);
            reply.with("X-RateLimit-Reset", format!("{reset:.3}"))
        };
        fake.on("POST", &path, resets.into_iter().map(reply).collect());
        for _ in 0..3 {
            assert_eq!(ask(&node, "POST", &path).await.status, 200);
        }
        let arrivals = fake.arrivals_at("POST", &path);
        assert_eq!(arrivals.len(), 3);
        for pair in arrivals.windows(2) {
            assert_within(wait_between(&pair[0], &pair[1]), ms(1000), ms(1500));
        }
    }
}
