//! Telling the new owners of credentials what is known of them: in which order, how often and for how long.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::members::Members;
use super::peer::Peers;
use crate::scheduler::handover::{Credential, Handover};

/// How often another node is told, and the pause after one that failed.
const TELLS: u32 = 4;
const TELL_AGAIN: Duration = Duration::from_millis(150);
/// Those who get credentials are told first, and have so long before the others are told that there is nothing for them.
const FIRST: Duration = Duration::from_millis(800);
/// What is left after that takes no longer: heirs wait half as long, and a node that stops has other things to do.
const TELLING: Duration = Duration::from_secs(3);

/// Tells every owner of a credential, and the other heirs, what of `all` concerns them.
pub(super) async fn tell(members: &Members, heirs: Vec<bool>, all: Handover, peers: &Peers) {
    let Handover { from, own, gone, invalid, credentials } = all;
    let mut shares: Vec<Vec<Credential>> = heirs.iter().map(|_| Vec::new()).collect();
    for credential in credentials {
        // Without an heir nobody serves it.
        if let Some(share) = members.rank(&credential.key).and_then(|place| shares.get_mut(usize::from(place))) {
            share.push(credential);
        }
    }
    let mut telling = JoinSet::new();
    let mut nothing = Vec::new();
    for (place, ((member, heir), credentials)) in members.list().iter().zip(heirs).zip(shares).enumerate() {
        let invalid: Vec<Duration> = invalid.iter().skip(place).step_by(members.list().len()).copied().collect();
        let moves = !credentials.is_empty();
        if !heir && !moves && invalid.is_empty() {
            continue;
        }
        let message = Handover { from: from.clone(), own, gone: gone.clone(), invalid, credentials }.encode();
        let teller = say(peers.clone(), member.peer(), message);
        if moves {
            telling.spawn(teller);
        } else {
            nothing.push(teller);
        }
    }
    // That there is nothing more to come is said last, so that it is not believed of what goes by way of another.
    _ = timeout(FIRST, done(&mut telling)).await;
    for teller in nothing {
        telling.spawn(teller);
    }
    if timeout(TELLING, done(&mut telling)).await.is_err() {
        tracing::warn!("could not hand credentials over to every member in time");
    }
}

async fn done(telling: &mut JoinSet<()>) {
    while telling.join_next().await.is_some() {}
}

/// Says a message to a member until it has taken it in.
async fn say(peers: Peers, to: SocketAddr, message: Option<Vec<u8>>) {
    let Some(message) = message else {
        return tracing::warn!(peer = %to, "too much is known of its credentials to be handed over");
    };
    let mut tries = 0;
    while let Err(error) = peers.tell(to, &message).await {
        tries += 1;
        if tries == TELLS {
            return tracing::warn!(peer = %to, %error, "could not hand credentials over");
        }
        // One that is new may not know this node yet.
        sleep(TELL_AGAIN).await;
    }
}
