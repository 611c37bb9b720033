//! A client error in words that carry no client data: no target, no header, no body.

use std::error::Error;
use std::io;

use super::SendError;
use super::connect::ConnectError;

/// Says what went wrong with an attempt. Without a connection nothing was sent.
pub(super) fn of(error: &(dyn Error + 'static)) -> SendError {
    let unconnected = causes(error).find_map(|error| error.downcast_ref::<ConnectError>());
    let message = unconnected.map_or_else(|| describe(error), ConnectError::to_string);
    SendError::Failed { message, sent: unconnected.is_none() }
}

/// An error, its cause, and so on.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    let mut next = Some(error);
    std::iter::from_fn(move || {
        let error = next?;
        next = error.source();
        Some(error)
    })
}

fn describe(error: &(dyn Error + 'static)) -> String {
    let mut fallback = None;
    for error in causes(error) {
        if let Some(error) = error.downcast_ref::<hyper::Error>() {
            fallback = fallback.or_else(|| http(error));
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return connection(error).unwrap_or_else(|| "connection failed".into());
        }
    }
    fallback.unwrap_or_else(|| "connection failed".into())
}

/// A failure of the HTTP exchange.
fn http(error: &hyper::Error) -> Option<String> {
    let words = if error.is_parse() {
        "the answer is not valid HTTP"
    } else if error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
        "connection closed before an answer"
    } else if error.is_body_write_aborted() {
        "the request's body ended early"
    } else {
        return None;
    };
    Some(words.into())
}

/// A failure of the socket, by its kind: the system's own words may hold addresses.
pub(super) fn connection(error: &io::Error) -> Option<String> {
    let words = match error.kind() {
        io::ErrorKind::ConnectionRefused => "connection refused",
        io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted | io::ErrorKind::BrokenPipe => {
            "connection reset"
        }
        io::ErrorKind::TimedOut => "connection timed out",
        io::ErrorKind::HostUnreachable => "host unreachable",
        io::ErrorKind::NetworkUnreachable => "network unreachable",
        io::ErrorKind::UnexpectedEof => "connection closed before an answer",
        io::ErrorKind::AddrNotAvailable => "no free local port, or OUTBOUND_IP is no address of this machine",
        _ => return None,
    };
    Some(words.into())
}
