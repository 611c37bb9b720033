//! Every node is replaced in turn, and nobody who asks notices.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use fake_discord::{Rule, Script};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use crate::seconds;
use crate::support::PATIENCE;
use crate::support::client::{Answer, Client};
use crate::town::{Node, Town};
use crate::{owned_by, three};

/// Longer than a node that stops lets anybody wait: then its 503 sends them to another node, where the bucket is as closed.
const CLOSED_FOR: Duration = Duration::from_secs(30);
/// An upload's parts, and the pause after each.
const PART: usize = 64 * 1024;
const PARTS: usize = 24;
const PAUSE: Duration = Duration::from_millis(40);

/// What a client asks for, again and again.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// As much as the global limit lets through.
    Saturate,
    /// A bucket that each call closes.
    Closed,
    /// A large body, slowly.
    Upload,
}

/// A service's part: asks the node it likes, and the next one when that refuses connections or new requests.
struct Service {
    nodes: Vec<SocketAddr>,
    home: usize,
    token: String,
    kind: Kind,
    number: usize,
}

impl Service {
    /// One request, answered; its target, which no other has.
    async fn ask(&self, round: usize) -> (String, Answer) {
        let channel = 100_000_000_000_000_100 + self.number;
        let (method, route, length) = match self.kind {
            Kind::Saturate => ("GET", "messages", 0),
            Kind::Closed => ("POST", "pins", 2),
            Kind::Upload => ("POST", "attachments", PART * PARTS),
        };
        let target = format!("/api/v10/channels/{channel}/{route}?round={round}");
        let head = format!(
            "{method} {target} HTTP/1.1\r\nhost: p\r\nauthorization: Bot {}\r\ncontent-length: {length}\r\n\r\n",
            self.token
        );
        for turn in 0..1_000 {
            let node = self.nodes[(self.home + turn) % self.nodes.len()];
            match self.try_at(node, &head).await {
                Some(answer) if answer.status == 503 && answer.text().contains("shutting down") => {}
                Some(answer) => return (target, answer),
                None => {}
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("no node serves");
    }

    /// None if the node is not there, or goes before it takes the request.
    async fn try_at(&self, node: SocketAddr, head: &str) -> Option<Answer> {
        let mut client = Client::over(TcpStream::connect(node).await.ok()?);
        client.patience += CLOSED_FOR;
        client.stream.write_all(head.as_bytes()).await.ok()?;
        match self.kind {
            Kind::Saturate => {}
            Kind::Closed => client.stream.write_all(b"{}").await.ok()?,
            Kind::Upload => {
                let part = vec![u8::try_from(self.number).unwrap(); PART];
                for _ in 0..PARTS {
                    // One that is refused is told so before its body is read.
                    if client.stream.write_all(&part).await.is_err() {
                        break;
                    }
                    sleep(PAUSE).await;
                }
            }
        }
        client.answer_if_any(if matches!(self.kind, Kind::Saturate) { "GET" } else { "POST" }).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_replaced_in_turn_under_load_lose_no_request_and_draw_no_429() {
    let rule = Rule::window("POST /channels/{}/pins", "abcd4444", 1, CLOSED_FOR);
    let town = Town::new(Script { rules: vec![rule], ..Script::default() }).await;
    let mut nodes: Vec<Option<Node>> = three(&town).await.into_iter().map(Some).collect();
    let addresses: Vec<SocketAddr> = nodes.iter().flatten().map(Node::address).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let uploads = Arc::new(AtomicUsize::new(0));
    let mut clients = Vec::new();
    let kinds = [(Kind::Saturate, 8), (Kind::Closed, 4), (Kind::Upload, 4)];
    for (place, (kind, count)) in kinds.into_iter().enumerate() {
        let token = owned_by(nodes.iter().flatten(), place, &format!("{kind:?}")).await;
        for number in 0..count {
            let service = Service { nodes: addresses.clone(), home: number, token: token.clone(), kind, number };
            let (stop, uploads) = (stop.clone(), uploads.clone());
            clients.push(tokio::spawn(async move {
                let mut targets = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let (target, answer) = service.ask(targets.len()).await;
                    assert_eq!(answer.status, 200, "{kind:?} {target}: {answer:?}");
                    assert!(answer.header("generated-by-proxy").is_none());
                    targets.push(target);
                    uploads.fetch_add(usize::from(matches!(kind, Kind::Upload)), Ordering::Relaxed);
                }
                targets
            }));
        }
    }
    let start = Instant::now();
    for (number, place) in nodes.iter_mut().enumerate() {
        sleep(Duration::from_secs(2)).await;
        let old = place.take().unwrap();
        old.signal("TERM").await;
        let (code, log) = old.ended().await;
        assert_eq!(code, Some(0), "{log}");
        let new = town.node(u8::try_from(number).unwrap() + 1).await;
        new.sees(3.0).await;
        *place = Some(new);
    }
    sleep(Duration::from_secs(2)).await;
    stop.store(true, Ordering::Relaxed);
    let mut answered = Vec::new();
    for client in clients {
        answered.extend(timeout(2 * CLOSED_FOR + PATIENCE, client).await.unwrap().unwrap());
    }
    seconds::kept(&town.discord);
    let mut arrived: BTreeMap<String, usize> = BTreeMap::new();
    for arrival in town.discord.arrivals() {
        *arrived.entry(arrival.target_text()).or_default() += usize::from(arrival.status == 200);
    }
    for target in &answered {
        // Each client of the three kinds asks for a path of its own kind.
        assert_eq!(arrived[target], 1, "{target} was done once");
    }
    let saturated = answered.iter().filter(|target| target.contains("messages")).count();
    let second = start.elapsed().as_secs_f64();
    assert!(saturated as f64 > 30.0 * second, "{saturated} of a token at its limit in {second} s");
    assert!(uploads.load(Ordering::Relaxed) >= 12, "{uploads:?}");
}
