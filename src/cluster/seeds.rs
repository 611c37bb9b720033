//! Where the first members are looked for: every address of every seed, as often as it is asked for.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::time::timeout;

use crate::config;

/// For one name to be looked up.
const PATIENCE: Duration = Duration::from_secs(3);
/// Addresses that are tried at once, whatever a name server answers.
const MOST: usize = 1_024;

/// What the seeds stand for at present.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Every address, in the order of the settings, each once.
    pub addresses: Vec<SocketAddr>,
    /// Seeds without an address, and why.
    pub failures: Vec<String>,
}

/// The variable that names the seeds.
pub fn variable(seeds: &config::Seeds) -> &'static str {
    match seeds {
        config::Seeds::Members(_) => "CLUSTER_MEMBERS",
        config::Seeds::Dns(_) => "CLUSTER_DNS",
    }
}

/// Looks every seed up, all at once.
pub async fn find(seeds: &config::Seeds) -> Found {
    let (config::Seeds::Members(list) | config::Seeds::Dns(list)) = seeds;
    let mut lookups = Vec::new();
    for seed in list {
        let seed = seed.clone();
        lookups.push((seed.host.clone(), tokio::spawn(async move { look_up(&seed).await })));
    }
    let mut found = Found::default();
    for (host, lookup) in lookups {
        match lookup.await {
            Ok(Ok(addresses)) => {
                for address in addresses {
                    if found.addresses.len() < MOST && !found.addresses.contains(&address) {
                        found.addresses.push(address);
                    }
                }
            }
            Ok(Err(failure)) => found.failures.push(failure),
            Err(_) => found.failures.push(format!("{host} cannot be looked up")),
        }
    }
    found
}

async fn look_up(seed: &config::Seed) -> Result<Vec<SocketAddr>, String> {
    let host = seed.host.as_str();
    match timeout(PATIENCE, lookup_host((host, seed.port))).await {
        Ok(Ok(addresses)) => {
            Ok(addresses.map(|address| SocketAddr::new(address.ip().to_canonical(), address.port())).collect())
        }
        Ok(Err(error)) => Err(format!("{host} cannot be looked up: {error}")),
        Err(_) => Err(format!("{host} cannot be looked up in time")),
    }
}

/// Whether a seed is the node itself, which advertises one address and is bound to another or to all.
pub fn is_own(seed: SocketAddr, advertised: SocketAddr, bound: SocketAddr) -> bool {
    if seed == advertised {
        return true;
    }
    seed.port() == bound.port()
        && (seed.ip() == bound.ip().to_canonical() || (bound.ip().is_unspecified() && is_local(seed.ip())))
}

/// Whether an address is one of this machine's: only such a one can be bound.
fn is_local(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Seed, Seeds};

    fn seed(host: &str, port: u16) -> Seed {
        Seed { host: host.to_owned(), port }
    }

    #[tokio::test]
    async fn every_seed_is_looked_up_once_and_a_bad_one_does_not_spoil_the_others() {
        let list = vec![
            seed("127.0.0.1", 1),
            seed("nobody.invalid", 2),
            seed("::1", 3),
            seed("127.0.0.1", 1),
            seed("::ffff:127.0.0.9", 4),
        ];
        let found = find(&Seeds::Members(list)).await;
        let expected: Vec<SocketAddr> =
            ["127.0.0.1:1", "[::1]:3", "127.0.0.9:4"].iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(found.addresses, expected);
        assert_eq!(found.failures.len(), 1);
        assert!(found.failures[0].starts_with("nobody.invalid cannot be looked up"), "{:?}", found.failures);
    }

    #[test]
    fn a_node_knows_its_own_address_however_it_is_written() {
        let own = |seed: &str, advertised: &str, bound: &str| {
            is_own(seed.parse().unwrap(), advertised.parse().unwrap(), bound.parse().unwrap())
        };
        assert!(own("127.0.0.1:7946", "127.0.0.1:7946", "127.0.0.1:7946"));
        assert!(own("127.0.0.1:7946", "192.0.2.1:7946", "0.0.0.0:7946"), "a local address while bound to all");
        assert!(!own("127.0.0.2:7946", "127.0.0.1:7946", "127.0.0.1:7946"), "a neighbour on one machine");
        assert!(!own("127.0.0.1:7947", "127.0.0.1:7946", "0.0.0.0:7946"), "another port");
        assert!(!own("192.0.2.7:7946", "127.0.0.1:7946", "0.0.0.0:7946"), "another machine");
    }
}
