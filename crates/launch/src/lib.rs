//! Starts the ranks of a distributed run, as torchrun does: with its environment, on one host or several, with
//! restarts, prefixed outputs, and a report of the first failure. Needs no libtorch, so a launch takes milliseconds.
//!
//! The program is `overdrive-run`; this is the library that it is made of.
//!
//! ```text
//! launcher ── socket ── guard ─┬─ rank 0        the launcher only waits and passes signals on
//!                              ├─ rank 1        the guard holds the ranks, reads their outputs, restarts them
//!                              └─ ..            either of the two ends what is left when the other dies
//! ```
//!
//! ```no_run
//! use overdrive_launch::{Launch, LaunchError};
//!
//! fn main() -> Result<(), LaunchError> {
//!     overdrive_launch::helper(); // this program is its own guard
//!     Launch::new("./train").args(["--epochs", "3"]).nproc(4).max_restarts(2).run()
//! }
//! ```
#![forbid(unsafe_code)]

mod attempt;
mod environment;
mod error;
mod failures;
mod guard;
mod host_name;
mod launch;
mod lines;
mod output;
mod plan;
mod port;
mod process;
mod rendezvous;
mod roles;
mod secret;
mod signals;
mod streams;

pub use error::{FailureReport, LaunchError, RankEnd, RankFailure};
pub use host_name::is_host;
pub use launch::Launch;
pub use roles::helper;
pub use signals::by_name as signal_by_name;
pub use streams::{Streams, StreamsByRank};
