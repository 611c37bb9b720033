use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Instant;

use aws_lc_rs::digest::{self, SHA256};
use proptest::prelude::*;

use super::*;

fn member(number: u8) -> Member {
    named(&format!("node-{number}"), number)
}

fn named(name: &str, number: u8) -> Member {
    let ip = IpAddr::from(Ipv4Addr::new(10, 0, 0, number));
    Member { name: name.into(), gossip: SocketAddr::new(ip, 7946), peer_port: 8443, generation: u64::from(number) }
}

/// The view of a node that is none of the members, so that every owner is a peer.
fn view(members: impl IntoIterator<Item = Member>) -> Members {
    Members::new(1, members, SocketAddr::from(([10, 9, 9, 9], 7946)), 9_500)
}

fn key(number: u32) -> Key {
    let mut key = [0; 32];
    key.copy_from_slice(digest::digest(&SHA256, &number.to_le_bytes()).as_ref());
    key
}

fn owner(view: &Members, number: u32) -> Arc<str> {
    match view.owner(&key(number)) {
        Owner::Peer(member) => member.name.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_owners_of_known_keys_never_change() {
    let hash = |name: &str, key: Key| Pinned.hash(&Name::new(name.into()), &&Ranked(super::digest(&key)));
    let golden = [
        hash("", [0; 32]),
        hash("node-1", [0; 32]),
        hash("node-1", [0xff; 32]),
        hash("node-2", key(1)),
        hash("a name with \u{e9} in it", key(2)),
    ];
    assert_eq!(golden, GOLDEN_HASHES, "{golden:#x?}");
    let view = view((1..=8).map(member));
    let owners: Vec<_> = (0..16).map(|number| owner(&view, number).to_string()).collect();
    assert_eq!(owners.join(" "), GOLDEN_OWNERS);
}

/// Computed by another implementation of SipHash-1-3.
const GOLDEN_HASHES: [u64; 5] =
    [0xb418_7bf4_5039_4220, 0xc107_c887_d91a_a21c, 0x74f1_1b73_4d61_86cd, 0x560f_e274_d054_5d80, 0x5cb3_74ac_b1e2_a9d3];
const GOLDEN_OWNERS: &str =
    "node-4 node-8 node-3 node-8 node-5 node-5 node-1 node-6 node-6 node-4 node-8 node-3 node-5 node-6 node-1 node-4";

#[test]
fn the_order_of_discovery_does_not_matter() {
    let forward = view((1..=32).map(member));
    let backward = view((1..=32).rev().map(member));
    assert!((0..1_000).all(|number| owner(&forward, number) == owner(&backward, number)));
}

#[test]
fn ten_thousand_credentials_spread_evenly_over_eight_nodes() {
    let view = view((1..=8).map(member));
    let mut counts = BTreeMap::<_, u32>::new();
    for number in 0..10_000 {
        *counts.entry(owner(&view, number)).or_default() += 1;
    }
    assert_eq!(counts.len(), 8);
    assert!(counts.values().all(|&count| (1_063..=1_437).contains(&count)), "{counts:?}");
}

#[test]
fn a_node_knows_itself_and_fails_closed_above_the_cap() {
    let local = member(1).gossip;
    let alone = Members::new(1, [member(1)], local, 2);
    assert_eq!(alone.owner(&key(1)), Owner::Local);
    let full = Members::new(2, [member(1), member(2)], local, 2);
    assert!(!full.over_capacity() && full.has_ip(member(2).gossip.ip()));
    let over = Members::new(3, (1..=3).map(member), local, 2);
    assert!(over.over_capacity());
    assert!((0..100).all(|number| over.owner(&key(number)) == Owner::OverCapacity));
}

#[test]
fn of_two_members_with_one_name_the_older_counts_on_every_node() {
    let aged = |name, number, generation| Member { generation, ..named(name, number) };
    let members = [aged("same", 2, 7), aged("same", 1, 8), aged("other", 3, 9)];
    let old = Members::new(1, members.clone(), members[0].gossip, 8);
    let young = Members::new(1, members.clone(), members[1].gossip, 8);
    assert_eq!(old.list(), young.list());
    assert_eq!((old.namesake(), young.namesake()), (Some(&members[1]), Some(&members[0])));
    assert!((0..100).any(|number| old.owner(&key(number)) == Owner::Local));
    assert!((0..100).all(|number| young.owner(&key(number)) != Owner::Local));
}

#[test]
fn what_a_node_owned_it_serves_a_moment_longer_and_no_more() {
    let local = member(1).gossip;
    let now = Instant::now();
    let first = View::new(Members::new(1, [member(1)], local, 8), now);
    let second = first.followed_by(Members::new(2, [member(1), member(2)], local, 8), now);
    let lost = (0..100).map(key).find(|key| second.owner(key) != Owner::Local).unwrap();
    assert!(!first.owned(&lost, now), "what it owns is no former thing");
    assert!(second.owned(&lost, now));
    assert!(!second.owned(&lost, now + GRACE));
    let mut view = second;
    for epoch in 3..100 {
        view = view.followed_by(Members::new(epoch, [member(1), member(2)], local, 8), now);
        assert!(view.former.len() <= FORMER);
    }
}

#[test]
fn the_former_owner_of_a_key_is_the_one_that_went_or_the_one_that_a_new_node_takes_it_from() {
    let start = Instant::now() + Duration::from_secs(100);
    let at = |millis| start + Duration::from_millis(millis);
    let local = member(1).gossip;
    let views = |counts: &[u8]| {
        let mut view = View::new(Members::new(1, [member(1)], local, 8), start);
        for (epoch, &count) in (2..).zip(counts) {
            view = view.followed_by(Members::new(epoch, (1..=count).map(member), local, 8), at(epoch));
        }
        view
    };
    // Of three members, the third went.
    let view = views(&[3]).followed_by(Members::new(9, (1..=2).map(member), local, 8), at(60_000));
    let three = Members::new(9, (1..=3).map(member), local, 8);
    for key in (0..100).map(key).filter(|key| view.owner(key) == Owner::Local) {
        let former = view.former_owners(&key, at(60_001)).next();
        let gone = matches!(three.owner(&key), Owner::Peer(other) if *other == member(3));
        assert_eq!(former.as_ref().map(|it| (*it.member).clone()), gone.then(|| member(3)));
        assert_eq!(view.former_owners(&key, at(60_000) + PATIENCE).count(), 0);
        let Some(former) = former else { continue };
        let told = |name: &str, millis| former.is_told_by(name, at(millis));
        assert!(told("node-3", 59_500) && told("node-3", 60_100));
        assert!(!told("node-3", 58_000) && !told("node-2", 60_100));
    }
    // This node joined two others, by and by: what it owns the second in rank had.
    let view = views(&[2, 3]);
    let others = Members::new(9, (2..=3).map(member), local, 8);
    for key in (0..100).map(key).filter(|key| view.owner(key) == Owner::Local) {
        let former = view.former_owners(&key, at(100)).next().unwrap();
        assert_eq!(others.owner(&key), Owner::Peer(former.member));
        assert_eq!(view.former_owners(&key, former.until).count(), 0);
    }
    // Others joined this node, which has served by itself.
    let view = View::new(Members::new(1, [member(1)], local, 8), start);
    let view = view.followed_by(Members::new(2, (1..=2).map(member), local, 8), start + YOUTH);
    assert!((0..100).map(key).all(|key| view.former_owners(&key, start + YOUTH).next().is_none()));
}

#[test]
fn of_members_that_go_at_once_each_that_had_a_key_is_waited_for() {
    let born = Instant::now();
    let now = born + YOUTH;
    let of = |numbers: &[u8]| Members::new(1, numbers.iter().map(|&number| member(number)), member(1).gossip, 8);
    let view = View::new(of(&[1, 2, 3]), born).followed_by(of(&[1, 3]), now).followed_by(of(&[1]), now);
    let mut both = 0;
    for key in (0..100).map(key) {
        let waited: Vec<_> = view.former_owners(&key, now).map(|former| (*former.member).clone()).collect();
        let owners = [of(&[1, 3]).owner(&key), of(&[1, 2, 3]).owner(&key)];
        let expected = owners.into_iter().filter_map(|owner| match owner {
            Owner::Peer(member) => Some((*member).clone()),
            _ => None,
        });
        assert_eq!(waited, expected.collect::<Vec<_>>());
        both += usize::from(waited == [member(3), member(2)]);
    }
    assert!(both > 0);
}

#[test]
fn what_is_left_of_a_cluster_owns_everything_without_the_node_that_leaves() {
    let view = Members::new(1, (1..=3).map(member), member(1).gossip, 8);
    let rest = view.without_local(2).unwrap();
    assert!(view.has_local() && !rest.has_local());
    assert!((0..100).map(key).all(|key| match (view.owner(&key), rest.owner(&key)) {
        (Owner::Local, Owner::Peer(_)) => true,
        (before, after) => before == after,
    }));
    assert!(Members::new(1, [member(1)], member(1).gossip, 8).without_local(2).is_none(), "it has no heirs");
    let one = rest.without(2, |other| *other == member(2));
    assert!((0..100).map(key).all(|key| one.owner(&key) == Owner::Peer(member(3).into())));
    assert_eq!((view.left(), one.left()), (None, Some(&member(1))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_new_node_moves_only_what_it_wins(count in 1u8..32, number in any::<u32>()) {
        let before = owner(&view((1..=count).map(member)), number);
        let after = owner(&view((1..=count + 1).map(member)), number);
        prop_assert!(after == before || after == member(count + 1).name);
    }

    #[test]
    fn a_node_that_goes_moves_only_what_it_had(count in 2u8..=32, gone in 1u8..=32, number in any::<u32>()) {
        let gone = (gone - 1) % count + 1;
        let before = owner(&view((1..=count).map(member)), number);
        let after = owner(&view((1..=count).filter(|&left| left != gone).map(member)), number);
        prop_assert!(after == before || before == member(gone).name);
    }
}
