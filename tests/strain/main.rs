//! A cluster whose gossip suffers: lost and late datagrams, deaf members, a machine that has no time for it. Nobody must be
//! found dead who is not.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

mod roads;
#[path = "../support/mod.rs"]
mod support;
#[path = "../cluster/town.rs"]
mod town;

use std::process::Stdio;
use std::time::Duration;

use fake_discord::Script;
use roads::Roads;
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};
use town::{Node, Town};

/// How long each strain lasts, unless NIRN_STRAIN_SECONDS says it.
const SECONDS: u64 = 10;
/// One test at a time: the strain is what it says.
static MACHINE: Mutex<()> = Mutex::const_new(());

#[allow(clippy::disallowed_methods, reason = "a test's setting is no setting of the proxy")]
fn span() -> Duration {
    let seconds = std::env::var("NIRN_STRAIN_SECONDS").ok().map(|seconds| seconds.parse().unwrap());
    Duration::from_secs(seconds.unwrap_or(SECONDS))
}

fn unlimited() -> Script {
    Script { global_limit: None, ..Script::default() }
}

/// All see each other all the time, and nobody is found dead.
async fn nobody_dies(nodes: &[Node; 3]) {
    for node in nodes {
        node.sees(3.0).await;
    }
    let start = Instant::now();
    while start.elapsed() < span() {
        for node in nodes {
            let log = node.log.lock().clone();
            let died = log.contains("left or died") || log.contains("given this node up");
            assert!(!died, "{}", nodes.iter().map(|node| node.log.lock().clone()).collect::<String>());
        }
        sleep(Duration::from_millis(200)).await;
    }
    for node in nodes {
        node.sees(3.0).await;
        for token in 0..6 {
            let answer = node.ask("/api/v10/users/@me", &format!("token-{token}"), "").await;
            assert_eq!(answer.status, 200, "{answer:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenth_of_all_datagrams_may_be_lost() {
    let _machine = MACHINE.lock().await;
    let town = Town::new(unlimited()).await;
    let roads = Roads { lost: 0.1, ..Roads::default() };
    nobody_dies(&roads.lay(&town).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn datagrams_may_take_200_ms() {
    let _machine = MACHINE.lock().await;
    let town = Town::new(unlimited()).await;
    let roads = Roads { delay: Duration::from_millis(200), ..Roads::default() };
    nobody_dies(&roads.lay(&town).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_may_be_deaf_to_another() {
    let _machine = MACHINE.lock().await;
    let town = Town::new(unlimited()).await;
    let roads = Roads { deaf: Some((2, 3)), ..Roads::default() };
    nobody_dies(&roads.lay(&town).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_without_time_kills_nobody() {
    let _machine = MACHINE.lock().await;
    let town = Town::new(unlimited()).await;
    let one = town.node(1).await;
    let nodes = [one, town.node(2).await, town.node(3).await];
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let mut busy = Vec::new();
    for _ in 0..2 * cores {
        let mut spinning = Command::new("sh");
        spinning.args(["-c", "while :; do :; done"]).stdin(Stdio::null()).kill_on_drop(true);
        busy.push(spinning.spawn().unwrap());
    }
    nobody_dies(&nodes).await;
    for mut process in busy {
        process.kill().await.unwrap();
    }
}
