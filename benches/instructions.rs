//! Instructions a request costs in the project's own code: route, identity, metrics handle, gate, budget and learning,
//! without sockets. Counted by valgrind, so the figure is the same however busy the machine is.
//!
//! valgrind's processor has no SHA instructions, with which a real one takes about a tenth of what is counted here for the
//! token's SHA-256. So `digest` is the library's digest alone, and `identity` all that is done around it.
//!
//! `cargo bench --bench instructions` needs `valgrind` (a Debian package). It fails when a figure exceeds its bound.

use std::process::Command;
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use nirn_proxy::config::Config;
use nirn_proxy::identity::Identity;
use nirn_proxy::observe::metrics::Metrics;
use nirn_proxy::route::Route;
use nirn_proxy::scheduler::client::Ask;
use nirn_proxy::scheduler::clients::Clients;
use nirn_proxy::scheduler::gate::Turn;
use nirn_proxy::scheduler::signal::Signal;

/// The parts, and the most instructions each may cost a request.
const PARTS: [(&str, f64); 6] = [
    ("route", 2500.0),
    ("digest", 5000.0),
    ("identity", 2500.0),
    ("metrics", 1200.0),
    ("signal", 2500.0),
    ("gate", 3000.0),
];

/// What a request's way through its gate must cost the same with, however many of them live: at most [`FLAT`] times the
/// least.
const GROWTH: [(&str, [u64; 3]); 2] = [("buckets", [1000, 10_000, 65_536]), ("credentials", [1, 100, 4096])];
const FLAT: f64 = 1.15;

const ROUNDS: u32 = 2000;
const FIRST_ID: u64 = 100_000_000_000_000_000;

fn main() {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--part");
    if let (Some(_), Some(part), Some(rounds)) = (arguments.next(), arguments.next(), arguments.next()) {
        return work(&part, rounds.parse().unwrap_or_else(|error| panic!("{error}")));
    }
    println!("| part | instructions a request | at most |\n|---|---|---|");
    let mut exceeded = Vec::new();
    let (mut sum, mut digest) = (0.0, 0.0);
    for (part, bound) in PARTS {
        let mut counted = (count(part, 2 * ROUNDS, &[]) - count(part, ROUNDS, &[])) / f64::from(ROUNDS);
        match part {
            "digest" => digest = counted,
            "identity" => counted -= digest,
            _ => {}
        }
        println!("| {part} | {counted:.0} | {bound:.0} |");
        sum += counted;
        if counted > bound {
            exceeded.push(part);
        }
    }
    println!("| all | {sum:.0} | |");
    println!("\n| live | how many | instructions a request | against the first |\n|---|---|---|---|");
    for (what, numbers) in GROWTH {
        // What it takes to make them all alive is left out.
        let only = ["--collect-atstart=no", "--toggle-collect=*live_rounds*"];
        let counted = numbers.map(|number| count(&format!("{what}:{number}"), ROUNDS, &only) / f64::from(ROUNDS));
        for (number, each) in numbers.iter().zip(counted) {
            println!("| {what} | {number} | {each:.0} | {:.2} |", each / counted[0]);
            if each > FLAT * counted.iter().copied().fold(f64::MAX, f64::min) {
                exceeded.push(what);
            }
        }
    }
    assert!(exceeded.is_empty(), "more instructions than written down: {exceeded:?}");
}

/// Instructions of a whole run, start-up included, unless valgrind's `options` say otherwise.
fn count(part: &str, rounds: u32, options: &[&str]) -> f64 {
    let program = std::env::current_exe().unwrap_or_else(|error| panic!("{error}"));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .args(options)
        .arg(program)
        .args(["--part", part, &rounds.to_string()])
        .output();
    let output = output.unwrap_or_else(|error| panic!("valgrind (a Debian package): {error}"));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let line = text.lines().find_map(|line| line.split("Collected : ").nth(1));
    line.and_then(|text| text.trim().parse().ok()).unwrap_or_else(|| panic!("valgrind said: {text}"))
}

fn work(part: &str, rounds: u32) {
    let paths: Vec<String> =
        (0..1000u64).map(|index| format!("/api/v10/channels/{}/messages", 100_000_000_000_000_000 + index)).collect();
    let path = |round: u32| paths[round as usize % paths.len()].as_str();
    let token = b"Bot MTIzNDU2Nzg5MDEyMzQ1Njc4.bench0.bench-bench-bench-bench-bench-bench";
    match part {
        "route" => (0..rounds).for_each(|round| {
            std::hint::black_box(Route::classify(&Method::GET, path(round), 1_700_000_000_000));
        }),
        "digest" => (0..rounds).for_each(|_| {
            std::hint::black_box(digest(&SHA256, std::hint::black_box(&token[b"Bot ".len()..])));
        }),
        "identity" => (0..rounds).for_each(|_| {
            std::hint::black_box(Identity::from_authorization(Some(std::hint::black_box(token))));
        }),
        "metrics" => {
            let metrics = Metrics::new();
            let identity = Identity::from_authorization(Some(token));
            let routes: Vec<Route> = paths.iter().map(|path| Route::classify(&Method::GET, path, 0)).collect();
            for round in 0..rounds {
                let route = metrics.route(&Method::GET, &routes[round as usize % routes.len()]);
                let open = route.open();
                route.observe(StatusCode::OK, false, identity.kind, 0.05);
                drop(open);
            }
        }
        "signal" => {
            let headers = answer();
            (0..rounds).for_each(|_| {
                std::hint::black_box(Signal::read(StatusCode::OK, std::hint::black_box(&headers)));
            });
        }
        "gate" => gate(1000, 1, rounds),
        other => match other.split_once(':').and_then(|(what, number)| Some((what, number.parse().ok()?))) {
            Some(("buckets", number)) => gate(number, 1, rounds),
            Some(("credentials", number)) => gate(number, number, rounds),
            _ => panic!("no part {other}"),
        },
    }
}

/// A request's whole way through its credential's gate, over so many buckets of so many credentials, all of them live.
fn gate(buckets: u64, credentials: u64, rounds: u32) {
    let lifted: Vec<String> = (0..credentials).map(|index| format!("{}:1000000", FIRST_ID + index)).collect();
    // Room for all of them and for what is not named yet: making room is another matter.
    let lifted =
        [("BOT_RATELIMIT_OVERRIDES".into(), lifted.join(",").into()), ("MAX_BUCKET_STATES".into(), "100000".into())];
    let config = Config::from_vars(lifted).unwrap_or_else(|problems| panic!("{problems:?}"));
    let clients = Clients::new(&config.scheduling);
    // Credentials met in a process's first second are new to it in another way.
    let fresh = Instant::now();
    while fresh.elapsed() < Duration::from_millis(1200) {
        std::thread::park_timeout(Duration::from_millis(1200));
    }
    let identities: Vec<Identity> = (0..credentials)
        .map(|index| {
            let token = format!("Bot {}.bench.bench", STANDARD_NO_PAD.encode((FIRST_ID + index).to_string()));
            Identity::from_authorization(Some(token.as_bytes()))
        })
        .collect();
    let signal = Signal::read(StatusCode::OK, &answer());
    let asks: Vec<Ask> = (0..buckets)
        .map(|index| {
            let path = format!("/api/v10/channels/{}/messages", FIRST_ID + index);
            Ask::new(&Method::GET, &Route::classify(&Method::GET, &path, 0))
        })
        .collect();
    let deadline = Instant::now() + config.scheduling.queue_timeout * 100;
    let call = |index: usize| {
        let gate =
            clients.gate(&identities[index % identities.len()], false).unwrap_or_else(|error| panic!("{error:?}"));
        match clients.enter(&gate, asks[index], deadline) {
            Ok(Turn::Has(permit)) => _ = permit.answered(&signal, false),
            Ok(Turn::Waits(_)) => panic!("nothing is in the way"),
            Err(error) => panic!("{error:?}"),
        }
    };
    // Often enough that what is learned at first is known and no log of a credential grows any more.
    (0..6).for_each(|_| (0..asks.len()).for_each(call));
    live_rounds(rounds, asks.len(), call);
}

/// In strides, so that neighbours do not help each other. The bench finds it by its name.
#[inline(never)]
fn live_rounds(rounds: u32, buckets: usize, call: impl Fn(usize)) {
    (0..rounds as usize).for_each(|round| call(round * 7919 % buckets));
}

/// The headers of a usual answer.
fn answer() -> HeaderMap {
    let lines = [
        ("date", "Sun, 06 Nov 1994 08:49:37 GMT"),
        ("content-type", "application/json"),
        ("x-ratelimit-bucket", "0123456789abcdef0123456789abcdef"),
        ("x-ratelimit-limit", "1000000"),
        ("x-ratelimit-remaining", "999999"),
        ("x-ratelimit-reset", "784111778.000"),
        ("x-ratelimit-reset-after", "1.000"),
        ("via", "1.1 google"),
        ("cf-ray", "0123456789abcdef-FRA"),
    ];
    lines.into_iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
}
