//! Outbound proxies: HTTPS_PROXY by a tunnel, HTTP_PROXY by absolute form, NO_PROXY around both.

use std::sync::Arc;

use http::Method;
use nirn_proxy::config;
use nirn_proxy::upstream::{RequestBody, SendError, Upstream};
use parking_lot::Mutex;
use tokio::io::{AsyncWriteExt, copy_bidirectional};
use tokio::net::TcpStream;

use crate::support::*;
use crate::tls;

/// `user:p@ss` in Basic.
const AUTHORIZATION: &str = "proxy-authorization: basic dxnlcjpwqhnz";

/// A proxy that answers CONNECT with `status`, and the heads it saw.
async fn tunnel(status: &'static str) -> (Server, Arc<Mutex<Vec<String>>>) {
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&heads);
    let server = Server::start(move |_, mut stream| {
        let seen = Arc::clone(&seen);
        async move {
            let head = read_head(&mut stream).await?;
            let target = head.split(' ').nth(1).unwrap_or_default().to_owned();
            seen.lock().push(head);
            stream.write_all(format!("HTTP/1.1 {status}\r\n\r\n").as_bytes()).await?;
            if status.starts_with("200") {
                let mut upstream = TcpStream::connect(target).await?;
                copy_bidirectional(&mut stream, &mut upstream).await?;
            }
            Ok(())
        }
    })
    .await;
    (server, heads)
}

async fn get(settings: &config::Upstream) -> Result<String, SendError> {
    let request = request(Method::GET, "/api//x?", settings.authority.as_str(), RequestBody::empty());
    Ok(text(client(settings).send(request).await?).await)
}

#[tokio::test]
async fn https_goes_through_a_tunnel() {
    let (discord, root) = tls::server(&["localhost"], &["http/1.1"]).await;
    let (proxy, heads) = tunnel("200 Connection established").await;
    let mut settings = tls::secure(&discord, root);
    let host = settings.authority.clone();
    for value in [format!("http://user:p%40ss@{}", proxy.host()), format!("user:p%40ss@{}", proxy.host())] {
        settings.proxy.https = Some(value);
        settings.proxy.http = Some("http://127.0.0.1:1".into());
        assert_eq!(get(&settings).await, Ok(format!("HTTP/1.1 GET /api//x? {host} hosts=1 body=0")));
        let head = heads.lock().pop().expect("a tunnel").to_lowercase();
        assert!(head.starts_with(&format!("connect {host} http/1.1\r\n")), "{head}");
        assert!(head.contains(AUTHORIZATION), "{head}");
    }
}

#[tokio::test]
async fn http_is_asked_for_in_absolute_form() {
    let (proxy, mut seen) = recorder().await;
    let mut settings = settings(([127, 0, 0, 1], 1).into());
    settings.authority = "discord.example".parse().expect("an authority");
    settings.proxy.http = Some(format!("http://user:p%40ss@{}", proxy.host()));
    settings.proxy.https = Some("http://127.0.0.1:1".into());
    for _ in 0..2 {
        assert_eq!(get(&settings).await, Ok("ok".into()));
        let (head, _) = seen.recv().await.expect("a request");
        let head = head.to_lowercase();
        assert!(head.starts_with("get http://discord.example/api//x? http/1.1\r\nhost: discord.example\r\n"), "{head}");
        assert!(head.contains(AUTHORIZATION), "{head}");
    }
}

#[tokio::test]
async fn no_proxy_goes_around_both() {
    let (plain, _seen) = recorder().await;
    let (secret, root) = tls::server(&["localhost"], &["http/1.1"]).await;
    let mut plain = settings(plain.address);
    let mut secure = tls::secure(&secret, root);
    for settings in [&mut plain, &mut secure] {
        settings.proxy.http = Some("http://127.0.0.1:1".into());
        settings.proxy.https = Some("http://127.0.0.1:1".into());
        let error = get(settings).await.expect_err("nobody listens there");
        assert!(matches!(error, SendError::Failed { message, .. } if message.contains("connection refused")));
        let port = settings.authority.port_u16().expect("a port");
        let with_port = format!("localhost:{port},127.0.0.1:{port}");
        for no in ["x, *", "localhost,127.0.0.0/8", " .localhost , 127.0.0.1 ", &with_port] {
            settings.proxy.no = Some(no.into());
            assert!(get(settings).await.is_ok(), "{no}");
        }
        for no in ["discord.com", "localhost:1,127.0.0.1:1", ",", "ocalhost, [::1]"] {
            settings.proxy.no = Some(no.into());
            assert!(get(settings).await.is_err(), "{no}");
        }
    }
}

#[tokio::test]
async fn a_refused_tunnel_is_said_to_be_the_proxys() {
    let (discord, root) = tls::server(&["localhost"], &[]).await;
    for (status, expected) in [
        ("407 Proxy Authentication Required", "proxy: tunnel error: proxy authorization required"),
        ("403 Forbidden", "proxy: tunnel error: unsuccessful"),
    ] {
        let (proxy, _heads) = tunnel(status).await;
        let mut settings = tls::secure(&discord, root.clone());
        settings.proxy.https = Some(format!("http://user:secret@{}", proxy.host()));
        assert_eq!(get(&settings).await, Err(SendError::Failed { message: expected.into(), sent: false }));
    }
}

#[test]
fn an_unusable_proxy_stops_the_start_without_being_printed() {
    for value in ["socks5://user:secret@127.0.0.1:1", "ftp://secret", "http://user:secret@", "http://a b"] {
        for https in [true, false] {
            let mut settings = settings(([127, 0, 0, 1], 1).into());
            settings.https = https;
            settings.proxy.https = https.then(|| value.to_owned());
            settings.proxy.http = (!https).then(|| value.to_owned());
            let error = Upstream::new(&settings).err().expect("no such proxy");
            let name = if https { "HTTPS_PROXY" } else { "HTTP_PROXY" };
            assert_eq!(error, format!("{name} must be the URL of an http or https proxy"));
        }
    }
}
