use super::*;
use http::StatusCode;
use std::task::Waker;

pub(super) fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

/// A client under test and a clock of milliseconds.
pub(super) struct Bench {
    pub(super) client: Client,
    pub(super) start: Instant,
}

const QUEUE: Duration = Duration::from_secs(60);

impl Bench {
    pub(super) fn new(limit: u32) -> Self {
        Self::with(limit, false, Room::new(1000))
    }

    pub(super) fn with(limit: u32, judged: bool, room: Room) -> Self {
        let start = Instant::now() + Duration::from_secs(100);
        let limits = Arc::new(Limits { queue_depth: 1000, attempt: Duration::from_secs(5) });
        let pacer = Pacer::new(limit, start, start - Duration::from_secs(60));
        Self { client: Client::new(limits, Arc::new(room), pacer, judged, start), start }
    }

    pub(super) fn at(&self, at: u64) -> Instant {
        self.start + ms(at)
    }

    pub(super) fn enter(&mut self, at: u64, ask: Ask) -> Result<Entered, ProxyError> {
        let now = self.at(at);
        self.client.enter(now, ask, now + QUEUE)
    }

    pub(super) fn go(&mut self, at: u64, ask: Ask) -> Grant {
        match self.enter(at, ask) {
            Ok(Entered::Go(grant)) => grant,
            other => panic!("at {at}: {other:?}"),
        }
    }

    pub(super) fn wait(&mut self, at: u64, ask: Ask) -> Ticket {
        match self.enter(at, ask) {
            Ok(Entered::Waits(ticket)) => ticket,
            other => panic!("at {at}: {other:?}"),
        }
    }

    pub(super) fn poll(&mut self, at: u64, ticket: Ticket) -> Step {
        let now = self.at(at);
        self.client.poll(now, ticket, Waker::noop())
    }

    pub(super) fn answer(&mut self, at: u64, grant: &Grant, signal: Signal) {
        let now = self.at(at);
        assert!(self.client.answered(now, grant, &signal, false).is_none());
    }

    pub(super) fn call(&mut self, at: u64, ask: Ask, signal: Signal) {
        let grant = self.go(at, ask);
        self.answer(at, &grant, signal);
    }
}

pub(super) fn ask(route: u128, class: Class) -> Ask {
    let key = Key::from((route << 64) | (route + 1));
    Ask { route: key, provisional: key, major: Key::from(7), class, detail: 0, interaction: false, path_token: false }
}

pub(super) fn write(route: u128) -> Ask {
    ask(route, Class::Write)
}

pub(super) fn answer(hash: u64, limit: u32, remaining: u32, reset_ms: u64) -> Signal {
    Signal {
        status: StatusCode::OK,
        bucket: Some(BucketHash(hash)),
        limit: Some(limit),
        remaining: Some(remaining),
        reset_after: Some(ms(reset_ms)),
        global: false,
        scope: None,
        unknown_webhook: false,
        retry_after: None,
    }
}

pub(super) fn status(code: u16) -> Signal {
    let status = StatusCode::from_u16(code).unwrap();
    Signal { status, bucket: None, limit: None, remaining: None, reset_after: None, ..answer(0, 0, 0, 0) }
}

pub(super) fn refusal(signal: Signal, wait: u64) -> Signal {
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

/// Two routes that alternate between the buckets 1 and 2, so that each queues in one and needs room in the other.
fn alternating(bench: &mut Bench) {
    for hash in [1, 2, 1, 2] {
        bench.call(0, write(1), answer(hash, 30, 20, 100_000));
    }
    bench.call(0, write(2), answer(1, 30, 19, 100_000));
}

#[test]
fn whoever_waits_for_an_answer_in_another_bucket_is_woken_by_it() {
    let mut bench = Bench::new(1000);
    alternating(&mut bench);
    let other = bench.go(10, write(2));
    let (first, second) = (bench.wait(11, write(1)), bench.wait(12, write(1)));
    assert!(matches!(bench.poll(12, first), Step::At(_)) && matches!(bench.poll(12, second), Step::Wait));
    bench.client.take_wakes();
    bench.answer(20, &other, answer(1, 30, 18, 99_980));
    assert_eq!(bench.client.take_wakes().len(), 1, "the head of the other line");
    let Step::Go(grant) = bench.poll(20, first) else { panic!("both buckets have room") };
    let other = bench.wait(21, write(2));
    bench.answer(30, &grant, answer(2, 30, 19, 99_970));
    let now = bench.at(31);
    // What stands at the head now must look, although its own bucket has nothing in flight.
    bench.client.leave(now, second);
    assert!(matches!(bench.poll(31, other), Step::Go(_)));
}

#[test]
fn who_comes_to_the_head_while_another_bucket_is_busy_waits_for_that_one() {
    let mut bench = Bench::new(1000);
    alternating(&mut bench);
    let other = bench.go(10, write(2));
    let (first, second) = (bench.wait(11, write(1)), bench.wait(12, write(1)));
    assert!(matches!(bench.poll(12, first), Step::At(_)) && matches!(bench.poll(12, second), Step::Wait));
    let now = bench.at(13);
    bench.client.leave(now, first);
    assert_eq!(bench.client.take_wakes().len(), 1);
    assert!(matches!(bench.poll(13, second), Step::At(_)));
    bench.answer(20, &other, answer(1, 30, 18, 99_980));
    assert_eq!(bench.client.take_wakes().len(), 1);
    assert!(matches!(bench.poll(20, second), Step::Go(_)));
}

#[test]
fn a_route_bound_anew_waits_for_its_former_bucket_only_while_its_own_closure_lasts() {
    let mut bench = Bench::new(1000);
    bench.call(0, write(1), answer(1, 5, 0, 100));
    bench.call(0, write(2), answer(3, 5, 4, 5000));
    bench.call(200, write(1), answer(2, 5, 4, 5000));
    bench.call(201, write(2), answer(1, 5, 4, 5000));
    let _busy = bench.go(202, write(2));
    bench.call(203, write(1), answer(2, 5, 3, 5000));
}

#[test]
fn an_interaction_that_is_refused_for_all_waits_by_itself() {
    let mut bench = Bench::new(50);
    let interaction = |route| Ask { interaction: true, path_token: true, ..write(route) };
    let global = |wait| Signal { global: true, ..refusal(status(429), wait) };
    let grant = bench.go(0, interaction(1));
    let now = bench.at(10);
    let again = bench.client.answered(now, &grant, &global(2000), true);
    let Some(Ok(again)) = again else { panic!("{again:?}") };
    assert!(matches!(bench.poll(11, again), Step::At(at) if at >= bench.at(2010)));
    bench.call(12, interaction(2), status(204));
    assert!(matches!(bench.poll(2100, again), Step::Go(_)));
    let grant = bench.go(2200, interaction(3));
    let now = bench.at(2210);
    let again = bench.client.answered(now, &grant, &global(120_000), true);
    assert!(matches!(again, Some(Err(ProxyError::RateLimited(_)))), "{again:?}");
}

#[test]
fn nothing_else_goes_out_while_a_global_refusal_is_being_read() {
    let mut bench = Bench::new(50);
    let (mut first, second) = (bench.go(0, write(1)), bench.go(0, write(2)));
    bench.client.blocks(&mut first);
    let waiting = bench.wait(1, write(3));
    assert!(matches!(bench.poll(1, waiting), Step::At(at) if at > bench.at(50_000)));
    bench.answer(2, &second, status(200));
    bench.call(3, Ask { interaction: true, path_token: true, ..write(9) }, status(204));
    assert!(matches!(bench.poll(3, waiting), Step::At(at) if at > bench.at(50_000)));
    bench.client.take_wakes();
    bench.answer(4, &first, Signal { global: true, ..refusal(status(429), 1000) });
    assert_eq!(bench.client.take_wakes().len(), 1);
    assert!(matches!(bench.poll(4, waiting), Step::At(at) if at >= bench.at(1004) && at < bench.at(1100)));
    // One that is given up without an answer holds nobody any longer.
    let Step::Go(mut grant) = bench.poll(1100, waiting) else { panic!("the block is over") };
    bench.client.blocks(&mut grant);
    let waiting = bench.wait(1200, write(4));
    assert!(matches!(bench.poll(1200, waiting), Step::At(_)));
    let now = bench.at(1300);
    bench.client.unanswered(now, &grant);
    assert!(matches!(bench.poll(1300, waiting), Step::Go(_)));
}

#[test]
fn who_comes_at_the_end_of_a_hold_does_not_overtake_those_it_held() {
    let mut bench = Bench::new(1000);
    let grant = bench.go(1, write(1));
    bench.answer(2, &grant, Signal { scope: Some(Scope::Shared), ..refusal(answer(1, 5, 2, 500), 2000) });
    let held = bench.wait(10, write(1));
    assert!(matches!(bench.poll(10, held), Step::At(_)));
    let late = bench.wait(2500, write(1));
    assert!(matches!(bench.poll(2500, late), Step::Wait));
    assert!(matches!(bench.poll(2500, held), Step::Go(_)));
}

#[test]
fn those_behind_one_that_another_hold_keeps_longer_go_when_theirs_ends() {
    let mut bench = Bench::new(1000);
    let rename = |detail| Ask { detail, ..write(1) };
    let held = |bench: &mut Bench, at, detail, wait| {
        let grant = bench.go(at, rename(detail));
        bench.answer(at + 1, &grant, refusal(answer(1, 5, 4, 500), wait));
    };
    held(&mut bench, 0, 0b01, 5000);
    let (both, name) = (bench.wait(10, rename(0b11)), bench.wait(11, rename(0b01)));
    assert!(matches!(bench.poll(11, both), Step::At(_)) && matches!(bench.poll(11, name), Step::Wait));
    held(&mut bench, 20, 0b10, 40_000);
    // The new hold has woken both.
    assert_eq!(bench.client.take_wakes().len(), 2);
    assert!(matches!(bench.poll(30, name), Step::Wait));
    assert!(matches!(bench.poll(30, both), Step::At(at) if at > bench.at(40_000)));
    assert_eq!(bench.client.take_wakes().len(), 1);
    assert!(matches!(bench.poll(30, name), Step::At(at) if at < bench.at(6000)));
    assert!(matches!(bench.poll(5200, name), Step::Go(_)));
}

#[test]
fn a_webhook_that_discord_does_not_know_is_asked_for_once() {
    let mut bench = Bench::new(50);
    let webhook = |route, major| Ask { path_token: true, major: Key::from(major), ..write(route) };
    let unknown = Signal { unknown_webhook: true, ..status(404) };
    let grant = bench.go(0, webhook(1, 8));
    let waiting = bench.wait(1, webhook(1, 8));
    assert!(matches!(bench.poll(1, waiting), Step::At(_)));
    bench.answer(5, &grant, unknown);
    assert!(matches!(bench.poll(5, waiting), Step::Refuse(ProxyError::UnknownWebhook)));
    assert!(matches!(bench.enter(6, webhook(2, 8)), Err(ProxyError::UnknownWebhook)));
    bench.call(7, webhook(3, 9), status(204));
    bench.call(600_100, webhook(1, 8), status(204));
    for (at, major) in (100_000..102_000).enumerate() {
        bench.client.webhook_is_gone(bench.start + ms(at as u64), Key::from(major));
    }
    assert!(bench.client.gone.len() <= 1024);
}
