//! The judge: who asks, what is left of each limit, and what the answer says.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::Rng;
use serde_json::{Value, json};

use crate::arrivals::Verdict;
use crate::believable::{self, Request};
use crate::clock;
use crate::limits::{Counter, Invalid, Rolling, Standing};
use crate::paths::{Pattern, Place};
use crate::reply::Reply;
use crate::script::{Bucket, Latency, Rule, Script, Shape, SubLimit};

/// The whole state of the limits.
#[derive(Debug)]
pub struct Judge {
    script: Script,
    rules: Vec<(Vec<Pattern>, Arc<Rule>)>,
    callers: HashMap<String, usize>,
    buckets: HashMap<(usize, usize, usize, String), Kept>,
    sub_limits: HashMap<(usize, usize, usize, String), Counter>,
    turns: HashMap<(usize, String), usize>,
    globals: HashMap<(usize, Option<IpAddr>), Rolling>,
    blocked: HashMap<usize, Instant>,
    peaks: Vec<Rolling>,
    invalid: HashMap<IpAddr, Invalid>,
}

#[derive(Debug)]
struct Kept {
    counter: Counter,
    answers: u64,
}

/// Who sent a request to where.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The client's address.
    pub ip: IpAddr,
    /// The method.
    pub method: &'a str,
    /// The target, taken apart.
    pub place: &'a Place,
    /// The caller's number.
    pub caller: usize,
    /// The token without scheme.
    pub token: Option<&'a str>,
    /// The rule it falls under.
    pub rule: Option<usize>,
    /// What the believable answer is made from.
    pub request: Request<'a>,
}

impl Judge {
    /// Full buckets and clean slates.
    pub fn new(script: Script) -> Self {
        let mut rules = script.rules.clone();
        if script.believable {
            rules.extend(believable::rules());
        }
        let patterns = |rule: &Rule| rule.routes.iter().map(|route| Pattern::new(route)).collect();
        let rules = rules.into_iter().map(|rule| (patterns(&rule), Arc::new(rule))).collect();
        Self {
            script,
            rules,
            callers: HashMap::new(),
            buckets: HashMap::new(),
            sub_limits: HashMap::new(),
            turns: HashMap::new(),
            globals: HashMap::new(),
            blocked: HashMap::new(),
            peaks: vec![Rolling::default()],
            invalid: HashMap::new(),
        }
    }

    /// The caller's number: 0 without a token, then by first appearance.
    pub fn caller(&mut self, token: Option<&str>) -> usize {
        let Some(token) = token else { return 0 };
        if let Some(&known) = self.callers.get(token) {
            return known;
        }
        let number = self.callers.len() + 1;
        self.callers.insert(token.to_owned(), number);
        self.peaks.push(Rolling::default());
        number
    }

    /// Notes an arrival for the peaks.
    pub fn arrived(&mut self, caller: usize, place: &Place, now: Instant) {
        if let (false, Some(peak)) = (place.interaction, self.peaks.get_mut(caller)) {
            peak.take(now, Duration::from_millis(self.script.global_window_ms));
        }
    }

    /// The most arrivals in any rolling second, by caller.
    pub fn peaks(&self) -> Vec<usize> {
        self.peaks.iter().map(Rolling::peak).collect()
    }

    /// Invalid answers given so far, over all addresses.
    pub fn invalid(&self) -> u64 {
        self.invalid.values().map(Invalid::total).sum()
    }

    /// The rule a request falls under.
    pub fn rule(&self, method: &str, place: &Place) -> Option<usize> {
        self.rules.iter().position(|(patterns, _)| patterns.iter().any(|pattern| pattern.matches(method, place)))
    }

    /// The latency of a rule.
    pub fn latency(&self, rule: Option<usize>) -> Latency {
        let own = rule.and_then(|rule| self.rules.get(rule)).and_then(|(_, rule)| rule.latency);
        own.unwrap_or(self.script.latency)
    }

    /// Makes every call of a token a global 429 for a time.
    pub fn block(&mut self, token: Option<&str>, now: Instant, length: Duration) {
        let caller = self.caller(token);
        self.blocked.insert(caller, now + length);
    }

    /// Bans an address.
    pub fn ban(&mut self, ip: IpAddr, now: Instant, length: Duration) {
        self.invalid.entry(ip).or_default().ban(now, length);
    }

    /// Adds or takes back a valid token. Without a list so far, all were valid; now only those listed are.
    pub fn set_tokens(&mut self, tokens: Option<Vec<String>>) {
        self.script.tokens = tokens;
    }

    /// Deletes a webhook: an id, or `id/token`.
    pub fn delete_webhook(&mut self, webhook: &str) {
        self.script.deleted_webhooks.push(webhook.into());
    }

    /// Counts an answer, scripted ones included, toward the ban of its address.
    pub fn answered(&mut self, ip: IpAddr, reply: &Reply, now: Instant) {
        let shared = reply.header("X-RateLimit-Scope") == Some(b"shared");
        let banned = self.invalid.get(&ip).is_some_and(|invalid| invalid.banned(now).is_some());
        if !banned && (matches!(reply.status, 401 | 403) || (reply.status == 429 && !shared)) {
            let span = Duration::from_millis(self.script.invalid_window_ms);
            let ban = Duration::from_millis(self.script.ban_ms);
            self.invalid.entry(ip).or_default().count(now, self.script.invalid_limit, span, ban);
        }
    }

    /// The answer of a banned address; it comes before anything else, scripted answers included.
    pub fn banned(&self, ip: IpAddr, now: Instant) -> Option<Reply> {
        let left = self.invalid.get(&ip)?.banned(now)?;
        let page = "<!DOCTYPE html><html><head><title>Access denied | discord.com used Cloudflare to restrict access</title></head>\
                    <body><h1>Error 1015</h1><p>You are being rate limited</p></body></html>\n";
        let reply = Reply { status: 429, body: page.into(), bare: true, ..Reply::default() }
            .with("Date", clock::http_date())
            .with("Content-Type", "text/html; charset=UTF-8")
            .with("Server", "cloudflare");
        let seconds = left.as_secs_f64().ceil();
        Some(if self.script.ban_retry_after { reply.with("Retry-After", format!("{seconds}")) } else { reply })
    }

    /// Judges one request by the rules.
    pub fn judge(&mut self, asked: &Asked<'_>, now: Instant) -> (Verdict, Reply) {
        if let Some(reply) = self.unauthorized(asked) {
            return (Verdict::Invalid401, reply);
        }
        if let Some(left) = self.global(asked, now) {
            return (Verdict::GlobalLimited, Reply::limited("global", millis(left)));
        }
        if self.deleted(asked.place) {
            let body = json!({"message": "Unknown Webhook", "code": 10015});
            return (Verdict::DeletedWebhook, Reply::json(404, &body));
        }
        let Some(rule) = asked.rule else {
            return (Verdict::Ok, believable::answer(&asked.request, None, self.script.believable));
        };
        let (verdict, mut reply) = self.by_rule(asked, rule, now);
        let (_, rule) = &self.rules[rule];
        reply.headers.retain(|(name, _)| !rule.drop_headers.iter().any(|dropped| dropped.eq_ignore_ascii_case(name)));
        for (name, value) in &rule.add_headers {
            reply.headers.push((name.clone(), value.clone().into_bytes()));
        }
        (verdict, reply)
    }

    fn unauthorized(&self, asked: &Asked<'_>) -> Option<Reply> {
        let tokens = self.script.tokens.as_ref()?;
        let first = asked.place.segments.first().map_or("", String::as_str);
        let open = asked.place.path_token || (first == "gateway" && asked.place.segments.len() == 1);
        let known = asked.token.is_some_and(|token| tokens.iter().any(|valid| valid == token));
        let body = json!({"message": "401: Unauthorized", "code": 0});
        (!open && !known).then(|| Reply::json(401, &body))
    }

    fn global(&mut self, asked: &Asked<'_>, now: Instant) -> Option<Duration> {
        if asked.place.interaction {
            return None;
        }
        if let Some(left) = self.blocked.get(&asked.caller).and_then(|until| until.checked_duration_since(now))
            && !left.is_zero()
        {
            return Some(left);
        }
        let own = self.script.global_overrides.iter().find(|(token, _)| Some(token.as_str()) == asked.token);
        let limit = own.map(|(_, limit)| *limit).or(self.script.global_limit).filter(|limit| *limit > 0)? as usize;
        let span = Duration::from_millis(self.script.global_window_ms);
        let address = (asked.caller == 0).then_some(asked.ip);
        let rolling = self.globals.entry((asked.caller, address)).or_default();
        let wait = rolling.wait(now, limit, span);
        if wait.is_none() {
            rolling.take(now, span);
        }
        wait
    }

    fn deleted(&self, place: &Place) -> bool {
        let [first, id, token, ..] = place.segments.as_slice() else { return false };
        first == "webhooks"
            && self
                .script
                .deleted_webhooks
                .iter()
                .any(|deleted| deleted == id || deleted.split_once('/') == Some((id.as_str(), token.as_str())))
    }

    fn by_rule(&mut self, asked: &Asked<'_>, number: usize, now: Instant) -> (Verdict, Reply) {
        let rule = Arc::clone(&self.rules[number].1);
        let early = rule.early_ms.unwrap_or(self.script.early_ms);
        let turn = self.turns.entry((number, asked.place.major.clone())).or_default();
        let which = *turn % rule.buckets.len().max(1);
        *turn += 1;
        let Some(bucket) = rule.buckets.get(which) else {
            let refused = self.sub_limited(asked, number, &rule, now);
            return refused.unwrap_or_else(|| (Verdict::Ok, self.allowed(asked, &rule)));
        };
        // A webhook is one counter whoever calls it; a shared bucket too.
        let caller = if bucket.shared || asked.place.path_token { 0 } else { asked.caller };
        let key = (number, which, caller, asked.place.major.clone());
        let kept = self.buckets.entry(key.clone()).or_insert_with(|| Kept { counter: counter(bucket), answers: 0 });
        kept.answers += 1;
        let hash = hash(bucket, kept.answers - 1);
        if let Some(wait) = kept.counter.wait(now) {
            let scope = if bucket.shared { "shared" } else { "user" };
            let standing = Standing { remaining: 0, reset_after: wait };
            let reply = bucket_headers(Reply::limited(scope, millis(wait)), bucket, &hash, standing, early);
            return (Verdict::BucketLimited, reply);
        }
        if let Some((verdict, reply)) = self.sub_limited(asked, number, &rule, now) {
            let standing = self.buckets.get(&key).map(|kept| kept.counter.standing(now));
            let standing = standing.unwrap_or(Standing { remaining: 0, reset_after: Duration::ZERO });
            return (verdict, bucket_headers(reply, bucket, &hash, standing, early));
        }
        let reply = self.allowed(asked, &rule);
        let Some(kept) = self.buckets.get_mut(&key) else { return (Verdict::Ok, reply) };
        kept.counter.take(now);
        (Verdict::Ok, bucket_headers(reply, bucket, &hash, kept.counter.standing(now), early))
    }

    fn allowed(&self, asked: &Asked<'_>, rule: &Rule) -> Reply {
        believable::answer(&asked.request, rule.status, self.script.believable)
    }

    fn sub_limited(&mut self, asked: &Asked<'_>, number: usize, rule: &Rule, now: Instant) -> Option<(Verdict, Reply)> {
        let body: Option<Value> = if rule.sub_limits.iter().any(|limit| !limit.fields.is_empty()) {
            serde_json::from_slice(asked.request.body).ok()
        } else {
            None
        };
        let met = |limit: &SubLimit| {
            limit.fields.is_empty()
                || limit.fields.iter().any(|field| body.as_ref().is_some_and(|body| body.get(field).is_some()))
        };
        let mut keys = Vec::new();
        for (index, limit) in rule.sub_limits.iter().enumerate().filter(|(_, limit)| met(limit)) {
            let major = if limit.over_all { String::new() } else { asked.place.major.clone() };
            let caller = if limit.scope == "shared" { 0 } else { asked.caller };
            let key = (number, index, caller, major);
            let period = Duration::from_millis(limit.period_ms);
            let counter = self.sub_limits.entry(key.clone()).or_insert_with(|| Counter::window(limit.limit, period));
            if let Some(wait) = counter.wait(now) {
                return Some((Verdict::SubLimited, sub_limit_reply(limit, wait)));
            }
            keys.push(key);
        }
        for key in keys {
            if let Some(counter) = self.sub_limits.get_mut(&key) {
                counter.take(now);
            }
        }
        None
    }
}

fn counter(bucket: &Bucket) -> Counter {
    let period = Duration::from_millis(bucket.period_ms);
    match bucket.shape {
        Shape::Window => Counter::window(bucket.limit, period),
        Shape::Drip => Counter::drip(bucket.limit, period),
    }
}

fn hash(bucket: &Bucket, answers: u64) -> String {
    let hashes = u64::try_from(bucket.hashes.len()).unwrap_or(1).max(1);
    let which = (answers / bucket.hash_every.max(1)) % hashes;
    usize::try_from(which).ok().and_then(|which| bucket.hashes.get(which)).cloned().unwrap_or_default()
}

fn sub_limit_reply(limit: &SubLimit, wait: Duration) -> Reply {
    let mut body = json!({"message": limit.message, "retry_after": millis(wait), "global": false});
    if let Some(code) = limit.code {
        body["code"] = code.into();
    }
    Reply::json(429, &body)
        .with("Retry-After", format!("{:.0}", millis(wait).ceil()))
        .with("X-RateLimit-Scope", &limit.scope)
}

fn bucket_headers(reply: Reply, bucket: &Bucket, hash: &str, standing: Standing, early: (u64, u64)) -> Reply {
    let early = Duration::from_millis(drawn(early));
    let reset_after = millis(standing.reset_after.saturating_sub(early));
    let reset = clock::unix_seconds() + reset_after;
    let reply = if hash.is_empty() { reply } else { reply.with("x-ratelimit-bucket", hash) };
    reply
        .with("x-ratelimit-limit", bucket.limit.to_string())
        .with("x-ratelimit-remaining", standing.remaining.to_string())
        .with("x-ratelimit-reset", format!("{reset:.3}"))
        .with("x-ratelimit-reset-after", format!("{reset_after:.3}"))
}

/// Seconds, in whole milliseconds rounded up: a fair judge never names a time before the true one.
fn millis(wait: Duration) -> f64 {
    (wait.as_secs_f64() * 1000.0).ceil() / 1000.0
}

/// An even draw from a range, its ends included.
pub fn drawn((from, to): (u64, u64)) -> u64 {
    if to > from { rand::rng().random_range(from..=to) } else { from }
}
