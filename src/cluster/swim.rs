//! The gossip's task: one loop around one [`Node`], its UDP socket, its seal and its seeds.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::members::{Member, Members, View};
use super::node::{Event, MAX_DATAGRAM, Node};
use super::seal::{Opened, Seal};
use super::seeds::{self, Found};
use crate::{clock, config};

/// For some seed to answer at the start.
const JOIN_PATIENCE: Duration = Duration::from_secs(10);
/// A node that is its own seed waits so long for the others before it starts alone.
const ALONE_AFTER: Duration = Duration::from_secs(1);
/// From the first answer until the whole list of members has arrived.
const FEED: Duration = Duration::from_millis(500);
/// The seeds are looked up again this often while alone, and with company.
const LOOK_UP_ALONE: Duration = Duration::from_secs(1);
const LOOK_UP: Duration = Duration::from_secs(30);
/// A leave is told this many times, and so far apart: datagrams get lost.
const FAREWELLS: u32 = 4;
const FAREWELL_PAUSE: Duration = Duration::from_millis(60);
/// Datagrams read in a row before timers get their turn.
const BURST: usize = 256;
/// At most one warning in this time about a clock that is off.
const WARNING_PAUSE: Duration = Duration::from_secs(30);

/// Everything the gossip has to know.
pub struct Settings {
    /// This node.
    pub local: Member,
    /// Where the others are.
    pub seeds: config::Seeds,
    /// CLUSTER_SECRET.
    pub secret: config::Secret,
    /// CLUSTER_MAX_NODES.
    pub cap: usize,
}

impl Settings {
    /// What the publisher begins with: this node alone.
    pub fn first_view(&self) -> View {
        View::new(self.view(1, vec![self.local.clone()]), Instant::now().into_std())
    }

    fn view(&self, epoch: u64, members: Vec<Member>) -> Members {
        Members::new(epoch, members, self.local.gossip, self.cap)
    }
}

/// A node's part in the gossip. Dropped, it falls silent without a farewell.
pub struct Gossip {
    members: watch::Receiver<Arc<View>>,
    found: watch::Receiver<Found>,
    /// The variable that names the seeds.
    variable: &'static str,
    advertised: SocketAddr,
    bound: SocketAddr,
    leave: mpsc::Sender<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

/// Binds the gossip's socket; `::` takes IPv4 too. Call it within a runtime.
///
/// # Errors
///
/// When the address cannot be had, naming CLUSTER_PORT.
pub fn listen(ip: IpAddr, port: u16) -> Result<UdpSocket, String> {
    let address = SocketAddr::new(ip, port);
    bind(address).map_err(|error| format!("CLUSTER_PORT: cannot listen on {address} (udp): {error}"))
}

fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    UdpSocket::from_std(socket.into())
}

impl Gossip {
    /// Begins to join the cluster; the members are published as they change. Call it within a runtime.
    ///
    /// # Errors
    ///
    /// When the system refuses what it takes.
    pub fn start(settings: Settings, socket: UdpSocket, publish: watch::Sender<Arc<View>>) -> Result<Self, String> {
        let bound = socket.local_addr().map_err(|error| format!("CLUSTER_PORT: {error}"))?;
        let mut random = [0; 8];
        aws_lc_rs::rand::fill(&mut random).map_err(|_| "the system has no randomness to give".to_owned())?;
        let node = Node::new(&settings.local, u64::from_ne_bytes(random), Instant::now().into_std());
        let seal = Seal::new(settings.secret.expose().as_bytes())?;
        let members = publish.subscribe();
        let (leave, orders) = mpsc::channel(1);
        let (variable, advertised) = (seeds::variable(&settings.seeds), settings.local.gossip);
        let (found_sender, found) = watch::channel(Found::default());
        let task = Task { settings, socket, node, seal, publish, found: found_sender, bound, warned: None };
        let task = tokio::spawn(task.run(orders));
        Ok(Self { members, found, variable, advertised, bound, leave, task })
    }

    /// Waits for what must not happen while the node runs: that the gossip ends.
    pub async fn ended(&self) {
        self.leave.closed().await;
    }

    /// The members, as they change.
    pub fn members(&self) -> watch::Receiver<Arc<View>> {
        self.members.clone()
    }

    /// Tells the others that this node leaves. The members that it saw last stay in force, without itself.
    pub async fn leave(&self) {
        let (told, done) = oneshot::channel();
        if self.leave.send(told).await.is_ok() {
            // An error means a task that has ended: there is nobody left to tell.
            done.await.ok();
        }
    }

    /// Waits until it has joined the cluster, or has begun it because it is one of its seeds.
    ///
    /// # Errors
    ///
    /// When no seed answers within 10 s, the cluster has too many members, or another member has this node's name.
    pub async fn joined(&self) -> Result<(), String> {
        let (mut found, advertised, bound) = (self.found.clone(), self.advertised, self.bound);
        let deadline = Instant::now() + JOIN_PATIENCE;
        let mut members = self.members.clone();
        let company = async {
            members.wait_for(|members| members.list().len() > 1 || members.namesake().is_some()).await.ok();
        };
        let alone = async {
            let is_own = |found: &Found| found.addresses.iter().any(|&seed| seeds::is_own(seed, advertised, bound));
            let Ok(found) = found.wait_for(is_own).await.map(|found| found.addresses.len()) else {
                return std::future::pending().await;
            };
            if found > 1 {
                sleep(ALONE_AFTER).await;
            }
        };
        let first = async {
            tokio::select! {
                () = company => true,
                () = alone => false,
            }
        };
        let Ok(company) = timeout_at(deadline, first).await else {
            return Err(unanswered(self.variable, &self.found.borrow()));
        };
        if company {
            sleep(FEED).await;
        }
        let mut members = self.members.clone();
        let clear = timeout_at(deadline, members.wait_for(|members| members.namesake().is_none())).await.is_ok();
        let members = self.members.borrow();
        match members.namesake() {
            Some(other) if !clear => Err(format!(
                "NODE_NAME: the member at {} has the name {:?} too; give every node a name of its own",
                other.gossip, other.name
            )),
            _ if members.over_capacity() => Err(format!(
                "CLUSTER_MAX_NODES: the cluster would have {} members with this node; raise it on every node",
                members.list().len()
            )),
            _ => Ok(()),
        }
    }
}

impl Drop for Gossip {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn unanswered(variable: &str, found: &Found) -> String {
    let tried: Vec<String> = found.addresses.iter().take(8).map(SocketAddr::to_string).collect();
    let mut text = format!("{variable}: no seed answered within {} s", JOIN_PATIENCE.as_secs());
    if !tried.is_empty() {
        text += &format!(" (tried {})", tried.join(", "));
    }
    for failure in found.failures.iter().take(8) {
        text += &format!("; {failure}");
    }
    text + "; CLUSTER_SECRET must be the same on every node, clocks within 30 s, and CLUSTER_PORT open for udp"
}

struct Task {
    settings: Settings,
    socket: UdpSocket,
    node: Node,
    seal: Seal,
    publish: watch::Sender<Arc<View>>,
    found: watch::Sender<Found>,
    bound: SocketAddr,
    /// When somebody's clock was last complained of.
    warned: Option<Instant>,
}

impl Task {
    async fn run(mut self, mut orders: mpsc::Receiver<oneshot::Sender<()>>) {
        let mut look_up = Box::pin(look_up(self.settings.seeds.clone(), Duration::ZERO));
        let mut buffer = [0; MAX_DATAGRAM + 1];
        loop {
            self.flush();
            let wake = self.node.next_tick().map_or_else(far, Instant::from_std);
            tokio::select! {
                biased;
                Some(told) = orders.recv() => {
                    self.leave().await;
                    // An error means that nobody waits for it.
                    told.send(()).ok();
                }
                found = &mut look_up => {
                    self.seek(found);
                    let pause = if self.node.alone() { LOOK_UP_ALONE } else { LOOK_UP };
                    look_up = Box::pin(self::look_up(self.settings.seeds.clone(), pause));
                }
                () = sleep_until(wake) => {
                    // What has arrived in time must not be missed because this task got its turn late.
                    self.read(&mut buffer);
                    self.node.tick(Instant::now().into_std());
                }
                // Last: a socket that is never empty must not keep the others from their turn.
                readable = self.socket.readable() => {
                    if readable.is_ok() {
                        self.read(&mut buffer);
                    }
                }
            }
        }
    }

    fn seek(&mut self, found: Found) {
        let own = |seed: &SocketAddr| seeds::is_own(*seed, self.settings.local.gossip, self.bound);
        let others: Vec<_> = found.addresses.iter().copied().filter(|seed| !own(seed)).collect();
        self.node.seek(others, Instant::now().into_std());
        self.found.send_replace(found);
    }

    fn read(&mut self, buffer: &mut [u8]) {
        for _ in 0..BURST {
            let length = match self.socket.try_recv_from(buffer) {
                Ok((length, _)) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // A port that was unreachable for something sent before: nothing of this datagram's concern.
                Err(_) => continue,
            };
            match self.seal.open(&buffer[..length], clock::unix_ms()) {
                Opened::Message(message) => self.node.receive(&message, Instant::now().into_std()),
                Opened::Foreign => {}
                Opened::OutOfTime => {
                    let now = Instant::now();
                    if self.warned.is_none_or(|last| now - last >= WARNING_PAUSE) {
                        self.warned = Some(now);
                        tracing::warn!("a member's clock is off by more than 30 s: its gossip is ignored");
                    }
                }
            }
        }
    }

    async fn leave(&mut self) {
        for round in 0..FAREWELLS {
            if round > 0 {
                sleep(FAREWELL_PAUSE).await;
            }
            self.node.leave(Instant::now().into_std());
            self.flush();
            if round == 0 {
                // The others have been told: what this node owned is theirs.
                let former = self.publish.borrow().clone();
                if let Some(rest) = former.without_local(former.epoch() + 1) {
                    self.publish.send_replace(Arc::new(former.followed_by(rest, Instant::now().into_std())));
                }
            }
        }
    }

    /// Sends, tells and publishes what the last step brought.
    fn flush(&mut self) {
        for (to, message) in self.node.take_sends() {
            if let Some(datagram) = self.seal.seal(&message, clock::unix_ms()) {
                // A datagram that cannot be sent is a datagram lost: the protocol lives with that.
                self.socket.try_send_to(&datagram, self.route(to)).ok();
            }
        }
        for event in self.node.take_events() {
            tell(&event);
        }
        if let Some(members) = self.node.members_if_changed() {
            let former = self.publish.borrow().clone();
            let now = self.settings.view(former.epoch() + 1, members);
            let before = self.publish.send_replace(Arc::new(former.followed_by(now, Instant::now().into_std())));
            let now = self.publish.borrow();
            if now.over_capacity() && !before.over_capacity() {
                let (count, cap) = (now.list().len(), self.settings.cap);
                tracing::warn!("the cluster has {count} members, more than CLUSTER_MAX_NODES={cap}: refusing requests");
            } else if before.over_capacity() && !now.over_capacity() {
                tracing::info!("the cluster is within CLUSTER_MAX_NODES again");
            }
        }
    }

    /// A dual-stack socket reaches IPv4 members by mapped addresses.
    fn route(&self, to: SocketAddr) -> SocketAddr {
        match (self.bound, to) {
            (SocketAddr::V6(_), SocketAddr::V4(to)) => SocketAddr::new(mapped(*to.ip()), to.port()),
            _ => to,
        }
    }
}

fn mapped(ip: Ipv4Addr) -> IpAddr {
    ip.to_ipv6_mapped().into()
}

async fn look_up(seeds: config::Seeds, pause: Duration) -> Found {
    sleep(pause).await;
    seeds::find(&seeds).await
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(3_600)
}

fn tell(event: &Event) {
    match event {
        Event::Joined(member) => tracing::info!(name = %member.name, address = %member.gossip, "member joined"),
        Event::Gone(member) => tracing::info!(name = %member.name, address = %member.gossip, "member left or died"),
        Event::Suspected(member) => {
            tracing::warn!(name = %member.name, address = %member.gossip, "member does not answer");
        }
        Event::Rejoined => tracing::warn!("the other members had given this node up: joining again"),
    }
}

#[cfg(test)]
mod tests;
