use super::*;
use http::StatusCode;
use proptest::prelude::*;

fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

fn answer(limit: u32, remaining: u32, reset_ms: u64) -> Signal {
    Signal {
        status: StatusCode::OK,
        bucket: Some(BucketHash(1)),
        limit: Some(limit),
        remaining: Some(remaining),
        reset_after: Some(ms(reset_ms)),
        global: false,
        scope: None,
        unknown_webhook: false,
        retry_after: None,
    }
}

fn bare() -> Signal {
    Signal { bucket: None, limit: None, remaining: None, reset_after: None, ..answer(1, 1, 1) }
}

struct Bench {
    bucket: Bucket,
    profile: Profile,
    start: Instant,
}

impl Bench {
    fn new() -> Self {
        let start = Instant::now();
        Self { bucket: Bucket::new(None, start), profile: Profile::default(), start }
    }

    fn call(&mut self, at: u64, class: Class, signal: Signal) {
        let now = self.start + ms(at);
        assert_eq!(self.bucket.admit(now, class, &self.profile), Admission::Now, "at {at} ms");
        self.bucket.sent(class);
        self.bucket.landed(class);
        self.bucket.learn(now, now, &signal, &mut self.profile);
    }

    fn admit(&self, at: u64, class: Class) -> Admission {
        self.bucket.admit(self.start + ms(at), class, &self.profile)
    }
}

#[test]
fn an_unknown_bucket_sends_one_until_it_is_answered() {
    let mut bench = Bench::new();
    bench.bucket.sent(Class::Read);
    assert_eq!(bench.admit(0, Class::Read), Admission::OnAnswer);
    bench.bucket.landed(Class::Read);
    assert_eq!(bench.admit(0, Class::Read), Admission::Now);
}

#[test]
fn zero_closes_until_the_reset_with_its_fraction() {
    let mut bench = Bench::new();
    bench.call(0, Class::Write, answer(5, 0, 1750));
    assert!(matches!(bench.admit(1749, Class::Write), Admission::At(at) if at >= bench.start + ms(1750)));
    assert_eq!(bench.admit(1775, Class::Write), Admission::Now);
}

#[test]
fn a_far_reset_with_calls_left_holds_nobody() {
    let mut bench = Bench::new();
    for call in 0..20 {
        bench.call(call, Class::Write, answer(50_000, 48_773 - call as u32, 86_400_000));
    }
}

#[test]
fn reads_go_side_by_side_up_to_what_remains_and_writes_alone() {
    let mut bench = Bench::new();
    bench.call(0, Class::Read, answer(5, 3, 5000));
    for _ in 0..3 {
        assert_eq!(bench.admit(1, Class::Read), Admission::Now);
        bench.bucket.sent(Class::Read);
    }
    assert_eq!(bench.admit(1, Class::Read), Admission::OnAnswer);
    assert_eq!(bench.admit(1, Class::Write), Admission::OnAnswer);
    for _ in 0..3 {
        bench.bucket.landed(Class::Read);
    }
    bench.bucket.sent(Class::Write);
    assert_eq!(bench.admit(1, Class::Read), Admission::OnAnswer);
}

#[test]
fn after_a_reset_one_read_goes_first_and_a_second_later_all_go() {
    let mut bench = Bench::new();
    bench.call(0, Class::Read, answer(5, 0, 1000));
    assert_eq!(bench.admit(1006, Class::Read), Admission::Now);
    bench.bucket.sent(Class::Read);
    assert_eq!(bench.admit(1006, Class::Read), Admission::OnAnswer, "the reset may have been announced early");
    assert_eq!(bench.admit(2000, Class::Read), Admission::Now);
    bench.bucket.landed(Class::Read);
    bench.bucket.learn(bench.start + ms(1020), bench.start + ms(1006), &answer(5, 4, 980), &mut bench.profile);
    for _ in 0..4 {
        assert_eq!(bench.admit(1020, Class::Read), Admission::Now);
        bench.bucket.sent(Class::Read);
    }
    assert_eq!(bench.admit(1020, Class::Read), Admission::OnAnswer);
}

#[test]
fn answers_out_of_order_never_raise_what_is_known_to_be_used() {
    let mut bench = Bench::new();
    bench.call(0, Class::Read, answer(5, 2, 5000));
    bench.call(10, Class::Read, answer(5, 4, 4990));
    bench.bucket.sent(Class::Read);
    bench.bucket.sent(Class::Read);
    assert_eq!(bench.admit(20, Class::Read), Admission::OnAnswer);
}

#[test]
fn an_answer_without_headers_leaves_a_closure_and_frees_a_limitless_route() {
    let mut bench = Bench::new();
    bench.call(0, Class::Write, answer(5, 0, 3000));
    let now = bench.start + ms(100);
    bench.bucket.learn(now, bench.start, &bare(), &mut bench.profile);
    assert!(matches!(bench.admit(200, Class::Write), Admission::At(_)));
    let mut free = Bench::new();
    free.call(0, Class::Read, bare());
    for _ in 0..40 {
        assert_eq!(free.admit(1, Class::Read), Admission::Now);
        free.bucket.sent(Class::Read);
    }
}

#[test]
fn another_routes_answer_never_raises_a_known_zero() {
    let mut bench = Bench::new();
    bench.call(0, Class::Write, answer(5, 0, 3000));
    let now = bench.start + ms(500);
    bench.bucket.learn(now, bench.start, &answer(5, 4, 5000), &mut bench.profile);
    assert!(matches!(bench.admit(2000, Class::Write), Admission::At(_)));
}

#[test]
fn a_drip_bucket_opens_one_period_at_a_time() {
    let mut bench = Bench::new();
    for (at, remaining, reset) in [(0, 4, 3850), (30, 3, 7670), (60, 2, 11_490), (90, 1, 15_310), (120, 0, 19_130)] {
        bench.call(at, Class::Write, answer(5, remaining, reset));
    }
    let Admission::At(open) = bench.admit(121, Class::Write) else { panic!("closed") };
    assert!(open >= bench.start + ms(3850) && open < bench.start + ms(3900), "{:?}", open - bench.start);
}

#[test]
fn a_quick_drip_is_not_taken_for_fuller_than_it_is() {
    let mut bench = Bench::new();
    for (at, remaining, reset) in [(0, 4, 193), (6, 3, 380), (9, 2, 570), (11, 1, 761), (17, 0, 948)] {
        bench.call(at, Class::Read, answer(5, remaining, reset));
    }
    let Admission::At(open) = bench.admit(18, Class::Read) else { panic!("closed") };
    assert!(open >= bench.start + ms(193) && open < bench.start + ms(220), "{:?}", open - bench.start);
    assert_eq!(bench.admit(220, Class::Read), Admission::Now);
    bench.bucket.sent(Class::Read);
    assert_eq!(bench.admit(220, Class::Read), Admission::OnAnswer, "one call has come back, not two");
}

#[test]
fn a_call_without_an_answer_may_have_counted_in_a_drip_bucket() {
    let mut bench = Bench::new();
    for (at, remaining, reset) in [(0, 4, 1000), (10, 3, 1990), (20, 2, 2980), (30, 1, 3970)] {
        bench.call(at, Class::Write, answer(5, remaining, reset));
    }
    bench.bucket.sent(Class::Write);
    bench.bucket.landed(Class::Write);
    bench.bucket.unanswered(bench.start + ms(40), &bench.profile);
    let Admission::At(open) = bench.admit(41, Class::Write) else { panic!("open") };
    assert!(open >= bench.start + ms(1000) && open < bench.start + ms(1050), "{:?}", open - bench.start);
    assert_eq!(bench.admit(6000, Class::Write), Admission::Now, "by time alone");
}

#[test]
fn a_zero_whose_reset_cannot_be_read_closes_until_the_known_one() {
    let mut bench = Bench::new();
    bench.call(0, Class::Write, answer(5, 4, 5000));
    bench.call(100, Class::Write, Signal { remaining: Some(0), ..bare() });
    let Admission::At(at) = bench.admit(101, Class::Write) else { panic!("nothing is left") };
    assert!(at >= bench.start + ms(5000) && bench.bucket.closed(bench.start + ms(101)) == Some(at));
    // A count by itself is believed as far as it makes us wait longer.
    let mut bench = Bench::new();
    bench.call(0, Class::Write, answer(5, 4, 5000));
    bench.call(100, Class::Write, Signal { remaining: Some(1), ..bare() });
    bench.call(101, Class::Write, bare());
    assert!(matches!(bench.admit(102, Class::Write), Admission::At(at) if at >= bench.start + ms(5000)));
}

#[test]
fn what_calls_without_an_answer_have_used_up_is_closed() {
    let mut bench = Bench::new();
    bench.call(0, Class::Write, answer(2, 1, 1_800_000));
    bench.bucket.sent(Class::Write);
    bench.bucket.landed(Class::Write);
    bench.bucket.unanswered(bench.start + ms(10), &bench.profile);
    assert!(bench.bucket.closed(bench.start + ms(11)) >= Some(bench.start + ms(1_800_000)));
}

#[test]
fn an_early_reset_costs_one_refusal_and_then_fits() {
    let mut bench = Bench::new();
    let refused = Signal { status: StatusCode::TOO_MANY_REQUESTS, ..answer(1, 0, 100) };
    bench.call(0, Class::Write, answer(1, 0, 250));
    let Admission::At(open) = bench.admit(1, Class::Write) else { panic!("closed") };
    bench.bucket.sent(Class::Write);
    bench.bucket.landed(Class::Write);
    bench.bucket.learn(open, open, &refused, &mut bench.profile);
    bench.bucket.refuse(open, open, ms(98), &refused, &mut bench.profile);
    bench.call(500, Class::Write, answer(1, 0, 250));
    let Admission::At(next) = bench.admit(501, Class::Write) else { panic!("closed") };
    assert!(next >= bench.start + ms(500 + 250 + 100) && next < bench.start + ms(500 + 250 + 135));
}

#[test]
fn waits_without_a_time_grow() {
    let mut bucket = Bucket::new(None, Instant::now());
    let waits: Vec<_> = (0..5).map(|_| bucket.untimed_wait().as_secs()).collect();
    assert_eq!(waits, [1, 4, 16, 60, 60]);
}

proptest! {
    /// A window of `limit` per `length`, enforced exactly, never refuses a request the model admits; and the model
    /// always admits again by time alone.
    #[test]
    fn never_admits_what_the_answers_so_far_show_to_be_refused(
        limit in 1u32..8, length in 300u64..3000, steps in prop::collection::vec((0u64..900, any::<bool>()), 1..120)
    ) {
        let mut bench = Bench::new();
        let (mut now, mut ends, mut used) = (0u64, 0u64, 0u32);
        for (pause, read) in steps {
            now += pause;
            let class = if read { Class::Read } else { Class::Write };
            let mut rounds = 0;
            loop {
                match bench.admit(now, class) {
                    Admission::Now => break,
                    Admission::At(at) => {
                        // Within the margin (2 ms, and the rounding) of when anybody could know it to be open.
                        prop_assert!(at <= bench.start + ms(ends + 4), "{:?} after the window's end", at - bench.start);
                        now = u64::try_from((at - bench.start).as_nanos().div_ceil(1_000_000)).unwrap();
                    }
                    Admission::OnAnswer => prop_assert!(false, "nothing is in flight"),
                }
                rounds += 1;
                prop_assert!(rounds < 4);
            }
            if now >= ends { ends = now + length; used = 0; }
            prop_assert!(used < limit, "sent into a spent window");
            used += 1;
            bench.call(now, class, answer(limit, limit - used, ends - now));
        }
    }

    /// A drip bucket (one call comes back each period) that is kept saturated is never overrun, and once told, it is
    /// used at its true rate.
    #[test]
    fn a_saturated_drip_bucket_is_used_at_its_rate(
        limit in 2u32..9, period in 250u64..4000, round_trip in 0u64..40, idle in 0u64..20_000
    ) {
        let mut bench = Bench::new();
        // Time until full, as the bucket keeps it: in ms after the start.
        let (mut now, mut full, mut sent) = (idle, 0u64, Vec::new());
        for _ in 0..4 * limit {
            while let Admission::At(at) = bench.admit(now, Class::Write) {
                now = u64::try_from((at - bench.start).as_nanos().div_ceil(1_000_000)).unwrap().max(now + 1);
            }
            let level = full.saturating_sub(now);
            prop_assert!(level <= u64::from(limit - 1) * period, "overrun by {} ms", level - u64::from(limit - 1) * period);
            full = full.max(now) + period;
            let used = u32::try_from((full - now).div_ceil(period)).unwrap();
            sent.push(now);
            let answered = now + round_trip;
            bench.bucket.sent(Class::Write);
            bench.bucket.landed(Class::Write);
            let signal = answer(limit, limit - used, full - now);
            bench.bucket.learn(bench.start + ms(answered), bench.start + ms(now), &signal, &mut bench.profile);
            now = answered;
        }
        let told = limit as usize;
        let (first, last) = (sent[told], sent[sent.len() - 1]);
        let ideal = (sent.len() - 1 - told) as u64 * period;
        prop_assert!(last - first <= ideal + ideal / 8 + 200, "{} ms for {ideal}", last - first);
    }
}
