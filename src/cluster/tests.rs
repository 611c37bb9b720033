use std::convert::Infallible;
use std::time::Duration;

use http::Method;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::*;
use crate::cluster::tls::tests::{Ca, NOW};
use crate::scheduler::handover::{Credential, Gone, Handover};

fn member(number: u8) -> Member {
    let gossip = SocketAddr::from(([10, 0, 0, number], 7946));
    Member { name: format!("node-{number}").into(), gossip, peer_port: 8443, generation: 0 }
}

fn membership(members: Members) -> (Membership, watch::Sender<Arc<View>>) {
    let (publish, members) = watch::channel(Arc::new(View::new(members, Instant::now())));
    let tls = tls::configure(&Ca::new().node("127.0.0.1"), [127, 0, 0, 1].into(), NOW).unwrap();
    (Membership::new("node-1".into(), members, Peers::new(tls.client, None, Duration::from_secs(1))), publish)
}

#[test]
fn a_remembered_owner_is_the_owner_and_is_forgotten_with_its_membership() {
    let view = |epoch, count: u8| Members::new(epoch, (1..=count).map(member), member(1).gossip, 4);
    let (membership, publish) = membership(view(1, 3));
    let keys: Vec<Key> = (0..2_000u32)
        .map(|number| {
            let mut key = [0; 32];
            key.copy_from_slice(digest(&SHA256, &number.to_le_bytes()).as_ref());
            key
        })
        .collect();
    for (epoch, count) in [(1, 3), (2, 4), (3, 2), (4, 5)] {
        let expected = view(epoch, count);
        publish.send_replace(Arc::new(View::new(view(epoch, count), Instant::now())));
        for key in keys.iter().chain(&keys) {
            assert_eq!(membership.owners.owner(key), expected.owner(key));
        }
    }
}

#[tokio::test]
async fn a_node_that_joins_waits_for_the_word_of_those_it_takes_over_from_and_not_for_long() {
    let now = Instant::now();
    let alone = View::new(Members::new(1, [member(1)], member(1).gossip, 4), now);
    let joined = alone.followed_by(Members::new(2, [member(1), member(2)], member(1).gossip, 4), now);
    let (membership, publish) = membership(Members::new(1, [member(1)], member(1).gossip, 4));
    let key = (0..100).map(|byte| [byte; 32]).find(|key| joined.owner(key) == Owner::Local).unwrap();
    publish.send_replace(Arc::new(joined));
    let cluster = Cluster::Member(Arc::new(membership));
    // It says nothing, as one that does not know how to.
    assert!(matches!(cluster.way(&key, 1, false, far()).await, Ok(Way::Here { unheard: true })));
    assert!(now.elapsed() >= Duration::from_secs(1) && now.elapsed() < Duration::from_secs(5));
    let Cluster::Member(membership) = &cluster else { panic!("a member") };
    let now = Instant::now();
    let alone = View::new(Members::new(3, [member(1)], member(1).gossip, 4), now);
    let joined = alone.followed_by(Members::new(4, [member(1), member(2)], member(1).gossip, 4), now);
    publish.send_replace(Arc::new(joined));
    let speaking = async {
        sleep(Duration::from_millis(50)).await;
        let word = Handover { from: "node-2".into(), own: true, ..Handover::default() };
        membership.heard.note(&word, Instant::now());
    };
    let (way, ()) = tokio::join!(cluster.way(&key, 1, false, far()), speaking);
    assert!(matches!(way, Ok(Way::Here { unheard: false })) && now.elapsed() < Duration::from_secs(1));
    // A hop for what another node owns: it was never this one's.
    let key = (0..100).map(|byte| [byte; 32]).find(|key| membership.owners.owner(key) != Owner::Local).unwrap();
    publish.send_modify(|view| {
        *view = Arc::new(View::new(Members::new(5, (1..=2).map(member), member(1).gossip, 4), now))
    });
    let refused = ProxyError::Unavailable(Reason::ClusterRouting);
    assert_eq!(cluster.way(&key, 1, false, far()).await.unwrap_err(), refused);
    assert!(matches!(cluster.way(&key, 0, false, far()).await, Ok(Way::There(_, 1))));
    assert!(matches!(cluster.way(&key, 1, true, far()).await, Ok(Way::There(_, 2))), "it waited here");
    assert_eq!(cluster.way(&key, MAX_HOPS, true, far()).await.unwrap_err(), refused);
}

#[tokio::test]
async fn what_one_that_leaves_sends_to_another_that_leaves_goes_on_to_who_stays() {
    let now = Instant::now();
    let three = || Members::new(1, (1..=3).map(member), member(1).gossip, 4);
    let before = View::new(three(), now);
    let (membership, publish) = membership(three());
    // This node is the heir of the key's owner.
    let owned_by = |view: &View, key: &Key, number: u8| view.owner(key) == Owner::Peer(Arc::new(member(number)));
    let heir = View::new(Members::new(1, [member(1), member(3)], member(1).gossip, 4), now);
    let mut keys = (0..=255).map(|byte| [byte; 32]);
    let key = keys.find(|key| owned_by(&before, key, 2) && heir.owner(key) == Owner::Local).unwrap();
    let cluster = Cluster::Member(Arc::new(membership));
    let left = before.followed_by(three().without_local(2).unwrap(), now);
    publish.send_replace(Arc::new(left));
    let Ok(Way::There(next, 3)) = cluster.way(&key, 2, false, far()).await else { panic!("a third hop") };
    assert_eq!(*next, member(3), "the owner has sent it, so it is not the owner any more");
    // From a node that thinks this one the owner: there is nothing to wait for here.
    assert!(matches!(cluster.way(&key, 1, false, far()).await, Ok(Way::There(next, 2)) if *next == member(2)));
    let refused = ProxyError::Unavailable(Reason::ClusterRouting);
    assert_eq!(cluster.way(&key, MAX_HOPS, false, far()).await.unwrap_err(), refused);
    // The owner has told it that it has left, as the gossip has not.
    let Cluster::Member(membership) = &cluster else { panic!("a member") };
    let gone = vec![Gone { name: "node-2".into(), generation: 0 }];
    membership.heard.note(&Handover { from: "node-2".into(), gone, ..Handover::default() }, Instant::now());
    assert!(matches!(cluster.way(&key, 1, false, far()).await, Ok(Way::There(next, 2)) if *next == member(3)));
    assert!(matches!(cluster.way(&key, 2, false, far()).await, Ok(Way::There(next, 3)) if *next == member(3)));
    // It has heard that the owner left before it left itself.
    let alone = Members::new(2, [member(1), member(3)], member(1).gossip, 4);
    let gone = before.followed_by(alone, now).followed_by(Members::new(3, [member(3)], member(1).gossip, 4), now);
    publish.send_replace(Arc::new(gone));
    assert!(matches!(cluster.way(&key, 2, false, far()).await, Ok(Way::There(next, 3)) if *next == member(3)));
}

#[test]
fn only_unauthenticated_interactions_are_spread_by_what_they_are_for() {
    let key_of = |authorization: Option<&[u8]>, path: &str| {
        let route = Route::classify(&Method::POST, path, 0);
        key(&Identity::from_authorization(authorization), &route, path)
    };
    let callback = |token: &str| format!("/api/v10/interactions/12345678901234567/{token}/callback");
    let one = key_of(None, &callback("aW50ZXJhY3Rpb246one"));
    assert_ne!(one, key_of(None, &callback("aW50ZXJhY3Rpb246two")));
    assert_eq!(one, key_of(None, "/api/webhooks/12345678901234567/aW50ZXJhY3Rpb246one/messages/@original"));
    assert_eq!(one, key_of(None, "/webhooks/12345678901234567/aW50ZXJhY3Rpb246on%65"));
    let other = key_of(None, "/api/v10/gateway");
    assert_eq!(other, key_of(Some(b"Basic eDp5"), "/api/v10/webhooks/12345678901234567/token"));
    let bot = key_of(Some(b"Bot secret"), "/gateway");
    assert_eq!(bot, key_of(Some(b"Bot secret"), &callback("aW50ZXJhY3Rpb246one")));
    assert!(bot != other && bot != one && one != other);
}

fn far() -> Deadline {
    Deadline::now() + Duration::from_secs(60)
}

/// A node that stays, and what it is told; it takes its time.
async fn stays(tls: &tls::Tls, slow: Duration) -> (SocketAddr, mpsc::Receiver<Handover>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (told, telling) = mpsc::channel(8);
    let take = move |message: &[u8]| {
        told.try_send(Handover::decode(message).unwrap()).unwrap();
        async move {
            sleep(slow).await;
            true
        }
    };
    let server = tls.server.clone();
    tokio::spawn(async move {
        let member = Member { gossip: address, peer_port: address.port(), ..member(3) };
        let (_publish, members) =
            watch::channel(Arc::new(View::new(Members::new(1, [member], address, 4), Instant::now())));
        let (_close, closing) = watch::channel(false);
        let handle = |_| async { Ok::<_, Infallible>(http::Response::new(http_body_util::Empty::<Bytes>::new())) };
        peer::serve(listener, server, members, closing, handle, take).await;
    });
    (address, telling)
}

#[tokio::test]
async fn who_has_left_passes_on_what_it_is_told_before_it_says_that_it_has_taken_it() {
    const SLOW: Duration = Duration::from_millis(300);
    let tls = tls::configure(&Ca::new().node("127.0.0.1"), [127, 0, 0, 1].into(), NOW).unwrap();
    let (address, mut told) = stays(&tls, SLOW).await;
    let has_left = |address: SocketAddr| {
        let third = Member { gossip: address, peer_port: address.port(), ..member(3) };
        let three = Members::new(1, [member(1), member(2), third], member(1).gossip, 4);
        let (_, members) = watch::channel(Arc::new(View::new(three.without_local(2).unwrap(), Instant::now())));
        let peers = Peers::new(tls.client.clone(), None, Duration::from_secs(1));
        Cluster::Member(Arc::new(Membership::new("node-1".into(), members, peers)))
    };
    let cluster = has_left(address);
    let config = Config::from_vars([]).unwrap();
    let scheduler = Scheduler::new(&config.scheduling, crate::upstream::Upstream::new(&config.upstream).unwrap());
    let gone = |number| Gone { name: format!("node-{number}"), generation: 0 };
    // From one that leaves too, as this one has not heard by gossip.
    let invalid = vec![Duration::from_secs(5); 4];
    let word = Handover { from: "node-2".into(), own: true, gone: vec![gone(2)], invalid, ..Handover::default() };
    let message = word.encode().unwrap();
    let start = Instant::now();
    assert!(cluster.take(&scheduler, &message).await);
    assert!(start.elapsed() >= SLOW, "{:?}", start.elapsed());
    let passed = told.try_recv().unwrap();
    assert_eq!((passed.from.as_str(), passed.own, passed.invalid.len()), ("node-1", false, 4), "all of it");
    assert_eq!(passed.gone, [gone(2), gone(1)]);
    // It was not sure that it was heard.
    assert!(cluster.take(&scheduler, &message).await);
    assert!(told.try_recv().is_err());
    // What could not be passed on is not taken, and can be said again.
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let cluster = has_left(nobody);
    assert!(!cluster.take(&scheduler, &message).await && !cluster.take(&scheduler, &message).await);
}

#[tokio::test]
async fn that_there_is_nothing_more_is_said_once_everybody_has_taken_what_there_is() {
    const SLOW: Duration = Duration::from_millis(300);
    let tls = tls::configure(&Ca::new().node("127.0.0.1"), [127, 0, 0, 1].into(), NOW).unwrap();
    let (slow, mut slow_told) = stays(&tls, SLOW).await;
    let (quick, mut quick_told) = stays(&tls, Duration::ZERO).await;
    let at = |number, address: SocketAddr| Member { gossip: address, peer_port: address.port(), ..member(number) };
    let members = Members::new(1, [at(2, slow), at(3, quick)], member(1).gossip, 4);
    let owned_by = |number: u8| {
        let name = format!("node-{number}");
        let owns = |key: &Key| matches!(members.owner(key), Owner::Peer(owner) if *owner.name == *name);
        let key = (0..=255).map(|byte| [byte; 32]).find(owns).unwrap();
        let client = postcard::from_bytes(&[0; 32]).unwrap();
        Credential { kind: Kind::Bot, key, bot_id: None, client }
    };
    let peers = Peers::new(tls.client, None, Duration::from_secs(1));
    let credentials = vec![owned_by(2), owned_by(3)];
    let word = Handover { from: "node-1".into(), own: true, credentials, ..Handover::default() };
    let start = Instant::now();
    let last = async {
        let said: [Handover; 2] = [quick_told.recv().await.unwrap(), quick_told.recv().await.unwrap()];
        assert!(start.elapsed() >= SLOW, "what the other passes on has arrived: {:?}", start.elapsed());
        said.map(|word| (word.own, word.credentials.len()))
    };
    let (took, last) = tokio::join!(telling::tell(&members, vec![true; 2], word, &peers), last);
    assert!(took);
    assert_eq!(last, [(false, 1), (true, 0)]);
    // Where only one gets anything, it has all of it at once.
    let word = Handover { from: "node-1".into(), own: true, credentials: vec![owned_by(3)], ..Handover::default() };
    assert!(telling::tell(&members, vec![true; 2], word, &peers).await);
    let only = quick_told.recv().await.unwrap();
    assert_eq!((only.own, only.credentials.len()), (true, 1));
    assert!(quick_told.try_recv().is_err());
    let told = [(); 3].map(|()| slow_told.try_recv().unwrap()).map(|word| (word.own, word.credentials.len()));
    assert_eq!(told, [(false, 1), (true, 0), (true, 0)]);
}
