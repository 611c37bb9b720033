use std::collections::BTreeSet;

use super::*;
use proptest::prelude::*;

fn seasoned(limit: u32) -> (Pacer, Instant) {
    let born = Instant::now();
    let now = born + Duration::from_secs(10);
    (Pacer::new(limit, now, born), now)
}

/// One that knows how quick an answer can be.
fn knowing(limit: u32, quickest: Duration) -> (Pacer, Instant) {
    let (mut pacer, now) = seasoned(limit);
    pacer.told = (quickest, BELIEVED);
    (pacer, now)
}

#[test]
fn a_burst_that_was_late_counts_from_when_it_can_have_arrived() {
    let (mut pacer, start) = seasoned(2);
    for _ in 0..2 {
        assert_eq!(pacer.claim(start), Ok(()));
    }
    // Both had to connect first: Discord may have counted them as late as this.
    let answered = start + Duration::from_millis(300);
    for _ in 0..2 {
        pacer.answered(start, None, answered);
    }
    let Err(free) = pacer.claim(start + SECOND + 2 * BASE_MARGIN) else { panic!("a rolling second of three") };
    assert_eq!(free, answered + SECOND);
    assert_eq!(pacer.claim(free), Ok(()));
}

#[test]
fn one_that_was_sent_late_counts_from_then() {
    let (mut pacer, start) = knowing(2, Duration::from_millis(25));
    let ms = Duration::from_millis;
    assert_eq!(pacer.claim(start), Ok(()));
    pacer.answered(start, Some(start), start + ms(25));
    assert_eq!(pacer.claim(start + ms(100)), Ok(()));
    pacer.answered(start + ms(100), Some(start + ms(100)), start + ms(131));
    let first = start + SECOND + BASE_MARGIN;
    assert_eq!(pacer.claim(first), Ok(()));
    let Err(second) = pacer.claim(first) else { panic!("a rolling second of three") };
    assert!(second > start + ms(1105) && second <= start + ms(1106), "{:?}", second - start);
}

#[test]
fn the_first_of_a_process_that_was_late_is_not_taken_for_as_quick_as_can_be() {
    let (mut pacer, start) = seasoned(2);
    let ms = Duration::from_millis;
    assert_eq!(pacer.claim(start), Ok(()));
    pacer.answered(start, Some(start), start + ms(2));
    assert_eq!(pacer.claim(start + ms(20)), Ok(()));
    pacer.answered(start + ms(20), Some(start + ms(20)), start + ms(21));
    // The second shows that the first may have arrived 1 ms late, or more.
    let Err(free) = pacer.claim(start + SECOND + BASE_MARGIN) else { panic!("a rolling second of three") };
    assert_eq!(free, start + ms(2) + SECOND);
}

#[test]
fn one_that_was_written_late_counts_from_then_whatever_others_answers_say() {
    let (mut pacer, start) = knowing(2, Duration::from_millis(25));
    let ms = Duration::from_millis;
    assert_eq!(pacer.claim(start), Ok(()));
    assert_eq!(pacer.claim(start + ms(5)), Ok(()));
    // The thread of the first was put off for 15 ms; the second, on another, was not, and what came back shows nothing odd.
    pacer.answered(start + ms(5), Some(start + ms(5)), start + ms(30));
    pacer.answered(start, Some(start + ms(15)), start + ms(40));
    let Err(free) = pacer.claim(start + SECOND + BASE_MARGIN) else { panic!("a rolling second of three") };
    assert_eq!(free, start + ms(5) + SECOND + BASE_MARGIN);
    assert_eq!(pacer.claim(free), Ok(()));
    let Err(free) = pacer.claim(free) else { panic!("a rolling second of three") };
    assert!(free >= start + ms(15) + SECOND, "{:?}", free - start);
}

#[test]
fn a_burst_over_open_connections_that_stood_still_counts_from_the_first_answer() {
    let (mut pacer, start) = knowing(3, Duration::from_millis(25));
    let ms = Duration::from_millis;
    assert_eq!(pacer.claim(start), Ok(()));
    pacer.answered(start, Some(start), start + ms(25));
    let burst = start + ms(30);
    for _ in 0..2 {
        assert_eq!(pacer.claim(burst), Ok(()));
    }
    // The machine stands still for 60 ms: neither can have been answered before the first was.
    pacer.answered(burst, Some(burst), burst + ms(85));
    pacer.answered(burst, Some(burst), burst + ms(200));
    assert_eq!(pacer.claim(start + SECOND + BASE_MARGIN), Ok(()));
    let Err(free) = pacer.claim(burst + SECOND + ms(30)) else { panic!("a rolling second of four") };
    assert!(free > burst + SECOND + ms(59) && free <= burst + SECOND + ms(60), "{:?}", free - burst);
}

#[test]
fn slow_answers_cost_next_to_nothing_while_others_come() {
    let (mut pacer, start) = knowing(2, Duration::from_millis(26));
    let ms = Duration::from_millis;
    assert_eq!(pacer.claim(start), Ok(()));
    assert_eq!(pacer.claim(start), Ok(()));
    pacer.answered(start, Some(start), start + ms(26));
    pacer.answered(start, Some(start), start + ms(900));
    let free = start + SECOND + BASE_MARGIN;
    assert_eq!(pacer.claim(free), Ok(()));
    assert_eq!(pacer.claim(free + BASE_MARGIN), Ok(()));
}

/// Sends `count` requests as fast as allowed, each timer late by `late`.
fn drain(pacer: &mut Pacer, mut now: Instant, count: usize, late: Duration) -> Vec<Instant> {
    let mut sent = Vec::new();
    while sent.len() < count {
        match pacer.claim(now) {
            Ok(()) => sent.push(now),
            Err(at) => now = at + late,
        }
    }
    sent
}

fn at_most(sent: &[Instant], limit: usize) -> bool {
    sent.windows(limit + 1).all(|run| run[limit] - run[0] >= SECOND)
}

#[test]
fn an_idle_credential_sends_its_limit_at_once_and_then_evenly() {
    let (mut pacer, now) = seasoned(50);
    let sent = drain(&mut pacer, now, 150, Duration::ZERO);
    assert_eq!(sent[49], now);
    assert!(at_most(&sent, 50));
    let gaps: Vec<_> = sent[50..].windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|gap| *gap >= Duration::from_millis(19) && *gap <= Duration::from_millis(21)), "{gaps:?}");
    assert!(sent[149] - now < Duration::from_millis(3000));
}

#[test]
fn what_the_limit_held_back_is_spread_too() {
    let (mut pacer, start) = seasoned(50);
    drain(&mut pacer, start, 8, Duration::ZERO);
    let burst = start + Duration::from_millis(630);
    drain(&mut pacer, burst, 42, Duration::ZERO);
    // The first eight come free long before the others, which must not go as the burst they were.
    let sent = drain(&mut pacer, burst, 150, Duration::ZERO);
    assert!(sent.windows(2).all(|pair| pair[1] - pair[0] >= Duration::from_millis(19)));
}

#[test]
fn late_timers_do_not_add_up() {
    let (mut pacer, now) = seasoned(50);
    let sent = drain(&mut pacer, now, 3200, Duration::from_millis(1));
    assert!(at_most(&sent, 50));
    assert!(sent[3199] - now < Duration::from_millis(64_200), "{:?}", sent[3199] - now);
}

#[test]
fn a_machine_that_wakes_late_leaves_as_much_room() {
    let (mut pacer, now) = seasoned(50);
    let sent = drain(&mut pacer, now, 200, Duration::from_millis(60));
    assert!(sent[100..].windows(51).all(|run| run[50] - run[0] >= SECOND + Duration::from_millis(30)));
    assert!(pacer.lateness(sent[199] + CALM_DOWN * 8) < Duration::from_millis(1));
}

#[test]
fn a_machine_that_stood_still_once_goes_on_at_nearly_its_old_pace() {
    let (mut pacer, start) = seasoned(50);
    let before = drain(&mut pacer, start, 60, Duration::ZERO);
    let Err(slot) = pacer.claim(before[59]) else { panic!("no slot is free") };
    let resumed = slot + Duration::from_millis(400);
    let after = drain(&mut pacer, resumed, 500, Duration::ZERO);
    // The last one before may have left only now.
    let sent: Vec<_> = before[10..59].iter().copied().chain([resumed]).chain(after.iter().copied()).collect();
    assert!(at_most(&sent, 50));
    assert!(after[499] - resumed < Duration::from_millis(10_200), "{:?}", after[499] - resumed);
}

#[test]
fn a_way_that_stands_still_now_and_then_costs_no_429_and_no_more_time_than_it_took() {
    let (mut pacer, start) = seasoned(50);
    let ms = Duration::from_millis;
    let (mut arrivals, mut answers) = (Vec::new(), VecDeque::new());
    let mut now = start;
    while arrivals.len() < 3_200 {
        // Nothing arrives in the last 45 ms of each 1.93 s.
        let stall = |at: Instant| {
            let phase = ((at - start).as_micros() % 1_930_000) as u64;
            Duration::from_micros(if phase < 1_885_000 { 0 } else { 1_930_000 - phase })
        };
        let next = match pacer.claim(now) {
            Ok(()) => {
                let arrival = now + stall(now);
                arrivals.push(arrival);
                answers.push_back((now, arrival + ms(25)));
                continue;
            }
            Err(at) => at,
        };
        while let Some((claimed, answered)) = answers.pop_front_if(|(_, answered)| *answered <= next) {
            pacer.answered(claimed, Some(claimed), answered);
        }
        now = next;
    }
    // But for a moment, by which the quickest answer seems slower than it was.
    assert!(arrivals.windows(51).all(|run| run[50] - run[0] >= SECOND - Duration::from_micros(20)));
    let stood_still = 33 * ms(45);
    assert!(now - start < ms(63_100) + stood_still, "{:?}", now - start);
}

#[test]
fn a_jittery_way_draws_a_few_429s_at_first_and_costs_less_than_a_tenth() {
    let ms = Duration::from_millis;
    for seed in 1..=12 {
        let mut jitter = jitter(seed);
        let start = Instant::now() + SECOND * 5;
        let mut pacer = Pacer::new(50, start, start);
        let (mut arrivals, mut answers, mut refusals) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
        let mut now = start;
        while arrivals.len() < 3_000 {
            let Err(next) = pacer.claim(now) else {
                let arrival = now + jitter();
                let refused = arrivals.range(arrival - SECOND + ms(1)..=arrival).count() >= 50;
                if refused {
                    refusals.push(arrival - start);
                } else {
                    arrivals.insert(arrival);
                }
                answers.insert((arrival + ms(1) + jitter(), now, refused));
                continue;
            };
            while let Some(&(answered, claimed, refused)) = answers.first().filter(|(answered, ..)| *answered <= next) {
                answers.pop_first();
                pacer.answered(claimed, Some(claimed), answered);
                if refused {
                    pacer.block(answered, answered + ms(300));
                }
            }
            now = next;
        }
        assert!(refusals.len() <= 3 && refusals.iter().all(|at| *at < 20 * SECOND), "seed {seed}: {refusals:?}");
        assert!(now - start < 66 * SECOND + ms(600), "seed {seed}: {:?}", now - start);
    }
}

/// Up to 80 ms.
fn jitter(mut seed: u64) -> impl FnMut() -> Duration {
    move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Duration::from_micros((seed >> 33) % 80_000)
    }
}

#[test]
fn a_fresh_process_has_no_credit_for_its_first_second() {
    let now = Instant::now() + SECOND * 5;
    let mut pacer = Pacer::new(50, now, now);
    let sent = drain(&mut pacer, now, 60, Duration::ZERO);
    assert!(sent.iter().filter(|at| **at - now < Duration::from_millis(500)).count() <= 25);
    assert!(at_most(&sent, 50));
}

#[test]
fn what_another_may_have_sent_counts_on_top_of_what_was_sent_here() {
    let (mut pacer, now) = seasoned(50);
    assert_eq!(drain(&mut pacer, now, 10, Duration::ZERO)[9], now);
    pacer.doubt(now, now);
    let sent = drain(&mut pacer, now, 60, Duration::ZERO);
    assert!(sent.iter().filter(|at| **at - now < Duration::from_millis(500)).count() <= 25);
    assert!(sent.windows(51).all(|run| run[50] - run[0] >= SECOND));
    assert!(pacer.sends.iter().is_sorted());
}

#[test]
fn what_goes_out_late_from_the_first_request_of_a_new_owner_on_is_seen_to_be_late() {
    let (mut former, now) = seasoned(50);
    let ms = Duration::from_millis;
    former.claim(now).unwrap();
    former.answered(now, Some(now), now + ms(1));
    let first = now + ms(1_500);
    let mut heir = Pacer::new(50, now, now);
    heir.unpack(first, &former.pack(first), false);
    // It gets there after 7 ms, where the former owner's took one there and back.
    heir.claim(first).unwrap();
    heir.answered(first, Some(first), first + ms(8));
    let sent = drain(&mut heir, first + ms(8), 50, Duration::ZERO);
    assert!(sent[49] > first + ms(6) + SECOND, "{:?}", sent[49] - first);
}

#[test]
fn a_global_block_holds_and_is_followed_by_an_even_stream() {
    let (mut pacer, now) = seasoned(50);
    let until = now + Duration::from_millis(1600);
    pacer.block(now, until);
    assert_eq!(pacer.claim(now), Err(until));
    let sent = drain(&mut pacer, now, 50, Duration::ZERO);
    assert!(sent[0] >= until);
    assert!(sent[49] - until > Duration::from_millis(900));
}

#[test]
fn disagreement_widens_the_window_and_time_narrows_it() {
    let (mut pacer, now) = seasoned(50);
    for _ in 0..9 {
        pacer.block(now, now);
    }
    assert_eq!(pacer.margin, MAX_MARGIN);
    assert!(pacer.margin_now(now + NARROW_EVERY * 8) < BASE_MARGIN * 2);
}

proptest! {
    #[test]
    fn no_rolling_second_exceeds_the_limit(
        limit in 1u32..60, idle in 0u64..3, steps in prop::collection::vec((0u64..300, 1usize..40), 1..60)
    ) {
        let born = Instant::now();
        let mut now = born + Duration::from_secs(idle);
        let mut pacer = Pacer::new(limit, now, born);
        let mut sent = Vec::new();
        for (pause, burst) in steps {
            now += Duration::from_millis(pause);
            for _ in 0..burst {
                if pacer.claim(now).is_ok() { sent.push(now); }
            }
        }
        prop_assert!(at_most(&sent, limit as usize));
    }

    #[test]
    fn a_promised_instant_holds(limit in 1u32..60, burst in 1usize..200) {
        let (mut pacer, mut now) = seasoned(limit);
        for _ in 0..burst {
            if let Err(at) = pacer.claim(now) {
                prop_assert!(at > now);
                now = at;
                prop_assert_eq!(pacer.claim(now), Ok(()));
            }
        }
    }

    #[test]
    fn below_the_limit_nobody_waits(limit in 2u32..60, count in 1u32..60) {
        let (mut pacer, now) = seasoned(limit);
        for step in 0..count.min(limit) {
            prop_assert!(pacer.claim(now + Duration::from_millis(u64::from(step))).is_ok());
        }
    }

    #[test]
    fn large_limits_cost_bounded_memory(limit in 1001u32..1_000_000) {
        let (mut pacer, now) = seasoned(limit);
        for step in 0..5000u32 {
            if pacer.claim(now + Duration::from_micros(u64::from(step) * 500)).is_err() { break; }
        }
        prop_assert!(pacer.sends.len() <= 1110);
    }
}
