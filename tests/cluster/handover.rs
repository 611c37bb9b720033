//! What a node that is told to stop knows goes to those who own its credentials after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fake_discord::{Rule, Script};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::seconds;
use crate::support::PATIENCE;
use crate::support::client::Client;
use crate::town::{Node, Town};
use crate::{ALONE, owned_by, owner, ranked, three};

const CLOSED_FOR: Duration = Duration::from_secs(8);

const PINS: &str = "/api/v10/channels/100000000000000001/pins";

/// Sixteen clients that ask the nodes as fast as they are answered.
fn saturate(nodes: &[Node], token: &str) -> (Arc<AtomicBool>, Vec<JoinHandle<usize>>) {
    let stop = Arc::new(AtomicBool::new(false));
    let clients = (0..16usize).map(|client| {
        let (stop, token, address) = (stop.clone(), token.to_owned(), nodes[client % nodes.len()].address());
        tokio::spawn(async move {
            let mut connection = Client::connect(address).await;
            let mut answered = 0;
            while !stop.load(Ordering::Relaxed) {
                let channel = 100_000_000_000_000_100 + client;
                let line = format!("GET /channels/{channel}/messages HTTP/1.1\r\nhost: proxy\r\n");
                connection.send(format!("{line}authorization: Bot {token}\r\n\r\n")).await;
                assert_eq!(connection.answer().await.status, 200);
                answered += 1;
            }
            answered
        })
    });
    let clients = clients.collect();
    (stop, clients)
}

async fn answered(clients: Vec<JoinHandle<usize>>) -> usize {
    let mut answered = 0;
    for client in clients {
        answered += timeout(PATIENCE, client).await.unwrap().unwrap();
    }
    answered
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_bucket_and_a_spent_second_move_with_their_credentials() {
    let _alone = ALONE.lock().await;
    let rule = Rule::window("GET /channels/{}/pins", "abcd4444", 1, CLOSED_FOR);
    let town = Town::new(Script { rules: vec![rule], ..Script::default() }).await;
    let mut nodes = Vec::from(three(&town).await);
    let closed = owned_by(&nodes, 2, "closed").await;
    let spent = owned_by(&nodes, 2, "spent").await;
    let last = nodes.pop().unwrap();
    let (stop, clients) = saturate(&nodes, &spent);
    sleep(Duration::from_millis(1_500)).await;
    let start = Instant::now();
    assert_eq!(nodes[0].ask(PINS, &closed, "").await.status, 200);
    last.signal("TERM").await;
    nodes[0].sees(2.0).await;
    nodes[1].sees(2.0).await;
    assert_eq!(nodes[0].ask("/users/@me", &closed, "").await.status, 200);
    assert!(start.elapsed() < CLOSED_FOR, "other routes do not wait");
    assert_eq!(nodes[1].ask(PINS, &closed, "").await.status, 200);
    assert!(start.elapsed() >= CLOSED_FOR, "{:?}", start.elapsed());
    let (code, log) = last.ended().await;
    assert_eq!(code, Some(0), "{log}");
    stop.store(true, Ordering::Relaxed);
    assert!(answered(clients).await > 200);
    seconds::kept(&town.discord);
    let heir = &nodes[owner(&nodes, &closed).await];
    assert!(heir.log.lock().contains("handed over what it knew"), "{}", heir.log.lock());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_joins_is_told_first_and_what_waited_elsewhere_goes_by_it() {
    let _alone = ALONE.lock().await;
    let rule = Rule::window("GET /channels/{}/pins", "abcd4444", 1, CLOSED_FOR);
    let town = Town::new(Script { rules: vec![rule], ..Script::default() }).await;
    let mut nodes = Vec::from(three(&town).await);
    let closed = owned_by(&nodes, 2, "closed").await;
    let spent = owned_by(&nodes, 2, "spent").await;
    let last = nodes.pop().unwrap();
    last.signal("TERM").await;
    assert_eq!(last.ended().await.0, Some(0));
    let (stop, clients) = saturate(&nodes, &spent);
    sleep(Duration::from_millis(1_500)).await;
    let start = Instant::now();
    assert_eq!(nodes[0].ask(PINS, &closed, "").await.status, 200);
    // It waits at the present owner, which one of the two nodes it entered by is not.
    let waiting = async {
        let answers = nodes[0].ask(PINS, &closed, "").await;
        (answers.status, start.elapsed())
    };
    let joined = async {
        let third = town.node(3).await;
        third.sees(3.0).await;
        assert!(start.elapsed() < CLOSED_FOR, "it is there in time: {:?}", start.elapsed());
        third
    };
    let ((status, waited), third) = tokio::join!(waiting, joined);
    assert_eq!(status, 200);
    assert!(waited >= CLOSED_FOR && waited < CLOSED_FOR + Duration::from_secs(3), "{waited:?}");
    let sent = Client::connect((third.ip, 9000).into()).await.get("/metrics").await;
    assert!(sent.text().contains(r#"route="/channels/!/pins""#), "the new owner sent it");
    stop.store(true, Ordering::Relaxed);
    assert!(answered(clients).await > 200);
    nodes.push(third);
    assert_eq!(owner(&nodes, &closed).await, 2);
    seconds::kept(&town.discord);
    assert!(nodes[2].log.lock().contains("handed over what it knew"), "{}", nodes[2].log.lock());
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_that_leave_at_once_hand_everything_to_the_one_that_stays() {
    let _alone = ALONE.lock().await;
    let rule = Rule::window("GET /channels/{}/pins", "abcd4444", 1, CLOSED_FOR);
    let town = Town::new(Script { rules: vec![rule], ..Script::default() }).await;
    let [first, second, stays] = three(&town).await;
    let nodes = [&first, &second, &stays];
    // What the one that leaves knows goes by way of the other, or straight to the one that stays.
    let ways = [([1, 2, 3], "one"), ([2, 1, 3], "two"), ([1, 3, 2], "three"), ([2, 3, 1], "four")];
    let closed = ways.map(|(order, name)| ranked(order, name));
    let spent = ranked([2, 1, 3], "spent");
    assert_eq!(owner(nodes, &spent).await, 1);
    let (stop, clients) = saturate(std::slice::from_ref(&stays), &spent);
    sleep(Duration::from_millis(1_500)).await;
    let start = Instant::now();
    for token in &closed {
        assert_eq!(stays.ask(PINS, token, "").await.status, 200);
    }
    let wait = async |token| {
        let status = stays.ask(PINS, token, "").await.status;
        (status, start.elapsed())
    };
    let leave = async {
        sleep(Duration::from_millis(500)).await;
        tokio::join!(first.signal("TERM"), second.signal("TERM"));
        stays.sees(1.0).await;
        tokio::join!(first.ended(), second.ended())
    };
    let [one, two, three, four] = &closed;
    let (one, two, three, four, (first, second)) = tokio::join!(wait(one), wait(two), wait(three), wait(four), leave);
    for (status, waited) in [one, two, three, four] {
        assert_eq!(status, 200);
        assert!(waited >= CLOSED_FOR && waited < CLOSED_FOR + Duration::from_secs(3), "{waited:?}");
    }
    for (code, log) in [first, second] {
        assert_eq!(code, Some(0), "{log}");
    }
    stop.store(true, Ordering::Relaxed);
    assert!(answered(clients).await > 300);
    seconds::kept(&town.discord);
}
