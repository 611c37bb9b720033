//! The walk of one request: refusals, a slot, its route and credential, its dispatch, and the answer's way back.
//!
//! This is where a failed request is counted, once, and logged if an operator must act on it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, VIA};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Version, header};
use http_body::Body as _;
use pin_project_lite::pin_project;
use tokio::time::{Instant, timeout_at};

use super::admission::{Admission, Phase, Slot};
use super::body::Body;
use super::framing::Fault;
use super::guard::Guard;
use super::headers::{self, Outgoing};
use super::link::{End, Link};
use super::report::Report;
use crate::clock;
use crate::cluster::members::{Key, Member};
use crate::cluster::{self, Cluster, Way, peer};
use crate::error::{ProxyError, Reason};
use crate::identity::Identity;
use crate::inbound::Inbound;
use crate::observe::metrics::{Metrics, RouteMetrics};
use crate::route::Route;
use crate::scheduler::client::Ask;
use crate::scheduler::{Dispatched, Fate, Moved, Scheduler, Want};

/// The health probe's path.
const HEALTH: &str = "/nirn/healthz";
/// What the proxy keeps for itself.
const RESERVED: &str = "/nirn/";

/// What every request's walk needs; one for the process.
pub struct Handler {
    /// Slots and phase.
    pub admission: Admission,
    /// How requests leave.
    pub outgoing: Outgoing,
    /// Where open requests are counted.
    pub metrics: Metrics,
    /// Where failed ones are.
    pub report: Report,
    /// What brings a request to Discord.
    pub scheduler: Scheduler,
    /// Who owns a credential.
    pub cluster: Cluster,
}

/// Where a request came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The front listener: a client.
    Public,
    /// The peer listener: it has made a hop, and makes another only while its credential moves. Only the listener tells;
    /// what a header claims is nothing.
    Peer,
}

/// The client is gone: there is nobody to answer, and hyper closes the connection.
#[derive(Debug)]
pub struct Gone;

impl std::fmt::Display for Gone {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("client closed the request")
    }
}

impl std::error::Error for Gone {}

/// A request that was admitted, with what its way to Discord needs.
struct Walk {
    parts: Box<Parts>,
    body: Inbound,
    ask: Ask,
    channel_edit: bool,
    identity: Identity,
    key: Key,
    metrics: RouteMetrics,
    guard: Guard,
    /// Hops made.
    hops: u8,
}

/// An answer that needs no walk; boxed because it is rare and large.
type Answered = Box<Result<Response<Body>, Gone>>;

pin_project! {
    /// The answer to a request. Not an async block: that would keep room for what has begun beside the walk that it
    /// becomes, and a waiting request is little more than this.
    #[project = AnsweringProjection]
    enum Answering<W> {
        Walks { #[pin] walk: W },
        Answered { answered: Option<Answered> },
    }
}

impl<W: Future<Output = Result<Response<Body>, Gone>>> Future for Answering<W> {
    type Output = Result<Response<Body>, Gone>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            AnsweringProjection::Walks { walk } => walk.poll(cx),
            AnsweringProjection::Answered { answered } => answered.take().map_or(Poll::Pending, |it| Poll::Ready(*it)),
        }
    }
}

impl Handler {
    /// Answers one request. All that needs no waiting is done before there is a future, so that a request that waits
    /// keeps no room for it.
    ///
    /// # Errors
    ///
    /// When the client went away before there was an answer.
    pub fn handle(
        self: Arc<Self>,
        request: Request<Inbound>,
        link: &Arc<Link>,
        origin: Origin,
    ) -> impl Future<Output = Result<Response<Body>, Gone>> + Send + use<> {
        match self.begin(request, link, origin) {
            Ok(walk) => Answering::Walks { walk: self.forward(walk) },
            Err(answered) => Answering::Answered { answered: Some(answered) },
        }
    }

    /// Health, refusals, a slot, and what the request is.
    fn begin(&self, request: Request<Inbound>, link: &Arc<Link>, origin: Origin) -> Result<Walk, Answered> {
        let fault = link.request();
        let head = *request.method() == Method::HEAD;
        if origin == Origin::Peer {
            self.metrics.routed_received();
        } else if fault.is_none() && request.uri().path() == HEALTH && (head || *request.method() == Method::GET) {
            return Err(Box::new(Ok(self.health(head))));
        }
        if request.version() == Version::HTTP_10 {
            link.ends_bodies_by_closing();
        }
        let admitted = match refusal(&request, fault) {
            Some(error) => Err(error),
            None if origin == Origin::Peer => self.admission.admit_hop(),
            None if headers::is_too_large(request.version(), request.uri(), request.headers()) => {
                Err(ProxyError::HeadTooLarge)
            }
            None => self.admission.admit(),
        };
        let walk = admitted.and_then(|slot| self.classify(request, slot, link, origin));
        // What follows a faulty request is not followed, so it is not read either.
        walk.map_err(|error| Box::new(self.fail(&error, head, fault.is_some())))
    }

    fn classify(
        &self,
        request: Request<Inbound>,
        slot: Slot,
        link: &Arc<Link>,
        origin: Origin,
    ) -> Result<Walk, ProxyError> {
        let (parts, body) = request.into_parts();
        let mut parts = Box::new(parts);
        let hops = if origin == Origin::Peer { peer::hops(&parts.headers) } else { 0 };
        // First, so that what is classified is what Discord gets.
        self.outgoing.apply(&mut parts, body.is_end_stream())?;
        let route = Route::classify(&parts.method, parts.uri.path(), clock::unix_ms());
        let authorization = parts.headers.get(header::AUTHORIZATION);
        let identity = Identity::from_authorization(authorization.map(HeaderValue::as_bytes));
        let metrics = self.metrics.route(&parts.method, &route);
        let guard = Guard::new(slot, metrics.open(), self.metrics.clone(), Arc::clone(link));
        let key = cluster::key(&identity, &route, parts.uri.path());
        let (ask, channel_edit) = (Ask::new(&parts.method, &route), route.channel_edit);
        Ok(Walk { parts, body, ask, channel_edit, identity, key, metrics, guard, hops })
    }

    /// The way of an admitted request to Discord and back.
    fn forward(self: Arc<Self>, walk: Walk) -> impl Future<Output = Result<Response<Body>, Gone>> + Send {
        // Taken apart before there is a future, which would hold it whole besides.
        let Walk { parts, body, ask, channel_edit, identity, key, metrics, mut guard, hops } = walk;
        let deadline = self.scheduler.deadline();
        let head = parts.method == Method::HEAD;
        let mut taken = Some((parts, body, Want { ask, channel_edit, deadline }, metrics));
        async move {
            let dispatch = async {
                let way = self.cluster.way(&key, hops, false, deadline).await?;
                // Out of the future around this one, or a waiting request would have room for it in both.
                let taken = taken.take().ok_or(ProxyError::Unavailable(Reason::RetryPreparation))?;
                let (parts, body, want, metrics) = taken;
                let moved = match way {
                    Way::Here { unheard } => {
                        if unheard {
                            self.scheduler.doubt();
                        }
                        match self.scheduler.dispatch(parts, body, &identity, want, metrics).await? {
                            Fate::Answered(dispatched) => return Ok(dispatched),
                            Fate::Moved(moved) => moved,
                        }
                    }
                    Way::There(peer, hop) => {
                        return Box::pin(self.pass_on(&peer, Request::from_parts(*parts, body), hop)).await;
                    }
                };
                // Rare, and not short.
                let followed = timeout_at(deadline, self.follow(moved, &identity, &key, hops, deadline));
                Box::pin(followed).await.map_err(|_| ProxyError::QueueTimeout)?
            };
            let dispatched = tokio::select! {
                biased;
                dispatched = dispatch => dispatched,
                end = guard.link().ended() => Err(error_of(end)),
            };
            match dispatched {
                Ok(Dispatched { response, deadline }) => {
                    let (mut parts, incoming) = response.into_parts();
                    parts.version = Version::HTTP_11;
                    headers::incoming(&mut parts.headers);
                    Ok(Response::from_parts(parts, Body::stream(incoming, deadline, guard)))
                }
                Err(error) => {
                    guard.settle();
                    // A request whose upload broke off because its client left did not fail at Discord.
                    let gone = guard.link().has_ended() == Some(End::ClientGone);
                    self.fail(if gone { &ProxyError::ClientClosed } else { &error }, head, false)
                }
            }
        }
    }

    /// The way of a request whose credential got another owner while it waited.
    async fn follow(
        &self,
        mut moved: Box<Moved>,
        identity: &Identity,
        key: &Key,
        hops: u8,
        deadline: Instant,
    ) -> Result<Dispatched, ProxyError> {
        loop {
            match self.cluster.way(key, hops, true, deadline).await? {
                Way::Here { .. } => match self.scheduler.resume(moved, identity).await? {
                    Fate::Answered(dispatched) => return Ok(dispatched),
                    Fate::Moved(again) => moved = again,
                },
                Way::There(peer, hop) => {
                    let request = moved.into_request().ok_or(ProxyError::Unavailable(Reason::RetryPreparation))?;
                    return self.pass_on(&peer, request, hop).await;
                }
            }
        }
    }

    async fn pass_on<B>(&self, peer: &Member, request: Request<B>, hop: u8) -> Result<Dispatched, ProxyError>
    where
        B: http_body::Body<Data = Bytes, Error: Into<ProxyError> + Send> + Send + 'static,
    {
        self.metrics.routed_sent();
        let answered = self.cluster.forward(peer, request, hop).await;
        answered.inspect_err(|error| {
            // A client's broken body is none of the peer's errors.
            if *error == ProxyError::Unavailable(Reason::PeerError) {
                self.metrics.routed_error();
            }
        })
    }

    fn health(&self, head: bool) -> Response<Body> {
        let (status, text) = match self.admission.phase() {
            Phase::Serving if self.cluster.over_capacity() => {
                (StatusCode::SERVICE_UNAVAILABLE, "more members than CLUSTER_MAX_NODES\n")
            }
            Phase::Serving => (StatusCode::OK, "ok\n"),
            Phase::Draining | Phase::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n"),
        };
        let mut response = Response::new(Body::local(Bytes::from_static(text.as_bytes()), head));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_LENGTH, HeaderValue::from(text.len()));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        headers.insert(VIA, HeaderValue::from_static("1.1 nirn-proxy"));
        headers.insert("generated-by-proxy", HeaderValue::from_static("true"));
        response
    }

    fn fail(&self, error: &ProxyError, head: bool, closing: bool) -> Result<Response<Body>, Gone> {
        self.report.failed(error);
        if *error == ProxyError::ClientClosed {
            return Err(Gone);
        }
        let mut response = error.response().map(|bytes| Body::local(bytes, head));
        if closing {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response)
    }
}

/// What is answered here whatever the proxy's state.
fn refusal(request: &Request<Inbound>, fault: Option<Fault>) -> Option<ProxyError> {
    match fault {
        Some(Fault::TwoLengths) => {
            return Some(ProxyError::BadRequest("a request has a Content-Length or a Transfer-Encoding, not both"));
        }
        Some(Fault::Fragment) => return Some(ProxyError::BadRequest("a request's target has no fragment")),
        Some(Fault::LongLength) => return Some(ProxyError::BadRequest("the Content-Length line is padded")),
        None => {}
    }
    if request.uri().path().starts_with(RESERVED) {
        return Some(ProxyError::UnknownEndpoint);
    }
    if headers::is_upgrade(request.method(), request.headers()) {
        return Some(ProxyError::BadRequest("protocol upgrades are not proxied"));
    }
    None
}

fn error_of(end: End) -> ProxyError {
    match end {
        End::ClientGone => ProxyError::ClientClosed,
        End::Stopped => ProxyError::Unavailable(Reason::ShuttingDown),
    }
}
