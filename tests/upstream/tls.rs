//! TLS: whom it trusts, which protocol it speaks, and what it says when it fails.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use nirn_proxy::config;
use nirn_proxy::upstream::{RequestBody, SendError};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::support::*;

/// A TLS server that tells what it was asked, and the certificate that it has to be trusted by.
pub(crate) async fn server(names: &[&str], protocols: &[&str]) -> (Server, Vec<u8>) {
    server_by(names, protocols, |stream| async move {
        let http = auto::Builder::new(TokioExecutor::new());
        http.serve_connection(TokioIo::new(stream), service_fn(tell)).await.map_err(io::Error::other)
    })
    .await
}

/// The same, by what serves a connection.
async fn server_by<F, R>(names: &[&str], protocols: &[&str], serve: F) -> (Server, Vec<u8>)
where
    F: Fn(TlsStream<TcpStream>) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = io::Result<()>> + Send + 'static,
{
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    let made = rcgen::generate_simple_self_signed(names).expect("a certificate");
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("a key");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .expect("a usable key");
    tls.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let server = Server::start(move |_, stream| {
        let (acceptor, serve) = (acceptor.clone(), serve.clone());
        async move { serve(acceptor.accept(stream).await?).await }
    })
    .await;
    (server, certificate.to_vec())
}

/// Answers with the protocol, the target, the host by either name, and the body's length.
async fn tell(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes().len()).unwrap_or_default();
    let hosts = head.headers.get_all(header::HOST).iter().count();
    let host = head.headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let host = head.uri.authority().map(http::uri::Authority::as_str).or(host).unwrap_or("nobody");
    let path = head.uri.path_and_query().map_or("", |path| path.as_str());
    let told = format!("{:?} {} {path} {host} hosts={hosts} body={body}", head.version, head.method);
    Ok(Response::new(Full::new(told.into())))
}

/// Settings that reach a TLS server by `localhost` and trust `root`.
pub(crate) fn secure(server: &Server, root: Vec<u8>) -> config::Upstream {
    let mut settings = settings(server.address);
    settings.https = true;
    settings.authority = format!("localhost:{}", server.address.port()).parse().expect("an authority");
    settings.extra_roots = vec![root];
    settings
}

async fn told(settings: &config::Upstream, target: &str) -> String {
    let request = request(Method::GET, target, settings.authority.as_str(), RequestBody::empty());
    text(client(settings).send(request).await.expect("an answer")).await
}

async fn refused(settings: &config::Upstream) -> String {
    let request = request(Method::GET, "/secret", "x", RequestBody::empty());
    match client(settings).send(request).await.expect_err("no trust") {
        SendError::Failed { message, .. } => message,
        SendError::Timeout => panic!("timed out"),
        SendError::Body(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn http_1_is_spoken_even_to_a_server_that_has_http_2() {
    let (server, root) = server(&["localhost"], &["h2", "http/1.1"]).await;
    let settings = secure(&server, root);
    let host = &settings.authority;
    assert_eq!(told(&settings, "/a//b/%2F?").await, format!("HTTP/1.1 GET /a//b/%2F? {host} hosts=1 body=0"));
}

#[tokio::test]
async fn http_2_is_spoken_when_both_sides_want_it() {
    let (server, root) = server(&["localhost"], &["h2", "http/1.1"]).await;
    let mut settings = secure(&server, root);
    settings.http2 = true;
    let host = &settings.authority;
    let client = client(&settings);
    for round in 0..3 {
        let request = request(Method::GET, "/a//b/%2F?", host.as_str(), RequestBody::empty());
        let answer = client.send(request).await.expect("an answer");
        assert_eq!(answer.written.is_some(), round > 0, "the first had to wait for its connection");
        let told = text(answer).await;
        assert_eq!(told, format!("HTTP/2.0 GET /a//b/%2F? {host} hosts=0 body=0"));
    }
    let body = kept(&vault(), pattern(1 << 20)).await.attempt().expect("a first attempt");
    let mut post = request(Method::POST, "/", host.as_str(), body);
    post.headers_mut().insert("content-length", (1 << 20).into());
    let told = text(client.send(post).await.expect("an answer")).await;
    assert_eq!(told, format!("HTTP/2.0 POST / {host} hosts=0 body=1048576"));
    assert_eq!(server.connections(), 1);
}

/// A server that answers a request's head with a piece, ended or not, and resets the stream when it is told to. It says
/// when the reset has been taken in.
struct Resetting {
    _server: Server,
    settings: config::Upstream,
    told: Arc<Notify>,
    taken: Arc<Notify>,
}

impl Resetting {
    async fn start(ended: bool, reason: h2::Reason) -> Self {
        let (told, taken) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let both = (told.clone(), taken.clone());
        let (server, root) = server_by(&["localhost"], &["h2"], move |stream| {
            let (told, taken) = both.clone();
            async move {
                let mut connection = h2::server::handshake(stream).await.map_err(io::Error::other)?;
                let mut pings = connection.ping_pong().expect("the first taker");
                let (_request, mut respond) =
                    connection.accept().await.expect("a request").map_err(io::Error::other)?;
                tokio::spawn(async move {
                    let mut answer = respond.send_response(Response::new(()), false).expect("a stream");
                    answer.send_data(Bytes::from_static(b"piece"), ended).expect("a stream");
                    told.notified().await;
                    answer.send_reset(reason);
                    pings.ping(h2::Ping::opaque()).await.expect("a connection");
                    taken.notify_one();
                });
                while connection.accept().await.is_some() {}
                Ok(())
            }
        })
        .await;
        let mut settings = secure(&server, root);
        settings.http2 = true;
        Self { _server: server, settings, told, taken }
    }

    async fn reset(&self) {
        self.told.notify_one();
        tokio::time::timeout(PATIENCE, self.taken.notified()).await.expect("a reset in time");
    }
}

#[tokio::test]
async fn an_http_2_answer_that_is_reset_has_broken_off() {
    for reason in [h2::Reason::CANCEL, h2::Reason::NO_ERROR, h2::Reason::INTERNAL_ERROR] {
        let server = Resetting::start(false, reason).await;
        let client = client(&server.settings);
        let request = request(Method::GET, "/x", server.settings.authority.as_str(), RequestBody::empty());
        let mut body = client.send(request).await.expect("an answer").response.into_body();
        assert_eq!(body.frame().await.expect("a piece").expect("a piece").into_data().expect("data"), "piece");
        server.reset().await;
        assert!(body.frame().await.expect("an error").is_err(), "{reason}");
    }
}

#[tokio::test]
async fn an_http_2_answer_that_comes_before_the_uploads_end_is_whole() {
    let server = Resetting::start(true, h2::Reason::NO_ERROR).await;
    let (pieces, body) = Fed::new();
    let mut kept = vault().keep(body, Some(1 << 20)).await.expect("room");
    pieces.send(Ok(Bytes::from_static(b"begun"))).await.expect("a reader");
    let body = kept.attempt().expect("a first attempt");
    let client = client(&server.settings);
    let request = request(Method::POST, "/x", server.settings.authority.as_str(), body);
    let answer = client.send(request).await.expect("an answer");
    server.reset().await;
    assert_eq!(text(answer).await, "piece");
}

#[tokio::test]
async fn http_1_is_spoken_to_a_server_that_has_no_http_2() {
    let (server, root) = server(&["localhost"], &["http/1.1"]).await;
    let mut settings = secure(&server, root);
    settings.http2 = true;
    let host = &settings.authority;
    assert_eq!(told(&settings, "/x").await, format!("HTTP/1.1 GET /x {host} hosts=1 body=0"));
}

#[tokio::test]
async fn an_address_is_checked_against_the_certificate() {
    let (server, root) = server(&["127.0.0.1"], &[]).await;
    let mut settings = secure(&server, root);
    settings.authority = server.host().parse().expect("an authority");
    assert!(told(&settings, "/x").await.starts_with("HTTP/1.1 GET /x"));
}

#[tokio::test]
async fn an_unknown_root_and_a_wrong_name_are_refused() {
    let (stranger, _) = server(&["localhost"], &[]).await;
    let (other, other_root) = server(&["elsewhere.example"], &[]).await;
    let message = refused(&secure(&stranger, other_root.clone())).await;
    assert!(message.starts_with("tls: invalid peer certificate"), "{message}");
    let message = refused(&secure(&other, other_root)).await;
    assert!(message.starts_with("tls: invalid peer certificate"), "{message}");
}

#[tokio::test]
async fn a_server_without_tls_is_refused() {
    let (plain, _seen) = recorder().await;
    let (_, root) = server(&["localhost"], &[]).await;
    let mut settings = secure(&plain, root);
    settings.request_timeout = PATIENCE;
    let server = Server::start(|_, mut stream| async move {
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n").await
    })
    .await;
    settings.authority = format!("localhost:{}", server.address.port()).parse().expect("an authority");
    let message = refused(&settings).await;
    assert!(message.starts_with("tls: "), "{message}");
}
