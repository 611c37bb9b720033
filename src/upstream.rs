//! The one client to Discord.
