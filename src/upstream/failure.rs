//! A client error in words that carry no client data: no target, no header, no body.

use std::error::Error;
use std::io;

use super::connect::ConnectError;

/// Says what went wrong with an attempt.
pub(super) fn describe(error: &(dyn Error + 'static)) -> String {
    let mut source = Some(error);
    let mut fallback = None;
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<ConnectError>() {
            return error.to_string();
        }
        if let Some(error) = error.downcast_ref::<hyper::Error>() {
            fallback = fallback.or_else(|| http(error));
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return connection(error).unwrap_or_else(|| "connection failed".into());
        }
        source = error.source();
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
