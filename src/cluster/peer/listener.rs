//! The listener for peers: verified nodes only, and a handler that is told nothing but the request.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::server::{self, SendResponse};
use h2::{Reason, RecvStream};
use http::{Request, Response, Uri};
use http_body::Body;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::gather::Gather;
use super::{CONNECTION_WINDOW, MAX_HEADERS, STREAM_WINDOW, handover, stream};
use crate::cluster::members::View;
use crate::cluster::tls;
use crate::inbound::Inbound;

/// For a handshake, of TLS and then of HTTP/2.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);
/// Connections that may be at their handshake at once: strangers get no further.
const HANDSHAKES: usize = 256;
/// Messages of nodes that leave that are taken in at once: they are long.
const HANDOVERS: usize = 2;
/// Requests of one peer at a time. Its admission and this node's are the real bounds.
const MAX_STREAMS: u32 = 65_536;
/// After an accept that failed.
const PAUSE: Duration = Duration::from_millis(50);

/// Serves peers, their requests by `handle` and what they hand over by `take`, which says whether that is acknowledged,
/// until `closing` says so (or its sender is gone) and the requests then running are answered. Dropping the future ends
/// every connection.
///
/// A peer is whoever has a certificate of the CA that is made for a node, for the address it comes from or that of a
/// member.
pub async fn serve<H, T, P, F, B, E>(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    members: watch::Receiver<Arc<View>>,
    mut closing: watch::Receiver<bool>,
    handle: H,
    take: T,
) where
    T: Fn(&[u8]) -> P + Clone + Send + 'static,
    P: Future<Output = bool> + Send + 'static,
    H: Fn(Request<Inbound>) -> F + Clone + Send + 'static,
    F: Future<Output = Result<Response<B>, E>> + Send + 'static,
    B: Body<Data = Bytes, Error: Send> + Send + 'static,
    E: Send + 'static,
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
            if stream.get_ref().1.alpn_protocol() == Some(tls::HANDOVER) {
                serve_handover(stream, take, &handovers).await;
            } else {
                serve_streams(stream, handle, closing).await;
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

/// One that breaks off had nothing to say.
async fn serve_handover<T, P>(mut stream: TlsStream<TcpStream>, take: T, handovers: &Semaphore)
where
    T: Fn(&[u8]) -> P,
    P: Future<Output = bool>,
{
    let Ok(permit) = handovers.acquire().await else { return };
    let Ok(message) = handover::hear(&mut stream).await else { return };
    let taken = take(&message);
    drop(message);
    // Passing it on may wait for another node, which may wait for this one.
    drop(permit);
    if taken.await {
        handover::acknowledge(stream).await.ok();
    }
}

async fn serve_streams<H, F, B, E>(stream: TlsStream<TcpStream>, handle: H, mut closing: watch::Receiver<bool>)
where
    H: Fn(Request<Inbound>) -> F + Send + 'static,
    F: Future<Output = Result<Response<B>, E>> + Send + 'static,
    B: Body<Data = Bytes, Error: Send> + Send + 'static,
    E: Send + 'static,
{
    let shaken = server::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buffer_size(STREAM_WINDOW as usize)
        .max_header_list_size(MAX_HEADERS)
        .max_concurrent_streams(MAX_STREAMS)
        // What keeps strangers from wearing a server out by resets would, between nodes, let the clients that leave all at
        // once take everybody else's requests with them.
        .max_pending_accept_reset_streams(MAX_STREAMS as usize)
        .max_local_error_reset_streams(None)
        .handshake(Gather::new(stream));
    let Ok(Ok(mut connection)) = timeout(HANDSHAKE_PATIENCE, shaken).await else { return };
    let mut silent = pin!(stream::silence(connection.ping_pong()));
    // Waited for once, and not anew after each request.
    let mut closed = pin!(closing.wait_for(|closing| *closing));
    let mut serving = true;
    loop {
        let accepted = tokio::select! {
            biased;
            accepted = connection.accept() => accepted,
            () = &mut silent => return,
            _ = &mut closed, if serving => {
                serving = false;
                connection.graceful_shutdown();
                continue;
            }
        };
        // A connection that breaks takes its requests with it; they know.
        let Some(Ok((request, respond))) = accepted else { return };
        // On the heap: moved from future to future into its task, it would be copied each time.
        let answering = Box::pin(handle(at_owner(request)));
        tokio::spawn(answer(answering, respond));
    }
}

/// Answers a request, unless the peer gives it up or the connection ends: then what answers it is dropped.
async fn answer<F, B, E>(mut answering: Pin<Box<F>>, mut respond: SendResponse<Bytes>)
where
    F: Future<Output = Result<Response<B>, E>>,
    B: Body<Data = Bytes>,
{
    let answered = poll_fn(|cx| match answering.as_mut().poll(cx) {
        Poll::Ready(answered) => Poll::Ready(answered.ok()),
        Poll::Pending => respond.poll_reset(cx).map(|_| None),
    });
    let answered = answered.await;
    drop(answering);
    let Some(response) = answered else { return respond.send_reset(Reason::INTERNAL_ERROR) };
    let (parts, body) = response.into_parts();
    let ends = body.is_end_stream();
    match respond.send_response(Response::from_parts(parts, ()), ends) {
        Ok(stream) if !ends => {
            // One that breaks off has reset the stream: that tells the peer.
            stream::send(body, stream).await.ok();
        }
        Ok(_) => {}
        Err(_) => respond.send_reset(Reason::INTERNAL_ERROR),
    }
}

/// The target as the client gave it to the entry node: `:authority` was only the way here.
fn at_owner(request: Request<RecvStream>) -> Request<Inbound> {
    let (mut parts, stream) = request.into_parts();
    if let Some(target) = parts.uri.path_and_query().cloned() {
        parts.uri = Uri::from(target);
    }
    let body = Inbound::from_peer(&parts.headers, stream);
    Request::from_parts(parts, body)
}
