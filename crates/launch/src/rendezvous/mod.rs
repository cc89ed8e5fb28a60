//! How the launchers of several nodes agree: one of them coordinates, over a TCP connection from each.
//!
//! ```text
//! node                       coordinator, on node 0
//!                   ◀───     a number that was never used before
//!   another; Hello  ───▶                                sealed, as is everything from here on: see `seal`
//!                   ◀───     Alive                      it knows the secret too
//!                   ◀───     Refused, or when all are there:
//!                   ◀───     Start { team }             ranks, address and port for this attempt
//!   Ended           ───▶                                every rank here ended, well or not
//!                   ◀───     Stop                       to the others, when one did not; a second after the first
//!                                                       failure, so that more ranks may fail by themselves
//!                   ◀───     Start | Finish             another attempt, or the result for all
//!                  ◀──▶      Alive                      every few seconds; silence counts as a cut
//! ```

mod cause;
mod coordinator;
mod door;
mod node;
mod seal;
mod wire;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::attempt::Team;
use crate::error::{LaunchError, RankEnd, RankFailure};
use crate::plan::Plan;

pub use coordinator::Coordinator;
pub use node::{Entry, Link};

/// Moves with the messages: launchers of different versions refuse one another.
const PROTOCOL: u32 = 4;

/// What node 0 says first, in front of the protocol and its number.
const GREETING: &str = "overdrive-run";

/// Of a node, in bytes; that of the longest run's name stays below.
const LONGEST_GREETING: usize = 16 << 10;

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
    /// Milliseconds between signs of life, and of silence after which a node is lost.
    keep_alive: (u128, u128),
    host: String,
}

impl Hello {
    fn new(plan: &Plan, host: &str, node_rank: Option<usize>) -> Self {
        Self {
            protocol: PROTOCOL,
            run_id: plan.run_id.clone(),
            nnodes: plan.nnodes,
            node_rank,
            nproc: plan.nproc,
            max_restarts: plan.max_restarts,
            keep_alive: (plan.keep_alive.as_millis(), plan.silence.as_millis()),
            host: host.to_owned(),
        }
    }
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
    Failed {
        /// How long ago the first of these was.
        age: Duration,
        first: RankFailure,
        /// Those that failed by themselves after it.
        also: Vec<RankFailure>,
        /// The launcher there was told to end meanwhile.
        told_to_end: bool,
    },
    /// The launcher there was told to end.
    Interrupted(i32),
    /// Its ranks could not be started.
    Broken(LaunchError),
    /// Because node 0 said so.
    Stopped,
}

impl NodeEnd {
    /// Whether somebody there wants the run to end, so that no other attempt may follow.
    pub fn ends_the_run(&self) -> bool {
        matches!(self, Self::Interrupted(_) | Self::Failed { told_to_end: true, .. })
    }
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
