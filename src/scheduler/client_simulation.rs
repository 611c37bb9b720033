//! A credential's turns over random histories: requests are looked at as their futures would be, when woken or when
//! their timer is due, and a Discord of windows enforces what it announces.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use proptest::prelude::*;

use super::tests::{Bench, answer, ask, refusal, status};
use super::*;

/// An answer is there within so many milliseconds.
const SLOWEST: u64 = 65;

/// A waiting request as its future would be.
struct Sleeper {
    ticket: Ticket,
    woken: Arc<Flag>,
    timer: Option<Instant>,
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Sleeper {
    fn new(ticket: Ticket) -> Self {
        Self { ticket, woken: Arc::new(Flag(AtomicBool::new(true))), timer: None }
    }

    fn due(&self, now: Instant) -> bool {
        self.woken.0.swap(false, Ordering::Relaxed) || self.timer.is_some_and(|at| at <= now)
    }
}

/// Lets everybody look who was woken or whose timer is due, until nobody is.
fn look(bench: &mut Bench, now: u64, waiting: &mut Vec<Sleeper>, grants: &mut Vec<Grant>) {
    let instant = bench.at(now);
    loop {
        bench.client.take_wakes().into_iter().for_each(Waker::wake);
        let Some(at) = waiting.iter().position(|sleeper| sleeper.due(instant)) else { return };
        let waker = Waker::from(Arc::clone(&waiting[at].woken));
        match bench.client.poll(instant, waiting[at].ticket, &waker) {
            Step::Go(grant) => {
                grants.push(grant);
                waiting.remove(at);
            }
            Step::Refuse(error) => panic!("{error:?}"),
            Step::Move(_) => panic!("nobody moves"),
            Step::At(timer) => waiting[at].timer = Some(timer.max(instant + Duration::from_nanos(1))),
            Step::Wait => waiting[at].timer = None,
        }
    }
}

/// Enforces a window for each bucket and 20 requests in any second, and that writes of a route keep their order.
#[derive(Default)]
struct Discord {
    windows: BTreeMap<u64, (u64, u32)>,
    accepted: Vec<u64>,
    order: BTreeMap<u32, u64>,
    /// When each route was first accepted.
    met: BTreeMap<u32, u64>,
    sent: usize,
}

impl Discord {
    /// Judges a request; its answer.
    fn receive(&mut self, now: u64, grant: &Grant) -> Signal {
        self.sent += 1;
        let route = grant.ask.route.short();
        if grant.ask.class == Class::Write {
            // A retry has its old number.
            let last = self.order.insert(route, grant.seq);
            assert!(last.is_none_or(|last| last <= grant.seq), "order of writes");
        }
        // Now and then Discord refuses for the whole credential, and the request comes back.
        if self.sent % 17 == 16 {
            return Signal { global: true, ..refusal(status(429), 300) };
        }
        self.accepted.push(now);
        let recent = self.accepted.iter().rev().take_while(|at| now - **at < 1000).count();
        assert!(recent <= 20, "global limit at {now}");
        // Routes 0 and 10 are one bucket; the others have one each.
        let bucket = u64::from(route.max(10));
        let (limit, length) = (3 + (bucket as u32 / 10) % 3, 900 + bucket * 40);
        let window = self.windows.entry(bucket).or_insert((0, 0));
        if now >= window.0 {
            *window = (now + length, 0);
        }
        // Until the first answer to one of the two that share a bucket is there, they may collide.
        self.met.entry(route).or_insert(now);
        let unknown = bucket == 10 && [0, 10].iter().any(|it| self.met.get(it).is_some_and(|at| now <= at + SLOWEST));
        assert!(window.1 < limit || unknown, "bucket {bucket} overrun at {now}");
        window.1 = (window.1 + 1).min(limit);
        answer(bucket, limit, limit - window.1, window.0 - now)
    }
}

/// One history: (pause before, route, which waiter leaves, kind) for each arrival.
fn simulate(history: &[(u64, u8, u8, u8)]) {
    let (mut bench, mut discord) = (Bench::new(20), Discord::default());
    let (mut waiting, mut flying) = (Vec::new(), Vec::<(u64, Grant, Signal)>::new());
    let mut arrivals = history.iter().scan(0, |at, step| {
        *at += step.0;
        Some((*at, step.1, step.2, step.3))
    });
    let mut next = arrivals.next();
    let mut ended = 0;
    for now in 0..400_000u64 {
        let mut grants = Vec::new();
        while let Some((_, route, who, kind)) = next.filter(|(at, ..)| *at <= now) {
            let class = if kind % 3 == 0 { Class::Read } else { Class::Write };
            match bench.enter(now, ask(10 * u128::from(route % 6), class)).unwrap() {
                Entered::Go(grant) => grants.push(grant),
                Entered::Waits(ticket) => waiting.push(Sleeper::new(ticket)),
            }
            if kind % 11 == 10 && !waiting.is_empty() {
                let gone: Sleeper = waiting.remove(usize::from(who) % waiting.len());
                let instant = bench.at(now);
                bench.client.leave(instant, gone.ticket);
                ended += 1;
            }
            next = arrivals.next();
        }
        for (_, grant, signal) in flying.extract_if(.., |(at, ..)| *at <= now).collect::<Vec<_>>() {
            let instant = bench.at(now);
            match bench.client.answered(instant, &grant, &signal, signal.refused()) {
                Some(Ok(ticket)) => waiting.push(Sleeper::new(ticket)),
                Some(Err(error)) => panic!("{error:?}"),
                None => ended += 1,
            }
        }
        look(&mut bench, now, &mut waiting, &mut grants);
        for grant in grants {
            let signal = discord.receive(now, &grant);
            flying.push((now + 5 + (discord.sent as u64 * 7) % (SLOWEST - 5), grant, signal));
        }
        if next.is_none() && waiting.is_empty() && flying.is_empty() {
            assert!(bench.client.is_quiet());
            assert_eq!(ended, history.len());
            return;
        }
    }
    panic!("{} never got their turn", waiting.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn random_histories_overrun_nothing_keep_their_order_and_all_end(
        history in prop::collection::vec((0u64..120, any::<u8>(), any::<u8>(), any::<u8>()), 1..150)
    ) {
        simulate(&history);
    }
}

/// A route whose answers name two buckets in turn, and a route in each of the two. Some answers close their bucket for a
/// moment. Nobody may be left waiting.
fn alternate(history: &[(u64, u8, u8)]) {
    let mut bench = Bench::new(1000);
    let (mut waiting, mut flying, mut grants) = (Vec::new(), Vec::<(u64, Grant, Signal)>::new(), Vec::new());
    let mut arrivals = history.iter().scan(0, |at, step| {
        *at += step.0;
        Some((*at, step.1, step.2))
    });
    let (mut next, mut sent) = (arrivals.next(), 0_u64);
    for now in 0..50_000 {
        while let Some((_, route, kind)) = next.filter(|(at, ..)| *at <= now) {
            let class = if kind % 3 == 0 { Class::Read } else { Class::Write };
            match bench.enter(now, ask(u128::from(route % 3), class)).unwrap() {
                Entered::Go(grant) => grants.push(grant),
                Entered::Waits(ticket) => waiting.push(Sleeper::new(ticket)),
            }
            if kind % 7 == 6 && !waiting.is_empty() {
                let gone: Sleeper = waiting.remove(usize::from(kind) % waiting.len());
                let instant = bench.at(now);
                bench.client.leave(instant, gone.ticket);
            }
            next = arrivals.next();
        }
        for (_, grant, signal) in flying.extract_if(.., |(at, ..)| *at <= now).collect::<Vec<_>>() {
            bench.answer(now, &grant, signal);
        }
        look(&mut bench, now, &mut waiting, &mut grants);
        for grant in grants.drain(..) {
            sent += 1;
            let bucket = match grant.ask.route.short() {
                0 => sent % 2,
                route => u64::from(route) - 1,
            };
            let counted = answer(bucket, 1000, 900, 50_000 - now);
            let signal = if sent % 5 == 4 { refusal(counted, 40) } else { counted };
            flying.push((now + 5 + (sent * 7) % 60, grant, signal));
        }
        if next.is_none() && waiting.is_empty() && flying.is_empty() {
            return assert!(bench.client.is_quiet());
        }
    }
    panic!("{} never got their turn", waiting.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn a_route_of_two_buckets_and_those_beside_it_all_end(
        history in prop::collection::vec((0u64..60, any::<u8>(), any::<u8>()), 1..80)
    ) {
        alternate(&history);
    }
}

/// Requests that all arrive at once in one bucket, each answer after `round_trip`; the instants at which they were sent.
fn burst(bench: &mut Bench, count: usize, class: Class, round_trip: u64, limit: u32) -> Vec<u64> {
    let (mut waiting, mut flying, mut sent) = (Vec::new(), Vec::<(u64, Grant)>::new(), Vec::new());
    let mut grants = Vec::new();
    for _ in 0..count {
        match bench.enter(0, ask(1, class)).unwrap() {
            Entered::Go(grant) => grants.push(grant),
            Entered::Waits(ticket) => waiting.push(Sleeper::new(ticket)),
        }
    }
    for now in 0..60_000 {
        for (_, grant) in flying.extract_if(.., |(at, _)| *at <= now).collect::<Vec<_>>() {
            let used = u32::try_from(sent.len()).unwrap();
            bench.answer(now, &grant, answer(1, limit, limit - used, 60_000 - now));
        }
        look(bench, now, &mut waiting, &mut grants);
        for grant in grants.drain(..) {
            sent.push(now);
            flying.push((now + round_trip, grant));
        }
        if waiting.is_empty() && flying.is_empty() {
            return sent;
        }
    }
    panic!("{} never got their turn", waiting.len());
}

#[test]
fn reads_of_one_bucket_go_at_the_global_limits_pace_and_not_at_one_a_round_trip() {
    let mut bench = Bench::with(50, true, Room::new(10));
    let sent = burst(&mut bench, 300, Class::Read, 50, 1000);
    assert!(sent[299] < 6100, "{}", sent[299]);
}

#[test]
fn writes_of_one_bucket_go_one_a_round_trip() {
    let mut bench = Bench::with(50, true, Room::new(10));
    let sent = burst(&mut bench, 20, Class::Write, 50, 1000);
    assert!(sent.windows(2).all(|pair| pair[1] - pair[0] >= 50));
}
