//! A client and an upstream that write bytes, and the proxy between them.

use nirn_proxy::config::Config;

use crate::support::client::{Answer, Client};
use crate::support::upstream::{Arrival, Upstream};
use crate::support::{Node, config};

pub(crate) struct Pair {
    pub(crate) upstream: Upstream,
    pub(crate) node: Node,
    pub(crate) client: Client,
}

impl Pair {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    /// With changed settings.
    pub(crate) async fn start_with(change: impl FnOnce(&mut Config)) -> Self {
        let upstream = Upstream::start().await;
        let mut config = config(upstream.address);
        change(&mut config);
        let node = Node::start_with(config, |_| {});
        let client = Client::connect(node.address()).await;
        Self { upstream, node, client }
    }

    /// Sends a request as it is and has it answered 200; what arrived.
    pub(crate) async fn pass(&mut self, request: impl AsRef<[u8]>) -> Arrival {
        self.client.send(request).await;
        let arrival = self.upstream.next().await;
        arrival.write("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        let is_head = arrival.head.starts_with("HEAD ");
        assert_eq!(self.client.answer_to(if is_head { "HEAD" } else { "GET" }).await.status, 200);
        arrival
    }

    /// Sends a GET of this target; the target that arrived.
    pub(crate) async fn target(&mut self, target: &str) -> String {
        let arrival = self.pass(format!("GET {target} HTTP/1.1\r\nhost: proxy\r\n\r\n")).await;
        arrival.line().strip_prefix("GET ").unwrap().strip_suffix(" HTTP/1.1").unwrap().to_owned()
    }

    /// Sends a request that must be refused, on a connection of its own.
    pub(crate) async fn refused(&mut self, request: &str) -> Answer {
        let mut client = Client::connect(self.node.address()).await;
        client.send(request).await;
        let answer = client.answer().await;
        assert!(self.upstream.is_untouched(), "{request}");
        answer
    }

    /// Asks, has Discord answer so, and gives what the client got. `request` is a method and a target, and header lines.
    pub(crate) async fn ask(&mut self, request: &str, answer: impl AsRef<[u8]>) -> Answer {
        let line = request.lines().next().unwrap();
        let rest = request.strip_prefix(line).unwrap();
        self.client.send(format!("{line} HTTP/1.1\r\nhost: proxy{rest}\r\n\r\n")).await;
        let arrival = self.upstream.next().await;
        arrival.write(answer).await;
        self.client.answer_to(line.split(' ').next().unwrap()).await
    }
}
