//! Nodes in network namespaces of their own on one bridge, whose wires can be cut: where the machine allows it.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use fake_discord::FakeDiscord;
use tokio::time::Instant;

use crate::town::{Node, Town};
use crate::unlimited;

/// A bridge and its namespaces, gone when the test ends.
struct Wires {
    tag: u32,
    nodes: u8,
}

fn ip(arguments: &str) -> bool {
    Command::new("ip").args(arguments.split(' ')).output().is_ok_and(|output| output.status.success())
}

fn address(node: u8) -> Ipv4Addr {
    let run = u8::try_from(std::process::id() % 250).unwrap();
    Ipv4Addr::new(10, 213, run, node)
}

impl Wires {
    /// None where namespaces may not be made.
    fn lay(nodes: u8) -> Option<Self> {
        let tag = std::process::id() % 100_000;
        let wires = Self { tag, nodes };
        let mut laid = ip(&format!("link add nb{tag} type bridge"))
            && ip(&format!("addr add {}/24 dev nb{tag}", address(254)))
            && ip(&format!("link set nb{tag} up"));
        for node in 1..=nodes {
            let (name, inner, outer) = (wires.name(node), format!("ni{tag}-{node}"), wires.wire(node));
            laid = laid
                && ip(&format!("netns add {name}"))
                && ip(&format!("link add {outer} type veth peer name {inner} netns {name}"))
                && ip(&format!("link set {outer} master nb{tag} up"))
                && ip(&format!("-n {name} link set lo up"))
                && ip(&format!("-n {name} addr add {}/24 dev {inner}", address(node)))
                && ip(&format!("-n {name} link set {inner} up"));
        }
        laid.then_some(wires)
    }

    fn name(&self, node: u8) -> String {
        format!("nn{}-{node}", self.tag)
    }

    fn wire(&self, node: u8) -> String {
        format!("nv{}-{node}", self.tag)
    }

    /// Cuts the nodes off from each other, or joins them again; all still reach Discord.
    fn part(&self, parted: bool) {
        for node in 1..=self.nodes {
            let state = if parted { "on" } else { "off" };
            assert!(ip(&format!("link set dev {} type bridge_slave isolated {state}", self.wire(node))));
        }
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        for node in 1..=self.nodes {
            ip(&format!("netns del {}", self.name(node)));
        }
        ip(&format!("link del nb{}", self.tag));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parted_nodes_serve_by_themselves_and_agree_again_within_15_s() {
    let Some(wires) = Wires::lay(3) else { return };
    let discord = FakeDiscord::listen(unlimited(), SocketAddr::from((address(254), 0))).await.unwrap();
    let town = Town::of(discord, address);
    let launch = |number| town.launch_in(Some(&wires.name(number)), number, &[], &town.ca, |_| {});
    let nodes: [Node; 3] = [launch(1), launch(2), launch(3)];
    for node in &nodes {
        node.serves().await;
        node.sees(3.0).await;
    }
    wires.part(true);
    for node in &nodes {
        node.sees(1.0).await;
        for token in 0..6 {
            assert_eq!(node.ask("/users/@me", &format!("token-{token}"), "").await.status, 200);
        }
    }
    wires.part(false);
    let joined = Instant::now();
    for node in &nodes {
        node.sees(3.0).await;
    }
    assert!(joined.elapsed() < Duration::from_secs(15), "{:?}", joined.elapsed());
    let received = crate::all(&nodes, "nirn_proxy_requests_routed_received").await;
    for node in &nodes {
        for token in 0..6 {
            assert_eq!(node.ask("/users/@me", &format!("token-{token}"), "").await.status, 200);
        }
    }
    let hops: f64 = crate::all(&nodes, "nirn_proxy_requests_routed_received").await.iter().sum();
    assert_eq!(hops - received.iter().sum::<f64>(), 12.0, "every token has one owner again");
}
