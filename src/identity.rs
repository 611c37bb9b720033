//! Who is asking: `Authorization` to a credential, without keeping the token.

/// The kind of credential a request carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `Bot X`, or a bare `X`.
    Bot,
    /// `Bearer X`.
    Bearer,
    /// `Basic`, an unknown scheme, or no header.
    Unauthenticated,
}

/// A credential: its kind and the SHA-256 of its token. The token itself is kept nowhere.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The kind of credential.
    pub kind: Kind,
    /// SHA-256 of the token without its scheme; all zero when unauthenticated.
    pub key: [u8; 32],
    /// The bot's user ID, if the token's first part names one.
    pub bot_id: Option<u64>,
}

impl Identity {
    /// Reads the value of an `Authorization` header.
    pub fn from_authorization(_value: Option<&[u8]>) -> Self {
        todo!()
    }
}
