//! What state costs, counted by an allocator: bytes an idle bucket, and allocations a request that waits for nothing.

#![expect(unsafe_code, reason = "a counting allocator can be written in no other way")]
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use nirn_proxy::config::Config;
use nirn_proxy::identity::Identity;
use nirn_proxy::route::Route;
use nirn_proxy::scheduler::client::Ask;
use nirn_proxy::scheduler::clients::Clients;
use nirn_proxy::scheduler::gate::Turn;
use nirn_proxy::scheduler::signal::Signal;

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// The tests count for the whole process, so one runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

// SAFETY: passes every call on to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are the ones the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const TOKEN: &[u8] = b"Bot MTIzNDU2Nzg5MDEyMzQ1Njc4.memory.memory";

fn clients() -> Clients {
    let lifted = [("BOT_RATELIMIT_OVERRIDES".into(), "123456789012345678:10000000".into())];
    let clients = Clients::new(&Config::from_vars(lifted).unwrap().scheduling);
    // A fresh process has no credit for its first second.
    let fresh = Instant::now();
    while fresh.elapsed() < Duration::from_millis(1100) {
        std::thread::park_timeout(Duration::from_millis(1100));
    }
    clients
}

fn ask(index: u64) -> Ask {
    let path = format!("/api/v10/channels/{}/messages", 100_000_000_000_000_000 + index);
    Ask::new(&Method::GET, &Route::classify(&Method::GET, &path, 0))
}

fn answer() -> Signal {
    let lines = [
        ("x-ratelimit-bucket", "0123456789abcdef0123456789abcdef"),
        ("x-ratelimit-limit", "1000000"),
        ("x-ratelimit-remaining", "999999"),
        ("x-ratelimit-reset-after", "0.001"),
    ];
    let headers: HeaderMap = lines
        .into_iter()
        .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
        .collect();
    Signal::read(StatusCode::OK, &headers)
}

fn call(clients: &Clients, ask: Ask, signal: &Signal) {
    let gate = clients.gate(&Identity::from_authorization(Some(TOKEN)), false).unwrap();
    let Ok(Turn::Has(permit)) = clients.enter(&gate, ask, Instant::now() + Duration::from_secs(60)) else {
        panic!("nothing is in the way");
    };
    assert!(permit.answered(signal, false).is_none());
}

#[test]
fn an_idle_bucket_costs_at_most_256_bytes() {
    let _alone = ALONE.lock().unwrap();
    let (clients, signal) = (clients(), answer());
    call(&clients, ask(0), &signal);
    // As many as MAX_BUCKET_STATES allows by default: the tables are then as full as they get before they double.
    let before = BYTES.load(Ordering::Relaxed);
    let count = 65_535;
    (1..=count).for_each(|index| call(&clients, ask(index), &signal));
    let each = (BYTES.load(Ordering::Relaxed) - before) as f64 / count as f64;
    println!("an idle bucket costs {each:.0} bytes");
    assert!(each <= 256.0, "{each} bytes");
}

#[test]
fn a_request_that_waits_for_nothing_allocates_nothing_at_its_gate() {
    let _alone = ALONE.lock().unwrap();
    let (clients, signal, ask) = (clients(), answer(), ask(0));
    (0..2000).for_each(|_| call(&clients, ask, &signal));
    let before = CALLS.load(Ordering::Relaxed);
    (0..1000).for_each(|_| call(&clients, ask, &signal));
    let calls = CALLS.load(Ordering::Relaxed) - before;
    // The pacer's log grows by doubling now and then.
    assert!(calls <= 4, "{calls} allocations in 1000 requests");
}
