//! How the launchers of several nodes agree: node 0 coordinates, over a TCP connection from each node.
//!
//! ```text
//! node                       coordinator, on node 0
//!                   ◀───     GREETING, PROTOCOL, nonce
//!   nonce, Hello    ───▶                                from here on all messages are authenticated: see `seal`
//!                   ◀───     Alive                      node 0 knows the secret too
//!                   ◀───     Refused, or when all nodes have joined, or enough of an elastic run:
//!                   ◀───     Start { team }             ranks, address and port for this attempt
//!   Ended           ───▶                                all ranks of this node have ended, with or without failures
//!                   ◀───     Stop                       to the other nodes after a failure; a failure window after
//!                                                       the first, so that more ranks may fail by themselves. At
//!                                                       once when a node is lost, or joins an elastic run
//!                   ◀───     Start | Finish             another attempt, or the result for all
//!                  ◀──▶      Alive                      every few seconds; a silent connection counts as lost
//! ```

mod cause;
mod coordinator;
mod door;
mod election;
mod etcd;
mod members;
mod node;
mod seal;
mod wire;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::attempt::Team;
use crate::error::{LaunchError, RankEnd, RankFailure};
use crate::plan::Plan;

pub use coordinator::Coordinator;
pub use election::{Election, Past, Role};
#[cfg(feature = "tls")]
pub use etcd::check as check_tls;
pub use node::{Entry, Link};

/// Increases when messages change: launchers of different versions refuse each other.
const PROTOCOL: u32 = 7;

/// The first word that node 0 sends, before the protocol and its nonce.
const GREETING: &str = "overdrive-run";

/// Of a node, in bytes; enough for the longest name of a run.
const LONGEST_GREETING: usize = 16 << 10;

/// A node's first message.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Hello {
    protocol: u32,
    run_id: String,
    /// As in `--nnodes`: `2`, or `1:4`.
    nnodes: String,
    /// None: any free rank.
    node_rank: Option<usize>,
    nproc: usize,
    max_restarts: u32,
    /// Part of how long a node waits for node 0 after a failure.
    failure_window: Duration,
    /// Milliseconds between heartbeats, and of silence after which a node counts as lost.
    keep_alive: (u128, u128),
    host: String,
    /// Of the next start, for a node 0 that was elected after the loss of another one.
    past: Option<Past>,
    /// Why the node takes no part: it only says that it has failed its check.
    unfit: Option<String>,
}

impl Hello {
    pub fn new(plan: &Plan, host: &str, node_rank: Option<usize>, past: Option<Past>) -> Self {
        Self {
            protocol: PROTOCOL,
            run_id: plan.run_id.clone(),
            nnodes: plan.nnodes_text(),
            node_rank,
            nproc: plan.nproc,
            max_restarts: plan.max_restarts,
            failure_window: plan.failure_window,
            keep_alive: (plan.keep_alive.as_millis(), plan.silence.as_millis()),
            host: host.to_owned(),
            past,
            unfit: None,
        }
    }

    /// Of a node that has failed its check.
    pub fn unfit(self, why: &str) -> Self {
        Self { unfit: Some(why.to_owned()), ..self }
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
        /// How long ago the first failure was.
        age: Duration,
        first: RankFailure,
        /// Ranks that failed by themselves after it.
        also: Vec<RankFailure>,
        /// The node's launcher also got a signal that ends the run.
        told_to_end: bool,
    },
    /// The node's launcher got this signal, which ends the run.
    Interrupted(i32),
    /// Its ranks could not be started.
    Broken(LaunchError),
    /// Node 0 sent `Stop`.
    Stopped,
}

impl NodeEnd {
    /// Whether the node's launcher got a signal that ends the run, so that no restart may follow.
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
    /// Never sent: made by the node itself when it has lost the connection.
    Lost(String),
}
