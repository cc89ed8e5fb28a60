//! Starts the ranks of a distributed run as torchrun does: the same environment variables, one host or several, with
//! restarts, prefixed output, and a report of the first failure. Needs no libtorch, so a launch takes milliseconds.
//!
//! This is the library behind the program `overdrive-run`.
//!
//! ```text
//! launcher ── socket ── guard ─┬─ rank 0        the launcher only waits and forwards signals
//!                              ├─ rank 1        the guard starts the ranks, reads their output, restarts them
//!                              └─ ..            if one of the two dies, the other kills the ranks
//! ```
//!
//! ```no_run
//! use overdrive_launch::{Launch, LaunchError};
//!
//! fn main() -> Result<(), LaunchError> {
//!     overdrive_launch::helper(); // must come first: the guard is this program, started again
//!     Launch::new("./train").args(["--epochs", "3"]).nproc(4).max_restarts(2).run()
//! }
//! ```
#![forbid(unsafe_code)]

mod attempt;
mod colors;
mod environment;
mod error;
mod error_file;
mod etcd_access;
mod failures;
mod filters;
mod forwarding;
mod guard;
mod health;
mod heartbeat;
mod host;
mod host_name;
mod launch;
mod lines;
mod lock;
mod node_check;
mod numa;
mod output;
mod plan;
mod port;
mod process;
mod record;
mod rendezvous;
mod roles;
mod run;
mod secret;
mod signals;
mod streams;
mod together;

pub use error::{FailureReport, LaunchError, RankEnd, RankFailure};
pub use error_file::RecordedError;
pub use heartbeat::heartbeat;
pub use host_name::is_host;
pub use launch::Launch;
pub use numa::NumaBinding;
pub use record::record;
pub use roles::helper;
pub use signals::by_name as signal_by_name;
pub use streams::{Streams, StreamsByRank};
