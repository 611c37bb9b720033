//! The same limits over TLS, in both versions of HTTP.

use std::sync::Arc;

use fake_discord::{Rule, Script};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;

use super::*;

/// A Discord's TLS with a certificate for 127.0.0.1, and that certificate in DER.
fn tls(protocols: &[&str]) -> (Arc<ServerConfig>, Vec<u8>) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    tls.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    (Arc::new(tls), certificate.to_vec())
}

#[tokio::test]
async fn limits_and_targets_are_kept_over_tls_in_both_versions_of_http() {
    for (protocols, http2, version) in [
        (&["h2", "http/1.1"][..], true, "HTTP/2.0"),
        (&["http/1.1"], true, "HTTP/1.1"),
        (&["h2", "http/1.1"], false, "HTTP/1.1"),
    ] {
        let (tls, certificate) = tls(protocols);
        let rule = Rule::window("POST /channels/{}/messages", "abcdef01", 5, ms(500));
        let script = Script { rules: vec![rule], tls: Some(tls), ..Script::default() };
        let (fake, node) = setup_with(script, |config| {
            config.upstream.https = true;
            config.upstream.http2 = http2;
            config.upstream.extra_roots = vec![certificate];
        })
        .await;
        let target = format!("{CHANNEL_1}/messages?a=%23&b=%2F/../?");
        let calls = vec![("POST", target.clone()); 12];
        assert_eq!(statuses(&ask_all(&node, ms(0), calls).await), [200; 12]);
        assert_eq!(fake.counts().limited(), 0);
        for arrival in fake.arrivals() {
            assert_eq!((arrival.version.as_str(), arrival.target_text()), (version, target.clone()));
            assert_eq!(arrival.header("host"), Some(fake.addr.to_string().as_bytes()));
        }
    }
}
