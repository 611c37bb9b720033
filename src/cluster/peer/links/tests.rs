use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::*;
use crate::cluster::peer::tests::{HOME, PATIENCE, Running, describe, peer, peers, tls};
use crate::cluster::peer::{PING_INTERVAL, PING_PATIENCE, Peers};
use crate::cluster::tls::tests::Ca;
use crate::error::{ProxyError, Reason};
use crate::upstream::RequestBody;

/// The network between two nodes: counts their connections, and stops carrying anything when told to.
struct Road {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    /// Where it leads to.
    owner: watch::Sender<SocketAddr>,
    blocked: watch::Sender<bool>,
}

impl Road {
    async fn to(owner: SocketAddr) -> Self {
        let listener = TcpListener::bind((HOME, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let (owner, leads_to) = watch::channel(owner);
        let (blocked, block) = watch::channel(false);
        let count = connections.clone();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (mut block, owner) = (block.clone(), *leads_to.borrow());
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(owner).await else { return };
                    let blocked = async { drop(block.wait_for(|blocked| *blocked).await) };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
                        () = blocked => {}
                    }
                    // What is on its way stays there: neither end hears that the other is gone.
                    std::future::pending().await
                });
            }
        });
        Self { address, connections, owner, blocked }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_share_a_connection_and_dial_again_when_the_owner_has_restarted() {
    let tls = tls(&Ca::new().node(HOME));
    let owner = peer(&tls, describe).await;
    let road = Road::to(owner.address).await;
    let peers = peers(&tls);
    let ask = || {
        let (peers, to) = (peers.clone(), road.address);
        async move {
            let answer = peers.forward(to, Request::get("/x").body(RequestBody::empty()).unwrap(), 1).await?;
            Ok::<_, ProxyError>(answer.response.into_body().collect().await.unwrap().to_bytes())
        }
    };
    let asking: JoinSet<_> = (0..50).map(|_| ask()).collect();
    assert!(asking.join_all().await.into_iter().all(|answer| answer.unwrap().starts_with(b"GET /x")));
    assert_eq!(road.connections(), 1);
    owner.closing.send(true).unwrap();
    timeout(PATIENCE, owner.served).await.expect("in time").unwrap();
    assert_eq!(ask().await.unwrap_err(), ProxyError::Unavailable(Reason::PeerError));
    let restarted = peer(&tls, describe).await;
    road.owner.send(restarted.address).unwrap();
    assert!(ask().await.unwrap().starts_with(b"GET /x"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_falls_silent_loses_its_requests_and_is_dialled_again() {
    let tls = tls(&Ca::new().node(HOME));
    let (running, owner) = Running::start(&tls).await;
    let road = Road::to(owner.address).await;
    let peers = Peers { bound: Duration::from_secs(60), ..peers(&tls) };
    let ask = || {
        let (peers, to) = (peers.clone(), road.address);
        async move { peers.forward(to, Request::new(RequestBody::empty()), 1).await.map(|_| "an answer") }
    };
    let asked = tokio::spawn(ask());
    running.reach(1).await;
    // Long enough that pings were answered before.
    tokio::time::sleep(PING_INTERVAL + Duration::from_millis(500)).await;
    assert!(!asked.is_finished());
    road.blocked.send(true).unwrap();
    let silent = Instant::now();
    assert_eq!(asked.await.unwrap(), Err(ProxyError::Unavailable(Reason::PeerError)));
    running.reach(0).await;
    assert!(silent.elapsed() < PING_INTERVAL + PING_PATIENCE + Duration::from_secs(1), "{:?}", silent.elapsed());
    road.blocked.send(false).unwrap();
    let _asked = tokio::spawn(ask());
    running.reach(1).await;
    assert_eq!(road.connections(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_never_speaks_http_2_is_hung_up_on() {
    let tls = tls(&Ca::new().node(HOME));
    let owner = peer(&tls, describe).await;
    let connector = Connector { tls: tokio_rustls::TlsConnector::from(tls.client.clone()), local: None };
    let mut silent = connector.dial(owner.address).await.unwrap();
    let dialled = Instant::now();
    let ended = timeout(PATIENCE, silent.read_to_end(&mut Vec::new())).await;
    assert!(ended.is_ok(), "the listener still waits");
    assert!(dialled.elapsed() > Duration::from_secs(4), "{:?}", dialled.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::disallowed_methods, reason = "the owner's one thread has to stand still")]
async fn clients_that_leave_all_at_once_take_nobody_elses_requests_with_them() {
    const LEAVE: usize = 300;
    let tls = tls(&Ca::new().node(HOME));
    let (arrived, mut arrivals) = tokio::sync::mpsc::channel(LEAVE);
    let (bound, address) = tokio::sync::oneshot::channel();
    let owners = tls.clone();
    // An owner with one thread, which one request holds up for a while.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let owner = peer(&owners, move |request| {
                let arrived = arrived.clone();
                async move {
                    let path = request.uri().path().to_owned();
                    arrived.send(path.clone()).await.unwrap();
                    match path.as_str() {
                        "/busy" => std::thread::sleep(Duration::from_millis(500)),
                        "/long" => tokio::time::sleep(Duration::from_secs(2)).await,
                        _ => {}
                    }
                    describe(request).await
                }
            })
            .await;
            bound.send(owner.address).unwrap();
            owner.served.await.unwrap();
        });
    });
    let (peers, to) = (peers(&tls), address.await.unwrap());
    let ask = |path: &str| {
        let (peers, request) = (peers.clone(), Request::get(path).body(RequestBody::empty()).unwrap());
        tokio::spawn(async move { peers.forward(to, request, 1).await.map(|answer| answer.response.status()) })
    };
    let long = ask("/long");
    assert_eq!(arrivals.recv().await.unwrap(), "/long");
    let busy = ask("/busy");
    assert_eq!(arrivals.recv().await.unwrap(), "/busy");
    let leaving: Vec<_> = (0..LEAVE).map(|_| ask("/short")).collect();
    tokio::time::sleep(Duration::from_millis(150)).await;
    leaving.iter().for_each(tokio::task::JoinHandle::abort);
    assert_eq!(busy.await.unwrap().unwrap(), 200);
    assert_eq!(long.await.unwrap().unwrap(), 200);
}
