//! Starts that must fail, and say why; and peers that must be refused.

use std::time::Duration;

use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, SanType, date_time_ymd};
use tokio::process::Command;
use tokio::time::timeout;

use crate::support::PATIENCE;
use crate::town::{Ca, Town};
use crate::{owned_by, unlimited};

async fn refusal(
    town: &Town,
    settings: &[(&str, &str)],
    ca: &Ca,
    change: impl FnOnce(&mut CertificateParams),
) -> String {
    let (code, log) = town.launch(2, settings, ca, change).ended().await;
    assert_eq!(code, Some(1), "{log}");
    log
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_a_wrong_certificate_does_not_start_and_names_the_remedy() {
    let town = Town::new(unlimited()).await;
    let expired = refusal(&town, &[], &town.ca, |params| params.not_after = date_time_ymd(2020, 1, 1)).await;
    assert!(expired.contains("CLUSTER_CERT_FILE") && expired.contains("expired"), "{expired}");
    let elsewhere = SanType::IpAddress([127, 0, 0, 99].into());
    let san = refusal(&town, &[], &town.ca, |params| params.subject_alt_names = vec![elsewhere]).await;
    assert!(san.contains("subjectAltName") && san.contains("CLUSTER_ADVERTISE_IP"), "{san}");
    let server = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let usage = refusal(&town, &[], &town.ca, |params| params.extended_key_usages = server).await;
    assert!(usage.contains("serverAuth, clientAuth"), "{usage}");
    let foreign = town.launch(9, &[], &Ca::new(), |_| {});
    drop(foreign);
    let file = [("CLUSTER_CA_FILE", "9-ca.pem")];
    let ca = refusal(&town, &file, &town.ca, |_| {}).await;
    assert!(ca.contains("CLUSTER_CA_FILE"), "{ca}");
    let missing = refusal(&town, &[("CLUSTER_KEY_FILE", "nowhere.pem")], &town.ca, |_| {}).await;
    assert!(missing.contains("CLUSTER_KEY_FILE: cannot read nowhere.pem"), "{missing}");
    let port = std::net::TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port().to_string();
    let everywhere = [("BIND_IP", "0.0.0.0"), ("PORT", port.as_str()), ("ENABLE_METRICS", "false")];
    let any = refusal(&town, &everywhere, &town.ca, |_| {}).await;
    assert!(any.contains("CLUSTER_ADVERTISE_IP"), "{any}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_a_wrong_secret_finds_nobody() {
    let town = Town::new(unlimited()).await;
    let one = town.node(1).await;
    let settings = [("CLUSTER_SECRET", "a secret that no other node knows"), ("NODE_NAME", "stranger")];
    // It is no seed itself.
    let (code, log) = town.launch(3, &settings, &town.ca, |_| {}).ended().await;
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("CLUSTER_MEMBERS: no seed answered") && log.contains("CLUSTER_SECRET"), "{log}");
    assert_eq!(one.metric("nirn_proxy_cluster_members").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_a_foreign_authority_gets_no_request_through() {
    let town = Town::new(unlimited()).await;
    let one = town.node(1).await;
    let stranger = town.launch(3, &[], &Ca::new(), |_| {});
    stranger.serves().await;
    stranger.sees(2.0).await;
    one.sees(2.0).await;
    let mut statuses = Vec::new();
    for node in [&one, &stranger] {
        for token in 0..8 {
            statuses.push(node.ask("/api/v10/users/@me", &format!("token-{token}"), "").await.status);
        }
    }
    assert!(statuses.contains(&503) && statuses.contains(&200), "{statuses:?}");
    assert_eq!(one.metric("nirn_proxy_requests_routed_received").await, 0.0);
    assert_eq!(stranger.metric("nirn_proxy_requests_routed_received").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_peer_port_speaks_tls_1_3_only() {
    let town = Town::new(unlimited()).await;
    let one = town.node(1).await;
    let dial = async |version: &str| {
        let address = format!("{}:8443", one.ip);
        let mut openssl = Command::new("openssl");
        openssl.args(["s_client", "-connect", &address, version]).stdin(std::process::Stdio::null()).kill_on_drop(true);
        let output = timeout(PATIENCE, openssl.output()).await.unwrap().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
    };
    let Some(old) = dial("-tls1_2").await else { return };
    assert!(old.contains("alert protocol version"), "{old}");
    let new = dial("-tls1_3").await.unwrap();
    assert!(new.contains("TLSv1.3"), "{new}");
    tokio::time::sleep(Duration::from_millis(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_has_a_name_by_mistake_takes_nothing_and_says_farewell_when_it_is_stopped() {
    let town = Town::new(unlimited()).await;
    let nodes = [town.node(1).await, town.node(2).await];
    for node in &nodes {
        node.sees(2.0).await;
    }
    let token = owned_by(&nodes, 0, "token").await;
    let sent = nodes[0].metric("nirn_proxy_requests_routed_sent").await;
    let namesake = town.launch(3, &[("NODE_NAME", "node-1")], &town.ca, |_| {});
    for node in &nodes {
        node.says(&format!("address={}:7946", town.ip(3))).await;
    }
    // It waits for the other to be gone, and is a member meanwhile.
    for _ in 0..20 {
        assert_eq!(nodes[0].ask("/api/v10/users/@me", &token, "").await.status, 200);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(nodes[0].metric("nirn_proxy_requests_routed_sent").await, sent, "its owner is who it was");
    namesake.signal("TERM").await;
    let (code, log) = namesake.ended().await;
    assert_eq!(code, Some(0), "{log}");
    for node in &nodes {
        node.says("member left or died").await;
        assert!(!node.log.lock().contains("does not answer"), "{}", node.log.lock());
    }
}
