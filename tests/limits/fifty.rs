//! Fifty in a second, and no more, whatever the network does.

use std::time::Instant;

use fake_discord::{Script, most_in};

use super::*;

/// Bare tokens are bots'. Their IDs, as Discord writes them: 123456789012345678 and 223456789012345678.
const BOT_OF_100: &str = "MTIzNDU2Nzg5MDEyMzQ1Njc4.made.up";
const BOT_OF_50: &str = "MjIzNDU2Nzg5MDEyMzQ1Njc4.made.up";

#[tokio::test]
async fn c41_no_rolling_second_sees_more_than_fifty() {
    let (fake, node) = setup(Script::default()).await;
    for _ in 0..3 {
        let start = Instant::now();
        assert_eq!(ask(&node, "GET", "/api/v10/users/@me").await.status, 200);
        assert!(start.elapsed() < ms(300), "an idle bot is not slowed down: {:?}", start.elapsed());
    }
    let start = Instant::now();
    let answers = ask_all(&node, ms(0), guilds(300)).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    told(&fake);
    let times: Vec<Instant> = fake.arrivals().iter().map(|arrival| arrival.at).collect();
    assert!(most_in(&times, ms(1000)) <= 50, "{}", most_in(&times, ms(1000)));
    assert_within(start.elapsed(), ms(4900), ms(6500));
}

#[tokio::test]
async fn c41_a_higher_limit_holds_for_the_bot_it_names() {
    let overrides = vec![(BOT_OF_100.to_owned(), 100)];
    let (fake, node) = setup_with(Script { global_overrides: overrides, ..Script::default() }, |config| {
        config.scheduling.overrides.by_bot_id.insert(123_456_789_012_345_678, 100);
    })
    .await;
    let address = node.address();
    let ask = |token: &'static str| async move {
        let start = Instant::now();
        let answers = ask_all_as(token, address, ms(0), guilds(150)).await;
        assert!(answers.iter().all(|answer| answer.status == 200));
        start.elapsed()
    };
    let (more, usual) = tokio::join!(ask(BOT_OF_100), ask(BOT_OF_50));
    told(&fake);
    assert_within(more, ms(500), ms(2200));
    assert_within(usual, ms(1900), ms(3500));
}

/// Fails with where in the run the fake refused, if it did.
#[track_caller]
fn told(fake: &FakeDiscord) {
    let arrivals = fake.arrivals();
    let Some(refused) = arrivals.iter().find(|arrival| arrival.verdict == fake_discord::Verdict::GlobalLimited) else {
        return;
    };
    let start = arrivals[0].at;
    let at: Vec<String> = arrivals
        .iter()
        .filter(|arrival| arrival.caller == refused.caller)
        .map(|arrival| format!("{}{}", if arrival.status == 429 { "!" } else { "" }, (arrival.at - start).as_millis()))
        .collect();
    panic!("caller {} was refused; arrivals at ms (! is a 429): {}", refused.caller, at.join(" "));
}
