//! What one answer of Discord says about limits: its headers, and a 429's body, to a [`Signal`].
//!
//! Each header stands alone: one that cannot be read (text, NaN, infinite, negative, overflowing) is ignored by
//! itself. Of several values the one that makes us wait longest counts. Units are seconds
//! (Discord's documentation, "Rate Limits"); nothing here exceeds [`MAX_WAIT`].

use std::str::FromStr;
use std::time::{Duration, SystemTime};

use http::header::{DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};

use crate::agreed;
use crate::error::Scope;

/// No announced wait counts for more than this.
pub const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// A 429 is never retried sooner, whatever it says.
pub const MIN_RETRY: Duration = Duration::from_millis(50);

/// What the names of Discord's limit headers start with.
const PREFIX: &str = "x-ratelimit-";
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

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
    /// A 404 whose body says that its webhook does not exist, after [`Signal::with_body`].
    pub unknown_webhook: bool,
    /// How long a 429 says to wait: from `Retry-After` and, after [`Signal::with_body`], the body.
    pub retry_after: Option<Duration>,
}

/// Discord's error code for a webhook that does not exist ("Opcodes and Status Codes", JSON error codes).
const UNKNOWN_WEBHOOK: u32 = 10015;

#[derive(Deserialize)]
struct Missing {
    code: u32,
}

#[derive(Deserialize)]
struct Refusal {
    retry_after: Option<f64>,
    #[serde(default)]
    global: bool,
}

impl Signal {
    /// Reads an answer's status and headers, in one pass. Total: no header can make it fail.
    pub fn read(status: StatusCode, headers: &HeaderMap) -> Self {
        let mut signal = Self {
            status,
            bucket: None,
            limit: None,
            remaining: None,
            reset_after: None,
            global: false,
            scope: None,
            unknown_webhook: false,
            retry_after: if status == StatusCode::TOO_MANY_REQUESTS { retry_after(headers) } else { None },
        };
        let mut resets = false;
        for (name, value) in headers {
            match name.as_str().strip_prefix(PREFIX) {
                None => {}
                Some("bucket") => signal.bucket = signal.bucket.or_else(|| Some(BucketHash::of(value.as_bytes()))),
                Some("limit") => signal.limit = smallest(signal.limit, value),
                Some("remaining") => signal.remaining = smallest(signal.remaining, value),
                Some("reset-after") => signal.reset_after = signal.reset_after.max(longest(value, seconds)),
                Some("reset") => resets = true,
                Some("global") => signal.global |= text(value).trim().eq_ignore_ascii_case("true"),
                Some("scope") => signal.scope = signal.scope.or_else(|| scope(value)),
                Some(_) => {}
            }
        }
        if resets && signal.reset_after.is_none() {
            signal.reset_after = until_reset(headers);
        }
        signal.global |= signal.scope == Some(Scope::Global);
        signal
    }

    /// Adds what a decoded JSON body says: of a 429 how long to wait, of anything else whether its webhook is missing. A
    /// 429's exact `retry_after` wins over a header that is merely its rounding up; else the longer one counts. Bodies that
    /// are not Discord's JSON add nothing.
    #[must_use]
    pub fn with_body(mut self, body: &[u8]) -> Self {
        if !self.refused() {
            let missing = serde_json::from_slice::<Missing>(body);
            self.unknown_webhook = missing.is_ok_and(|missing| missing.code == UNKNOWN_WEBHOOK);
            return self;
        }
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

/// A value's text; one that is not ASCII says nothing.
fn text(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or_default()
}

fn seconds(value: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(value).ok().map(|wait| wait.min(MAX_WAIT))
}

/// What can be read of a value and, since several lines may be one, of its parts between commas.
fn each<T: FromStr>(value: &HeaderValue, mut take: impl FnMut(T)) {
    let text = text(value);
    match text.parse() {
        Ok(read) => take(read),
        Err(_) => text.split(',').filter_map(|part| part.trim().parse().ok()).for_each(take),
    }
}

/// The smaller of two counts, since it makes us wait longer.
fn smallest(mut known: Option<u32>, value: &HeaderValue) -> Option<u32> {
    each(value, |count: u32| known = Some(known.map_or(count, |known| known.min(count))));
    known
}

/// The longest wait in a value.
fn longest(value: &HeaderValue, wait: impl Fn(f64) -> Option<Duration>) -> Option<Duration> {
    let mut longest = None;
    each(value, |number| longest = longest.max(wait(number)));
    longest
}

/// `X-RateLimit-Reset` is Discord's wall clock, so it is compared with Discord's own `Date` and never with ours.
/// `Date` has whole seconds: the result is up to one second too long, never too short.
fn until_reset(headers: &HeaderMap) -> Option<Duration> {
    let date = server_date(headers)?.as_secs_f64();
    headers.get_all(RESET).iter().filter_map(|value| longest(value, |at| seconds(at - date))).max()
}

fn server_date(headers: &HeaderMap) -> Option<Duration> {
    let date = httpdate::parse_http_date(headers.get(DATE)?.to_str().ok()?).ok()?;
    date.duration_since(SystemTime::UNIX_EPOCH).ok()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let values = || headers.get_all(RETRY_AFTER).iter();
    values().filter_map(|value| longest(value, seconds)).max().or_else(|| {
        // RFC 9110 section 10.2.3 allows a date.
        let date = server_date(headers)?;
        values()
            .filter_map(|value| httpdate::parse_http_date(text(value)).ok())
            .filter_map(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok()?.checked_sub(date))
            .map(|wait| wait.min(MAX_WAIT))
            .max()
    })
}

fn scope(value: &HeaderValue) -> Option<Scope> {
    match text(value).trim() {
        text if text.eq_ignore_ascii_case("user") => Some(Scope::User),
        text if text.eq_ignore_ascii_case("global") => Some(Scope::Global),
        text if text.eq_ignore_ascii_case("shared") => Some(Scope::Shared),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RESET_AFTER: HeaderName = HeaderName::from_static("x-ratelimit-reset-after");

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
