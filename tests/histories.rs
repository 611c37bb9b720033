//! Random mixed histories against a Discord that enforces its limits: several tokens, windows and drips, routes that
//! share a bucket, network jitter. No 429 is drawn that could have been avoided, every request is answered, and the
//! writes of a bucket keep their order.
//!
//! What cannot be avoided: until a route has been answered once, nobody knows which bucket it counts in. And where
//! resets are announced too early, nobody knows by how much until a 429 tells.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

#[path = "support/mod.rs"]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fake_discord::{Arrival, FakeDiscord, Latency, Rule, Script, Verdict};
use support::calls::{ms, pulse, request};
use support::client::Client;
use support::{Node, PATIENCE, config, eventually};
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout};

const HISTORIES: u64 = 200;
/// Each history has a thread of its own, so that what one starts later is seen later.
const THREADS: usize = 10;
/// From the moment an answer was written until the proxy has surely learned from it, on a machine that does not stall.
const LEARNING: Duration = Duration::from_millis(50);
/// Of one token, in any rolling second.
const GLOBAL_LIMIT: usize = 50;
/// Requests that start within this of each other have no order.
const TIE: Duration = Duration::from_millis(10);

/// Families of routes that share a bucket: the fake's rule, and the calls of each route.
const FAMILIES: [(&str, &[(&str, &str)]); 8] = [
    ("POST /channels/{}/messages", &[("POST", "channels/{major}/messages")]),
    ("PATCH /channels/{}/messages/{}", &[("PATCH", "channels/{major}/messages/{minor}")]),
    (
        "PUT /channels/{}/messages/{}/reactions/**, DELETE /channels/{}/messages/{}/reactions/**",
        &[
            ("PUT", "channels/{major}/messages/{minor}/reactions/%F0%9F%91%8D/@me"),
            ("DELETE", "channels/{major}/messages/{minor}/reactions/%F0%9F%91%8D/@me"),
        ],
    ),
    (
        "GET /guilds/{}/members, GET /guilds/{}/members/{}",
        &[("GET", "guilds/{major}/members"), ("GET", "guilds/{major}/members/{minor}")],
    ),
    (
        "PUT /guilds/{}/members/{}/roles/{}, DELETE /guilds/{}/members/{}/roles/{}",
        &[
            ("PUT", "guilds/{major}/members/{minor}/roles/400000000000000001"),
            ("DELETE", "guilds/{major}/members/{minor}/roles/400000000000000001"),
        ],
    ),
    ("GET /users/{}", &[("GET", "users/{minor}")]),
    (
        "GET /channels/{}/pins, PUT /channels/{}/pins/{}",
        &[("GET", "channels/{major}/pins"), ("PUT", "channels/{major}/pins/{minor}")],
    ),
    // One counter whoever calls it, so that each token has one of its own here.
    (
        "POST /webhooks/{}/{}, PATCH /webhooks/{}/{}/messages/{}",
        &[("POST", "webhooks/{major}/WHTOKEN"), ("PATCH", "webhooks/{major}/WHTOKEN/messages/{minor}")],
    ),
];
const WEBHOOKS: usize = 7;
/// Without limits of their own, and outside the global one as well.
const LIMITLESS: usize = 8;
const INTERACTIONS: usize = 9;

#[test]
fn two_hundred_random_histories_draw_no_429_that_could_have_been_avoided() {
    let next = AtomicU64::new(0);
    let faults = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= HISTORIES {
                        return;
                    }
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    let found = runtime.block_on(live(&History::random(seed)));
                    faults.lock().unwrap().extend(found.into_iter().map(|fault| format!("history {seed}: {fault}")));
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

/// What happens, and to what limits.
struct History {
    script: Script,
    calls: Vec<Call>,
    /// Resets are announced too early.
    early: bool,
}

/// One request.
#[derive(Clone, Debug)]
struct Call {
    at: Duration,
    token: usize,
    family: usize,
    route: usize,
    major: usize,
    method: &'static str,
    path: String,
}

/// Whose limit a call counts in.
type Bucket = (usize, usize, usize);

impl Call {
    fn bucket(&self) -> Bucket {
        (self.token, self.family, self.major)
    }

    fn is_write(&self) -> bool {
        self.method != "GET"
    }
}

/// SplitMix64: the same history from the same seed, wherever it runs.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).unwrap()
    }

    fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }
}

impl History {
    fn random(seed: u64) -> Self {
        let mut random = Random(seed);
        let early = seed % 5 == 4;
        let mut rules = Vec::new();
        // How many calls each family's buckets serve in about a second and a half.
        let mut capacities = Vec::new();
        for (number, (routes, _)) in FAMILIES.iter().enumerate() {
            let hash = format!("{seed:04}{number:04}");
            let (limit, period) = (random.between(1, 6), random.between(150, 700));
            let (rule, served) = if random.below(2) == 0 {
                (Rule::window(routes, &hash, limit as u32, ms(period)), limit * 1500 / period)
            } else {
                let (limit, period) = (limit.max(2), period / 3);
                (Rule::drip(routes, &hash, limit as u32, ms(period)), 1500 / period)
            };
            rules.push(rule);
            capacities.push((limit + served).min(14));
        }
        let latency = Latency { before_ms: (0, random.below(15)), after_ms: (0, random.below(25)) };
        let early_ms = if early { (0, random.between(5, 60)) } else { (0, 0) };
        let script = Script { rules, latency, early_ms, ..Script::default() };
        let calls = calls(&mut random, &capacities);
        Self { script, calls, early }
    }
}

/// Calls of a few buckets, and some that have none.
fn calls(random: &mut Random, capacities: &[u64]) -> Vec<Call> {
    let tokens = random.between(1, 3);
    let mut calls = Vec::new();
    let mut buckets = BTreeSet::new();
    for _ in 0..random.between(3, 8) {
        let (token, family) = (random.index(tokens as usize), random.index(FAMILIES.len()));
        let major = match family {
            WEBHOOKS => 50 + token,
            5 => 0,
            _ => random.index(2),
        };
        if !buckets.insert((token, family, major)) {
            continue;
        }
        let mut at = random.below(800);
        let pause = [0, 5, 40, 150][random.index(4)];
        for _ in 0..random.between(1, capacities[family]) {
            let routes = FAMILIES[family].1;
            let route = random.index(routes.len());
            let (method, path) = routes[route];
            calls.push(Call { at: ms(at), token, family, route, major, method, path: path.into() });
            at += random.between(0, 2 * pause);
        }
    }
    let burst = if random.below(5) == 0 { 60 } else { random.below(20) };
    let together = ms(random.below(500));
    for _ in 0..burst {
        let at = if burst == 60 { together } else { ms(random.below(1200)) };
        let (token, major) = (random.index(tokens as usize), random.index(90));
        let path = "guilds/{major}/preview".into();
        calls.push(Call { at, token, family: LIMITLESS, route: 0, major, method: "GET", path });
    }
    for number in 0..random.below(8) {
        let path = format!("interactions/900000000000000001/aW50ZXJhY3Rpb246{number}/callback");
        let (at, token) = (ms(random.below(1200)), random.index(tokens as usize));
        calls.push(Call { at, token, family: INTERACTIONS, route: 0, major: 0, method: "POST", path });
    }
    for call in &mut calls {
        let major = format!("1000000000000000{:02}", call.major);
        let minor = format!("60000000000000{:04}", random.below(10_000));
        call.path = format!("/api/v10/{}", call.path.replace("{major}", &major).replace("{minor}", &minor));
    }
    calls.sort_by_key(|call| call.at);
    for (number, call) in calls.iter_mut().enumerate() {
        write!(call.path, "?call={number}").unwrap();
    }
    calls
}

/// Lives through a history; what was wrong with it.
async fn live(history: &History) -> Vec<String> {
    let fake = FakeDiscord::start(history.script.clone()).await;
    let node = Node::start_with(config(fake.addr), |_| {});
    let mut tasks = JoinSet::new();
    let stall = Arc::new(AtomicU64::new(0));
    let pulse = tokio::spawn(pulse(Arc::clone(&stall)));
    let start = tokio::time::Instant::now() + ms(20);
    for (number, call) in history.calls.clone().into_iter().enumerate() {
        let mut client = Client::connect(node.address()).await;
        tasks.spawn(async move {
            sleep_until(start + call.at).await;
            let started = Instant::now();
            client.send(request(&format!("Bot {}", call.token), call.method, &call.path, "")).await;
            (number, started, client.answer().await.status)
        });
    }
    let ended = timeout(PATIENCE * 2, tasks.join_all()).await.expect("every answer in time");
    pulse.abort();
    let stall = Duration::from_micros(stall.load(Ordering::Relaxed));
    let starts: BTreeMap<usize, Instant> = ended.iter().map(|(number, started, _)| (*number, *started)).collect();
    let failed = ended.iter().filter(|(_, _, status)| *status != 200);
    let mut faults: Vec<String> =
        failed.map(|(number, _, status)| format!("{status} for {:?}", history.calls[*number])).collect();
    let arrivals = fake.arrivals();
    faults.extend(avoidable(history, &arrivals, stall));
    faults.extend(out_of_order(history, &arrivals, &starts, stall));
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
    faults
}

fn call_of<'a>(history: &'a History, arrival: &Arrival) -> (usize, &'a Call) {
    let number = arrival.target_text().rsplit('=').next().unwrap().parse().unwrap();
    (number, &history.calls[number])
}

/// The first arrivals of every route of a bucket whose answers name it: a global 429 does not.
fn firsts<'a>(history: &History, arrivals: &'a [Arrival]) -> BTreeMap<Bucket, Vec<&'a Arrival>> {
    let mut seen = BTreeSet::new();
    let mut firsts: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for arrival in arrivals.iter().filter(|arrival| arrival.verdict != Verdict::GlobalLimited) {
        let (_, call) = call_of(history, arrival);
        if seen.insert((call.bucket(), call.route)) {
            firsts.entry(call.bucket()).or_default().push(arrival);
        }
    }
    firsts
}

fn learned(first: &Arrival, stall: Duration) -> Instant {
    first.done_at.unwrap() + LEARNING + 2 * stall
}

/// 429s that nothing excuses.
fn avoidable(history: &History, arrivals: &[Arrival], stall: Duration) -> Vec<String> {
    let firsts = firsts(history, arrivals);
    let mut early: BTreeMap<(usize, usize), u32> = BTreeMap::new();
    let mut faults = Vec::new();
    for arrival in arrivals.iter().filter(|arrival| arrival.status == 429) {
        let (number, call) = call_of(history, arrival);
        // One of the bucket's routes was still to be answered for the first time.
        let judged = arrival.judged_at.unwrap();
        let routes = &firsts[&call.bucket()];
        if arrival.verdict == Verdict::BucketLimited
            && routes.iter().any(|first| first.judged_at.unwrap() <= judged && arrival.at <= learned(first, stall))
        {
            continue;
        }
        // Jitter pushes two of our seconds into one of Discord's: between arrival and judgement here, and where the
        // machine stood still in between.
        let span = Duration::from_secs(1).saturating_sub(2 * stall);
        if arrival.verdict == Verdict::GlobalLimited && just_before(history, arrivals, arrival, span) <= GLOBAL_LIMIT {
            continue;
        }
        // Each teaches by how much.
        if arrival.verdict == Verdict::BucketLimited && history.early {
            let drawn = early.entry((call.token, call.family)).or_default();
            *drawn += 1;
            if *drawn <= 3 {
                continue;
            }
        }
        faults.push(report(history, arrivals, number, call, arrival, stall));
    }
    faults
}

/// How many requests of its token arrived in the span that ends with this one.
fn just_before(history: &History, arrivals: &[Arrival], arrival: &Arrival, span: Duration) -> usize {
    let (_, call) = call_of(history, arrival);
    let counts = |other: &&Arrival| {
        let (_, known) = call_of(history, other);
        let earlier = other.index <= arrival.index && arrival.at < other.at + span;
        earlier && known.token == call.token && known.family != INTERACTIONS
    };
    arrivals.iter().filter(counts).count()
}

/// A 429 and what its bucket saw before it.
fn report(
    history: &History,
    arrivals: &[Arrival],
    number: usize,
    call: &Call,
    arrival: &Arrival,
    stall: Duration,
) -> String {
    let bucket = history.script.rules.get(call.family).map(|rule| &rule.buckets[0]);
    let mut text = format!("(stall {stall:?}) {:?} of call {number} {call:?}, bucket {bucket:?}", arrival.verdict);
    let zero = arrivals[0].at;
    let since = |at: Instant| at.saturating_duration_since(zero).as_millis();
    for other in arrivals.iter().filter(|other| call_of(history, other).1.bucket() == call.bucket()) {
        let (number, call) = call_of(history, other);
        let (judged, done) = (other.judged_at.map(since), other.done_at.map(since));
        write!(text, "\n    {number} route {} at {} {judged:?} {done:?}", call.route, since(other.at)).unwrap();
        write!(text, " {}", other.status).unwrap();
    }
    text
}

/// Writes that overtook an earlier one of their bucket.
fn out_of_order(
    history: &History,
    arrivals: &[Arrival],
    starts: &BTreeMap<usize, Instant>,
    stall: Duration,
) -> Vec<String> {
    let firsts = firsts(history, arrivals);
    let mut buckets: BTreeMap<Bucket, Vec<(usize, &Call)>> = BTreeMap::new();
    for arrival in arrivals.iter().filter(|arrival| arrival.status == 200) {
        let (number, call) = call_of(history, arrival);
        if call.family < FAMILIES.len() && call.is_write() {
            buckets.entry(call.bucket()).or_default().push((number, call));
        }
    }
    let mut faults = Vec::new();
    for (bucket, sent) in buckets {
        let known = firsts[&bucket].iter().map(|first| learned(first, stall)).max().unwrap();
        for (place, (earlier, before)) in sent.iter().enumerate() {
            for (later, after) in &sent[place + 1..] {
                // Two routes have one order once both are known to share a bucket.
                let comparable = before.route == after.route || (starts[earlier] > known && starts[later] > known);
                if comparable && starts[earlier] > starts[later] + TIE {
                    faults.push(format!("{before:?} was sent before {after:?}"));
                }
            }
        }
    }
    faults
}
