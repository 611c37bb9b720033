//! What reached the fake, and how it was judged.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How a request was judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Its head was read; nothing else is known yet.
    Pending,
    /// Allowed.
    Ok,
    /// Its bucket was empty: 429.
    BucketLimited,
    /// The rolling second was full: 429.
    GlobalLimited,
    /// A limit that no header speaks of: 429.
    SubLimited,
    /// The token is not known: 401.
    Invalid401,
    /// The webhook was deleted: 404.
    DeletedWebhook,
    /// The address is banned: HTML 429.
    Banned,
    /// Answered as scripted, with this status (0: without an answer).
    Scripted(u16),
    /// Not HTTP, or its body broke off.
    Malformed,
}

impl Verdict {
    /// The verdict's name in counts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Ok => "ok",
            Self::BucketLimited => "bucket_limited",
            Self::GlobalLimited => "global_limited",
            Self::SubLimited => "sub_limited",
            Self::Invalid401 => "invalid_401",
            Self::DeletedWebhook => "deleted_webhook",
            Self::Banned => "banned",
            Self::Scripted(_) => "scripted",
            Self::Malformed => "malformed",
        }
    }
}

/// One request, as it came in.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Its number, from 0.
    pub index: u64,
    /// The connection it came by, from 0.
    pub connection: u64,
    /// When the whole header block had been read.
    pub at: Instant,
    /// When it was judged.
    pub judged_at: Option<Instant>,
    /// When the answer had been written, or given up.
    pub done_at: Option<Instant>,
    /// `HTTP/1.1`, `HTTP/2.0`.
    pub version: String,
    /// The method.
    pub method: String,
    /// The request target, byte for byte.
    pub target: Vec<u8>,
    /// Header lines in order, names in their case (HTTP/1); pseudo headers left out, `:authority` as `host` (HTTP/2).
    pub headers: Vec<(String, Vec<u8>)>,
    /// Bytes of body read.
    pub body_len: u64,
    /// SHA-256 of the body, once it was read to its end.
    pub body_sha256: Option<[u8; 32]>,
    /// The body, if bodies are kept.
    pub body: Option<bytes::Bytes>,
    /// The number of the caller: 0 without a token, then by first appearance.
    pub caller: usize,
    /// The token in `Authorization`, without its scheme.
    pub token: Option<String>,
    /// How it was judged.
    pub verdict: Verdict,
    /// The status answered, 0 before or without an answer.
    pub status: u16,
    /// The client went away before the answer was out.
    pub client_left: bool,
}

impl Arrival {
    /// The first value of a header, in any case.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|(given, _)| given.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_slice())
    }

    /// Every value of a header, in any case.
    pub fn header_all(&self, name: &str) -> Vec<&[u8]> {
        let named = self.headers.iter().filter(|(given, _)| given.eq_ignore_ascii_case(name));
        named.map(|(_, value)| value.as_slice()).collect()
    }

    /// The target as text.
    pub fn target_text(&self) -> String {
        String::from_utf8_lossy(&self.target).into_owned()
    }

    /// For the control port: everything but secrets (no token, no header values, no query values, no body).
    pub fn to_json(&self, start: Instant) -> Value {
        json!({
            "index": self.index,
            "connection": self.connection,
            "at_ms": self.at.saturating_duration_since(start).as_secs_f64() * 1000.0,
            "version": self.version,
            "method": self.method,
            "target": self.target_text(),
            "header_names": self.headers.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            "body_len": self.body_len,
            "body_sha256": self.body_sha256.map(|hash| hex(&hash)),
            "caller": self.caller,
            "verdict": self.verdict.name(),
            "status": self.status,
            "client_left": self.client_left,
        })
    }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Totals since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests whose head was read.
    pub arrivals: u64,
    /// By verdict's name.
    pub verdicts: BTreeMap<&'static str, u64>,
    /// By status; 0 stands for no answer.
    pub statuses: BTreeMap<u16, u64>,
    /// Invalid answers: 401, 403 and 429 that is not shared.
    pub invalid: u64,
    /// By caller (0: without a token): the most arrivals in any rolling second, interactions left out.
    pub peaks: Vec<usize>,
    /// Connections accepted.
    pub connections: u64,
    /// Connections open now.
    pub open_connections: u64,
}

impl Counts {
    /// How many had a verdict of that name.
    pub fn verdict(&self, name: &str) -> u64 {
        self.verdicts.get(name).copied().unwrap_or(0)
    }

    /// How many were answered with that status.
    pub fn status(&self, status: u16) -> u64 {
        self.statuses.get(&status).copied().unwrap_or(0)
    }

    /// 429s that the fake's own limits gave out.
    pub fn limited(&self) -> u64 {
        ["bucket_limited", "global_limited", "sub_limited", "banned"].iter().map(|name| self.verdict(name)).sum()
    }

    /// As JSON.
    pub fn to_json(&self) -> Value {
        let statuses: BTreeMap<String, u64> = self.statuses.iter().map(|(code, n)| (code.to_string(), *n)).collect();
        json!({
            "arrivals": self.arrivals,
            "verdicts": self.verdicts,
            "statuses": statuses,
            "limited": self.limited(),
            "invalid": self.invalid,
            "peaks": self.peaks,
            "connections": self.connections,
            "open_connections": self.open_connections,
        })
    }
}

/// The smallest gap between two neighbours of a list of times; `None` for fewer than two.
pub fn smallest_gap(times: &[Instant]) -> Option<Duration> {
    times.windows(2).map(|pair| pair[1].saturating_duration_since(pair[0])).min()
}

/// The most of a list of times that any span of that length holds.
pub fn most_in(times: &[Instant], span: Duration) -> usize {
    let mut times = times.to_vec();
    times.sort_unstable();
    let end = |first: Instant| times.partition_point(|&at| at < first + span);
    (0..times.len()).map(|start| end(times[start]) - start).max().unwrap_or(0)
}
