//! Which calls share a bucket: hashes, major parameters, methods.

use std::time::Instant;

use fake_discord::{Reply, Rule, Script, smallest_gap};

use super::*;

const MESSAGE: &str = "/api/v10/channels/100000000000000001/messages/600000000000000001";

#[tokio::test]
async fn c19_two_channels_of_one_hash_are_independent() {
    let (fake, node) = setup(Script::default()).await;
    let post = |channel: &str| ("POST", format!("{channel}/messages"));
    fake.on(
        "POST",
        "/channels/100000000000000001/messages",
        vec![Reply::status(200).bucket("aaaa1111", "5", "0", "5")],
    );
    fake.always("POST", "/channels/**", Reply::status(200).bucket("aaaa1111", "5", "4", "5"));
    assert_eq!(statuses(&ask_all(&node, ms(0), vec![post(CHANNEL_1)]).await), [200]);
    let waiting = ask_all(&node, ms(0), vec![post(CHANNEL_1)]);
    let others = async {
        // Once while nothing waits for the closed bucket, and again while something does.
        for _ in 0..2 {
            let start = Instant::now();
            assert_eq!(statuses(&ask_all(&node, ms(0), vec![post(CHANNEL_2)]).await), [200]);
            assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
            tokio::time::sleep(ms(500)).await;
        }
    };
    let (waited, ()) = tokio::join!(waiting, others);
    assert_eq!(statuses(&waited), [200]);
    let arrivals = fake.arrivals();
    assert!(arrivals[1..3].iter().all(|arrival| arrival.target_text().contains("100000000000000002")));
    assert_within(wait_between(&arrivals[0], &arrivals[3]), ms(5000), ms(5500));
}

#[tokio::test]
async fn c20_paths_of_one_hash_and_channel_share_their_limit() {
    let routes = "PUT /channels/{}/messages/{}/reactions/**, DELETE /channels/{}/messages/{}/reactions";
    let rule = Rule::window(routes, "cccc3333", 1, ms(250));
    let (fake, node) = setup(Script { rules: vec![rule], ..Script::default() }).await;
    let put = || ("PUT", format!("{MESSAGE}/reactions/%F0%9F%91%8D/@me"));
    let delete = || ("DELETE", format!("{MESSAGE}/reactions"));
    for (method, path) in [delete(), put()] {
        assert_eq!(ask(&node, method, &path).await.status, 200);
        tokio::time::sleep(ms(300)).await;
    }
    let learned = fake.counts().limited();
    let calls = (0..12).map(|n| if n % 2 == 0 { put() } else { delete() }).collect();
    assert_eq!(statuses(&ask_all(&node, ms(0), calls).await), [200; 12]);
    assert_eq!(fake.counts().limited(), learned, "none once both have shown their hash");
    let times: Vec<Instant> = fake.arrivals().iter().skip(2).map(|arrival| arrival.at).collect();
    assert!(smallest_gap(&times).unwrap() >= ms(245), "{:?}", smallest_gap(&times));
}

#[tokio::test]
async fn c22_a_route_whose_hash_alternates_loses_neither_its_zero_nor_its_queue() {
    let (fake, node) = setup(Script::default()).await;
    let mut answered = 0_u32;
    fake.on_each("DELETE", "/channels/{}/messages/{}", move |_| {
        answered += 1;
        let reply = Reply::status(204);
        Some(match answered {
            21 => reply.bucket("dddd4444", "3", "0", "1.000"),
            n if n % 2 == 1 => reply.bucket("dddd4444", "3", "2", "1.000"),
            _ => reply.bucket("eeee5555", "30", "20", "118.000"),
        })
    });
    let start = Instant::now();
    let calls = (0..60).map(|n| ("DELETE", format!("{CHANNEL_1}/messages/6000000000000000{n:02}"))).collect();
    assert_eq!(statuses(&ask_all(&node, ms(4), calls).await), [204; 60]);
    assert!(start.elapsed() < ms(4000) + SLACK, "nobody waits for the bucket with quota: {:?}", start.elapsed());
    let arrivals = fake.arrivals();
    assert_eq!(arrivals.len(), 60);
    let ids: Vec<String> = arrivals.iter().map(fake_discord::Arrival::target_text).collect();
    assert!(ids.is_sorted(), "in order: {ids:?}");
    assert_within(wait_between(&arrivals[20], &arrivals[21]), ms(1000), ms(1500));
}

#[tokio::test]
async fn c24_a_get_without_limits_does_not_lift_those_of_a_patch_on_its_path() {
    let rule = Rule::window("PATCH /channels/{}/messages/{}", "abcd2424", 5, ms(2000));
    let (fake, node) = setup(Script { rules: vec![rule], ..Script::default() }).await;
    assert_eq!(ask(&node, "GET", MESSAGE).await.status, 200);
    let patches = ask_all(&node, ms(0), vec![("PATCH", MESSAGE.to_owned()); 12]);
    let get = async {
        fake.wait_until(PATIENCE, |fake| fake.arrivals_at("PATCH", "**").len() >= 5).await;
        let start = Instant::now();
        assert_eq!(ask(&node, "GET", MESSAGE).await.status, 200);
        start.elapsed()
    };
    let (patches, get) = tokio::join!(patches, get);
    assert_eq!(statuses(&patches), [200; 12]);
    assert!(get < AT_ONCE, "a GET in the middle waited {get:?}");
    assert_eq!(fake.counts().limited(), 0);
}

#[tokio::test]
async fn c26_webhooks_part_by_id_and_token_and_not_by_query() {
    let (fake, node) = setup(Script::default()).await;
    let empty = Reply::status(200).bucket("9999aaaa", "5", "0", "2");
    fake.on("POST", "/webhooks/500000000000000001/WHTOKEN-A", vec![empty]);
    let first = "/api/v10/webhooks/500000000000000001/WHTOKEN-A";
    fake.on(
        "POST",
        "/webhooks/500000000000000002/WHTOKEN-B",
        vec![Reply::status(200).bucket("9999aaaa", "5", "4", "2")],
    );
    for path in [
        first,
        "/api/v10/webhooks/500000000000000002/WHTOKEN-B",
        &format!("{first}?thread_id=800000000000000001&wait=true"),
    ] {
        assert_eq!(ask_with(node.address(), "", "POST", path, "").await.status, 200);
    }
    let arrivals = fake.arrivals();
    assert!(wait_between(&arrivals[0], &arrivals[1]) < AT_ONCE, "the other goes at once");
    assert_within(wait_between(&arrivals[0], &arrivals[2]), ms(2000), ms(2500));
}

#[tokio::test]
async fn c27_follow_ups_of_different_interactions_do_not_queue_behind_each_other() {
    let (fake, node) = setup(Script::default()).await;
    let (one, two) = ("aW50ZXJhY3Rpb246MQ", "aW50ZXJhY3Rpb246Mg");
    let application = "/api/v10/webhooks/700000000000000001";
    let empty = Reply::status(200).bucket("ffff2727", "5", "0", "5");
    fake.on("POST", &format!("{application}/{one}"), vec![empty]);
    assert_eq!(ask(&node, "POST", &format!("{application}/{one}")).await.status, 200);
    assert_eq!(ask(&node, "PATCH", &format!("{application}/{two}/messages/@original")).await.status, 200);
    assert_eq!(ask(&node, "POST", &format!("{application}/{one}")).await.status, 200);
    let arrivals = fake.arrivals();
    assert!(wait_between(&arrivals[0], &arrivals[1]) < AT_ONCE);
    assert_within(wait_between(&arrivals[0], &arrivals[2]), ms(5000), ms(5500));
}

#[tokio::test]
async fn c28_ids_that_are_no_major_parameter_do_not_split_a_bucket() {
    let rule = Rule::window("PUT /guilds/{}/members/{}/roles/{}", "b0b0b0b0", 10, ms(5000));
    let (fake, node) = setup(Script { rules: vec![rule], ..Script::default() }).await;
    let path = |n| format!("{GUILD}/members/3000000000000000{n:02}/roles/400000000000000001");
    let start = Instant::now();
    let calls = (0..12).map(|n| ("PUT", path(n))).collect();
    assert_eq!(statuses(&ask_all(&node, ms(0), calls).await), [200; 12]);
    assert_eq!(fake.counts().limited(), 0);
    assert_within(start.elapsed(), ms(5000), ms(5500));
    fake.on("GET", "/users/{}", vec![Reply::status(200).bucket("abab2828", "30", "0", "1.5")]);
    for user in ["300000000000000001", "300000000000000002"] {
        assert_eq!(ask(&node, "GET", &format!("/api/v10/users/{user}")).await.status, 200);
    }
    let users = fake.arrivals_at("GET", "/users/{}");
    assert_within(wait_between(&users[0], &users[1]), ms(1500), ms(2000));
}

#[tokio::test]
async fn c29_routes_nobody_has_heard_of_are_forwarded_and_paced() {
    let (fake, node) = setup(Script::default()).await;
    let calls = [
        ("POST", "/api/v10/brand-new/900000000000000001/thing"),
        ("GET", "/api/v10/guilds/200000000000000001/members/@me"),
        ("PUT", "/api/v10/channels/100000000000000001/voice-status"),
        ("PURGE", "/api/v99/brand-new//900000000000000001/%23?"),
    ];
    for (method, path) in calls {
        fake.on(method, path.trim_end_matches('?'), vec![Reply::status(200).bucket(method, "1", "0", "1")]);
        for _ in 0..2 {
            assert_eq!(ask(&node, method, path).await.status, 200);
        }
        let arrivals = fake.arrivals_at(method, "**");
        assert_eq!(arrivals.len(), 2);
        assert_eq!(arrivals[0].target_text(), path, "untouched");
        assert_within(wait_between(&arrivals[0], &arrivals[1]), ms(1000), ms(1500));
    }
}
