//! Several nodes as one proxy: who they are, which of them owns a credential, and the way to it.

pub mod members;
pub mod node;
pub mod peer;
pub mod seal;
pub mod seeds;
pub mod swim;
pub mod tls;
