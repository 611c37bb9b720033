//! TLS towards Discord: one provider, the system's roots.

use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};

use crate::config;

/// The client's side: roots of the system, else those of Mozilla, and the extra ones; ALPN as the settings say.
pub(super) fn client(config: &config::Upstream) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    if let Some(first) = native.errors.first() {
        tracing::warn!(errors = native.errors.len(), "not every root certificate of the system can be used: {first}");
    }
    roots.add_parsable_certificates(native.certs);
    if roots.is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    for root in &config.extra_roots {
        roots.add(root.clone().into()).map_err(|error| format!("an extra root certificate is unusable: {error}"))?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("tls: {error}"))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    if config.http2 {
        tls.alpn_protocols.push(b"h2".to_vec());
    }
    tls.alpn_protocols.push(b"http/1.1".to_vec());
    Ok(tls)
}
