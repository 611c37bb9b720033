//! TLS between nodes: 1.3 only, certificates of one CA on both sides, and what a node's own certificate must be.
//!
//! Reads no file and no clock: it is given PEM text and the time. A client's verifier holds a server to its address by
//! itself; a server's does not look at a client's names, and neither side's minds a certificate without usages, so
//! [`is_nodes`] is asked about every client's certificate after the handshake.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, Error, InconsistentKeys, RootCertStore, ServerConfig};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The hop's protocol: plain HTTP/2.
pub const HOP: &[u8] = b"h2";
/// What a node that leaves tells of the credentials that move: see [`crate::scheduler::handover`].
pub const HANDOVER: &[u8] = b"nirn-handover/1";

/// The three files' contents.
pub struct Pem {
    /// CLUSTER_CA_FILE: one certificate or several.
    pub ca: Vec<u8>,
    /// CLUSTER_CERT_FILE: the node's own, then the intermediates, if any.
    pub cert: Vec<u8>,
    /// CLUSTER_KEY_FILE.
    pub key: Vec<u8>,
}

/// Both sides of a node.
#[derive(Clone)]
pub struct Tls {
    /// For dialling peers.
    pub client: Arc<ClientConfig>,
    /// For peers that dial.
    pub server: Arc<ServerConfig>,
}

/// Checks a node's certificate and makes its configurations.
///
/// # Errors
///
/// In words that name the variable and the remedy: what cannot be read, a key that is not the certificate's, and
/// whatever peers would refuse the certificate for at `unix_ms`: chain, validity, usages, no SAN for `advertised`.
pub fn configure(pem: &Pem, advertised: IpAddr, unix_ms: u64) -> Result<Tls, String> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let roots = Arc::new(roots(&pem.ca)?);
    let chain = certificates(&pem.cert, "CLUSTER_CERT_FILE")?;
    let key = PrivateKeyDer::from_pem_slice(&pem.key)
        .map_err(|_| "CLUSTER_KEY_FILE holds no private key in PEM (PKCS#8, PKCS#1 or SEC1, unencrypted)".to_owned())?;
    let for_clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .build()
        .map_err(|error| format!("CLUSTER_CA_FILE cannot be used: {error}"))?;
    let for_servers = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
        .build()
        .map_err(|error| format!("CLUSTER_CA_FILE cannot be used: {error}"))?;
    check_own(&chain, advertised, unix_ms, &*for_clients, &*for_servers)?;
    let mut server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| format!("tls: {error}"))?
        .with_client_cert_verifier(for_clients)
        .with_single_cert(chain.clone(), key.clone_key())
        .map_err(|error| refused_key(&error))?;
    server.alpn_protocols = vec![HOP.to_vec(), HANDOVER.to_vec()];
    // A resumed session would outlive the check of its certificate.
    server.send_tls13_tickets = 0;
    server.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| format!("tls: {error}"))?
        .with_webpki_verifier(for_servers)
        .with_client_auth_cert(chain, key)
        .map_err(|error| refused_key(&error))?;
    client.alpn_protocols = vec![HOP.to_vec()];
    client.resumption = rustls::client::Resumption::disabled();
    Ok(Tls { client: Arc::new(client), server: Arc::new(server) })
}

/// Whether a verified certificate is that of a node: made for both sides, and for an address that `is_known`.
pub fn is_nodes(certificate: &CertificateDer<'_>, is_known: impl Fn(IpAddr) -> bool) -> bool {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return false };
    has_both_usages(&certificate) && addresses(&certificate).into_iter().any(is_known)
}

fn roots(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(pem, "CLUSTER_CA_FILE")? {
        roots.add(certificate).map_err(|error| format!("CLUSTER_CA_FILE holds an unusable certificate: {error}"))?;
    }
    Ok(roots)
}

fn certificates(pem: &[u8], variable: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let unreadable = || format!("{variable} holds no certificate in PEM (`-----BEGIN CERTIFICATE-----`)");
    let list = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>().map_err(|_| unreadable())?;
    if list.is_empty() { Err(unreadable()) } else { Ok(list) }
}

fn refused_key(error: &Error) -> String {
    match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            "CLUSTER_KEY_FILE is not the key of the first certificate in CLUSTER_CERT_FILE".to_owned()
        }
        // Errors of keys say what is wrong with the kind of key, never what is in it.
        other => format!("CLUSTER_KEY_FILE cannot be used: {other}"),
    }
}

/// Sees the certificate as peers will.
fn check_own(
    chain: &[CertificateDer<'static>],
    advertised: IpAddr,
    unix_ms: u64,
    for_clients: &dyn ClientCertVerifier,
    for_servers: &dyn ServerCertVerifier,
) -> Result<(), String> {
    let refuse = |what: &str| Err(format!("CLUSTER_CERT_FILE: the certificate {what}"));
    let Some((own, intermediates)) = chain.split_first() else { return refuse("is missing") };
    let now = UnixTime::since_unix_epoch(Duration::from_millis(unix_ms));
    let name = ServerName::IpAddress(advertised.into());
    let as_server = for_servers.verify_server_cert(own, intermediates, &name, &[], now).map(drop);
    let verdict = as_server.and_then(|()| for_clients.verify_client_cert(own, intermediates, now).map(drop));
    match verdict {
        Ok(()) => {}
        Err(Error::InvalidCertificate(problem)) => return refuse(&remedy(&problem, advertised)),
        Err(other) => return refuse(&format!("is refused: {other}")),
    }
    match X509Certificate::from_der(own) {
        Ok((_, own)) if has_both_usages(&own) => Ok(()),
        _ => refuse(USAGES),
    }
}

const USAGES: &str =
    "is not made for both sides: issue it with `extendedKeyUsage = serverAuth, clientAuth`, as CLUSTER_CERT_FILE needs";

fn remedy(problem: &CertificateError, advertised: IpAddr) -> String {
    match problem {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "has expired (or this machine's clock is wrong): issue a new one".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "is not valid yet: set this machine's clock, or issue one that is valid now".to_owned()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => format!(
            "is not made for {advertised}, which this node advertises: issue it with `subjectAltName = IP:{advertised}`, \
             or set CLUSTER_ADVERTISE_IP (or BIND_IP) to an address it is made for"
        ),
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "was not issued by a certificate in CLUSTER_CA_FILE: issue it from that CA, or add the intermediates after it"
                .to_owned()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => USAGES.to_owned(),
        other => format!("is refused: {other:?}"),
    }
}

/// A certificate that names no usages would pass for any: here they must be named.
fn has_both_usages(certificate: &X509Certificate<'_>) -> bool {
    matches!(certificate.extended_key_usage(), Ok(Some(usage)) if usage.value.server_auth && usage.value.client_auth)
}

fn addresses(certificate: &X509Certificate<'_>) -> Vec<IpAddr> {
    let Ok(Some(names)) = certificate.subject_alternative_name() else { return Vec::new() };
    let address = |name: &GeneralName<'_>| match *name {
        GeneralName::IPAddress(bytes) if bytes.len() == 4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        GeneralName::IPAddress(bytes) => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    };
    names.value.general_names.iter().filter_map(address).collect()
}

#[cfg(test)]
pub(crate) mod tests;
