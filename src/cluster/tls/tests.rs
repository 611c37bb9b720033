use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    SanType, date_time_ymd,
};

use super::*;

/// 2026-12-01.
pub(crate) const NOW: u64 = 1_796_083_200_000;
const BOTH: [ExtendedKeyUsagePurpose; 2] = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];

/// A certificate authority of a test.
pub(crate) struct Ca(CertifiedIssuer<'static, KeyPair>);

impl Ca {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// A node's certificate, changed as wished.
    pub(crate) fn issue(&self, ip: &str, change: impl FnOnce(&mut CertificateParams)) -> Pem {
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::IpAddress(ip.parse().unwrap())];
        params.extended_key_usages = BOTH.to_vec();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        Pem { ca: self.0.pem().into_bytes(), cert: cert.pem().into_bytes(), key: key.serialize_pem().into_bytes() }
    }

    pub(crate) fn node(&self, ip: &str) -> Pem {
        self.issue(ip, |_| {})
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn refusal(pem: &Pem) -> String {
    configure(pem, ip("10.0.0.1"), NOW).err().unwrap()
}

#[test]
fn a_good_certificate_of_either_family_is_accepted() {
    let ca = Ca::new();
    let tls = configure(&ca.node("10.0.0.1"), ip("10.0.0.1"), NOW).unwrap();
    assert_eq!((tls.client.alpn_protocols[0].as_slice(), tls.server.alpn_protocols.len()), (HOP, 2));
    assert!(configure(&ca.node("2001:db8::1"), ip("2001:db8::1"), NOW).is_ok());
}

#[test]
fn a_certificate_that_peers_would_refuse_stops_the_start_with_the_remedy() {
    let ca = Ca::new();
    let expired = refusal(&ca.issue("10.0.0.1", |params| params.not_after = date_time_ymd(2026, 11, 30)));
    assert!(expired.starts_with("CLUSTER_CERT_FILE") && expired.contains("has expired"), "{expired}");
    let early = refusal(&ca.issue("10.0.0.1", |params| params.not_before = date_time_ymd(2026, 12, 2)));
    assert!(early.contains("not valid yet"), "{early}");
    let elsewhere = refusal(&ca.node("10.0.0.2"));
    assert!(elsewhere.contains("subjectAltName = IP:10.0.0.1") && elsewhere.contains("CLUSTER_ADVERTISE_IP"));
    for usages in [vec![], vec![ExtendedKeyUsagePurpose::ServerAuth], vec![ExtendedKeyUsagePurpose::ClientAuth]] {
        let usage = refusal(&ca.issue("10.0.0.1", |params| params.extended_key_usages = usages));
        assert!(usage.contains("serverAuth, clientAuth"), "{usage}");
    }
    let foreign = refusal(&Pem { ca: Ca::new().node("10.0.0.1").ca, ..ca.node("10.0.0.1") });
    assert!(foreign.contains("CLUSTER_CA_FILE"), "{foreign}");
}

#[test]
fn files_that_hold_something_else_are_told_apart() {
    let ca = Ca::new();
    let good = || ca.node("10.0.0.1");
    let key = refusal(&Pem { key: ca.node("10.0.0.1").key, ..good() });
    assert!(key.starts_with("CLUSTER_KEY_FILE is not the key"), "{key}");
    for rubbish in [&b""[..], b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &good().key] {
        let ca_file = refusal(&Pem { ca: rubbish.to_vec(), ..good() });
        assert!(ca_file.starts_with("CLUSTER_CA_FILE"), "{ca_file}");
        let cert_file = refusal(&Pem { cert: rubbish.to_vec(), ..good() });
        assert!(cert_file.starts_with("CLUSTER_CERT_FILE"), "{cert_file}");
    }
    let key_file = refusal(&Pem { key: good().cert, ..good() });
    assert!(key_file.starts_with("CLUSTER_KEY_FILE holds no private key"), "{key_file}");
}

#[test]
fn a_peer_must_be_made_for_both_sides_and_for_a_known_address() {
    let ca = Ca::new();
    let der = |pem: &Pem| CertificateDer::from_pem_slice(&pem.cert).unwrap();
    let node = der(&ca.node("10.0.0.7"));
    assert!(is_nodes(&node, |address| address == ip("10.0.0.7")));
    assert!(!is_nodes(&node, |address| address == ip("10.0.0.8")));
    let unnamed = der(&ca.issue("10.0.0.7", |params| params.subject_alt_names.clear()));
    assert!(!is_nodes(&unnamed, |_| true));
    let client = der(&ca.issue("10.0.0.7", |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    }));
    assert!(!is_nodes(&client, |_| true));
    assert!(!is_nodes(&CertificateDer::from(vec![1, 2, 3]), |_| true));
}
