//! What one answer of Discord says about limits: its headers, and a 429's body, to a [`Signal`].
//!
//! Each header stands alone: one that cannot be read (text, NaN, infinite, negative, overflowing) is ignored by
//! itself. Of several values the one that makes us wait longest counts. Units are seconds
//! (Discord's documentation, "Rate Limits"); nothing here exceeds [`MAX_WAIT`].

use std::time::{Duration, SystemTime};

use http::header::{DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, StatusCode};
use serde::{Deserialize, Serialize};

use crate::agreed;
use crate::error::Scope;

/// No announced wait counts for more than this.
pub const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// A 429 is never retried sooner, whatever it says.
pub const MIN_RETRY: Duration = Duration::from_millis(50);

const BUCKET: HeaderName = HeaderName::from_static("x-ratelimit-bucket");
const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RESET_AFTER: HeaderName = HeaderName::from_static("x-ratelimit-reset-after");
const GLOBAL: HeaderName = HeaderName::from_static("x-ratelimit-global");
const SCOPE: HeaderName = HeaderName::from_static("x-ratelimit-scope");

/// Discord's name of a bucket, as a hash, see [`agreed`].
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BucketHash(pub u64);

impl BucketHash {
    fn of(name: &[u8]) -> Self {
        Self(agreed::hash(b"bucket hash", &[name]) as u64)
    }
}

/// What one answer says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Signal {
    /// The answer's status.
    pub status: StatusCode,
    /// `X-RateLimit-Bucket`.
    pub bucket: Option<BucketHash>,
    /// `X-RateLimit-Limit`: the calls a full bucket allows.
    pub limit: Option<u32>,
    /// `X-RateLimit-Remaining`: the calls it still allows.
    pub remaining: Option<u32>,
    /// `X-RateLimit-Reset-After`, else `X-RateLimit-Reset` against `Date`.
    pub reset_after: Option<Duration>,
    /// `X-RateLimit-Global`, or scope `global`.
    pub global: bool,
    /// `X-RateLimit-Scope`.
    pub scope: Option<Scope>,
    /// How long a 429 says to wait: from `Retry-After` and, after [`Signal::with_body`], the body.
    pub retry_after: Option<Duration>,
}

#[derive(Deserialize)]
struct Refusal {
    retry_after: Option<f64>,
    #[serde(default)]
    global: bool,
}

impl Signal {
    /// Reads an answer's status and headers. Total: no header can make it fail.
    pub fn read(status: StatusCode, headers: &HeaderMap) -> Self {
        let scope = scope(headers);
        Self {
            status,
            bucket: headers.get(BUCKET).map(|name| BucketHash::of(name.as_bytes())),
            limit: count(headers, &LIMIT),
            remaining: count(headers, &REMAINING),
            reset_after: longest(headers, &RESET_AFTER).or_else(|| until_reset(headers)),
            global: scope == Some(Scope::Global) || flag(headers, &GLOBAL),
            scope,
            retry_after: if status == StatusCode::TOO_MANY_REQUESTS { retry_after(headers) } else { None },
        }
    }

    /// Adds what a 429's decoded JSON body says. The body's exact `retry_after` wins over a header that is merely its
    /// rounding up; else the longer one counts. Bodies that are not Discord's JSON add nothing.
    #[must_use]
    pub fn with_body(mut self, body: &[u8]) -> Self {
        let Ok(refusal) = serde_json::from_slice::<Refusal>(body) else { return self };
        self.global |= refusal.global;
        if let Some(exact) = refusal.retry_after.and_then(seconds) {
            self.retry_after = Some(match self.retry_after {
                Some(header) if header > exact && header != ceil(exact) => header,
                _ => exact,
            });
        }
        self
    }

    /// Whether Discord counts this answer as an invalid request (401, 403, and 429 except of shared scope).
    pub fn invalid(&self) -> bool {
        match self.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => true,
            StatusCode::TOO_MANY_REQUESTS => self.scope != Some(Scope::Shared),
            _ => false,
        }
    }

    /// Whether this is a 429.
    pub fn refused(&self) -> bool {
        self.status == StatusCode::TOO_MANY_REQUESTS
    }
}

fn ceil(exact: Duration) -> Duration {
    if exact.subsec_nanos() == 0 { exact } else { Duration::from_secs(exact.as_secs() + 1) }
}

fn values<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers.get_all(name).iter().filter_map(|value| value.to_str().ok())
}

fn parts<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    values(headers, name).flat_map(|value| value.split(',')).map(str::trim)
}

fn seconds(value: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(value).ok().map(|wait| wait.min(MAX_WAIT))
}

/// A count; of several the smallest, since it makes us wait longest.
fn count(headers: &HeaderMap, name: &HeaderName) -> Option<u32> {
    parts(headers, name).filter_map(|text| text.parse().ok()).min()
}

fn longest(headers: &HeaderMap, name: &HeaderName) -> Option<Duration> {
    parts(headers, name).filter_map(|text| text.parse().ok()).filter_map(seconds).max()
}

/// `X-RateLimit-Reset` is Discord's wall clock, so it is compared with Discord's own `Date` and never with ours.
/// `Date` has whole seconds: the result is up to one second too long, never too short.
fn until_reset(headers: &HeaderMap) -> Option<Duration> {
    let date = server_date(headers)?.as_secs_f64();
    parts(headers, &RESET).filter_map(|text| text.parse::<f64>().ok()).filter_map(|at| seconds(at - date)).max()
}

fn server_date(headers: &HeaderMap) -> Option<Duration> {
    let date = httpdate::parse_http_date(headers.get(DATE)?.to_str().ok()?).ok()?;
    date.duration_since(SystemTime::UNIX_EPOCH).ok()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    longest(headers, &RETRY_AFTER).or_else(|| {
        // RFC 9110 section 10.2.3 allows a date.
        let date = server_date(headers)?;
        values(headers, &RETRY_AFTER)
            .filter_map(|text| httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::UNIX_EPOCH).ok())
            .filter_map(|at| at.checked_sub(date))
            .map(|wait| wait.min(MAX_WAIT))
            .max()
    })
}

fn flag(headers: &HeaderMap, name: &HeaderName) -> bool {
    values(headers, name).any(|value| value.trim().eq_ignore_ascii_case("true"))
}

fn scope(headers: &HeaderMap) -> Option<Scope> {
    values(headers, &SCOPE).find_map(|value| match value.trim() {
        text if text.eq_ignore_ascii_case("user") => Some(Scope::User),
        text if text.eq_ignore_ascii_case("global") => Some(Scope::Global),
        text if text.eq_ignore_ascii_case("shared") => Some(Scope::Shared),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use proptest::prelude::*;

    fn read(status: u16, lines: &[(&str, &str)]) -> Signal {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        Signal::read(StatusCode::from_u16(status).unwrap(), &headers)
    }

    fn ms(value: u64) -> Option<Duration> {
        Some(Duration::from_millis(value))
    }

    #[test]
    fn resets_keep_their_fraction_and_ignore_what_cannot_be_read() {
        for (text, expected) in [
            ("1.750", ms(1750)),
            (" 2 ", ms(2000)),
            ("0", ms(0)),
            ("2814, 2", ms(2_814_000)),
            ("soon, 3", ms(3000)),
            ("102737.719", Some(MAX_WAIT)),
            ("1e300", None),
            ("NaN", None),
            ("inf", None),
            ("-1", None),
            ("", None),
            ("soon", None),
        ] {
            assert_eq!(read(200, &[("x-ratelimit-reset-after", text)]).reset_after, expected, "{text:?}");
        }
    }

    #[test]
    fn the_absolute_reset_counts_only_without_the_relative_one_and_only_against_date() {
        let date = ("date", "Sun, 06 Nov 1994 08:49:37 GMT"); // 784111777
        assert_eq!(read(200, &[("x-ratelimit-reset", "784111780.5"), date]).reset_after, ms(3500));
        assert_eq!(read(200, &[("x-ratelimit-reset", "784111780.5")]).reset_after, None);
        assert_eq!(read(200, &[("x-ratelimit-reset", "784111000"), date]).reset_after, None);
        let both = [("x-ratelimit-reset", "784119999"), ("x-ratelimit-reset-after", "1.0"), date];
        assert_eq!(read(200, &both).reset_after, ms(1000));
    }

    #[test]
    fn the_body_wins_over_a_header_that_is_its_rounding_up_and_else_the_longer_one_counts() {
        for (header, body, expected) in [
            (Some("3"), r#"{"retry_after": 2.5, "global": false}"#, ms(2500)),
            (Some("1"), r#"{"retry_after": 899}"#, ms(899_000)),
            (Some("41"), r#"{"retry_after": 40.6}"#, ms(40_600)),
            (Some("90"), r#"{"retry_after": 2.5}"#, ms(90_000)),
            (Some("2"), r#"{"retry_after": 2}"#, ms(2000)),
            (None, r#"{"retry_after": 0.3, "code": 20028}"#, ms(300)),
            (Some("5"), "<html>", ms(5000)),
            (None, r#"{"retry_after": -1}"#, None),
            (None, r#"{"retry_after": "NaN"}"#, None),
            (None, "", None),
        ] {
            let lines: Vec<_> = header.map(|value| ("retry-after", value)).into_iter().collect();
            assert_eq!(read(429, &lines).with_body(body.as_bytes()).retry_after, expected, "{header:?} {body}");
        }
        assert!(read(429, &[]).with_body(br#"{"retry_after": 1, "global": true}"#).global);
    }

    #[test]
    fn counts_that_overflow_or_are_text_are_ignored_and_the_smallest_wins() {
        for (text, expected) in
            [("4", Some(4)), ("99999999999999999999", None), ("Infinity", None), ("-1", None), ("5, 2", Some(2))]
        {
            assert_eq!(read(200, &[("x-ratelimit-remaining", text)]).remaining, expected, "{text}");
        }
    }

    #[test]
    fn invalid_requests_are_401_403_and_429_that_is_not_shared() {
        assert!(read(401, &[]).invalid() && read(403, &[]).invalid() && read(429, &[]).invalid());
        assert!(read(429, &[("x-ratelimit-scope", "user")]).invalid());
        assert!(!read(429, &[("X-RateLimit-Scope", "Shared")]).invalid());
        assert!(!read(404, &[]).invalid() && !read(400, &[]).invalid() && !read(502, &[]).invalid());
    }

    proptest! {
        #[test]
        fn nothing_a_header_says_panics_or_exceeds_a_day(
            reset_after in "\\PC{0,24}", reset in "[0-9eE+.,-]{0,24}", retry in "[ -~]{0,24}", body in "\\PC{0,64}"
        ) {
            let mut headers = HeaderMap::new();
            for (name, value) in [(RESET_AFTER, &reset_after), (RESET, &reset), (RETRY_AFTER, &retry)] {
                if let Ok(value) = HeaderValue::from_bytes(value.as_bytes()) { headers.append(name, value); }
            }
            headers.insert(DATE, HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT"));
            let signal = Signal::read(StatusCode::TOO_MANY_REQUESTS, &headers).with_body(body.as_bytes());
            prop_assert!(signal.reset_after.is_none_or(|wait| wait <= MAX_WAIT));
            prop_assert!(signal.retry_after.is_none_or(|wait| wait <= MAX_WAIT));
        }
    }
}
