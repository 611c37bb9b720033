//! One request from its head to its answer, whatever the protocol: recording and judging.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use aws_lc_rs::digest::{Context, SHA256};
use bytes::{Bytes, BytesMut};

use crate::arrivals::{Arrival, Verdict};
use crate::believable::Request;
use crate::judge::{Asked, drawn};
use crate::paths::Place;
use crate::reply::Reply;
use crate::server::Shared;

/// The largest body that is looked into or kept; longer ones are hashed as they pass.
const LARGEST_KEPT: usize = 64 * 1024 * 1024;

/// A request's head as it was read.
#[derive(Debug, Default)]
pub(crate) struct Head {
    pub(crate) version: &'static str,
    pub(crate) method: String,
    pub(crate) target: Vec<u8>,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
}

/// A request under way.
pub(crate) struct Exchange {
    shared: Arc<Shared>,
    ip: IpAddr,
    arrival: Arrival,
    place: Place,
    rule: Option<usize>,
    hash: Option<Context>,
    body: BytesMut,
    whole: bool,
    /// The scripted answer, taken when the head was read.
    pub(crate) scripted: Option<Reply>,
    counted: bool,
}

impl Exchange {
    /// Records an arrival and takes its scripted answer, if there is one.
    pub(crate) fn begin(shared: &Arc<Shared>, ip: IpAddr, connection: u64, head: Head) -> Self {
        let at = Instant::now();
        let place = Place::of(&head.target);
        let mut arrival = Arrival {
            index: 0,
            connection,
            at,
            judged_at: None,
            done_at: None,
            version: head.version.into(),
            method: head.method,
            target: head.target,
            headers: head.headers,
            body_len: 0,
            body_sha256: None,
            body: None,
            caller: 0,
            token: None,
            verdict: Verdict::Pending,
            status: 0,
            client_left: false,
        };
        arrival.token = arrival.header("authorization").and_then(token);
        let (rule, banned) = {
            let mut judge = shared.judge.lock();
            arrival.caller = judge.caller(arrival.token.as_deref());
            judge.arrived(arrival.caller, &place, at);
            (judge.rule(&arrival.method, &place), judge.banned(ip, at).is_some())
        };
        // Numbering and scripting under one lock: the n-th arrival gets the n-th answer.
        let mut scripted = shared.scripted.lock();
        {
            let mut record = shared.record.lock();
            arrival.index = record.counts.arrivals;
            record.counts.arrivals += 1;
            if shared.script.record > 0 {
                record.kept.push_back(arrival.clone());
                if record.kept.len() > shared.script.record {
                    record.kept.pop_front();
                    record.first += 1;
                }
            }
        }
        let mut matching = scripted.iter_mut().filter(|entry| entry.pattern.matches(&arrival.method, &place));
        let answer = if banned { None } else { matching.find_map(|entry| (entry.answerer)(&arrival)) };
        drop(scripted);
        shared.changed.notify_waiters();
        let hash = (shared.script.record > 0).then(|| Context::new(&SHA256));
        let shared = Arc::clone(shared);
        Self {
            shared,
            ip,
            arrival,
            place,
            rule,
            hash,
            body: BytesMut::new(),
            whole: true,
            scripted: answer,
            counted: false,
        }
    }

    /// Takes a piece of the request's body.
    pub(crate) fn body_piece(&mut self, piece: &[u8]) {
        self.arrival.body_len += piece.len() as u64;
        if let Some(hash) = &mut self.hash {
            hash.update(piece);
        }
        if self.whole && self.body.len() + piece.len() <= LARGEST_KEPT {
            self.body.extend_from_slice(piece);
        } else {
            self.whole = false;
            self.body = BytesMut::new();
        }
    }

    /// The request's body was read to its end.
    pub(crate) fn body_end(&mut self) {
        if let Some(hash) = self.hash.take() {
            let mut sum = [0; 32];
            sum.copy_from_slice(hash.finish().as_ref());
            self.arrival.body_sha256 = Some(sum);
        }
        if self.shared.script.keep_bodies && self.whole {
            self.arrival.body = Some(Bytes::copy_from_slice(&self.body));
        }
    }

    /// Latency before the judgement and after it.
    pub(crate) fn latency(&self) -> (std::time::Duration, std::time::Duration) {
        let latency = self.shared.judge.lock().latency(self.rule);
        let length = |range| std::time::Duration::from_millis(drawn(range));
        (length(latency.before_ms), length(latency.after_ms))
    }

    /// Judges by ban, script or rules, and records the verdict.
    pub(crate) fn judge(&mut self) -> Reply {
        let now = Instant::now();
        let scripted = self.scripted.take();
        let (verdict, mut reply) = {
            let mut judge = self.shared.judge.lock();
            let (verdict, reply) = if let Some(reply) = judge.banned(self.ip, now) {
                (Verdict::Banned, reply)
            } else if let Some(reply) = scripted {
                (Verdict::Scripted(reply.status), reply)
            } else {
                judge.judge(&self.asked(), now)
            };
            judge.answered(self.ip, &reply, now);
            (verdict, reply)
        };
        if reply.status == 0 {
            reply.status = 200;
        }
        self.arrival.judged_at = Some(now);
        self.arrival.status = reply.status;
        self.settle(if let Verdict::Scripted(_) = verdict { Verdict::Scripted(reply.status) } else { verdict });
        reply
    }

    fn asked(&self) -> Asked<'_> {
        let arrival = &self.arrival;
        let query =
            arrival.target.iter().position(|&byte| byte == b'?').map_or(&b""[..], |at| &arrival.target[at + 1..]);
        let request = Request {
            method: &arrival.method,
            place: &self.place,
            query: std::str::from_utf8(query).unwrap_or_default(),
            content_type: arrival.header("content-type").and_then(|v| std::str::from_utf8(v).ok()).unwrap_or_default(),
            body: &self.body,
        };
        Asked {
            ip: self.ip,
            method: &arrival.method,
            place: &self.place,
            caller: arrival.caller,
            token: arrival.token.as_deref(),
            rule: self.rule,
            request,
        }
    }

    /// The answer is out, or was given up: `sent` is false when no head was written.
    pub(crate) fn done(&mut self, sent: bool, client_left: bool) {
        self.arrival.done_at = Some(Instant::now());
        self.arrival.client_left = client_left;
        if !sent {
            self.arrival.status = 0;
        }
        let status = self.arrival.status;
        let mut record = self.shared.record.lock();
        *record.counts.statuses.entry(status).or_default() += 1;
        self.write_back(&mut record);
        drop(record);
        self.shared.changed.notify_waiters();
    }

    /// The request broke off before its end.
    pub(crate) fn broken(&mut self) {
        self.settle(Verdict::Malformed);
        self.done(false, true);
    }

    fn settle(&mut self, verdict: Verdict) {
        self.arrival.verdict = verdict;
        let mut record = self.shared.record.lock();
        if !self.counted {
            *record.counts.verdicts.entry(verdict.name()).or_default() += 1;
            self.counted = true;
        }
        self.write_back(&mut record);
        drop(record);
        self.shared.changed.notify_waiters();
    }

    fn write_back(&self, record: &mut crate::server::Record) {
        let place = self.arrival.index.checked_sub(record.first).and_then(|at| usize::try_from(at).ok());
        if let Some(kept) = place.and_then(|at| record.kept.get_mut(at)) {
            kept.clone_from(&self.arrival);
        }
    }
}

/// The token of an `Authorization` header, without its scheme.
fn token(value: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(value);
    let text = text.trim();
    let token = match text.split_once(char::is_whitespace) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bot") || scheme.eq_ignore_ascii_case("bearer") => {
            rest.trim()
        }
        _ => text,
    };
    (!token.is_empty()).then(|| token.to_owned())
}
