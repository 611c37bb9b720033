//! The scenarios: what Discord enforces, and what the bots ask for.

use std::time::Duration;

use fake_discord::{Bucket, Latency, Rule, Script, Shape, SubLimit};

use crate::load::{Job, Report};

const LONG: Duration = Duration::from_secs(300);

/// Beside which others a scenario may run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// None: it measures latency, or all of its requests go within seconds.
    Alone,
    /// Those that mostly sleep: it begins with thousands of requests at once, which keeps the machine busy for a second.
    Crowd,
    /// All but the above.
    Beside,
}

/// One comparison.
#[derive(Clone)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) script: fn() -> Script,
    pub(crate) jobs: fn() -> Vec<Job>,
    /// The shortest time Discord's limits allow for it.
    pub(crate) ideal: Option<Duration>,
    pub(crate) when: When,
    /// QUEUE_TIMEOUT.
    pub(crate) queue: Duration,
    pub(crate) notes: fn(&Report) -> Vec<String>,
}

impl Scenario {
    fn new(name: &'static str, script: fn() -> Script, jobs: fn() -> Vec<Job>, ideal: Option<f64>) -> Self {
        let ideal = ideal.map(Duration::from_secs_f64);
        Self { name, script, jobs, ideal, when: When::Beside, queue: LONG, notes: |_| Vec::new() }
    }

    /// What is not done by then is given up: a run that draws a ban would take ten minutes and more.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(if self.when == When::Crowd { 80 } else { 195 })
    }
}

/// All of them.
pub(crate) fn all() -> Vec<Scenario> {
    vec![
        Scenario { when: When::Alone, ..Scenario::new("poisson 40%", || answering(25), || poisson(20.0), None) },
        Scenario { when: When::Alone, ..Scenario::new("poisson 80%", || answering(25), || poisson(40.0), None) },
        Scenario {
            when: When::Crowd,
            ..Scenario::new("3200 channels, 8 processes", || answering(25), channels, Some(63.0))
        },
        Scenario::new("one channel, window 5/5s", one_channel, || spread(64, 8, "POST", CHANNEL), Some(60.0)),
        Scenario {
            notes: |report| vec![format!("the 6th arrived {:.2} s after the 1st", nth(report, 5) - nth(report, 0))],
            ..Scenario::new("drip 5, period 3.85s", drip, || spread(20, 1, "POST", CHANNEL), Some(57.75))
        },
        Scenario::new("early resets 0 ms, 5/1s", || early(0, 5, 1000), || spread(500, 1, "POST", CHANNEL), Some(99.0)),
        Scenario::new(
            "early resets 100 ms, 5/1s",
            || early(100, 5, 1000),
            || spread(500, 1, "POST", CHANNEL),
            Some(99.0),
        ),
        Scenario::new(
            "early resets 400 ms, 5/1s",
            || early(400, 5, 1000),
            || spread(500, 1, "POST", CHANNEL),
            Some(99.0),
        ),
        Scenario::new(
            "early resets 20 ms, 1/0.25s",
            || early(20, 1, 250),
            || spread(500, 1, "POST", CHANNEL),
            Some(124.75),
        ),
        Scenario {
            when: When::Alone,
            ..Scenario::new("300 reads of one bucket", reads, || spread(300, 1, "GET", MEMBERS), Some(6.0))
        },
        Scenario {
            when: When::Crowd,
            notes: |report| {
                let late = report.refused_at.iter().filter(|at| **at > Duration::from_secs(10)).count();
                let rate = report.accepted_at.len() as f64 / report.took.as_secs_f64();
                vec![format!("{late} 429s after the first 10 s; {rate:.1} a second")]
            },
            ..Scenario::new("60 s saturated, 0..80 ms jitter", jittery, saturated, Some(59.0))
        },
        // Renames cannot be waited out, so they are refused: within a minute, not after five.
        Scenario { queue: Duration::from_secs(60), ..Scenario::new("rename storm", renames, rename_storm, Some(18.0)) },
    ]
}

const CHANNEL: &str = "/api/v10/channels/100000000000000001/messages";
const MEMBERS: &str = "/api/v10/guilds/200000000000000001/members/300000000000000001";
const BODY: &str = r#"{"content": "hello"}"#;

fn nth(report: &Report, index: usize) -> f64 {
    report.accepted_at.get(index).map_or(f64::NAN, Duration::as_secs_f64)
}

/// Nothing but the global limit and the usual message bucket, each answer after so many milliseconds.
fn answering(ms: u64) -> Script {
    let latency = Latency { before_ms: (0, 0), after_ms: (ms, ms) };
    Script {
        rules: vec![Rule::window("POST /channels/{}/messages", "messages", 5, Duration::from_secs(5))],
        latency,
        ..Script::default()
    }
}

fn one_channel() -> Script {
    answering(25)
}

fn drip() -> Script {
    let rules = vec![Rule::drip("POST /channels/{}/messages", "drip", 5, Duration::from_millis(3850))];
    Script { rules, ..answering(25) }
}

fn early(ms: u64, limit: u32, period: u64) -> Script {
    let rule = Rule::window("POST /channels/{}/messages", "early", limit, Duration::from_millis(period));
    Script { rules: vec![Rule { early_ms: Some((ms, ms)), ..rule }], ..answering(1) }
}

fn reads() -> Script {
    let rules = vec![Rule::window("GET /guilds/{}/members/{}", "members", 1000, Duration::from_secs(10))];
    Script { rules, ..answering(50) }
}

fn jittery() -> Script {
    Script { rules: Vec::new(), latency: Latency { before_ms: (0, 80), after_ms: (0, 80) }, ..Script::default() }
}

fn renames() -> Script {
    let bucket =
        Bucket { hashes: vec!["edits".into()], shape: Shape::Window, limit: 10, period_ms: 2000, ..Bucket::default() };
    let sub = |field: &str| SubLimit { fields: vec![field.into()], ..SubLimit::default() };
    let routes = vec!["PATCH /channels/{}".into()];
    let rule = Rule { routes, buckets: vec![bucket], sub_limits: vec![sub("name"), sub("topic")], ..Rule::default() };
    Script { rules: vec![rule], ..answering(5) }
}

/// `count` equal requests at once, by `processes` in turn.
fn spread(count: usize, processes: usize, method: &'static str, path: &str) -> Vec<Job> {
    let body = if method == "GET" { "" } else { BODY };
    let job = |index| Job { at: Duration::ZERO, process: index % processes, method, path: path.to_owned(), body };
    (0..count).map(job).collect()
}

/// Far faster than they can go, but not all in one instant: thousands of connections at once would measure this machine.
fn one_by_one(index: usize) -> Duration {
    Duration::from_micros(600) * u32::try_from(index).unwrap_or(u32::MAX)
}

fn channels() -> Vec<Job> {
    let path = |index: usize| format!("/api/v10/channels/{}/messages", 100_000_000_000_000_000 + index);
    let job = |index| Job { at: one_by_one(index), process: index % 8, method: "POST", path: path(index), body: BODY };
    (0..3200).map(job).collect()
}

/// The same arrivals in every run (splitmix64).
struct Random(u64);

impl Random {
    /// A number above 0, up to 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + f64::EPSILON
    }
}

/// Independent arrivals for 10 s over 500 channels, a fifth of them to 20 busy ones.
fn poisson(rate: f64) -> Vec<Job> {
    let mut random = Random(7);
    let (mut at, mut jobs) = (0.0, Vec::new());
    while at < 10.0 {
        at -= random.unit().ln() / rate;
        let channel = if random.unit() < 0.2 { random.unit() * 20.0 } else { 20.0 + random.unit() * 480.0 } as u64;
        let path = format!("/api/v10/channels/{}/messages/900000000000000001", 100_000_000_000_000_000u64 + channel);
        jobs.push(Job { at: Duration::from_secs_f64(at), process: 0, method: "GET", path, body: "" });
    }
    jobs
}

fn saturated() -> Vec<Job> {
    let path = |index: usize| format!("/api/v10/guilds/{}/roles", 200_000_000_000_000_000 + index);
    let job = |index| Job { at: one_by_one(index), process: 0, method: "GET", path: path(index), body: "" };
    (0..3000).map(job).collect()
}

fn rename_storm() -> Vec<Job> {
    let job = |index: usize| Job {
        at: Duration::ZERO,
        process: 0,
        method: "PATCH",
        path: "/api/v10/channels/100000000000000001".into(),
        body: if index.is_multiple_of(11) { r#"{"name": "renamed"}"# } else { r#"{"nsfw": false}"# },
    };
    (0..110).map(job).collect()
}
