//! What other nodes have said when they handed credentials over: who has said it, so that nobody waits for it any longer,
//! and which of them are gone, so that nothing is handed to them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OnceCell, watch};
use tokio::time::{Instant as Deadline, timeout_at};

use super::members::{Former, Member};
use crate::agreed;
use crate::scheduler::handover::{Gone, Handover};

/// Of each kind so much is remembered: more than most clusters have members.
const REMEMBERED: usize = 256;
/// Between a node's handover and the news that it has left.
const LATELY: Duration = Duration::from_secs(1);

/// What was said lately.
#[derive(Default)]
pub(super) struct Heard {
    words: watch::Sender<VecDeque<Word>>,
    /// Hashes of the messages, and whether what they say has been passed on.
    messages: Mutex<VecDeque<(u128, Arc<OnceCell<()>>)>>,
    gone: Mutex<VecDeque<Gone>>,
}

/// That a node has handed something over.
struct Word {
    from: String,
    at: Instant,
    /// See [`Handover::own`].
    own: bool,
}

impl Heard {
    /// Whether a message says something new: a node that had no answer in time says the same again, and what it sent and was
    /// refused must not count twice. And whether what it says has been passed on: once, whoever asks for it first.
    pub(super) fn message(&self, message: &[u8]) -> (bool, Arc<OnceCell<()>>) {
        let hash = agreed::hash(b"handover", &[message]);
        let mut messages = self.messages.lock();
        if let Some((_, passed)) = messages.iter().find(|(known, _)| *known == hash) {
            return (false, Arc::clone(passed));
        }
        let passed = Arc::default();
        remember(&mut messages, (hash, Arc::clone(&passed)));
        (true, passed)
    }

    /// Notes who spoke, once what was said is taken in.
    pub(super) fn note(&self, handover: &Handover, at: Instant) {
        let mut gone = self.gone.lock();
        for left in &handover.gone {
            // The youngest of a name stands for all before it.
            if !gone.iter().any(|known| known.name == left.name && known.generation >= left.generation) {
                gone.retain(|known| known.name != left.name);
                remember(&mut gone, left.clone());
            }
        }
        drop(gone);
        let word = Word { from: handover.from.clone(), at, own: handover.own };
        self.words.send_modify(|words| {
            words.retain(|known| known.from != word.from || known.own != word.own);
            remember(words, word);
        });
    }

    /// Whether a former owner has said all it knew.
    pub(super) fn has_told(&self, former: &Former) -> bool {
        told(&self.words.borrow(), former)
    }

    /// Waits for that; false if the time for it is over.
    pub(super) async fn wait(&self, former: &Former, deadline: Deadline) -> bool {
        let mut words = self.words.subscribe();
        let told = words.wait_for(|words| told(words, former));
        timeout_at(deadline.min(former.until.into()), told).await.is_ok()
    }

    /// Whether a node handed something over a moment ago.
    pub(super) fn lately(&self, name: &str, now: Instant) -> bool {
        self.words.borrow().iter().any(|word| word.from == name && now.saturating_duration_since(word.at) < LATELY)
    }

    /// Whether a member is known to have left.
    pub(super) fn is_gone(&self, member: &Member) -> bool {
        self.gone.lock().iter().any(|gone| gone.is(member))
    }

    /// The nodes that are known to have left, whether or not the gossip says so too.
    pub(super) fn gone(&self) -> Vec<Gone> {
        self.gone.lock().iter().cloned().collect()
    }
}

impl Gone {
    /// Whether it is this member that has left, and not one that came after it under its name.
    pub(super) fn is(&self, member: &Member) -> bool {
        *self.name == *member.name && self.generation >= member.generation
    }
}

fn told(words: &VecDeque<Word>, former: &Former) -> bool {
    words.iter().any(|word| word.own && former.is_told_by(&word.from, word.at))
}

fn remember<T>(all: &mut VecDeque<T>, new: T) {
    all.truncate(REMEMBERED - 1);
    all.push_front(new);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_says_again_is_taken_in_once() {
        let heard = Heard::default();
        let is_new = |message: &[u8]| heard.message(message).0;
        assert!(is_new(b"something") && is_new(b"something else") && !is_new(b"something"));
        assert!((0..1_000_u32).all(|number| is_new(&number.to_le_bytes())));
        assert!(heard.messages.lock().len() <= REMEMBERED);
    }

    #[test]
    fn what_is_passed_on_is_not_the_word_of_who_passes_it_on() {
        let now = Instant::now();
        let gossip = ([10, 0, 0, 2], 7946).into();
        let member = Member { name: "two".into(), gossip, peer_port: 1, generation: 5 };
        let left = |generation| Gone { name: "two".into(), generation };
        let former = Former { member: member.clone().into(), since: now, until: now + LATELY };
        let (heard, mut word) = (Heard::default(), Handover { from: "two".into(), ..Handover::default() });
        word.gone = vec![left(5)];
        heard.note(&word, now);
        assert!(!heard.has_told(&former));
        word.own = true;
        heard.note(&word, now);
        assert!(heard.has_told(&former));
        assert!(heard.lately("two", now) && !heard.lately("two", now + LATELY) && !heard.lately("one", now));
        assert_eq!(heard.gone(), [left(5)]);
        for generation in [4, 6] {
            heard.note(&Handover { gone: vec![left(generation)], ..Handover::default() }, now);
        }
        assert_eq!(heard.gone(), [left(6)], "one for each name");
        assert!(left(5).is(&member) && left(6).is(&member) && !left(4).is(&member));
    }
}
