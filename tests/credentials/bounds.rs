//! How many credentials and buckets have state: the oldest idle one makes room, and nothing that is known to be closed
//! is ever forgotten for it.

use fake_discord::{FakeDiscord, Gate, Reply, Script};

use crate::support::calls::*;
use crate::support::{Node, PATIENCE, eventually};

const ME: &str = "/api/v10/users/@me";

/// Holds back the answers to these calls; they are in flight when this returns.
async fn in_flight(
    fake: &FakeDiscord,
    node: &Node,
    calls: Vec<(String, &'static str, String)>,
) -> (Gate, tokio::task::JoinHandle<Vec<crate::support::client::Answer>>) {
    let gate = Gate::default();
    let before = fake.counts().arrivals;
    let count = calls.len();
    for (_, method, path) in &calls {
        fake.on(method, path.trim_start_matches("/api/v10"), vec![Reply::status(200).held(&gate)]);
    }
    let answers = tokio::spawn(ask_all(node.address(), ms(0), calls));
    fake.wait_for(before + count as u64, PATIENCE).await;
    (gate, answers)
}

#[tokio::test]
async fn a_credential_without_room_is_503_until_another_is_idle() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_client_states = 2).await;
    warm_up(&fake, &node, "Bot A").await;
    let calls = [("Bot A".to_owned(), "GET", channel(1)), ("Bearer B".to_owned(), "GET", channel(2))];
    let (gate, answers) = in_flight(&fake, &node, calls.to_vec()).await;
    for token in ["Bot C", "Bearer C"] {
        let answer = ask(node.address(), token, "GET", ME).await;
        assert_unavailable(&answer, &node, "client_limit");
        assert!(answer.text().contains("MAX_CLIENT_STATES"), "{}", answer.text());
    }
    assert_eq!(ask(node.address(), "", "GET", ME).await.status, 200, "unauthenticated traffic needs no room");
    assert_eq!(ask(node.address(), "Bot A", "GET", ME).await.status, 200, "who has state keeps it");
    gate.open(2);
    assert_eq!(statuses(&answers.await.unwrap()), [200; 2]);
    assert_eq!(ask(node.address(), "Bot C", "GET", ME).await.status, 200);
    assert_eq!(node.failures("client_limit"), 2.0);
}

#[tokio::test]
async fn the_credential_unused_for_longest_makes_room_and_its_validity_goes_with_it() {
    let script = Script { tokens: Some(vec!["B".into(), "C".into()]), ..Script::default() };
    let (fake, node) = setup(script, |config| config.scheduling.max_client_states = 2).await;
    for (token, status) in [("Bot DEAD", 401), ("Bot B", 200), ("Bot DEAD", 401)] {
        assert_eq!(ask(node.address(), token, "GET", ME).await.status, status);
        tokio::time::sleep(ms(5)).await;
    }
    assert_eq!(fake.counts().arrivals, 2);
    // B is the oldest now, and DEAD stays known.
    assert_eq!(ask(node.address(), "Bot C", "GET", ME).await.status, 200);
    assert!(is_local(&ask(node.address(), "Bot DEAD", "GET", ME).await));
    tokio::time::sleep(ms(5)).await;
    assert_eq!(ask(node.address(), "Bot C", "GET", ME).await.status, 200);
    // Now DEAD is the oldest.
    assert_eq!(ask(node.address(), "Bot B", "GET", ME).await.status, 200);
    assert_eq!(ask(node.address(), "Bot B", "GET", ME).await.status, 200);
    let again = ask(node.address(), "Bot DEAD", "GET", ME).await;
    assert_eq!((again.status, is_local(&again)), (401, false), "asked again, in place of C");
}

#[tokio::test]
async fn a_credential_with_a_live_block_is_never_forgotten() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_client_states = 4).await;
    // A closed bucket, a route held by a shared limit, a hidden one, a global block.
    let blocks = [
        Reply::status(200).bucket("abcd0001", "5", "0", "120"),
        Reply::limited("shared", 120.0),
        Reply::limited("user", 120.0).bucket("abcd0002", "5", "3", "1"),
        Reply::limited("global", 120.0),
    ];
    for (number, block) in blocks.into_iter().enumerate() {
        let status = block.status;
        fake.on("GET", "/users/@me", vec![block]);
        assert_eq!(ask(node.address(), &format!("Bot {number}"), "GET", ME).await.status, status);
    }
    assert_unavailable(&ask(node.address(), "Bot NEW", "GET", ME).await, &node, "client_limit");
    let arrivals = fake.counts().arrivals;
    for number in 0..4 {
        let answer = ask(node.address(), &format!("Bot {number}"), "GET", ME).await;
        assert_eq!((answer.status, is_local(&answer)), (429, true), "{number} is still blocked");
    }
    assert_eq!(fake.counts().arrivals, arrivals);
}

#[tokio::test]
async fn bearers_have_a_bound_of_their_own() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_bearer_count = 2).await;
    let calls = [("Bearer A".to_owned(), "GET", channel(1)), ("Bearer B".to_owned(), "GET", channel(2))];
    let (gate, answers) = in_flight(&fake, &node, calls.to_vec()).await;
    let answer = ask(node.address(), "Bearer C", "GET", ME).await;
    assert_unavailable(&answer, &node, "client_limit");
    assert!(answer.text().contains("MAX_BEARER_COUNT"), "{}", answer.text());
    for bot in ["Bot A", "Bot B", "Bot C"] {
        assert_eq!(ask(node.address(), bot, "GET", ME).await.status, 200, "bots are not bearers");
    }
    gate.open(2);
    assert_eq!(statuses(&answers.await.unwrap()), [200; 2]);
    for bearer in ["Bearer C", "Bearer D", "Bearer A"] {
        assert_eq!(ask(node.address(), bearer, "GET", ME).await.status, 200, "idle ones make room");
    }
}

#[tokio::test]
async fn a_bucket_without_room_is_503_until_another_is_idle() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_bucket_states = 3).await;
    warm_up(&fake, &node, "Bot A").await;
    warm_up(&fake, &node, "Bot B").await;
    let calls = (1..=3).map(|n| (["Bot A", "Bot B"][n % 2].to_owned(), "POST", channel(n))).collect();
    let (gate, answers) = in_flight(&fake, &node, calls).await;
    for token in ["Bot A", "Bot C", ""] {
        let answer = ask(node.address(), token, "POST", &channel(4)).await;
        assert_unavailable(&answer, &node, "bucket_limit");
        assert!(answer.text().contains("MAX_BUCKET_STATES"), "{}", answer.text());
    }
    gate.open(3);
    assert_eq!(statuses(&answers.await.unwrap()), [200; 3]);
    for n in 4..40 {
        assert_eq!(ask(node.address(), ["Bot A", "Bot B"][n % 2], "POST", &channel(n)).await.status, 200);
    }
    assert_eq!(node.failures("bucket_limit"), 3.0);
}

#[tokio::test]
async fn a_bucket_that_is_closed_makes_no_room() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_bucket_states = 2).await;
    fake.on("POST", "/channels/**", vec![Reply::status(200).bucket("abcd0001", "5", "0", "1.5")]);
    fake.on("POST", "/channels/**", vec![Reply::limited("shared", 120.0)]);
    assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
    assert_eq!(ask(node.address(), "Bot A", "POST", &channel(2)).await.status, 429);
    assert_unavailable(&ask(node.address(), "Bot A", "POST", &channel(3)).await, &node, "bucket_limit");
    assert!(is_local(&ask(node.address(), "Bot A", "POST", &channel(2)).await), "the held one is known");
    eventually_room(&node).await;
    assert!(is_local(&ask(node.address(), "Bot A", "POST", &channel(2)).await), "it still is");
}

/// Asks in a new channel until there is room for its bucket.
async fn eventually_room(node: &Node) {
    for _ in 0..400 {
        if ask(node.address(), "Bot A", "POST", &channel(3)).await.status == 200 {
            return;
        }
        tokio::time::sleep(ms(25)).await;
    }
    panic!("a bucket that has reset makes room");
}

#[tokio::test]
async fn an_alias_without_room_is_not_learned_and_its_route_keeps_its_bucket() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_bucket_states = 1).await;
    let answers = [("aaaa0001", "4", "1"), ("bbbb0002", "3", "1"), ("cccc0003", "0", "1.2"), ("aaaa0001", "3", "1")];
    let replies = answers.map(|(hash, remaining, reset)| Reply::status(200).bucket(hash, "5", remaining, reset));
    fake.on("POST", "/channels/**", replies.to_vec());
    for _ in 0..4 {
        assert_eq!(ask(node.address(), "Bot A", "POST", &channel(1)).await.status, 200);
    }
    let arrivals = fake.arrivals();
    assert!(wait_between(&arrivals[0], &arrivals[2]) < AT_ONCE);
    assert_within(wait_between(&arrivals[2], &arrivals[3]), ms(1200), ms(1700));
    eventually("nothing is held", || node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn a_credential_that_made_room_a_moment_ago_has_no_second_allowance() {
    let (fake, node) = setup(Script::default(), |config| config.scheduling.max_bearer_count = 1).await;
    let burst = |count: usize| (0..count).map(|n| ("Bearer A".to_owned(), "GET", channel(n))).collect();
    let answers = ask_all(node.address(), ms(0), burst(50)).await;
    assert_eq!(with_status(&answers, 200), 50);
    assert_eq!(ask(node.address(), "Bearer B", "GET", ME).await.status, 200);
    let answers = ask_all(node.address(), ms(0), burst(50)).await;
    assert_eq!(with_status(&answers, 200), 50);
    let of_a = fake.arrivals().into_iter().filter(|arrival| arrival.header("authorization") == Some(b"Bearer A"));
    let times: Vec<_> = of_a.map(|arrival| arrival.at).collect();
    assert_eq!(times.len(), 100);
    assert!(fake_discord::most_in(&times, ms(1000)) <= 50, "{}", fake_discord::most_in(&times, ms(1000)));
}
