//! The roads between nodes on one machine: each node advertises an address that is not its own, from where what arrives is
//! carried on to it. Gossip is lost and delayed there as a test wants; connections are carried as they are.
#![allow(unreachable_pub, reason = "a module of one test binary")]

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rcgen::SanType;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::sleep;

use crate::town::{Node, Town};

const GOSSIP: u16 = 7946;
const PEER: u16 = 8443;

/// What happens to datagrams.
#[derive(Clone, Copy, Debug, Default)]
pub struct Roads {
    /// How many of them are lost.
    pub lost: f64,
    /// How long they take.
    pub delay: Duration,
    /// The first hears nothing of what the second says, which hears the first.
    pub deaf: Option<(u8, u8)>,
}

impl Roads {
    /// Three nodes that reach each other by these roads.
    pub async fn lay(self, town: &Town) -> [Node; 3] {
        for number in 1..=3 {
            self.lead_to(town, number).await;
        }
        let one = self.node(town, 1).await;
        [one, self.node(town, 2).await, self.node(town, 3).await]
    }

    async fn node(self, town: &Town, number: u8) -> Node {
        let advertised = town.ip(100 + number).to_string();
        let seeds = format!("{},{}", town.ip(101), town.ip(102));
        let settings = [("CLUSTER_ADVERTISE_IP", advertised.as_str()), ("CLUSTER_MEMBERS", seeds.as_str())];
        let node = town.launch(number, &settings, &town.ca, |params| {
            params.subject_alt_names = vec![SanType::IpAddress(IpAddr::V4(town.ip(100 + number)))];
        });
        node.serves().await;
        node
    }

    async fn lead_to(self, town: &Town, number: u8) {
        let (front, real) = (town.ip(100 + number), town.ip(number));
        let deaf_to = self.deaf.filter(|(deaf, _)| *deaf == number).map(|(_, to)| town.ip(to));
        let gossip = Arc::new(UdpSocket::bind((front, GOSSIP)).await.unwrap());
        tokio::spawn(async move { self.carry(gossip, real, deaf_to, number).await });
        let listener = TcpListener::bind((front, PEER)).await.unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let Ok(mut on) = TcpStream::connect((real, PEER)).await else { return };
                    stream.set_nodelay(true).unwrap();
                    on.set_nodelay(true).unwrap();
                    // One that breaks has ended.
                    copy_bidirectional(&mut stream, &mut on).await.ok();
                });
            }
        });
    }

    async fn carry(self, gossip: Arc<UdpSocket>, to: Ipv4Addr, deaf_to: Option<Ipv4Addr>, seed: u8) {
        let chance = Mutex::new(SmallRng::seed_from_u64(seed.into()));
        let mut datagram = [0; 2_000];
        loop {
            // An error tells of one sent before.
            let Ok((length, from)) = gossip.recv_from(&mut datagram).await else { continue };
            if deaf_to.is_some_and(|deaf_to| from.ip() == deaf_to) || chance.lock().random_bool(self.lost) {
                continue;
            }
            let (gossip, datagram) = (gossip.clone(), datagram[..length].to_vec());
            tokio::spawn(async move {
                sleep(self.delay).await;
                // Its node may be gone.
                gossip.send_to(&datagram, (to, GOSSIP)).await.ok();
            });
        }
    }
}
