//! A Discord that enforces its limits, and so judges whoever talks to it.
//!
//! A test starts one with a [`Script`], points a proxy at [`FakeDiscord::addr`], and looks at [`FakeDiscord::arrivals`]
//! and [`FakeDiscord::counts`] afterwards. The limits of the script's [`Rule`]s are enforced on every request for which no
//! answer was scripted by [`FakeDiscord::on`].
//!
//! The order of a judgement: a ban of the address, a scripted answer, the token, the rolling second, deleted webhooks, the
//! bucket, the limits that no header speaks of.
//!
//! HTTP/1.1 is read and written by hand, so that a request is recorded byte for byte and an answer can go wrong in every
//! way; HTTP/2 is hyper's.

pub mod arrivals;
pub mod believable;
pub mod clock;
pub mod control;
mod exchange;
mod http1;
mod http2;
pub mod judge;
pub mod limits;
pub mod paths;
pub mod reply;
pub mod script;
mod server;

pub use arrivals::{Arrival, Counts, Verdict, most_in, smallest_gap};
pub use reply::{Action, Framing, Gate, Reply};
pub use script::{Bucket, Latency, Rule, Script, Shape, SubLimit};
pub use server::FakeDiscord;
