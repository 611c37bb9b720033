//! A cluster of real processes.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod handover;
mod hop;
mod readme;
mod rolling;
mod seconds;
mod starts;
#[path = "../support/mod.rs"]
mod support;
mod town;
mod wires;

use std::time::Duration;

use fake_discord::Script;
use nirn_proxy::cluster::members::{Member, Members, Owner};
use nirn_proxy::identity::Identity;
use support::PATIENCE;
use tokio::time::{Instant, sleep};
use town::{Node, Town};

const SENT: &str = "nirn_proxy_requests_count";

/// For tests that keep a small machine busy: side by side they would measure how late it is.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn unlimited() -> Script {
    Script { global_limit: None, ..Script::default() }
}

async fn three(town: &Town) -> [Node; 3] {
    let one = town.node(1).await;
    let (two, three) = tokio::join!(town.node(2), town.node(3));
    for node in [&one, &two, &three] {
        node.sees(3.0).await;
    }
    [one, two, three]
}

async fn all<'a>(nodes: impl IntoIterator<Item = &'a Node>, metric: &str) -> Vec<f64> {
    let mut values = Vec::new();
    for node in nodes {
        values.push(node.metric(metric).await);
    }
    values
}

/// The node that brings a token's requests to Discord, whichever node is asked.
async fn owner<'a>(nodes: impl IntoIterator<Item = &'a Node>, token: &str) -> usize {
    let nodes: Vec<&Node> = nodes.into_iter().collect();
    let before = all(nodes.iter().copied(), SENT).await;
    for node in &nodes {
        let answer = node.ask("/api/v10/channels/100000000000000001/messages", token, "").await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    let after = all(nodes.iter().copied(), SENT).await;
    let sent: Vec<_> = before.iter().zip(&after).map(|(before, after)| after - before).collect();
    let owner = sent.iter().position(|&sent| sent == nodes.len() as f64);
    owner.unwrap_or_else(|| panic!("one owner and not {sent:?}"))
}

/// A token that the node at this place owns.
async fn owned_by<'a>(nodes: impl IntoIterator<Item = &'a Node>, place: usize, name: &str) -> String {
    let nodes: Vec<&Node> = nodes.into_iter().collect();
    for number in 0..200 {
        let token = format!("{name}-{number}");
        if owner(nodes.iter().copied(), &token).await == place {
            return token;
        }
    }
    panic!("it owns nothing");
}

/// A token for which the first three nodes rank in this order: the first owns it, and the last only once both others are gone.
fn ranked(order: [u8; 3], name: &str) -> String {
    let of = |numbers: &[u8]| {
        let member = |&number: &u8| Member {
            name: format!("node-{number}").into(),
            gossip: ([127, 0, 0, number], 1).into(),
            peer_port: 1,
            generation: 1,
        };
        Members::new(1, numbers.iter().map(member), ([127, 0, 0, order[2]], 1).into(), 3)
    };
    let owns = |members: Members, token: &str, number: u8| {
        let key = Identity::from_authorization(Some(format!("Bot {token}").as_bytes())).key;
        matches!(members.owner(&key), Owner::Peer(owner) if *owner.name == *format!("node-{number}"))
    };
    let token = (0..1_000)
        .map(|number| format!("{name}-{number}"))
        .find(|token| owns(of(&order), token, order[0]) && owns(of(&order[1..]), token, order[1]));
    token.expect("one of so many")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credential_has_one_owner_whichever_node_is_asked() {
    let town = Town::new(unlimited()).await;
    let nodes = three(&town).await;
    let mut owned = [0; 3];
    for token in 0..12 {
        owned[owner(&nodes, &format!("token-{token}")).await] += 1;
    }
    assert!(owned.iter().all(|&count| count > 0), "{owned:?}");
    let sent: f64 = all(&nodes, "nirn_proxy_requests_routed_sent").await.iter().sum();
    let received: f64 = all(&nodes, "nirn_proxy_requests_routed_received").await.iter().sum();
    assert_eq!((sent, received), (24.0, 24.0), "each node is asked once for each token and owns it once");
    let unauthenticated = "GET /api/v10/gateway HTTP/1.1\r\nhost: proxy\r\n\r\n";
    let before = all(&nodes, SENT).await;
    for node in &nodes {
        let mut client = support::client::Client::connect(node.address()).await;
        client.send(unauthenticated).await;
        assert_eq!(client.answer().await.status, 200);
    }
    let after = all(&nodes, SENT).await;
    assert!(before.iter().zip(&after).any(|(before, after)| after - before == 3.0), "one owner for all of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_global_limit_holds_over_all_entry_nodes() {
    let town = Town::new(Script::default()).await;
    let nodes = three(&town).await;
    assert_eq!(nodes[0].ask("/users/@me", "token", "").await.status, 200);
    let asking = (0..150usize).map(|number| {
        let node = &nodes[number % 3];
        async move {
            let path = format!("/api/v10/channels/1000000000000{number:05}/messages");
            node.ask(&path, "token", "").await.status
        }
    });
    let start = Instant::now();
    let mut asking: Vec<_> = asking.map(Box::pin).collect();
    let statuses = futures_of(&mut asking).await;
    assert!(statuses.iter().all(|&status| status == 200), "{statuses:?}");
    assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
    seconds::kept(&town.discord);
    assert_eq!(town.discord.counts().verdict("ok"), 151);
}

/// Polls all to their end.
async fn futures_of<F: Future + Unpin>(list: &mut [F]) -> Vec<F::Output> {
    let mut outputs: Vec<Option<F::Output>> = list.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (future, output) in list.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let std::task::Poll::Ready(value) = std::pin::Pin::new(future).poll(cx)
            {
                *output = Some(value);
            }
        }
        if outputs.iter().all(Option::is_some) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_killed_node_only_its_credentials_move_and_come_back_with_it() {
    let town = Town::new(unlimited()).await;
    let [one, two, mut three] = three(&town).await;
    let tokens: Vec<String> = (0..12).map(|number| format!("token-{number}")).collect();
    let mut nodes = [one, two, three];
    let mut before = Vec::new();
    for token in &tokens {
        before.push(owner(&nodes, token).await);
    }
    nodes[2].child.kill().await.unwrap();
    let killed = Instant::now();
    for (token, &owner) in tokens.iter().zip(&before) {
        let path = "/api/v10/channels/100000000000000001/messages";
        let answer = nodes[0].ask(path, token, "").await;
        if owner == 2 {
            assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
            assert_eq!(nodes[0].failures("peer_error").await, 1.0);
            break;
        }
        assert_eq!(answer.status, 200, "a credential of another node is not concerned");
    }
    nodes[0].sees(2.0).await;
    nodes[1].sees(2.0).await;
    nodes[0].says("member left or died").await;
    nodes[0].says("member does not answer").await;
    assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
    for (token, &former) in tokens.iter().zip(&before) {
        let now = owner(&nodes[..2], token).await;
        assert!(now == former || former == 2);
    }
    three = town.node(3).await;
    nodes[2] = three;
    for node in &nodes {
        node.sees(3.0).await;
    }
    for (token, &former) in tokens.iter().zip(&before) {
        assert_eq!(owner(&nodes, token).await, former);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_hop_and_datagrams_of_strangers_have_no_effect() {
    let town = Town::new(unlimited()).await;
    let nodes = three(&town).await;
    let socket = tokio::net::UdpSocket::bind((town.ip(200), 0)).await.unwrap();
    for length in 0..1_500 {
        socket.send_to(&vec![u8::try_from(length % 251).unwrap(); length], (nodes[0].ip, 7946)).await.unwrap();
    }
    for token in 0..6 {
        for node in &nodes {
            let answer = node.ask("/api/v10/users/@me", &format!("token-{token}"), "x-nirn-hop: 1\r\n").await;
            assert_eq!(answer.status, 200, "{answer:?}");
        }
    }
    for node in &nodes {
        assert_eq!(node.metric("nirn_proxy_cluster_members").await, 3.0);
    }
    let arrivals = town.discord.arrivals();
    assert_eq!(arrivals.len(), 18);
    assert!(arrivals.iter().all(|arrival| arrival.header("x-nirn-hop").is_none()), "a hop is no business of Discord's");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_reaches_discord_the_same_whether_it_hops_or_not() {
    let town = Town::new(unlimited()).await;
    let nodes = three(&town).await;
    let bare = |line: &str| format!("{line} HTTP/1.1\r\nhost: proxy\r\nauthorization: Bot token\r\n");
    let chunked = "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n";
    let known = "content-length: 11\r\nx-one: 1\r\nX-One: 2\r\n\r\nhello world";
    let requests = [
        bare("OPTIONS *") + "\r\n",
        bare("POST //a%2f/../b/{x}/?") + chunked,
        bare("PUT /api/v10/channels/100000000000000001/x?limit=1&&") + known,
        bare("POST /empty") + "connection: x-gone\r\nx-gone: 1\r\nx-forwarded-for: 1\r\n\r\n",
    ];
    for request in requests {
        for node in &nodes {
            let mut client = support::client::Client::connect(node.address()).await;
            client.send(&request).await;
            assert_eq!(client.answer().await.status, 200, "{request}");
        }
        let arrivals = town.discord.arrivals();
        let [.., one, two, three] = &arrivals[..] else { panic!("three arrivals") };
        for other in [two, three] {
            assert_eq!(one.target, other.target);
            assert_eq!((&one.method, one.body_sha256), (&other.method, other.body_sha256), "{request}");
            let sorted = |arrival: &fake_discord::Arrival| {
                let mut headers = arrival.headers.clone();
                headers.sort();
                headers
            };
            assert_eq!(sorted(one), sorted(other), "{request}");
        }
    }
    let sent: f64 = all(&nodes, "nirn_proxy_requests_routed_sent").await.iter().sum();
    assert_eq!(sent, 8.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn above_the_cap_nobody_serves_until_it_is_no_longer_so() {
    let town = Town::new(unlimited()).await;
    let cap = [("CLUSTER_MAX_NODES", "2")];
    let one = town.node_with(1, &cap).await;
    let two = town.node_with(2, &cap).await;
    let three = town.node_with(3, &[("CLUSTER_MAX_NODES", "3")]).await;
    one.has_health(503).await;
    two.has_health(503).await;
    one.says("member joined").await;
    one.says("more than CLUSTER_MAX_NODES=2").await;
    let refused = one.ask("/api/v10/users/@me", "token", "").await;
    assert_eq!(refused.status, 503);
    assert!(refused.text().contains("CLUSTER_MAX_NODES"), "{}", refused.text());
    assert_eq!(one.failures("cluster_over_capacity").await, 1.0);
    three.signal("TERM").await;
    one.serves().await;
    two.serves().await;
    one.says("within CLUSTER_MAX_NODES again").await;
    assert_eq!(one.ask("/api/v10/users/@me", "token", "").await.status, 200);
    assert_eq!(three.ended().await.0, Some(0));
    let fourth = town.launch(4, &cap, &town.ca, |_| {});
    let (code, log) = fourth.ended().await;
    assert_eq!(code, Some(1));
    assert!(log.contains("CLUSTER_MAX_NODES"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_replaced_in_turn_lose_no_request() {
    let town = Town::new(unlimited()).await;
    let mut nodes: Vec<Option<Node>> = three(&town).await.into_iter().map(Some).collect();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let addresses: Vec<_> = nodes.iter().flatten().map(Node::address).collect();
    // As a load balancer does, clients leave a node that answers 503 to their probe.
    let out = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(usize::MAX));
    let clients = (0..8usize).map(|client| {
        let (stop, out, addresses) = (stop.clone(), out.clone(), addresses.clone());
        tokio::spawn(async move {
            let mut answered = 0;
            let mut number = client;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                number += 1;
                if number % 3 == out.load(std::sync::atomic::Ordering::Relaxed) {
                    continue;
                }
                let mut connection = support::client::Client::connect(addresses[number % 3]).await;
                let head = format!("GET /users/@me HTTP/1.1\r\nhost: p\r\nauthorization: Bot token-{number}\r\n\r\n");
                connection.send(head).await;
                let answer = connection.answer().await;
                assert_eq!(answer.status, 200, "{answer:?}");
                answered += 1;
                sleep(Duration::from_millis(5)).await;
            }
            answered
        })
    });
    let clients: Vec<_> = clients.collect();
    for (number, place) in nodes.iter_mut().enumerate() {
        sleep(Duration::from_millis(300)).await;
        out.store(number, std::sync::atomic::Ordering::Relaxed);
        sleep(Duration::from_millis(300)).await;
        let old = place.take().unwrap();
        old.signal("TERM").await;
        let (code, log) = old.ended().await;
        assert_eq!(code, Some(0), "{log}");
        *place = Some(town.node(u8::try_from(number).unwrap() + 1).await);
        out.store(usize::MAX, std::sync::atomic::Ordering::Relaxed);
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut answered = 0;
    for client in clients {
        answered += tokio::time::timeout(PATIENCE, client).await.unwrap().unwrap();
    }
    assert!(answered > 100, "{answered}");
}
