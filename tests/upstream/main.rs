//! The client to Discord, judged at the socket: what goes on the wire, what is sent twice, how long it takes.

mod clock;
mod proxy;
mod replay;
mod support;
mod tls;
mod wire;
