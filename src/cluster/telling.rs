//! Telling the new owners of credentials what is known of them: what, in which order, how often and for how long; and
//! taking in what others tell.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::members::{Key, Member, Members, Owner, View};
use super::peer::Peers;
use super::{Membership, Occasion};
use crate::scheduler::Scheduler;
use crate::scheduler::clients::Departing;
use crate::scheduler::handover::{Credential, Gone, Handover};

/// What is under way when its credential moves has so long to land, that its answer may be told of; and how often that is
/// looked at.
const LANDING: Duration = Duration::from_millis(400);
const LANDING_CHECK: Duration = Duration::from_millis(5);
/// How often another node is told, and the pause after one that failed.
const TELLS: u32 = 4;
const TELL_AGAIN: Duration = Duration::from_millis(150);
/// Those who get credentials are told first, and have so long before all are told that there is nothing more.
const FIRST: Duration = Duration::from_millis(800);
/// What is left after that takes no longer: heirs wait half as long, and a node that stops has other things to do.
const TELLING: Duration = Duration::from_secs(3);

impl Membership {
    /// See [`super::Cluster::hand_over`].
    pub(super) fn hand_over(
        &self,
        scheduler: &Scheduler,
        view: &View,
        occasion: Occasion<'_>,
    ) -> Option<impl Future<Output = ()> + use<>> {
        if view.over_capacity() {
            return None;
        }
        let members = self.heirs(view);
        let departing = scheduler.release(|key| matches!(members.owner(key), Owner::Peer(_)));
        let is_told = |member: &Arc<Member>| match &occasion {
            Occasion::Changed(before) => member.name != self.name && !before.contains(member),
            Occasion::Left => true,
        };
        let heirs = members.list().iter().map(is_told).collect();
        let invalid = match occasion {
            // A node that stays keeps its part of the budget.
            Occasion::Changed(_) => Vec::new(),
            Occasion::Left => scheduler.invalid_requests(),
        };
        let word = Handover { own: true, invalid, ..self.word(view) };
        let peers = self.peers.clone();
        Some(async move {
            hand(departing, &members, heirs, word, &peers).await;
        })
    }

    /// See [`super::Cluster::take`]; nothing if it is no message.
    pub(super) fn take(&self, scheduler: &Scheduler, message: &[u8]) -> Option<impl Future<Output = bool> + use<>> {
        let handover = Handover::decode(message)?;
        let (name, credentials) = (&handover.from, handover.credentials.len());
        tracing::info!(name, credentials, "another member handed over what it knew");
        let (new, passed) = self.heard.message(message);
        let left = self.members().left().is_some();
        if new && !left {
            scheduler.unpack(&handover);
        }
        let now = Instant::now();
        self.heard.note(&handover, now);
        // It may have left since, and handed over before this was taken in.
        let view = self.members().clone();
        let (word, members) = (self.word(&view), self.heirs(&view));
        // One that has left keeps nothing for itself. What a member takes may be yet another one's as well, but it gives
        // nothing back: who has just handed it over is about to leave, as this node will hear.
        let (departing, word) = if left {
            let Handover { invalid, credentials, .. } = handover;
            (None, Handover { invalid, credentials, ..word })
        } else {
            let told = |owner: &Member| self.heard.lately(&owner.name, now) || self.heard.is_gone(owner);
            let keeps = |owner: &Member| view.left().is_none() && told(owner);
            let lost = |key: &Key| matches!(members.owner(key), Owner::Peer(owner) if !keeps(&owner));
            let taken = handover.credentials.iter().map(|credential| credential.key).filter(|_| new);
            let lost: HashSet<Key> = taken.filter(lost).collect();
            ((!lost.is_empty()).then(|| scheduler.release(|key| lost.contains(key))), word)
        };
        let peers = self.peers.clone();
        Some(async move {
            let pass = async || {
                let nobody = vec![false; members.list().len()];
                let took = match departing {
                    None => tell(&members, nobody, word, &peers).await,
                    Some(departing) => hand(departing, &members, nobody, word, &peers).await,
                };
                took.then_some(()).ok_or(())
            };
            passed.get_or_try_init(pass).await.is_ok()
        })
    }

    /// What this node says, as far as it is always the same.
    fn word(&self, view: &View) -> Handover {
        let mut gone = self.heard.gone();
        gone.extend(view.left().map(|left| Gone { name: left.name.to_string(), generation: left.generation }));
        Handover { from: self.name.to_string(), gone, ..Handover::default() }
    }
}

/// Hands departing credentials over as a part of `word`, and lets go who waits for them.
async fn hand(departing: Departing, members: &Members, heirs: Vec<bool>, word: Handover, peers: &Peers) -> bool {
    let landed = async {
        while !departing.has_landed() {
            sleep(LANDING_CHECK).await;
        }
    };
    // What takes longer counts as if it had been answered.
    _ = timeout(LANDING, landed).await;
    let start = Instant::now();
    let credentials = departing.pack();
    let count = credentials.len();
    let took = tell(members, heirs, Handover { credentials, ..word }, peers).await;
    // Now who waited may go there: what it waited for is known.
    drop(departing);
    if count > 0 {
        let took_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(credentials = count, took_ms, "handed credentials over to their new owners");
    }
    took
}

/// Tells every owner of a credential, and the other heirs, what of `all` concerns them. False if not everybody took it.
///
/// That there is nothing more to come is said last, so that it is not believed of what goes by way of another.
pub(super) async fn tell(members: &Members, heirs: Vec<bool>, all: Handover, peers: &Peers) -> bool {
    let Handover { from, own, gone, invalid, credentials } = all;
    let mut shares: Vec<Vec<Credential>> = heirs.iter().map(|_| Vec::new()).collect();
    for credential in credentials {
        // Without an heir nobody serves it.
        if let Some(share) = members.rank(&credential.key).and_then(|place| shares.get_mut(usize::from(place))) {
            share.push(credential);
        }
    }
    // If it is the only one that something goes to, nothing that concerns it goes by way of another.
    let only = shares.iter().filter(|share| !share.is_empty()).count() == 1;
    let mut telling = JoinSet::new();
    let mut last = Vec::new();
    for (place, ((member, heir), credentials)) in members.list().iter().zip(heirs).zip(shares).enumerate() {
        let said = |own, invalid, credentials| {
            let message = Handover { from: from.clone(), own, gone: gone.clone(), invalid, credentials }.encode();
            say(peers.clone(), member.peer(), message)
        };
        let invalid: Vec<Duration> = invalid.iter().skip(place).step_by(members.list().len()).copied().collect();
        let moves = !credentials.is_empty();
        let (first, invalid) = if moves || !own { (invalid, Vec::new()) } else { (Vec::new(), invalid) };
        if moves || !first.is_empty() {
            telling.spawn(said(own && only, first, credentials));
        }
        if own && if moves { !only } else { heir } {
            last.push(said(true, invalid, Vec::new()));
        }
    }
    let mut all_took = true;
    _ = timeout(FIRST, done(&mut telling, &mut all_took)).await;
    for teller in last {
        telling.spawn(teller);
    }
    let in_time = timeout(TELLING, done(&mut telling, &mut all_took)).await.is_ok();
    if !in_time {
        tracing::warn!("could not hand credentials over to every member in time");
    }
    in_time && all_took
}

async fn done(telling: &mut JoinSet<bool>, all_took: &mut bool) {
    while let Some(took) = telling.join_next().await {
        *all_took &= took.unwrap_or(false);
    }
}

/// Says a message to a member until it has taken it in.
async fn say(peers: Peers, to: SocketAddr, message: Option<Vec<u8>>) -> bool {
    let Some(message) = message else {
        tracing::warn!(peer = %to, "too much is known of its credentials to be handed over");
        return false;
    };
    let mut tries = 0;
    while let Err(error) = peers.tell(to, &message).await {
        tries += 1;
        if tries == TELLS {
            tracing::warn!(peer = %to, %error, "could not hand credentials over");
            return false;
        }
        // One that is new may not know this node yet.
        sleep(TELL_AGAIN).await;
    }
    true
}
