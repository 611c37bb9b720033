//! Part of observing.
