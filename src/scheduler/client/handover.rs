//! A credential's state on its way to another node: what it was told, without a token, a path or an instant.
//!
//! Before it is told nothing more goes from here, and what is still under way counts as sent, so that both nodes together
//! stay within what is known. What waits here goes to the new owner and is counted there.

use std::time::{Duration, Instant};

use super::*;
use crate::scheduler::bucket::BucketState;
use crate::scheduler::pacer::PacerState;
use crate::scheduler::profile::ProfileState;
use crate::scheduler::routes::RouteState;

/// Nothing that was sent before counts in a second's limit.
const RECENT: Duration = Duration::from_secs(2);

/// All that another node needs.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct ClientState {
    validity: Validity,
    pacer: PacerState,
    /// Each with its key, and whose answer closed it.
    lanes: Vec<(Option<Key>, u32, BucketState)>,
    routes: Vec<(Key, RouteState)>,
    profiles: Vec<(BucketHash, ProfileState)>,
}

impl Client {
    /// Another node owns the credential from now on: nothing more goes from here.
    pub fn seal(&mut self) {
        self.place = Place::Moving;
    }

    /// Requests that are under way.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// What was known is told: whoever waits goes to the new owner.
    pub fn let_go(&mut self) {
        self.place = Place::Gone;
        self.wake_everybody();
    }

    fn wake_everybody(&mut self) {
        for (_, waiter) in &mut self.waiters {
            self.wakes.extend(waiter.waker.take());
        }
    }

    /// What the next owner should know; nothing if there is nothing to know.
    pub fn pack(&mut self, now: Instant) -> Option<ClientState> {
        if self.next_seq == 0 && self.lanes.is_empty() && self.validity != Validity::Invalid {
            return None;
        }
        let mut places = HashMap::new();
        let mut lanes = Vec::with_capacity(self.lanes.len());
        for (id, lane) in &self.lanes {
            places.insert(id, u32::try_from(lanes.len()).ok()?);
            lanes.push((lane.key, lane.closed_by, lane.bucket.pack(now)));
        }
        let place = |lane| places.get(&lane).copied();
        Some(ClientState {
            validity: self.validity,
            pacer: self.pacer.pack(now),
            lanes,
            routes: self.routes.iter().filter_map(|(key, route)| Some((*key, route.pack(now, place)?))).collect(),
            profiles: self.profiles.iter().map(|(hash, profile)| (*hash, profile.pack(now))).collect(),
        })
    }

    /// Takes over what the former owner knew, beside what is known here. What finds no room is left out.
    pub fn unpack(&mut self, now: Instant, state: &ClientState) {
        let used = self.next_seq > 0 && now.saturating_duration_since(self.used) < RECENT;
        self.used = now;
        match state.validity {
            Validity::Invalid if self.judged => self.validity = Validity::Invalid,
            Validity::Valid if self.validity == Validity::Unjudged => self.validity = Validity::Valid,
            _ => {}
        }
        self.pacer.unpack(now, &state.pacer, used);
        for (hash, profile) in state.profiles.iter().take(MAX_PROFILES) {
            if self.profiles.len() < MAX_PROFILES {
                self.profiles.entry(*hash).or_insert_with(|| Profile::unpack(now, profile));
            }
        }
        let mut lanes: Vec<Option<LaneId>> = vec![None; state.lanes.len()];
        for (key, route) in &state.routes {
            let place = route.lane as usize;
            let known = self.routes.get(key).map(|route| route.lane);
            let Some(lane) = known.or_else(|| self.unpack_lane(now, state, &mut lanes, place)) else { continue };
            if known.is_none() {
                if !self.take_room(0, 1) {
                    break;
                }
                self.lanes[lane].routes += 1;
                self.routes.insert(*key, RouteEntry::new(lane));
            } else if let Some((_, _, bucket)) = state.lanes.get(place) {
                self.lanes[lane].bucket.merge(&Bucket::unpack(now, bucket));
            }
        }
        // Buckets that no route queues in: others may meet them.
        for place in 0..state.lanes.len() {
            if state.lanes[place].0.is_some() {
                self.unpack_lane(now, state, &mut lanes, place);
            }
        }
        for (key, state) in &state.routes {
            if let Some(route) = self.routes.get_mut(key) {
                route.unpack(now, state, |place| lanes.get(place as usize).copied().flatten());
            }
        }
        self.give_room_back();
        self.wake_everybody();
    }

    /// The bucket here that stands for the one at `place`.
    fn unpack_lane(
        &mut self,
        now: Instant,
        state: &ClientState,
        lanes: &mut [Option<LaneId>],
        place: usize,
    ) -> Option<LaneId> {
        let slot = lanes.get_mut(place)?;
        if slot.is_some() {
            return *slot;
        }
        let (key, closed_by, bucket) = state.lanes.get(place)?;
        let bucket = Bucket::unpack(now, bucket);
        let lane = match key.and_then(|key| self.named.get(&key).copied()) {
            Some(lane) => {
                self.lanes[lane].bucket.merge(&bucket);
                lane
            }
            None if self.take_room(1, 0) => {
                let lane = self.new_lane(bucket, *key);
                self.lanes[lane].closed_by = *closed_by;
                lane
            }
            None => return None,
        };
        *slot = Some(lane);
        *slot
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{Bench, answer, ask, ms, refusal, status, write};
    use super::*;
    use crate::error::Scope;
    use crate::identity::Kind;
    use crate::scheduler::bucket::Class;
    use crate::scheduler::handover::{Credential, Gone, Handover};
    use crate::scheduler::signal::Signal;

    /// The next owner, at whose clock the same instant has another name.
    fn move_over(from: &mut Bench, at: u64) -> Bench {
        let client = from.client.pack(from.at(at)).unwrap();
        let credential = Credential { kind: Kind::Bot, key: [7; 32], bot_id: None, client };
        let sent = Handover {
            from: "node".into(),
            own: true,
            gone: vec![Gone { name: "node".into(), generation: 7 }],
            invalid: vec![ms(5)],
            credentials: vec![credential],
        };
        let bytes = sent.encode().unwrap();
        let received = Handover::decode(&bytes).unwrap();
        assert_eq!(received, sent);
        assert!(Handover::decode(&[&[1], &bytes[1..]].concat()).is_none() && Handover::decode(&[]).is_none());
        assert!((0..bytes.len()).all(|end| Handover::decode(&bytes[..end]).is_none()));
        let mut heir = Bench::with(50, true, Room::new(1000));
        heir.start += ms(12_345);
        heir.client.unpack(heir.at(at), &received.credentials[0].client);
        heir
    }

    /// When a request may go; none if it is refused.
    fn opens(bench: &mut Bench, at: u64, ask: Ask) -> Option<Duration> {
        match bench.enter(at, ask) {
            Ok(Entered::Go(grant)) => {
                let now = bench.at(at);
                bench.client.unsent(now, &grant);
                Some(Duration::ZERO)
            }
            Ok(Entered::Waits(ticket)) => {
                let step = bench.poll(at, ticket);
                let now = bench.at(at);
                bench.client.leave(now, ticket);
                let Step::At(until) = step else { panic!("{step:?}") };
                Some(until - now)
            }
            Err(_) => None,
        }
    }

    #[test]
    fn what_is_closed_held_or_bound_is_so_at_the_next_owner() {
        let mut bench = Bench::with(50, true, Room::new(1000));
        bench.call(0, write(1), answer(9, 5, 0, 30_000));
        bench.call(0, write(2), answer(9, 5, 0, 30_000));
        bench.call(0, write(3), Signal { scope: Some(Scope::Shared), ..refusal(answer(8, 5, 4, 2_000), 20_000) });
        bench.call(0, write(4), answer(7, 5, 4, 2_000));
        let mut heir = move_over(&mut bench, 1_000);
        for (route, low, high) in [(1, 29_000, 29_100), (2, 29_000, 29_100), (3, 19_000, 19_100), (4, 0, 0)] {
            let wait = opens(&mut heir, 1_000, write(route)).unwrap();
            assert!(wait >= ms(low) && wait <= ms(high), "{route}: {wait:?}");
        }
        heir.call(1_000, write(5), answer(9, 5, 0, 29_000));
        assert_eq!(heir.client.lanes.len(), 3, "a new route of a bucket that moved finds it");
    }

    #[test]
    fn a_refused_credential_a_global_block_and_what_is_under_way_are_told() {
        let mut bench = Bench::with(50, true, Room::new(1000));
        bench.call(0, write(1), status(401));
        assert_eq!(opens(&mut move_over(&mut bench, 10), 10, write(2)), None);
        // Also where it moves on before it was used, and its buckets are forgotten.
        let (late, calm) = (bench.at(3_600_000), bench.at(3_000_000));
        assert!(bench.client.sweep(late, calm, 10) > 0 && bench.client.lanes.is_empty());
        let mut unused = move_over(&mut bench, 3_600_000);
        assert_eq!(opens(&mut move_over(&mut unused, 3_600_010), 3_600_010, write(2)), None);
        assert!(Bench::with(50, false, Room::new(1)).client.pack(late).is_none(), "nothing is known of it");
        let mut bench = Bench::with(50, true, Room::new(1000));
        bench.call(0, write(1), Signal { global: true, ..refusal(status(429), 9_000) });
        let wait = opens(&mut move_over(&mut bench, 10), 10, write(2)).unwrap();
        assert!(wait > ms(8_900) && wait < ms(9_200), "{wait:?}");
        let mut bench = Bench::with(50, true, Room::new(1000));
        bench.call(0, ask(1, Class::Read), answer(9, 2, 1, 5_000));
        let under_way = bench.go(10, ask(1, Class::Read));
        let waiting = bench.wait(10, ask(1, Class::Read));
        let wait = opens(&mut move_over(&mut bench, 20), 20, ask(1, Class::Read)).unwrap();
        assert!(wait > ms(4_900), "{wait:?}");
        let now = bench.at(30);
        bench.client.leave(now, waiting);
        bench.client.unanswered(now, &under_way);
    }

    #[test]
    fn while_a_credential_moves_all_wait_and_then_go_to_its_new_owner() {
        let mut bench = Bench::with(50, true, Room::new(1000));
        bench.call(0, write(1), answer(9, 5, 0, 30_000));
        let under_way = bench.go(10, write(2));
        let closed = bench.wait(20, write(1));
        bench.client.seal();
        assert_eq!(bench.client.in_flight(), 1);
        let open = bench.wait(30, write(3));
        for ticket in [closed, open] {
            assert!(matches!(bench.poll(40, ticket), Step::At(_) | Step::Wait));
        }
        // A 429 of what is under way is tried again there.
        let now = bench.at(50);
        let again = bench.client.answered(now, &under_way, &refusal(status(429), 100), true).unwrap().unwrap();
        assert!(matches!(bench.poll(200, again), Step::Wait));
        assert_eq!(bench.client.in_flight(), 0);
        assert!(bench.client.pack(bench.at(200)).is_some());
        bench.client.let_go();
        assert_eq!(bench.client.take_wakes().len(), 3, "each is told");
        let edit = Ask { detail: 1, ..write(4) };
        let late = bench.wait(210, edit);
        for (ticket, asked) in [(closed, write(1)), (open, write(3)), (again, under_way.ask), (late, edit)] {
            assert!(matches!(bench.poll(210, ticket), Step::Move(ask) if ask == asked));
        }
        assert!(bench.client.is_quiet());
    }

    #[test]
    fn two_owners_in_a_row_keep_one_rolling_second() {
        let mut bench = Bench::with(50, false, Room::new(1000));
        for route in 0..40 {
            bench.call(u64::try_from(route).unwrap() * 10, write(route * 2 + 1), status(200));
        }
        let mut heir = move_over(&mut bench, 400);
        let at_once =
            (100..200).filter(|route| matches!(heir.enter(400, write(route * 2)), Ok(Entered::Go(_)))).count();
        assert_eq!(at_once, 10);
    }

    proptest! {
        #[test]
        fn the_next_owner_lets_nothing_go_before_the_former_would(
            calls in prop::collection::vec((0u128..6, 0u64..3, 1u32..4, 0u32..3, 1u64..4_000, 0u64..300, 0u8..8), 1..30),
            pause in 0u64..2_000,
        ) {
            let mut bench = Bench::with(50, true, Room::new(1000));
            let mut at = 0;
            for (route, hash, limit, remaining, reset, step, kind) in calls {
                at += step;
                let Ok(entered) = bench.enter(at, write(route * 2)) else { continue };
                let grant = match entered {
                    Entered::Go(grant) => grant,
                    Entered::Waits(ticket) => {
                        let now = bench.at(at);
                        bench.client.leave(now, ticket);
                        continue;
                    }
                };
                let told = answer(hash, limit, remaining, reset);
                let signal = match kind {
                    0 => refusal(told, reset),
                    1 => Signal { scope: Some(Scope::Shared), ..refusal(told, reset) },
                    2 => status(500),
                    _ => told,
                };
                at += 5;
                bench.answer(at, &grant, signal);
            }
            at += pause;
            if bench.client.next_seq > 0 {
                let mut heir = move_over(&mut bench, at);
                for route in 0..7 {
                    let (next, former) = (opens(&mut heir, at, write(route * 2)), opens(&mut bench, at, write(route * 2)));
                    // A reset that is past is told as one that is just now: its margin begins anew.
                    let late = next.unwrap_or_default().checked_sub(former.unwrap_or_default());
                    prop_assert!(next.is_some() == former.is_some() && late.is_some_and(|late| late <= ms(1_000)));
                }
            }
        }

        #[test]
        fn no_bytes_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            if let Some(handover) = Handover::decode(&[&[2], &bytes[..]].concat()) {
                for credential in &handover.credentials {
                    let mut bench = Bench::with(50, true, Room::new(10));
                    let now = bench.at(0);
                    bench.client.unpack(now, &credential.client);
                    bench.enter(0, write(1)).ok();
                }
            }
        }
    }
}
