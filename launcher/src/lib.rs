//! The launcher: `steadfast launch`. It runs one agent on each host of an elastic job, and follows hosts that
//! come and go. The decisions are those of `steadfast-launcher-core`.
//!
//! ```text
//!   poll ──▶ hosts ─────────┐
//!                           ▼
//!   agents ──▶ an end ──▶ driver ──▶ decide ──▶ store (one transaction) ──▶ start and stop agents
//!     │                                                                          │
//!     └── launcher_link: stdin of ssh, or of the agent ◀─────────────────────────┘
//! ```

mod admin;
mod agents;
mod args;
mod driver;
mod host;
mod own_machine;
mod poll;
mod run;
mod shell_words;
mod store;
mod template;

pub use args::LaunchArgs;
pub use run::launch;
