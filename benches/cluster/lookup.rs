//! The look-up of an owner among 32 members.
#![expect(unsafe_code, reason = "a counting allocator can be written in no other way")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use nirn_proxy::cluster::members::{Key, Member, Members, View};
use nirn_proxy::cluster::owners::Owners;
use tokio::sync::watch;

const LOOK_UPS: u32 = 200_000;

/// Counts allocations.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: passes everything on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of the very same method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of the very same method.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn member(number: u8) -> Member {
    let gossip = SocketAddr::from(([10, 0, 0, number], 7946));
    Member { name: format!("node-{number}").into(), gossip, peer_port: 8443, generation: 0 }
}

pub(crate) fn run() {
    let members = || Members::new(1, (1..=32).map(member), member(1).gossip, 64);
    let keys: Vec<Key> = (0..=255).map(|byte: u8| std::array::from_fn(|at| byte.wrapping_mul(at as u8 | 1))).collect();
    let computed = members();
    let (_publish, receiver) = watch::channel(Arc::new(View::new(members(), Instant::now())));
    let owners = Owners::new(receiver);
    let timed = |look_up: &dyn Fn(&Key)| {
        keys.iter().for_each(look_up);
        let (start, before) = (Instant::now(), ALLOCATIONS.load(Ordering::Relaxed));
        for at in 0..LOOK_UPS as usize {
            look_up(black_box(&keys[at % keys.len()]));
        }
        let took = start.elapsed().as_nanos() as f64 / f64::from(LOOK_UPS);
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        (took, allocations as f64 / f64::from(LOOK_UPS))
    };
    let ranked = timed(&|key| _ = black_box(computed.owner(key)));
    let kept = timed(&|key| _ = black_box(owners.owner(key)));
    println!("\n| owner among 32 | time | allocations |\n|---|---|---|");
    println!("| computed | {:.0} ns | {:.2} |", ranked.0, ranked.1);
    println!("| kept | {:.0} ns | {:.2} |", kept.0, kept.1);
}
