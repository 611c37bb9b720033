//! What a hop costs and what it leaves behind.

use std::fs;
use std::time::Duration;

use fake_discord::{Rule, Script};
use tokio::time::{Instant, sleep};

use crate::support::PATIENCE;
use crate::support::client::Client;
use crate::town::{Node, Town};
use crate::{ALONE, owned_by, three, unlimited};

const PINS: &str = "/api/v10/channels/100000000000000001/pins";
/// The largest upload that Discord takes from most bots.
const UPLOAD: usize = 25 * 1024 * 1024;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_at_the_entry_node_frees_its_place_at_the_owner() {
    let rule = Rule::window("GET /channels/{}/pins", "abcd4444", 1, Duration::from_secs(30));
    let town = Town::new(Script { rules: vec![rule], ..unlimited() }).await;
    let nodes = three(&town).await;
    let token = owned_by(&nodes, 2, "token").await;
    let open = async |expected: f64| {
        let start = Instant::now();
        while nodes[2].metric("nirn_proxy_open_connections").await != expected {
            assert!(start.elapsed() < PATIENCE, "{expected} open");
            sleep(Duration::from_millis(10)).await;
        }
    };
    assert_eq!(nodes[0].ask(PINS, &token, "").await.status, 200);
    let mut waiting = Vec::new();
    for entry in [0, 0, 1] {
        let mut client = Client::connect(nodes[entry].address()).await;
        client.send(format!("GET {PINS} HTTP/1.1\r\nhost: proxy\r\nauthorization: Bot {token}\r\n\r\n")).await;
        waiting.push(client);
    }
    open(3.0).await;
    let left = Instant::now();
    drop(waiting);
    open(0.0).await;
    assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_upload_is_its_clients_fault_whether_it_hops_or_not() {
    let town = Town::new(unlimited()).await;
    let nodes = [town.node(1).await, town.node(2).await];
    for node in &nodes {
        node.sees(2.0).await;
    }
    let token = owned_by(&nodes, 1, "token").await;
    for (count, node) in nodes.iter().enumerate() {
        let mut client = Client::connect(node.address()).await;
        let head = format!("POST /api/v10/channels/1/messages HTTP/1.1\r\nhost: p\r\nauthorization: Bot {token}\r\n");
        client.send(format!("{head}transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n")).await;
        let answer = client.answer_to("POST").await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains("malformed") && answer.header("retry-after").is_none(), "{count}: {answer:?}");
        // The owner has seen the first one break off too.
        assert!(node.failures("bad_request").await >= 1.0);
        assert_eq!(node.metric("nirn_proxy_requests_routed_error").await, 0.0);
        assert_eq!(node.failures("peer_error").await, 0.0);
        assert!(!node.log.lock().contains("cannot reach a peer"), "{}", node.log.lock());
    }
}

fn kilobytes(node: &Node, what: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", node.child.id().unwrap())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    line.trim_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_upload_crosses_in_bounded_memory_at_both_nodes() {
    let _alone = ALONE.lock().await;
    let town = Town::new(unlimited()).await;
    // The owner keeps bodies for a retry as its settings say; here it is the crossing that is weighed.
    let keeps_none = [("MAX_RETRY_CAPTURE_BYTES", "0")];
    let one = town.node_with(1, &keeps_none).await;
    let nodes = [one, town.node_with(2, &keeps_none).await, town.node_with(3, &keeps_none).await];
    for node in &nodes {
        node.sees(3.0).await;
    }
    let token = owned_by(&nodes, 2, "token").await;
    let before = [kilobytes(&nodes[0], "VmRSS:"), kilobytes(&nodes[2], "VmRSS:")];
    let mut client = Client::connect(nodes[0].address()).await;
    let head = format!(
        "POST /api/v10/channels/100000000000000001/attachments HTTP/1.1\r\nhost: p\r\nauthorization: Bot {token}"
    );
    client.send(format!("{head}\r\ncontent-length: {UPLOAD}\r\n\r\n")).await;
    let part = vec![7; 64 * 1024];
    for _ in 0..UPLOAD / part.len() {
        client.send(&part).await;
    }
    assert_eq!(client.answer_to("POST").await.status, 200);
    let arrival = town.discord.arrivals().pop().unwrap();
    assert_eq!(arrival.body_len, u64::try_from(UPLOAD).unwrap());
    let most = [kilobytes(&nodes[0], "VmHWM:"), kilobytes(&nodes[2], "VmHWM:")];
    for (before, most) in before.into_iter().zip(most) {
        assert!(most - before < 8 * 1024, "grew by {} KiB", most - before);
    }
}
