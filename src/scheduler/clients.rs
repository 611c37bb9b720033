//! The credentials with state: found, made, bounded and swept.

use std::sync::Arc;
use std::time::Instant;

use ahash::AHashMap;
use parking_lot::{Mutex, RwLock};

use super::client::{Ask, Client, IDLE, Limits};
use super::gate::{Gate, Turn, now};
use super::handover::Credential;
use super::pacer::Pacer;
use super::room::Room;
use crate::config::{Overrides, Scheduling};
use crate::error::{ProxyError, Reason};
use crate::identity::{Identity, Kind};

/// Requests a second, for every bot and bearer without an override and for all unauthenticated traffic together
/// (Discord's documentation, "Global Rate Limit").
const GLOBAL_LIMIT: u32 = 50;
/// When no bucket state is free, this part of all makes room at once, so that the search pays.
const EVICT_PART: usize = 16;

/// So many idle buckets go at once: as long as that takes, their credential's requests wait.
const SWEEP_PART: usize = 4096;

/// Gates by kind and SHA-256 of the credential.
type Known = AHashMap<(Kind, [u8; 32]), Arc<Gate>>;

/// All credentials of the process.
#[derive(Debug)]
pub struct Clients {
    known: RwLock<Known>,
    unauthenticated: RwLock<Arc<Gate>>,
    /// What interactions without a credential wait at: each belongs to its own owner.
    interactions: Arc<Gate>,
    limits: Arc<Limits>,
    room: Arc<Room>,
    overrides: Overrides,
    lock_invalid: bool,
    max_bearers: usize,
    max_clients: usize,
    max_buckets: usize,
    /// What was sent before, by this process or another, is not known of a credential without state.
    credit_from: Mutex<Instant>,
}

impl Clients {
    /// None yet.
    pub fn new(config: &Scheduling) -> Self {
        let started = now();
        let limits = Arc::new(Limits { queue_depth: config.max_queue_depth, attempt: config.request_timeout });
        let room = Arc::new(Room::new(config.max_bucket_states));
        Self {
            known: RwLock::default(),
            unauthenticated: RwLock::new(nobody(&limits, &room, started)),
            interactions: nobody(&limits, &room, started),
            limits,
            room,
            overrides: config.overrides.clone(),
            lock_invalid: !config.disable_401_lock,
            max_bearers: config.max_bearer_count,
            max_clients: config.max_client_states,
            max_buckets: config.max_bucket_states,
            credit_from: Mutex::new(started),
        }
    }

    /// A credential's gate, made if it has none; that of an interaction without one is another.
    pub fn gate(&self, identity: &Identity, interaction: bool) -> Result<Arc<Gate>, ProxyError> {
        if identity.kind == Kind::Unauthenticated {
            return Ok(if interaction { Arc::clone(&self.interactions) } else { self.unauthenticated.read().clone() });
        }
        let key = (identity.kind, identity.key);
        if let Some(gate) = self.known.read().get(&key) {
            return Ok(Arc::clone(gate));
        }
        let mut known = self.known.write();
        if let Some(gate) = known.get(&key) {
            return Ok(Arc::clone(gate));
        }
        let bearers = || known.keys().filter(|(kind, _)| *kind == Kind::Bearer).count();
        let full = known.len() >= self.max_clients;
        let bearers_full = identity.kind == Kind::Bearer && bearers() >= self.max_bearers;
        if full || bearers_full {
            let evicted = evict_oldest(&mut known, bearers_full);
            let used = evicted.ok_or(ProxyError::Unavailable(Reason::ClientLimit))?;
            // Its last second is forgotten with it, and it may be the next to come.
            let mut credit_from = self.credit_from.lock();
            *credit_from = used.max(*credit_from);
        }
        let now = now();
        let pacer = Pacer::new(self.limit(identity), now, *self.credit_from.lock());
        let client = Client::new(Arc::clone(&self.limits), Arc::clone(&self.room), pacer, self.lock_invalid, now);
        let gate = Gate::of_bot(client, identity.bot_id);
        known.insert(key, Arc::clone(&gate));
        Ok(gate)
    }

    /// Enters a gate; idle buckets of any credential make room for a new one when none is left.
    pub fn enter(&self, gate: &Arc<Gate>, ask: Ask, deadline: Instant) -> Result<Turn, ProxyError> {
        match gate.enter(ask, deadline) {
            Err(ProxyError::Unavailable(Reason::BucketLimit)) if self.make_room() => gate.enter(ask, deadline),
            entered => entered,
        }
    }

    /// Credentials have just changed their owners: those that are new here, and the `gained` ones of which there is old
    /// state, may have been used elsewhere until now.
    pub fn moved(&self, gained: impl Fn(&[u8; 32]) -> bool) {
        let now = now();
        *self.credit_from.lock() = now;
        let known = self.known.read();
        let unauthenticated = self.unauthenticated.read();
        let all = known
            .iter()
            .map(|((_, key), gate)| (key, gate))
            .chain([(&Identity::UNAUTHENTICATED.key, &*unauthenticated)]);
        for (_, gate) in all.filter(|(key, _)| gained(key)) {
            gate.with(|client| client.doubt(now));
        }
    }

    /// Lets the credentials go that are `lost` to other owners: nothing more is sent for them from here, and whoever asks
    /// for one here again finds it without state.
    pub fn release(&self, lost: impl Fn(&[u8; 32]) -> bool) -> Departing {
        let mut departing = Vec::new();
        self.known.write().retain(|(kind, key), gate| {
            let lost = lost(key);
            if lost {
                departing.push((*kind, *key, Arc::clone(gate)));
            }
            !lost
        });
        if lost(&Identity::UNAUTHENTICATED.key) {
            let gate = std::mem::replace(&mut *self.unauthenticated.write(), nobody(&self.limits, &self.room, now()));
            departing.push((Kind::Unauthenticated, Identity::UNAUTHENTICATED.key, gate));
        }
        for (_, _, gate) in &departing {
            gate.with(Client::seal);
        }
        Departing(departing)
    }

    /// Takes over what a former owner knew of a credential, if there is room.
    pub fn unpack(&self, credential: &Credential) {
        let Credential { kind, key, bot_id, client: state } = credential;
        if let Ok(gate) = self.gate(&Identity { kind: *kind, key: *key, bot_id: *bot_id }, false) {
            gate.with(|client| client.unpack(now(), state));
        }
    }

    /// Drops what nobody used for ten minutes.
    pub fn sweep(&self) {
        let now = now();
        let Some(before) = now.checked_sub(IDLE) else { return };
        let keys: Vec<_> = self.known.read().keys().copied().collect();
        // One after the other, none of them behind the map's lock: a new credential must not wait for it.
        let known = keys.iter().filter_map(|key| self.known.read().get(key).cloned());
        let unauthenticated = self.unauthenticated.read().clone();
        for gate in known.chain([unauthenticated, Arc::clone(&self.interactions)]) {
            while gate.with(|client| client.sweep(now, before, SWEEP_PART)) == SWEEP_PART {}
        }
        self.known.write().retain(|_, gate| {
            let old = |gate: &Arc<Gate>| gate.with(|client| client.disposable(now)).is_some_and(|used| used <= before);
            Arc::strong_count(gate) > 1 || !old(gate)
        });
    }

    /// Whether no request waits or is in flight anywhere.
    pub fn is_quiet(&self) -> bool {
        let mut quiet = true;
        self.each(|client| quiet &= client.is_quiet());
        quiet
    }

    /// Visits every credential without holding on to any: a gate held outside the map is one in use.
    fn each(&self, mut visit: impl FnMut(&mut Client)) {
        let (known, unauthenticated) = (self.known.read(), self.unauthenticated.read());
        for gate in known.values().chain([&*unauthenticated, &self.interactions]) {
            gate.with(&mut visit);
        }
    }

    /// Whether any bucket could be dropped.
    fn make_room(&self) -> bool {
        let now = now();
        let mut wanted = self.max_buckets / EVICT_PART + 1;
        let before = wanted;
        self.each(|client| {
            if wanted > 0 {
                wanted -= client.sweep(now, now, wanted);
            }
        });
        wanted < before
    }

    fn limit(&self, identity: &Identity) -> u32 {
        let by_id = identity.bot_id.and_then(|id| self.overrides.by_bot_id.get(&id));
        by_id.or_else(|| self.overrides.by_key.get(&identity.key)).copied().unwrap_or(GLOBAL_LIMIT)
    }
}

/// Whoever has no credential, of whom nothing is known but what is sent from now on.
fn nobody(limits: &Arc<Limits>, room: &Arc<Room>, now: Instant) -> Arc<Gate> {
    let pacer = Pacer::new(GLOBAL_LIMIT, now, now);
    Gate::new(Client::new(Arc::clone(limits), Arc::clone(room), pacer, false, now))
}

/// Credentials on their way to other owners.
#[derive(Debug)]
pub struct Departing(Vec<(Kind, [u8; 32], Arc<Gate>)>);

impl Departing {
    /// Whether nothing is under way for them any more.
    pub fn has_landed(&self) -> bool {
        self.0.iter().all(|(_, _, gate)| gate.with(|client| client.in_flight()) == 0)
    }

    /// What the next owners should know.
    pub fn pack(&self) -> Vec<Credential> {
        let now = now();
        let pack = |(kind, key, gate): &(Kind, [u8; 32], Arc<Gate>)| {
            let client = gate.with(|client| client.pack(now))?;
            Some(Credential { kind: *kind, key: *key, bot_id: gate.bot_id(), client })
        };
        self.0.iter().filter_map(pack).collect()
    }
}

impl Drop for Departing {
    /// Whoever waits here is sent on to the next owners: they have been told, as far as they could be.
    fn drop(&mut self) {
        for (_, _, gate) in &self.0 {
            gate.with(Client::let_go);
        }
    }
}

/// Drops the state unused for longest among those with nothing to lose, and says when it was last used. One that somebody
/// is about to use (its gate is held outside the map) is not among them.
fn evict_oldest(known: &mut Known, bearers_only: bool) -> Option<Instant> {
    let now = now();
    let oldest = known
        .iter()
        .filter(|((kind, _), gate)| (!bearers_only || *kind == Kind::Bearer) && Arc::strong_count(gate) == 1)
        .filter_map(|(key, gate)| Some((gate.with(|client| client.disposable(now))?, *key)))
        .min_by_key(|(used, _)| *used);
    let (used, key) = oldest?;
    known.remove(&key);
    Some(used)
}
