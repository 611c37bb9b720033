//! What a node that is told to stop knows goes to those who own its credentials after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fake_discord::{Rule, Script};
use tokio::time::{Instant, sleep, timeout};

use crate::support::PATIENCE;
use crate::support::client::Client;
use crate::town::{Node, Town};
use crate::{owner, three};

const CLOSED_FOR: Duration = Duration::from_secs(8);

/// A token of the third node's.
async fn of_the_third(nodes: &[Node], name: &str) -> String {
    for number in 0..200 {
        let token = format!("{name}-{number}");
        if owner(nodes, &token).await == 2 {
            return token;
        }
    }
    panic!("the third owns nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_bucket_and_a_spent_second_move_with_their_credentials() {
    let rule = Rule::window("GET /channels/{}/pins", "abcd4444", 1, CLOSED_FOR);
    // A busy machine brings a request so late that a few more than 50 may fall into one second.
    let town = Town::new(8, Script { rules: vec![rule], global_limit: Some(54), ..Script::default() }).await;
    let mut nodes = Vec::from(three(&town).await);
    let closed = of_the_third(&nodes, "closed").await;
    let spent = of_the_third(&nodes, "spent").await;
    let last = nodes.pop().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let clients = (0..16usize).map(|client| {
        let (stop, spent, address) = (stop.clone(), spent.clone(), nodes[client % 2].address());
        tokio::spawn(async move {
            let mut connection = Client::connect(address).await;
            let mut answered = 0;
            while !stop.load(Ordering::Relaxed) {
                let channel = 100_000_000_000_000_100 + client;
                let line = format!("GET /channels/{channel}/messages HTTP/1.1\r\nhost: proxy\r\n");
                connection.send(format!("{line}authorization: Bot {spent}\r\n\r\n")).await;
                assert_eq!(connection.answer().await.status, 200);
                answered += 1;
            }
            answered
        })
    });
    let clients: Vec<_> = clients.collect();
    let pins = "/api/v10/channels/100000000000000001/pins";
    sleep(Duration::from_millis(1_500)).await;
    let start = Instant::now();
    assert_eq!(nodes[0].ask(pins, &closed, "").await.status, 200);
    last.signal("TERM").await;
    nodes[0].sees(2.0).await;
    nodes[1].sees(2.0).await;
    let heir = owner(&nodes, &closed).await;
    assert!(start.elapsed() < CLOSED_FOR, "other routes do not wait");
    assert_eq!(nodes[1 - heir].ask(pins, &closed, "").await.status, 200);
    assert!(start.elapsed() >= CLOSED_FOR, "{:?}", start.elapsed());
    let (code, log) = last.ended().await;
    assert_eq!(code, Some(0), "{log}");
    stop.store(true, Ordering::Relaxed);
    let mut answered = 0;
    for client in clients {
        answered += timeout(PATIENCE, client).await.unwrap().unwrap();
    }
    assert!(answered > 200, "{answered}");
    assert_eq!(town.discord.counts().limited(), 0, "{:?}", town.discord.counts());
    assert!(nodes[heir].log.lock().contains("handed over"), "{}", nodes[heir].log.lock());
}
