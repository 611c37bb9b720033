//! A Discord that enforces its limits.
