//! Keeping a body while it is first sent.
