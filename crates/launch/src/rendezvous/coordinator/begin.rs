//! Waits for the nodes of an attempt, and starts it.

use std::time::Instant;

use super::Decider;
use crate::attempt::Team;
use crate::error::LaunchError;
use crate::port::ReservedPort;
use crate::rendezvous::cause::Cause;
use crate::rendezvous::door::Heard;
use crate::rendezvous::members::Members;
use crate::rendezvous::{FromNodeZero, ToNodeZero};

impl Decider {
    /// Waits until enough nodes have joined. Before the first attempt, and when there were too few, waits for more of
    /// them until all are there or the last call is over.
    pub fn gather(&mut self) -> Result<(), LaunchError> {
        let plan = &self.members.plan;
        let (deadline, last_call) = (Instant::now() + plan.join_timeout, plan.last_call);
        self.members.find_places();
        let mut waits_for_more = !self.begun;
        if self.begun && self.members.plan.is_elastic() && !self.members.are_enough() {
            let (there, fewest) = (self.members.nodes.len(), self.members.plan.fewest_nodes());
            self.say(&format!("{there} of at least {fewest} nodes are there; waiting for more"));
        }
        let mut begin_at = None;
        loop {
            if self.members.are_enough() {
                let now = Instant::now();
                let at = *begin_at.get_or_insert(if waits_for_more { now + last_call } else { now });
                // What has been said already counts before the attempt begins.
                let all = self.members.are_all() || self.expected.is_some_and(|some| self.members.nodes.len() >= some);
                let until = if all { now } else { at };
                match self.hear(Some(until)) {
                    Ok(heard) => self.hear_before_the_attempt(heard)?,
                    Err(_) => break,
                }
            } else {
                (begin_at, waits_for_more) = (None, true);
                match self.hear(Some(deadline)) {
                    Ok(heard) => self.hear_before_the_attempt(heard)?,
                    Err(_) => return Err(self.members.missing()),
                }
            }
        }
        self.members.assign_places();
        Ok(())
    }

    pub fn hear_before_the_attempt(&mut self, heard: Heard) -> Result<(), LaunchError> {
        match heard {
            Heard::Joined(id, speaker, hello) => {
                // A node may know more of the run than this node 0.
                if let Some(past) = hello.past.filter(|_| !self.begun) {
                    (self.attempt, self.restarts) = (self.attempt.max(past.attempt), self.restarts.max(past.restarts));
                }
                self.members.admit(id, speaker, &hello);
                if let Some(why) = hello.unfit.filter(|_| !self.members.plan.is_elastic()) {
                    let host = hello.host;
                    return Err(LaunchError::NodeUnfit(format!("host {host} has failed its check: {why}")));
                }
            }
            Heard::Deposed(why) => return Err(self.depose(&why)),
            // It may connect again.
            Heard::Lost(id, _) => drop(self.members.remove(id)),
            Heard::Said(id, ToNodeZero::Ended { how, ends, .. }) if how.ends_the_run() => {
                if let Some(Cause::Other(error)) = self.node_ended(id, how, ends) {
                    return Err(error);
                }
            }
            Heard::Said(..) => {}
        }
        Ok(())
    }

    pub fn begin(&mut self) -> Result<(), LaunchError> {
        let Members { plan, nodes, console, started, succeeded, .. } = &mut self.members;
        (*started, *succeeded) = (nodes.len(), 0);
        (self.begun, self.expected) = (true, None);
        self.port = None;
        let master_port = match plan.master_port {
            Some(given) => given,
            None => self.port.insert(ReservedPort::new()?).number,
        };
        let (world_size, nnodes) = (nodes.iter().map(|node| node.nproc).sum(), nodes.len());
        if plan.is_elastic() {
            let nodes = if nnodes == 1 { "1 node".to_owned() } else { format!("{nnodes} nodes") };
            console
                .say(&format!("starting on {nodes} with {world_size} ranks in all (--nnodes {})", plan.nnodes_text()));
        }
        let mut first_rank = 0;
        for (node_rank, node) in nodes.iter_mut().enumerate() {
            (node.ended, node.succeeded, node.is_new) = (false, false, false);
            node.ends.clear();
            node.tell(&FromNodeZero::Start(Team {
                attempt: self.attempt,
                restarts: self.restarts,
                node_rank,
                nnodes,
                first_rank,
                world_size,
                master_addr: self.master_addr.clone(),
                master_port,
            }));
            first_rank += node.nproc;
        }
        Ok(())
    }
}
