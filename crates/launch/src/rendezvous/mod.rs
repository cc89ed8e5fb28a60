//! How the launchers of several nodes agree: one of them coordinates, over a TCP connection from each.
//!
//! ```text
//! node                       coordinator, on node 0
//!   Hello           ───▶
//!                   ◀───     Refused, or when all are there:
//!                   ◀───     Start { team }             ranks, address and port for this attempt
//!   Ended           ───▶                                every rank here ended, well or not
//!                   ◀───     Stop                       to the others, when one did not
//!                   ◀───     Start | Finish             another attempt, or the result for all
//!                  ◀──▶      Alive                      every few seconds; silence counts as a cut
//! ```

mod coordinator;
mod door;
mod node;
mod wire;

use serde::{Deserialize, Serialize};

use crate::attempt::Team;
use crate::error::{LaunchError, RankEnd, RankFailure};

pub use coordinator::Coordinator;
pub use node::{Entry, Link};

/// Moves with the messages: launchers of different versions refuse one another.
const PROTOCOL: u32 = 1;

/// What a node says when it comes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Hello {
    protocol: u32,
    run_id: String,
    nnodes: usize,
    /// None: whichever is free.
    node_rank: Option<usize>,
    nproc: usize,
    max_restarts: u32,
    host: String,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub enum ToNodeZero {
    Hello(Hello),
    Ended { attempt: u32, how: NodeEnd, ends: Vec<(usize, RankEnd)> },
    Alive,
}

/// How an attempt ended on one node.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub enum NodeEnd {
    Done,
    Failed(RankFailure),
    /// The launcher there was told to end.
    Interrupted(i32),
    /// Its ranks could not be started.
    Broken(LaunchError),
    /// Because node 0 said so.
    Stopped,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub enum FromNodeZero {
    Start(Team),
    Stop {
        attempt: u32,
    },
    Finish(Result<(), LaunchError>),
    Refused(String),
    Alive,
    /// Not sent: what a node tells itself when the connection is gone.
    Lost(String),
}
