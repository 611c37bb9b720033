//! Part of the front.
