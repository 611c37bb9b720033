use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use http_body::Frame;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

use super::*;
use crate::cluster::members::{Member, Members, View};
use crate::cluster::tls::tests::{Ca, NOW};
use crate::cluster::tls::{HOP, Pem, Tls, configure};
use crate::inbound::BrokenOff;
use crate::upstream::RequestBody;

pub(super) const HOME: &str = "127.0.0.1";
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn tls(pem: &Pem) -> Tls {
    configure(pem, HOME.parse().unwrap(), NOW).unwrap()
}

/// A listener for peers around a handler, and the switch that closes it.
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    pub(super) closing: watch::Sender<bool>,
    pub(super) served: tokio::task::JoinHandle<()>,
}

pub(super) async fn peer<H, F, B>(tls: &Tls, handle: H) -> Peer
where
    H: Fn(Request<Inbound>) -> F + Clone + Send + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error: Send> + Send + 'static,
{
    let listener = TcpListener::bind((HOME, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let member = Member { name: "one".into(), gossip: address, peer_port: address.port(), generation: 0 };
    let (_, members) =
        watch::channel(Arc::new(View::new(Members::new(1, [member], address, 32), std::time::Instant::now())));
    let (closing, closed) = watch::channel(false);
    let handle = move |request| {
        let answer = handle(request);
        async move { Ok::<_, Infallible>(answer.await) }
    };
    let served = tokio::spawn(serve(listener, tls.server.clone(), members, closed, handle, |_: &[u8]| async { true }));
    Peer { address, closing, served }
}

/// An entry node: plain HTTP/1 in front of `peers`, with the status of whatever failed.
async fn entry(peers: Peers, to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((HOME, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let peers = peers.clone();
            let service = hyper::service::service_fn(move |mut request: Request<hyper::body::Incoming>| {
                let peers = peers.clone();
                // As the front does.
                request.headers_mut().remove(http::header::CONNECTION);
                async move {
                    Ok::<_, Infallible>(match peers.forward(to, Inbound::request(request), 1).await {
                        Ok(dispatched) => dispatched.response.map(|body| body.map_err(|_| "broken").boxed()),
                        Err(error) => {
                            let text = format!("{:?}", error);
                            let mut response = Response::new(Full::from(text).map_err(|_| "never").boxed());
                            *response.status_mut() = http::StatusCode::SERVICE_UNAVAILABLE;
                            response
                        }
                    })
                }
            });
            tokio::spawn(async move {
                let http1 = hyper::server::conn::http1::Builder::new();
                http1.serve_connection(TokioIo::new(stream), service).await.ok();
            });
        }
    });
    address
}

/// Sends bytes to the entry and reads until it closes.
async fn ask(entry: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(entry).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut text = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut text)).await.expect("in time").unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

pub(super) fn peers(tls: &Tls) -> Peers {
    Peers::new(tls.client.clone(), Some(HOME.parse().unwrap()), Duration::from_secs(5))
}

pub(super) async fn describe(request: Request<Inbound>) -> Response<Full<Bytes>> {
    let (parts, body) = request.into_parts();
    let declared = body.size_hint().exact();
    let length = body.collect().await.map(|body| body.to_bytes().len()).unwrap_or_default();
    let hop = parts.headers.get(HOP_HEADER).map(|value| value.to_str().unwrap().to_owned());
    let text = format!("{} {} {:?} {length} of {declared:?}", parts.method, parts.uri.path_and_query().unwrap(), hop);
    let twice = Response::builder().header("set-cookie", "a=1").header("set-cookie", "b=2");
    twice.body(text.into()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_and_its_answer_cross_with_everything_they_carry() {
    let tls = tls(&Ca::new().node(HOME));
    let owner = peer(&tls, describe).await;
    let entry = entry(peers(&tls), owner.address).await;
    let raw = "//a%2Fb/..//%zz/?x={y}&&";
    let text = format!("POST {raw} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello");
    let answer = ask(entry, text.as_bytes()).await;
    assert!(answer.contains(&format!("POST {raw} Some(\"1\") 5 of Some(5)")), "{answer}");
    assert!(answer.contains("set-cookie: a=1\r\nset-cookie: b=2\r\n"), "{answer}");
    let query = ask(entry, b"GET /a? HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(query.contains("GET /a? Some"), "{query}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_upload_crosses_in_windows() {
    let tls = tls(&Ca::new().node(HOME));
    let owner = peer(&tls, describe).await;
    let entry = entry(peers(&tls), owner.address).await;
    let size = 25 * 1024 * 1024;
    let mut text =
        format!("PUT /up HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n").into_bytes();
    text.resize(text.len() + size, b'x');
    let answer = ask(entry, &text).await;
    assert!(
        answer.contains(&format!("PUT /up Some(\"1\") {size} of Some({size})")),
        "{}",
        &answer[..answer.len().min(300)]
    );
}

/// Requests that run at an owner which never answers.
#[derive(Clone, Default)]
pub(super) struct Running(Arc<AtomicUsize>);

struct Run(Running);

impl Running {
    /// With the owner.
    pub(super) async fn start(tls: &Tls) -> (Self, Peer) {
        let running = Self::default();
        let run = running.clone();
        let owner = peer(tls, move |request| run.clone().run(request)).await;
        (running, owner)
    }

    async fn run(self, _: Request<Inbound>) -> Response<Full<Bytes>> {
        self.0.fetch_add(1, Ordering::SeqCst);
        let _run = Run(self);
        std::future::pending().await
    }

    pub(super) async fn reach(&self, count: usize) {
        let reached = async {
            while self.0.load(Ordering::SeqCst) != count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, reached).await.expect("in time");
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A body that a test feeds.
struct Fed(mpsc::Receiver<Result<Bytes, BrokenOff>>);

impl Body for Fed {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_the_entry_leaves_the_owner_within_a_second() {
    let tls = tls(&Ca::new().node(HOME));
    let (running, owner) = Running::start(&tls).await;
    let entry = entry(peers(&tls), owner.address).await;
    let mut client = TcpStream::connect(entry).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    running.reach(1).await;
    let left = Instant::now();
    drop(client);
    running.reach(0).await;
    assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_whose_client_leaves_never_looks_whole_to_the_owner() {
    let tls = tls(&Ca::new().node(HOME));
    let (seen, mut pieces) = mpsc::channel(1);
    let owner = peer(&tls, move |request: Request<Inbound>| {
        let seen = seen.clone();
        // Goes on when nobody waits for the answer any more, as a connection to Discord does.
        tokio::spawn(async move {
            let mut body = request.into_body();
            loop {
                let piece = body.frame().await.map(|frame| frame.map(|frame| frame.into_data().unwrap()));
                let last = !matches!(piece, Some(Ok(_)));
                seen.send(piece).await.unwrap();
                if last {
                    return;
                }
            }
        });
        std::future::pending::<Response<Full<Bytes>>>()
    })
    .await;
    let peers = peers(&tls);
    let entry = entry(peers.clone(), owner.address).await;
    let mut next = async || timeout(PATIENCE, pieces.recv()).await.expect("in time").unwrap();
    for _ in 0..10 {
        let mut client = TcpStream::connect(entry).await.unwrap();
        client
            .write_all(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\npart\r\n")
            .await
            .unwrap();
        assert_eq!(next().await, Some(Ok("part".into())));
        drop(client);
        assert_eq!(next().await, Some(Err(BrokenOff)));
        // The same without a word from the body.
        let (feed, fed) = mpsc::channel(1);
        feed.send(Ok(Bytes::from_static(b"part"))).await.unwrap();
        let (peers, request) = (peers.clone(), Request::post("/").body(Fed(fed)).unwrap());
        let asking = tokio::spawn(async move { peers.forward(owner.address, request, 1).await.map(drop) });
        assert_eq!(next().await, Some(Ok("part".into())));
        asking.abort();
        assert_eq!(next().await, Some(Err(BrokenOff)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_breaks_off_at_the_owner_breaks_off_at_the_entry() {
    let tls = tls(&Ca::new().node(HOME));
    let (feeds, mut fed) = mpsc::channel(1);
    let owner = peer(&tls, move |_| {
        let (feed, pieces) = mpsc::channel(2);
        let feeds = feeds.clone();
        async move {
            feeds.send(feed).await.unwrap();
            Response::new(Fed(pieces))
        }
    })
    .await;
    let asking = Request::new(RequestBody::empty());
    let peers = peers(&tls);
    let mut body = peers.forward(owner.address, asking, 1).await.unwrap().response.into_body();
    let feed = fed.recv().await.unwrap();
    feed.send(Ok(Bytes::from_static(b"half"))).await.unwrap();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "half");
    feed.send(Err(BrokenOff)).await.unwrap();
    body.frame().await.unwrap().unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_comes_before_the_uploads_end_is_whole_and_ends_it() {
    let tls = tls(&Ca::new().node(HOME));
    let owner = peer(&tls, |_| async { Response::new(Full::from("too large")) }).await;
    let (feed, pieces) = mpsc::channel(1);
    feed.send(Ok(Bytes::from_static(b"begun"))).await.unwrap();
    let peers = peers(&tls);
    let answer = peers.forward(owner.address, Request::post("/").body(Fed(pieces)).unwrap(), 1).await.unwrap();
    timeout(PATIENCE, feed.closed()).await.expect("the upload ends in time");
    assert_eq!(answer.response.into_body().collect().await.unwrap().to_bytes(), "too large");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_breaks_off_is_its_clients_error_and_not_the_peers() {
    let tls = tls(&Ca::new().node(HOME));
    let owner = peer(&tls, |_| std::future::pending::<Response<Full<Bytes>>>()).await;
    let (feed, pieces) = mpsc::channel(2);
    feed.send(Ok(Bytes::from_static(b"begun"))).await.unwrap();
    feed.send(Err(BrokenOff)).await.unwrap();
    let answer = peers(&tls).forward(owner.address, Request::post("/").body(Fed(pieces)).unwrap(), 1).await;
    assert_eq!(answer.unwrap_err(), ProxyError::BadRequest(BrokenOff::OF_REQUEST));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_is_not_there_or_refuses_or_hangs_is_unavailable() {
    let ca = Ca::new();
    let tls = tls(&ca.node(HOME));
    let get = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let closed = TcpListener::bind((HOME, 0)).await.unwrap().local_addr().unwrap();
    let gone = ask(entry(peers(&tls), closed).await, get).await;
    assert!(gone.contains("Unavailable(PeerError)"), "{gone}");
    let owner = peer(&tls, |_| std::future::pending::<Response<Full<Bytes>>>()).await;
    let hasty = Peers { bound: Duration::from_millis(300), ..peers(&tls) };
    let hung = ask(entry(hasty, owner.address).await, get).await;
    assert!(hung.contains("Unavailable(PeerError)"), "{hung}");
    // Each side of a foreign CA refuses the other; the owner's refusal comes after the client's handshake is done.
    let foreign = self::tls(&Ca::new().node(HOME));
    let mut stranger = (*foreign.client).clone();
    stranger.dangerous().set_certificate_verifier(Arc::new(Credulous));
    let refused = Peers::new(Arc::new(stranger), None, Duration::from_secs(5));
    let refused = ask(entry(refused, owner.address).await, get).await;
    assert!(refused.contains("Unavailable(PeerError)"), "{refused}");
    let distrusted = ask(entry(peers(&foreign), owner.address).await, get).await;
    assert!(distrusted.contains("Unavailable(PeerError)"), "{distrusted}");
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_refused_at_the_peer_port() {
    let ca = Ca::new();
    let tls = tls(&ca.node(HOME));
    let owner = peer(&tls, describe).await;
    let refused = |config: ClientConfig, why: &'static str| async move {
        let stream = TcpStream::connect(owner.address).await.unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let Ok(mut stream) =
            connector.connect(ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into()), stream).await
        else {
            return;
        };
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.ok();
        let mut byte = [0; 1];
        let read = timeout(PATIENCE, stream.read(&mut byte)).await.expect("in time");
        assert!(matches!(read, Err(_) | Ok(0)), "{why} was answered");
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = |versions: &[&'static rustls::SupportedProtocolVersion]| {
        let builder = ClientConfig::builder_with_provider(provider.clone()).with_protocol_versions(versions).unwrap();
        builder.dangerous().with_custom_certificate_verifier(Arc::new(Credulous))
    };
    let auth = |pem: &Pem| {
        let chain = vec![CertificateDer::from_pem_slice(&pem.cert).unwrap()];
        (chain, rustls::pki_types::PrivateKeyDer::from_pem_slice(&pem.key).unwrap())
    };
    let with = |pem: &Pem| {
        let (chain, key) = auth(pem);
        let mut config = builder(&[&rustls::version::TLS13]).with_client_auth_cert(chain, key).unwrap();
        config.alpn_protocols = vec![HOP.to_vec()];
        config
    };
    let mut bare = builder(&[&rustls::version::TLS13]).with_no_client_auth();
    bare.alpn_protocols = vec![HOP.to_vec()];
    refused(bare, "no certificate").await;
    refused(with(&Ca::new().node(HOME)), "a foreign certificate").await;
    refused(with(&ca.node("127.0.0.9")), "a certificate for another address").await;
    let client_only = ca.issue(HOME, |params| params.extended_key_usages.truncate(1));
    refused(with(&client_only), "a certificate for servers").await;
    let mut other = with(&ca.node(HOME));
    other.alpn_protocols.clear();
    refused(other, "no protocol").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closing_listener_finishes_what_it_has_begun() {
    let tls = tls(&Ca::new().node(HOME));
    let owner = peer(&tls, |request| async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        describe(request).await
    })
    .await;
    let entry = entry(peers(&tls), owner.address).await;
    let asking =
        tokio::spawn(async move { ask(entry, b"GET /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await });
    tokio::time::sleep(Duration::from_millis(150)).await;
    owner.closing.send(true).unwrap();
    assert!(asking.await.unwrap().contains("GET /slow"));
    timeout(PATIENCE, owner.served).await.expect("in time").unwrap();
}

/// Believes every server.
#[derive(Debug)]
struct Credulous;

impl rustls::client::danger::ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
