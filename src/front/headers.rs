//! What changes about a message on its way through: hop-by-hop fields, `Host`, `User-Agent`, forwarding fields, and the
//! form of the target. Everything else passes as it came, in place: a header map is never rebuilt.

use http::header::{CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, Entry, HOST, TRANSFER_ENCODING, UPGRADE, USER_AGENT};
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, Version};

use crate::error::ProxyError;

/// Largest header block, request line included.
pub const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Sent for clients that do not say who they are; Discord's edge refuses requests without it.
const AGENT: HeaderValue = HeaderValue::from_static(concat!(
    "DiscordBot (https://github.com/germanoeich/nirn-proxy, ",
    env!("CARGO_PKG_VERSION"),
    ")"
));
const ZERO: HeaderValue = HeaderValue::from_static("0");
const CHUNKED: HeaderValue = HeaderValue::from_static("chunked");
const TARGET: ProxyError = ProxyError::BadRequest("the request target is neither a path nor an absolute URL");

/// How requests leave: what is the same for all of them.
#[derive(Clone, Debug)]
pub struct Outgoing {
    host: HeaderValue,
}

impl Outgoing {
    /// For an upstream whose `Host` is this.
    ///
    /// # Errors
    ///
    /// When the authority is no header value, which no parsed one is.
    pub fn new(authority: &Authority) -> Result<Self, String> {
        let host = HeaderValue::from_str(authority.as_str()).map_err(|_| "DISCORD_API_URL is not usable".to_owned())?;
        Ok(Self { host })
    }

    /// Makes a client's request what Discord gets. `empty` says that it has no body.
    ///
    /// # Errors
    ///
    /// A 400 for a target that is no path, and for a body in a transfer coding that cannot be undone.
    pub fn apply(&self, parts: &mut http::request::Parts, empty: bool) -> Result<(), ProxyError> {
        to_origin_form(&parts.method, &mut parts.uri)?;
        let headers = &mut parts.headers;
        // hyper undoes the last coding of a list, and takes the others for a part of the body
        let chunked = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"chunked");
        if !empty && !headers.get_all(TRANSFER_ENCODING).iter().all(chunked) {
            return Err(ProxyError::BadRequest("the only Transfer-Encoding that can be forwarded is chunked"));
        }
        remove(headers, |name| is_hop_by_hop(name) || tells_who_forwarded(name));
        // its `100 Continue` is the proxy's own business
        headers.remove(EXPECT);
        // An insertion makes room for one more before it looks whether it needs it: what is there is written over.
        let single = headers.get_all(HOST).iter().nth(1).is_none();
        match headers.get_mut(HOST).filter(|_| single) {
            Some(host) => *host = self.host.clone(),
            None => _ = headers.insert(HOST, self.host.clone()),
        }
        if !headers.contains_key(USER_AGENT) {
            headers.insert(USER_AGENT, AGENT);
        }
        if parts.version == Version::HTTP_2 {
            join_cookies(headers);
        }
        if !headers.contains_key(CONTENT_LENGTH) {
            if empty {
                end_at_head(parts);
            } else {
                // said here because hyper takes a GET of unknown length for one without a body
                headers.insert(TRANSFER_ENCODING, CHUNKED);
            }
        }
        Ok(())
    }
}

/// Says of a request whose length was not known that it has no body (RFC 9110, 8.6: methods that anticipate content say
/// so, the others say nothing).
pub fn end_at_head(parts: &mut http::request::Parts) {
    parts.headers.remove(TRANSFER_ENCODING);
    if matches!(parts.method, Method::POST | Method::PUT | Method::PATCH) {
        parts.headers.insert(CONTENT_LENGTH, ZERO);
    }
}

/// Makes Discord's response what a client gets.
pub fn incoming(headers: &mut HeaderMap) {
    // RFC 9112, 6.3: the transfer coding overrides a length, which may be a lie
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    remove(headers, is_hop_by_hop);
}

/// Whether an HTTP/2 request's block is too large. HTTP/1's is measured as it is read.
pub fn is_too_large(version: Version, uri: &Uri, headers: &HeaderMap) -> bool {
    // RFC 9113, 6.5.2: name and value, and 32 for each field
    let list = || headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum::<usize>();
    let target = || uri.path_and_query().map_or(0, |path| path.as_str().len());
    version == Version::HTTP_2 && list() + target() > MAX_HEAD_BYTES
}

/// Whether a request asks for another protocol than HTTP on its connection.
pub fn is_upgrade(method: &Method, headers: &HeaderMap) -> bool {
    let names_upgrade = |value: &HeaderValue| options(value).any(|name| name.eq_ignore_ascii_case(b"upgrade"));
    *method == Method::CONNECT || headers.contains_key(UPGRADE) || headers.get_all(CONNECTION).iter().any(names_upgrade)
}

/// Gives a target its origin form, `*` for OPTIONS. Its path and query stay what they are byte for byte; a URL that has
/// no path gets the one that RFC 9112 (3.2.1) gives it.
fn to_origin_form(method: &Method, uri: &mut Uri) -> Result<(), ProxyError> {
    let is_relative = uri.authority().is_none() && uri.scheme().is_none();
    let target = uri.path_and_query().map_or("", PathAndQuery::as_str);
    if is_relative && (target.starts_with('/') || target == "*" && *method == Method::OPTIONS) {
        return Ok(());
    }
    let is_http = matches!(uri.scheme_str(), Some(scheme) if matches!(scheme, "http" | "https"));
    if !is_http {
        return Err(TARGET);
    }
    *uri = match uri.path_and_query() {
        Some(path) if target.starts_with('/') => Uri::from(path.clone()),
        _ => Uri::try_from(format!("/{target}")).map_err(|_| TARGET)?,
    };
    Ok(())
}

/// Removes `Connection`, what it names, and every field that `unwanted` picks.
fn remove(headers: &mut HeaderMap, unwanted: impl Fn(&str) -> bool) {
    let plain = |value: &HeaderValue| matches!(value.as_bytes(), b"keep-alive" | b"close");
    // neither list allocates unless there is something in it
    let named: Vec<HeaderValue> = match headers.entry(CONNECTION) {
        Entry::Occupied(options) => options.remove_entry_mult().1.filter(|value| !plain(value)).collect(),
        Entry::Vacant(_) => Vec::new(),
    };
    let unwanted: Vec<HeaderName> = headers.keys().filter(|name| unwanted(name.as_str())).cloned().collect();
    for name in unwanted {
        headers.remove(name);
    }
    for name in named.iter().flat_map(options) {
        if let Ok(name) = HeaderName::from_bytes(name)
            && !frames(&name)
        {
            headers.remove(name);
        }
    }
}

/// The connection options in a value.
fn options(value: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    value.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii)
}

/// Fields that say where a message goes and where it ends. RFC 9110 (7.6.1) forbids to name such a field in
/// `Connection`; obeying would change the message, so it stays. What else is named goes, even `Authorization`: then
/// the request was meant to go without it, and it is classified afterwards.
fn frames(name: &HeaderName) -> bool {
    *name == CONTENT_LENGTH || *name == HOST
}

fn is_hop_by_hop(name: &str) -> bool {
    matches!(name, "connection" | "keep-alive" | "te" | "trailer" | "transfer-encoding" | "upgrade")
        || name.starts_with("proxy-")
}

fn tells_who_forwarded(name: &str) -> bool {
    matches!(name, "forwarded" | "x-real-ip" | "x-nirn-hop") || name.starts_with("x-forwarded-")
}

/// HTTP/2 may split cookies over lines; HTTP/1.1 has one (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let mut lines = headers.get_all(COOKIE).iter();
    let (Some(first), Some(second)) = (lines.next(), lines.next()) else { return };
    let joined =
        [first, second].into_iter().chain(lines).map(HeaderValue::as_bytes).collect::<Vec<_>>().join(&b"; "[..]);
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        headers.insert(COOKIE, joined);
    }
}

#[cfg(test)]
#[path = "headers_tests.rs"]
mod tests;
