use super::*;
use http::StatusCode;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

/// A client under test and a clock of milliseconds.
struct Bench {
    client: Client,
    start: Instant,
}

const QUEUE: Duration = Duration::from_secs(60);

impl Bench {
    fn new(limit: u32) -> Self {
        Self::with(limit, false, Room::new(1000))
    }

    fn with(limit: u32, judged: bool, room: Room) -> Self {
        let start = Instant::now() + Duration::from_secs(100);
        let limits = Arc::new(Limits { queue_depth: 1000, attempt: Duration::from_secs(5) });
        let pacer = Pacer::new(limit, start, start - Duration::from_secs(60));
        Self { client: Client::new(limits, Arc::new(room), pacer, judged, start), start }
    }

    fn at(&self, at: u64) -> Instant {
        self.start + ms(at)
    }

    fn enter(&mut self, at: u64, ask: Ask) -> Result<Entered, ProxyError> {
        let now = self.at(at);
        self.client.enter(now, ask, now + QUEUE)
    }

    fn go(&mut self, at: u64, ask: Ask) -> Grant {
        match self.enter(at, ask) {
            Ok(Entered::Go(grant)) => grant,
            other => panic!("at {at}: {other:?}"),
        }
    }

    fn wait(&mut self, at: u64, ask: Ask) -> Ticket {
        match self.enter(at, ask) {
            Ok(Entered::Waits(ticket)) => ticket,
            other => panic!("at {at}: {other:?}"),
        }
    }

    fn poll(&mut self, at: u64, ticket: Ticket) -> Step {
        let now = self.at(at);
        self.client.poll(now, ticket, Waker::noop())
    }

    fn answer(&mut self, at: u64, grant: &Grant, signal: Signal) {
        let now = self.at(at);
        assert!(self.client.answered(now, grant, &signal, false).is_none());
    }

    fn call(&mut self, at: u64, ask: Ask, signal: Signal) {
        let grant = self.go(at, ask);
        self.answer(at, &grant, signal);
    }
}

fn ask(route: u128, class: Class) -> Ask {
    let key = Key::from((route << 64) | (route + 1));
    Ask { route: key, provisional: key, major: Key::from(7), class, detail: 0, interaction: false, path_token: false }
}

fn write(route: u128) -> Ask {
    ask(route, Class::Write)
}

fn answer(hash: u64, limit: u32, remaining: u32, reset_ms: u64) -> Signal {
    Signal {
        status: StatusCode::OK,
        bucket: Some(BucketHash(hash)),
        limit: Some(limit),
        remaining: Some(remaining),
        reset_after: Some(ms(reset_ms)),
        global: false,
        scope: None,
        retry_after: None,
    }
}

fn status(code: u16) -> Signal {
    let status = StatusCode::from_u16(code).unwrap();
    Signal { status, bucket: None, limit: None, remaining: None, reset_after: None, ..answer(0, 0, 0, 0) }
}

fn refusal(signal: Signal, wait: u64) -> Signal {
    Signal { status: StatusCode::TOO_MANY_REQUESTS, retry_after: Some(ms(wait)), ..signal }
}

#[test]
fn routes_of_one_hash_and_major_share_a_queue_in_order_of_arrival() {
    let mut bench = Bench::new(1000);
    let (put, delete) = (write(1), write(2));
    bench.call(0, put, answer(9, 5, 4, 5000));
    let first = bench.go(10, delete);
    let second = bench.wait(11, delete);
    let ahead = bench.go(12, put);
    let third = bench.wait(13, put);
    bench.answer(20, &first, answer(9, 5, 3, 4980));
    assert!(matches!(bench.poll(20, second), Step::At(_)), "the bucket's other request is in flight");
    bench.answer(30, &ahead, answer(9, 5, 2, 4970));
    assert!(matches!(bench.poll(30, third), Step::Wait));
    let Step::Go(grant) = bench.poll(30, second) else { panic!("first in line") };
    bench.answer(40, &grant, answer(9, 5, 1, 4960));
    assert!(matches!(bench.poll(40, third), Step::Go(_)));
}

#[test]
fn a_route_that_alternates_needs_room_in_both_buckets() {
    let mut bench = Bench::new(1000);
    bench.call(0, write(1), answer(1, 3, 2, 1000));
    bench.call(10, write(1), answer(2, 30, 20, 118_000));
    bench.call(20, write(1), answer(1, 3, 1, 980));
    bench.call(30, write(1), answer(2, 30, 19, 117_980));
    bench.call(40, write(1), answer(1, 3, 0, 960));
    let waiting = bench.wait(50, write(1));
    assert!(matches!(bench.poll(900, waiting), Step::At(at) if at >= bench.at(1000) && at < bench.at(1100)));
    assert!(matches!(bench.poll(1100, waiting), Step::Go(_)));
}

#[test]
fn a_route_bound_anew_does_not_wait_for_a_bucket_that_others_closed() {
    let mut bench = Bench::new(1000);
    bench.call(0, write(1), answer(1, 5, 4, 5000));
    bench.call(1, write(2), answer(1, 5, 3, 5000));
    let moving = bench.go(2, write(1));
    bench.answer(3, &moving, answer(2, 5, 4, 5000));
    bench.call(4, write(2), answer(1, 5, 0, 60_000));
    bench.call(5, write(1), answer(2, 5, 3, 5000));
}

#[test]
fn a_sub_limit_holds_its_route_and_detail_alone() {
    let mut bench = Bench::new(1000);
    let rename = Ask { detail: 1, ..write(1) };
    let grant = bench.go(0, rename);
    bench.answer(5, &grant, refusal(answer(1, 5, 4, 15_000), 583_000));
    assert!(matches!(bench.enter(10, rename), Err(ProxyError::RateLimited(_))));
    bench.call(20, write(1), answer(1, 5, 3, 15_000));
    bench.call(30, write(2), answer(3, 5, 3, 15_000));
    bench.call(583_200 + 6000, rename, answer(1, 5, 4, 15_000));
}

#[test]
fn those_behind_a_short_hold_take_their_old_places() {
    let mut bench = Bench::new(1000);
    let (held, other) = (write(1), write(2));
    bench.call(0, held, answer(1, 5, 4, 500));
    bench.call(0, other, answer(1, 5, 3, 500));
    let grant = bench.go(1, held);
    bench.answer(2, &grant, Signal { scope: Some(Scope::Shared), ..refusal(answer(1, 5, 2, 500), 2000) });
    let early = bench.wait(10, held);
    let late = bench.wait(11, held);
    bench.call(12, other, answer(1, 5, 1, 480));
    assert!(matches!(bench.poll(13, early), Step::At(at) if at >= bench.at(2002)));
    assert!(matches!(bench.poll(13, late), Step::Wait));
    let Step::Go(grant) = bench.poll(2100, early) else { panic!("the hold is over") };
    assert!(matches!(bench.poll(2100, late), Step::Wait | Step::At(_)));
    bench.answer(2110, &grant, answer(1, 5, 4, 500));
    assert!(matches!(bench.poll(2110, late), Step::Go(_)));
}

#[test]
fn a_cooldown_that_leaves_no_full_attempt_is_told_at_once_and_to_those_in_line() {
    let mut bench = Bench::new(1000);
    let first = bench.go(0, write(1));
    let waiting = bench.wait(1, write(1));
    bench.answer(10, &first, answer(1, 1, 0, 120_000));
    let Step::Refuse(ProxyError::RateLimited(cooldown)) = bench.poll(10, waiting) else { panic!("refused") };
    assert!(cooldown.retry_after >= Duration::from_secs(120) && cooldown.scope == Scope::User);
    assert!(matches!(bench.enter(20, write(1)), Err(ProxyError::RateLimited(_))));
    assert!(bench.client.is_quiet());
}

#[test]
fn a_global_block_holds_all_but_interactions_and_the_later_wait_rules() {
    let mut bench = Bench::new(50);
    let grant = bench.go(0, write(1));
    bench.call(1, write(2), answer(2, 5, 0, 5000));
    bench.answer(10, &grant, Signal { global: true, ..refusal(status(429), 1000) });
    let (other, closed) = (bench.wait(20, write(3)), bench.wait(21, write(2)));
    let interaction = Ask { interaction: true, path_token: true, ..write(9) };
    bench.call(30, interaction, status(204));
    assert!(matches!(bench.poll(40, other), Step::At(at) if at >= bench.at(1010)));
    assert!(matches!(bench.poll(1100, other), Step::Go(_)));
    assert!(matches!(bench.poll(1100, closed), Step::At(at) if at >= bench.at(5000)));
}

#[test]
fn an_unjudged_credential_sends_one_and_a_401_costs_one() {
    let mut bench = Bench::with(50, true, Room::new(1000));
    let first = bench.go(0, write(1));
    let waiting: Vec<_> = (2..10).map(|route| bench.wait(1, write(route))).collect();
    bench.call(2, Ask { path_token: true, ..write(20) }, status(401));
    bench.answer(5, &first, status(502));
    let Step::Go(second) = bench.poll(5, waiting[0]) else { panic!("5xx proves nothing") };
    bench.answer(6, &second, status(401));
    for ticket in &waiting[1..] {
        assert!(matches!(bench.poll(7, *ticket), Step::Refuse(ProxyError::InvalidToken)));
    }
    assert!(matches!(bench.enter(8, write(30)), Err(ProxyError::InvalidToken)));
    bench.call(9, Ask { path_token: true, ..write(20) }, status(200));
}

#[test]
fn a_retry_keeps_its_place_ahead_of_later_requests() {
    let mut bench = Bench::new(1000);
    let first = bench.go(0, write(1));
    let later = bench.wait(1, write(1));
    let now = bench.at(5);
    let again = bench.client.answered(now, &first, &refusal(answer(1, 5, 0, 2500), 2500), true);
    let Some(Ok(again)) = again else { panic!("{again:?}") };
    assert!(matches!(bench.poll(2600, later), Step::Wait));
    assert!(matches!(bench.poll(2400, again), Step::At(_)));
    let Step::Go(grant) = bench.poll(2600, again) else { panic!("its turn") };
    bench.answer(2610, &grant, answer(1, 5, 4, 5000));
    assert!(matches!(bench.poll(2610, later), Step::Go(_)));
}

#[test]
fn queues_and_buckets_are_bounded_and_idle_buckets_make_room() {
    let mut bench = Bench::with(1000, false, Room::new(2));
    let first = bench.go(0, write(1));
    for _ in 0..1000 {
        bench.wait(1, write(1));
    }
    assert!(matches!(bench.enter(1, write(1)), Err(ProxyError::Unavailable(Reason::QueueFull))));
    bench.call(2, write(2), answer(2, 5, 4, 100));
    assert!(matches!(bench.enter(3, write(3)), Err(ProxyError::Unavailable(Reason::BucketLimit))));
    let later = bench.at(5000);
    assert_eq!(bench.client.sweep(later, later, 10), 1);
    bench.call(5000, write(3), answer(3, 5, 4, 100));
    bench.answer(5001, &first, status(200));
    assert_eq!(bench.client.room.taken(), 2);
}

/// A waiting request as its future would be: looked at when woken or when its timer is due, and at no other time.
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

/// A Discord of windows that enforces what it announces, for a random history of arrivals, latencies and departures.
fn simulate(seed: &[(u64, u8, u8, u8)]) {
    let mut bench = Bench::new(20);
    let mut windows: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
    let mut global: Vec<u64> = Vec::new();
    let mut waiting: Vec<Sleeper> = Vec::new();
    let mut flying: Vec<(u64, Grant, Signal)> = Vec::new();
    let mut order: BTreeMap<u128, Vec<u64>> = BTreeMap::new();
    let mut arrivals = seed.iter().scan(0, |at, step| {
        *at += step.0;
        Some((*at, step.1, step.2, step.3))
    });
    let mut next = arrivals.next();
    let (mut sent, mut left, mut answered) = (0usize, 0usize, 0usize);
    for now in 0..400_000u64 {
        let mut grants = Vec::new();
        while let Some((_, route, latency, kind)) = next.filter(|(at, ..)| *at <= now) {
            let route = u128::from(route % 6);
            let class = if kind % 3 == 0 { Class::Read } else { Class::Write };
            match bench.enter(now, ask(10 * route, class)).unwrap() {
                Entered::Go(grant) => grants.push(grant),
                Entered::Waits(ticket) => waiting.push(Sleeper::new(ticket)),
            }
            if kind % 11 == 10 && !waiting.is_empty() {
                let gone = waiting.swap_remove(usize::from(latency) % waiting.len());
                bench.client.leave(bench.start + ms(now), gone.ticket);
                left += 1;
            }
            next = arrivals.next();
        }
        let landed: Vec<_> = flying.extract_if(.., |(at, ..)| *at <= now).collect();
        for (_, grant, signal) in landed {
            let instant = bench.at(now);
            match bench.client.answered(instant, &grant, &signal, signal.refused()) {
                Some(Ok(ticket)) => waiting.push(Sleeper::new(ticket)),
                Some(Err(error)) => panic!("{error:?}"),
                None => answered += 1,
            }
        }
        loop {
            bench.client.take_wakes().into_iter().for_each(Waker::wake);
            let instant = bench.at(now);
            let Some(at) = waiting.iter().position(|sleeper| sleeper.due(instant)) else { break };
            let waker = Waker::from(Arc::clone(&waiting[at].woken));
            match bench.client.poll(instant, waiting[at].ticket, &waker) {
                Step::Go(grant) => {
                    grants.push(grant);
                    waiting.swap_remove(at);
                }
                Step::Refuse(error) => panic!("{error:?}"),
                Step::At(timer) => waiting[at].timer = Some(timer.max(instant + Duration::from_nanos(1))),
                Step::Wait => waiting[at].timer = None,
            }
        }
        for grant in grants {
            sent += 1;
            let route = grant.ask.route.short();
            // Routes 0 and 10 are one bucket; the others have one each.
            let bucket = u64::from(route.max(10));
            let (limit, length) = (3 + (bucket as u32 / 10) % 3, 900 + bucket * 40);
            let window = windows.entry(bucket).or_insert((0, 0));
            if now >= window.0 {
                *window = (now + length, 0);
            }
            // Now and then Discord refuses for the whole credential, and the request comes back.
            if sent % 17 == 16 {
                flying.push((now + 20, grant, Signal { global: true, ..refusal(status(429), 300) }));
                continue;
            }
            // Before the shared bucket is known the two may collide once.
            if window.1 >= limit {
                assert!(bucket == 10 && sent < 30, "bucket {bucket} overrun at {now}");
            }
            window.1 = (window.1 + 1).min(limit);
            global.push(now);
            assert!(global.iter().rev().take_while(|at| now - **at < 1000).count() <= 20, "global limit at {now}");
            if grant.ask.class == Class::Write {
                let line = order.entry(u128::from(route)).or_default();
                assert!(line.last().is_none_or(|last| *last <= grant.seq), "order of writes");
                line.push(grant.seq);
            }
            let signal = answer(bucket, limit, limit - window.1, window.0 - now);
            flying.push((now + 5 + (sent as u64 * 7) % 60, grant, signal));
        }
        if next.is_none() && waiting.is_empty() && flying.is_empty() {
            assert!(bench.client.is_quiet());
            assert_eq!(answered + left, seed.len());
            return;
        }
    }
    panic!("{} never got their turn", waiting.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn random_histories_overrun_nothing_keep_their_order_and_all_end(
        seed in prop::collection::vec((0u64..120, any::<u8>(), any::<u8>(), any::<u8>()), 1..150)
    ) {
        simulate(&seed);
    }
}

/// Requests that all arrive at once in one bucket, each answer after `round_trip`; the instants at which they were sent.
fn burst(bench: &mut Bench, count: usize, class: Class, round_trip: u64, limit: u32) -> Vec<u64> {
    let (mut waiting, mut flying, mut sent) = (Vec::new(), Vec::new(), Vec::new());
    let mut grants = Vec::new();
    for _ in 0..count {
        match bench.enter(0, ask(1, class)).unwrap() {
            Entered::Go(grant) => grants.push(grant),
            Entered::Waits(ticket) => waiting.push(Sleeper::new(ticket)),
        }
    }
    for now in 0..60_000 {
        let landed: Vec<(u64, Grant)> = flying.extract_if(.., |(at, _)| *at <= now).collect();
        for (_, grant) in landed {
            let used = u32::try_from(sent.len()).unwrap();
            bench.answer(now, &grant, answer(1, limit, limit - used, 60_000 - now));
        }
        loop {
            bench.client.take_wakes().into_iter().for_each(Waker::wake);
            let instant = bench.at(now);
            let Some(at) = waiting.iter().position(|sleeper| sleeper.due(instant)) else { break };
            let waker = Waker::from(Arc::clone(&waiting[at].woken));
            match bench.client.poll(instant, waiting[at].ticket, &waker) {
                Step::Go(grant) => {
                    grants.push(grant);
                    waiting.remove(at);
                }
                Step::Refuse(error) => panic!("{error:?}"),
                Step::At(timer) => waiting[at].timer = Some(timer),
                Step::Wait => waiting[at].timer = None,
            }
        }
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
