//! The daemon's own small requests: `nirn-proxy --healthcheck`, for images without a shell.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use reqwest::redirect::Policy;
use rustls::{ClientConfig, RootCertStore};

/// The whole of a health check. Orchestrators' own limits are not shorter.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Asks a daemon bound to `bind_ip:port` on this host for its health.
///
/// # Errors
///
/// In a line for the operator, when it is not healthy or does not answer within 3 s.
pub async fn healthcheck(bind_ip: IpAddr, port: u16) -> Result<(), String> {
    let address = SocketAddr::new(reachable(bind_ip), port);
    let url = format!("http://{address}/nirn/healthz");
    let client = client().map_err(|error| format!("no client for health checks: {error}"))?;
    let response = client.get(&url).send().await.map_err(|error| format!("{url}: {}", cause(&error)))?;
    let status = response.status();
    if status.is_success() { Ok(()) } else { Err(format!("{url}: {status}")) }
}

/// What is dialled to reach a listener on every address.
fn reachable(bind_ip: IpAddr) -> IpAddr {
    match bind_ip {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    }
}

/// Plain http only, but reqwest wants a TLS set-up all the same: one that trusts nobody.
fn client() -> Result<reqwest::Client, Box<dyn std::error::Error>> {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let tls = ClientConfig::builder_with_provider(provider.into())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let builder = reqwest::Client::builder().tls_backend_preconfigured(tls).timeout(TIMEOUT);
    Ok(builder.no_proxy().redirect(Policy::none()).retry(reqwest::retry::never()).build()?)
}

/// The innermost cause, which is the one that says something.
fn cause(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return format!("no answer within {} s", TIMEOUT.as_secs());
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Answers one request with the given head, and tells what was asked.
    async fn answer(head: &'static str) -> (SocketAddr, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap();
            stream.write_all(head.as_bytes()).await.unwrap();
            String::from_utf8_lossy(&request[..length]).into_owned()
        });
        (address, served)
    }

    #[tokio::test]
    async fn a_healthy_daemon_passes() {
        let (address, served) = answer("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(healthcheck(Ipv4Addr::UNSPECIFIED.into(), address.port()).await, Ok(()));
        assert!(served.await.unwrap().starts_with("GET /nirn/healthz HTTP/1.1\r\n"));
    }

    #[tokio::test]
    async fn a_draining_daemon_and_a_redirect_do_not_pass() {
        for (head, status) in [
            ("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "503"),
            ("HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", "302"),
        ] {
            let (address, _served) = answer(head).await;
            let problem = healthcheck(address.ip(), address.port()).await.unwrap_err();
            assert!(problem.contains(status) && problem.contains("/nirn/healthz"), "{problem}");
        }
    }

    #[tokio::test]
    async fn nobody_there_does_not_pass() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let problem = healthcheck(address.ip(), address.port()).await.unwrap_err();
        assert!(problem.to_lowercase().contains("refused"), "{problem}");
    }

    #[test]
    fn an_unspecified_address_is_reached_over_loopback() {
        assert_eq!(reachable("0.0.0.0".parse().unwrap()), Ipv4Addr::LOCALHOST);
        assert_eq!(reachable("::".parse().unwrap()), Ipv6Addr::LOCALHOST);
        assert_eq!(reachable("10.0.0.1".parse().unwrap()), Ipv4Addr::new(10, 0, 0, 1));
    }
}
