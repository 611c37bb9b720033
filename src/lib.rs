//! nirn-proxy: a clustered HTTP reverse proxy for Discord's REST API.
//!
//! A bot's processes share one token, and Discord counts for the token and for the IP, not for the process. This daemon
//! stands between them and Discord: it learns the limits from Discord's answers, lets requests wait for their turn, and
//! passes everything through byte for byte.
//!
//! # Three layers
//!
//! - **Core**: decisions. No socket, no task, no clock read, no log, no metric; what needs the time is given it.
//!   [`config`], [`error`], [`identity`], [`route`], [`front::framing`], [`front::headers`], [`front::unread`],
//!   [`cluster::members`], and in the scheduler everything but its gate, its attempts and the bodies it keeps: above all
//!   [`scheduler::client`].
//! - **Shell**: tokio and hyper around the cores. It moves bytes, sleeps until the instant a core named, and holds guards
//!   whose drop is the whole clean-up: [`front`], [`inbound`], [`scheduler`], [`upstream`], [`cluster`], [`observe`].
//! - **Wiring**: [`daemon`] and `main`. They see everything and decide nothing.
//!
//! # One request
//!
//! 1. [`front`] accepts a connection; [`front::connection`] finds out which HTTP it speaks and serves it until either side
//!    closes it. [`front::socket`] keeps the time limits a client has, [`front::framing`] watches the bytes for what hyper
//!    does not tell, [`front::unread`] speaks for requests that hyper cannot read, and [`front::link`] is what the
//!    connection's requests know of it: above all, whether it still stands. What a client, Discord or a peer sends after a
//!    head is an [`inbound`] body, which tells an end from a break.
//! 2. [`front::handler`] walks one request. Health and refusals are answered at once; [`front::admission`] gives a slot or
//!    refuses. From here to the last byte of its answer the request holds a [`front::guard`].
//! 3. [`route`] says what the request is for and [`identity`] who asks, both from a look at the head alone.
//! 4. [`front::headers`] makes the headers that go to Discord.
//! 5. [`cluster`] says who owns the credential. A peer's request crosses to it by [`cluster::peer`], once unless the credential
//!    moves meanwhile, and comes back the same way; what is ours (alone, everything is) goes on here.
//! 6. [`scheduler`] dispatches it under one deadline. [`scheduler::clients`] finds the credential's state, which is a pure
//!    state machine behind one lock, the [`scheduler::client`]; [`scheduler::gate`] waits at it and holds what it grants:
//!    - [`scheduler::routes`]: no hold on the route, and the bucket (or buckets) it counts in;
//!    - [`scheduler::line`]: the head of that bucket's line, in order of arrival;
//!    - [`scheduler::bucket`]: what Discord's answers allow, with the shape and the margin that [`scheduler::profile`] has
//!      learned for the bucket's hash;
//!    - the credential's validity, then [`scheduler::pacer`]: the global limit.
//!
//!    A slot of the [`scheduler::budget`] of invalid requests is reserved, and [`upstream`] finds a connection, before which
//!    nothing counts as sent, and sends it. What the answer says ([`scheduler::signal`]) is learned, and the turn is given on
//!    at the headers: a slow body holds nobody up. A 429 that can be repeated within the deadline goes round again and keeps
//!    its place, with its body from [`scheduler::replay`].
//! 7. The answer's head goes back through [`front::headers`], and its body as a [`front::body`], which carries the guard
//!    and the deadline. A body past its deadline is cut, never ended as if it were whole.
//!
//! # A client that goes away
//!
//! Dropping the future of a request is the whole of its clean-up, wherever it is: its place in the queue, its slot and its
//! gauge are given back, and Discord never sees a request that was still waiting. An attempt that was sent still runs to its
//! headers, so that what Discord counted is learned. A client that closes its sending half while it waits counts as gone:
//! from a socket the two cannot be told apart.
//!
//! # Stopping
//!
//! [`Daemon::run`] drains: health answers 503, new requests are refused, admitted ones finish; what is left after 15 s gets
//! a 503, or its stream is cut.
//!
//! In a cluster the node first tells the others that it leaves. From then on its credentials are theirs: [`scheduler`] lets
//! them go, [`cluster`] hands what was known of them over ([`scheduler::handover`]) and sends on to their new owners what
//! waited here. [`daemon`] does the same whenever a node that joins takes credentials over. What another node that leaves
//! tells this one after it has left is passed on.

pub mod agreed;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod daemon;
pub mod error;
pub mod front;
pub mod identity;
pub mod inbound;
pub mod observe;
pub mod probe;
pub mod route;
pub mod scheduler;
pub mod upstream;

pub use daemon::{Addresses, Daemon, bind};
