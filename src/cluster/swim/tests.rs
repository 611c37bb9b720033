use tokio::time::timeout;

use super::*;
use crate::config::{Secret, Seed, Seeds};

const SECRET: &str = "a secret of at least 32 characters";

async fn socket() -> (UdpSocket, SocketAddr) {
    let socket = listen(IpAddr::from([127, 0, 0, 1]), 0).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

fn settings(name: &str, gossip: SocketAddr, seeds: &[SocketAddr], secret: &str) -> Settings {
    let seeds = seeds.iter().map(|seed| Seed { host: seed.ip().to_string(), port: seed.port() }).collect();
    Settings {
        local: Member { name: name.into(), gossip, peer_port: 1, generation: clock::unix_ms() },
        seeds: Seeds::Members(seeds),
        secret: Secret::new(secret.to_owned()),
        cap: 3,
    }
}

async fn counts(gossip: &Gossip, count: usize) {
    let mut members = gossip.members();
    let reached = members.wait_for(|members| members.list().len() == count);
    timeout(Duration::from_secs(10), reached).await.expect("in time").unwrap();
}

async fn join(settings: Settings, socket: UdpSocket) -> Result<Gossip, String> {
    let (publish, _) = watch::channel(Arc::new(settings.first_view()));
    let gossip = Gossip::start(settings, socket, publish)?;
    if let Err(error) = gossip.joined().await {
        gossip.leave().await;
        return Err(error);
    }
    Ok(gossip)
}

async fn first() -> (Gossip, SocketAddr) {
    let (socket, address) = socket().await;
    (join(settings("first", address, &[address], SECRET), socket).await.unwrap(), address)
}

async fn next(name: &str, seed: SocketAddr) -> Result<Gossip, String> {
    let (socket, address) = socket().await;
    join(settings(name, address, &[seed], SECRET), socket).await
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_find_each_other_and_notice_who_leaves_and_who_dies() {
    let (one, seed) = first().await;
    let (two, three) = (next("second", seed).await.unwrap(), next("third", seed).await.unwrap());
    for node in [&one, &two, &three] {
        counts(node, 3).await;
    }
    let started = Instant::now();
    three.leave().await;
    counts(&one, 2).await;
    counts(&two, 2).await;
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    let last = three.members().borrow().clone();
    assert_eq!((last.list().len(), last.has_local()), (2, false), "what it knew of the others stays in force");
    let started = Instant::now();
    drop(two);
    counts(&one, 1).await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn one_member_too_many_or_a_name_taken_stops_the_start() {
    let (one, seed) = first().await;
    let (_two, _three) = (next("second", seed).await.unwrap(), next("third", seed).await.unwrap());
    let over = next("fourth", seed).await.err().unwrap();
    assert!(over.starts_with("CLUSTER_MAX_NODES"), "{over}");
    counts(&one, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_in_use_and_a_wrong_secret_stop_the_start_after_10_s() {
    let (_one, seed) = first().await;
    let foreign = async {
        let (socket, address) = socket().await;
        join(settings("other", address, &[seed], "another secret of 32 characters.."), socket).await
    };
    let noise = async {
        let (socket, _) = socket().await;
        for length in 0..1_500 {
            socket.send_to(&vec![1; length], seed).await.unwrap();
        }
    };
    let (taken, foreign, ()) = tokio::join!(next("first", seed), foreign, noise);
    let (taken, foreign) = (taken.err().unwrap(), foreign.err().unwrap());
    assert!(taken.starts_with("NODE_NAME"), "{taken}");
    assert!(foreign.starts_with("CLUSTER_MEMBERS: no seed answered within 10 s"), "{foreign}");
    assert!(foreign.contains("CLUSTER_SECRET"), "{foreign}");
}
