//! Outbound proxies: HTTPS_PROXY, HTTP_PROXY and NO_PROXY.
//!
//! An https upstream is reached through a CONNECT tunnel. A plain http upstream is asked for in absolute form, as curl
//! and every other user of HTTP_PROXY does: many proxies refuse CONNECT to ports other than 443. NO_PROXY decides over
//! loopback as over anything else.

use http::{HeaderValue, Uri};
use hyper_util::client::proxy::matcher::Matcher;

use crate::config;

/// How the upstream is reached; settled at the start, since there is only one.
#[derive(Clone)]
pub(super) enum Way {
    /// Without a proxy.
    Direct,
    /// Through a CONNECT tunnel.
    Tunnel(Proxy),
    /// By absolute-form requests.
    Forward(Proxy),
}

/// A proxy's address, and what it wants to see.
#[derive(Clone)]
pub(super) struct Proxy {
    /// Scheme, host and port.
    pub(super) uri: Uri,
    /// `Proxy-Authorization`, from its user info.
    pub(super) authorization: Option<HeaderValue>,
}

/// Finds the way to `upstream`. A value that cannot be used stops the start rather than sending traffic around the proxy.
pub(super) fn way(config: &config::Upstream, upstream: &Uri) -> Result<Way, String> {
    let (name, value) =
        if config.https { ("HTTPS_PROXY", &config.proxy.https) } else { ("HTTP_PROXY", &config.proxy.http) };
    let Some(value) = value.as_deref().map(str::trim).filter(|value| !value.is_empty()) else { return Ok(Way::Direct) };
    let matcher = |no: &str| {
        let builder = Matcher::builder().no(no.to_owned());
        if config.https { builder.https(value.to_owned()) } else { builder.http(value.to_owned()) }.build()
    };
    // without exceptions first, to tell an unusable value from one that does not apply
    let usable = matcher("").intercept(upstream);
    if !usable.is_some_and(|proxy| matches!(proxy.uri().scheme_str(), Some("http" | "https"))) {
        return Err(format!("{name} must be the URL of an http or https proxy"));
    }
    let exceptions = exceptions(config.proxy.no.as_deref().unwrap_or_default(), upstream.port_u16(), config.https);
    let Some(proxy) = exceptions.and_then(|no| matcher(&no).intercept(upstream)) else { return Ok(Way::Direct) };
    let proxy = Proxy { uri: proxy.uri().clone(), authorization: proxy.basic_auth().cloned() };
    Ok(if config.https { Way::Tunnel(proxy) } else { Way::Forward(proxy) })
}

/// NO_PROXY in the matcher's terms; `None` when it excepts everything. The matcher holds `*` against names only, and
/// knows no ports: `host:port` excepts the host if that is the upstream's port.
fn exceptions(no: &str, port: Option<u16>, https: bool) -> Option<String> {
    let port = port.unwrap_or(if https { 443 } else { 80 });
    let entries: Vec<_> = no.split(',').map(str::trim).collect();
    if entries.contains(&"*") {
        return None;
    }
    let hosts = entries.into_iter().filter_map(|entry| match entry.rsplit_once(':') {
        Some((host, number)) if !host.contains(':') || host.ends_with(']') => {
            (number.parse() == Ok(port)).then(|| host.trim_matches(['[', ']']))
        }
        _ => Some(entry.trim_matches(['[', ']'])),
    });
    Some(hosts.collect::<Vec<_>>().join(","))
}
