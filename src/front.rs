//! The front listener: accepts connections and serves them until the daemon stops.

pub mod admission;
pub mod body;
pub mod connection;
pub mod framing;
pub mod guard;
pub mod handler;
pub mod headers;
pub mod link;
pub mod report;
pub mod socket;
pub mod unread;

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;
use tokio::time::sleep;

use self::handler::Handler;
use self::socket::Patience;
use crate::error::Throttle;

/// Connections the kernel holds until they are accepted: a restart of many bots connects at once.
const BACKLOG: i32 = 4096;
/// After a failed accept: at first, and at most.
const PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Binds a listener; `variable` is the setting that chose its port. Call it within a runtime.
///
/// # Errors
///
/// When the address cannot be had, with the variable, the address and why.
pub fn listen(ip: IpAddr, port: u16, variable: &str) -> Result<TcpListener, String> {
    let address = SocketAddr::new(ip, port);
    bind(address).map_err(|error| format!("{variable}: cannot listen on {address}: {error}"))
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        // `::` takes IPv4 too, whatever the system's default is.
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(StdListener::from(socket))
}

/// Accepts until the future is dropped. Connections live on in tasks of their own.
pub async fn accept(listener: TcpListener, handler: Arc<Handler>, patience: Patience) {
    let (mut pause, mut throttle) = (PAUSE, Throttle::default());
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                pause = PAUSE;
                let phase = handler.admission.follow();
                tokio::spawn(connection::serve(stream, Arc::clone(&handler), patience, phase));
            }
            Err(error) if is_about_one_connection(&error) => {}
            Err(error) => {
                // Most likely out of file descriptors: accepting again at once would only spin.
                if let Some(left_out) = throttle.record(std::time::Instant::now()) {
                    tracing::warn!(%error, left_out, "cannot accept a connection");
                }
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

fn is_about_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}
