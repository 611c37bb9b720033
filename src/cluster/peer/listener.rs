//! The listener for peers: verified nodes only, and a handler that is told nothing but the request.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::gather::Gather;
use super::{CONNECTION_WINDOW, MAX_HEADERS, PING_INTERVAL, PING_PATIENCE, STREAM_WINDOW, handover};
use crate::cluster::members::View;
use crate::cluster::tls;

/// For a handshake.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);
/// Connections that may be at their handshake at once: strangers get no further.
const HANDSHAKES: usize = 256;
/// Messages of nodes that leave that are taken in at once: they are long.
const HANDOVERS: usize = 2;
/// Requests of one peer at a time. Its admission and this node's are the real bounds.
const MAX_STREAMS: u32 = 65_536;
/// After an accept that failed.
const PAUSE: Duration = Duration::from_millis(50);

/// Serves peers, their requests by `handle` and what they hand over by `take`, until `closing` says so (or its sender is gone) and the requests then running are answered. Dropping
/// the future ends every connection.
///
/// A peer is whoever has a certificate of the CA that is made for a node, for the address it comes from or that of a
/// member.
pub async fn serve<H, T, F, B, E>(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    members: watch::Receiver<Arc<View>>,
    mut closing: watch::Receiver<bool>,
    handle: H,
    take: T,
) where
    T: Fn(&[u8]) + Clone + Send + 'static,
    H: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Result<Response<B>, E>> + Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let acceptor = TlsAcceptor::from(tls);
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    let handovers = Arc::new(Semaphore::new(HANDOVERS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            _ = closing.wait_for(|closing| *closing) => break,
        };
        let Ok((stream, _)) = accepted else {
            sleep(PAUSE).await;
            continue;
        };
        // Beyond the bound a connection is dropped at once: real peers dial again.
        let Ok(permit) = handshakes.clone().try_acquire_owned() else { continue };
        let (acceptor, members, closing) = (acceptor.clone(), members.clone(), closing.clone());
        let (handle, take, handovers) = (handle.clone(), take.clone(), handovers.clone());
        connections.spawn(async move {
            let accepted = timeout(HANDSHAKE_PATIENCE, shake_hands(acceptor, stream, &members)).await;
            drop(permit);
            let Ok(Some(stream)) = accepted else { return };
            if stream.get_ref().1.alpn_protocol() != Some(tls::HANDOVER) {
                answer(stream, handle, closing).await;
            } else if let Ok(_permit) = handovers.acquire().await {
                // One that breaks off had nothing to say.
                handover::hear(stream, take).await.ok();
            }
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// None for whoever is not a node of this cluster.
async fn shake_hands(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    members: &watch::Receiver<Arc<View>>,
) -> Option<TlsStream<TcpStream>> {
    let from = stream.peer_addr().ok()?.ip().to_canonical();
    stream.set_nodelay(true).ok()?;
    let stream = acceptor.accept(stream).await.ok()?;
    let (_, session) = stream.get_ref();
    let certificate = session.peer_certificates()?.first()?;
    let known = tls::is_nodes(certificate, |ip| ip == from || members.borrow().has_ip(ip));
    let spoken = session.alpn_protocol().is_some_and(|protocol| [tls::HOP, tls::HANDOVER].contains(&protocol));
    (known && spoken).then_some(stream)
}

async fn answer<H, F, B, E>(stream: TlsStream<TcpStream>, handle: H, mut closing: watch::Receiver<bool>)
where
    H: Fn(Request<Incoming>) -> F + Send + 'static,
    F: Future<Output = Result<Response<B>, E>> + Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .max_header_list_size(MAX_HEADERS)
        .max_concurrent_streams(MAX_STREAMS)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_PATIENCE)
        .serve_connection(
            TokioIo::new(Gather::new(stream)),
            service_fn(move |request| handle(to_origin_form(request))),
        );
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        _ = closing.wait_for(|closing| *closing) => None,
    };
    if ended.is_none() {
        connection.as_mut().graceful_shutdown();
        // A connection that breaks takes its requests with it; they know.
        connection.await.ok();
    }
}

/// The target as the client gave it to the entry node: `:authority` was only the way here.
fn to_origin_form(mut request: Request<Incoming>) -> Request<Incoming> {
    if let Some(target) = request.uri().path_and_query().cloned() {
        *request.uri_mut() = Uri::from(target);
    }
    request
}
