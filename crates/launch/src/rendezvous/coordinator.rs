//! Node 0's side: starts attempts, and decides what happens when a rank or a node fails, or a node joins.

mod begin;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};

use super::cause::Cause;
use super::door::{Door, GREETING_TIMEOUT, Heard};
use super::election::{Kept, Lease, Past};
use super::members::{Members, Node};
use super::{FromNodeZero, NodeEnd, ToNodeZero};
use crate::attempt;
use crate::error::{LaunchError, RankEnd};
use crate::health::Health;
use crate::host::Host;
use crate::port::{self, ReservedPort};

/// Connections beyond the run's nodes: of nodes that wait for a place, or are about to be refused.
const SPARE_CONNECTIONS: usize = 64;

/// The name of the decider's loop in health checks.
const LOOP: &str = "coordinator";

/// The thread that decides for all nodes.
pub struct Coordinator {
    thread: JoinHandle<()>,
    address: SocketAddr,
}

impl Coordinator {
    /// `past` and `lease` are set for a node 0 that was elected: what it knows of the last start, and its key's lease.
    pub fn start(
        listener: TcpListener,
        host: &Host,
        master_addr: &str,
        past: Option<Past>,
        lease: Option<Lease>,
    ) -> Result<Self, LaunchError> {
        let (plan, console) = (&host.plan, &host.console);
        let failed = || LaunchError::system("serve the other nodes");
        let address = listener.local_addr().map_err(failed())?;
        let doors = listener.try_clone().map_err(failed())?;
        let (heard, inbox) = channel();
        let lease = lease.map(|lease| lease.keep(heard.clone())).transpose().map_err(failed())?;
        let door = Door {
            listener,
            trust: plan.trust.clone(),
            heard,
            most: plan.nnodes + SPARE_CONNECTIONS,
            silence: plan.silence,
            greeting_timeout: GREETING_TIMEOUT,
            console: Arc::clone(console),
        };
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        named("door").spawn(move || door.run()).map_err(failed())?;
        let decider = Decider {
            members: Members::new(plan.clone(), Arc::clone(console)),
            master_addr: master_addr.to_owned(),
            inbox,
            attempt: past.map_or(0, |past| past.attempt),
            restarts: past.map_or(0, |past| past.restarts),
            expected: past.map(|past| past.nnodes),
            lease,
            health: Arc::clone(&host.health),
            listener: doors,
            deposed: false,
            begun: false,
            port: None,
            last_heartbeat: Instant::now(),
            told_to_end: false,
        };
        let thread = named("coordinator").spawn(move || decider.run()).map_err(failed())?;
        Ok(Self { thread, address })
    }

    /// The address at which node 0's own launcher connects.
    pub fn local_address(&self) -> (String, u16) {
        let ip = self.address.ip();
        let host = if ip.is_unspecified() { "127.0.0.1".to_owned() } else { ip.to_string() };
        (host, self.address.port())
    }

    /// Waits, for at most `limit`, until the other nodes have been told how the run ended. Returns whether they were.
    pub fn finish(self, limit: Duration) -> bool {
        let start = Instant::now();
        while !self.thread.is_finished() && start.elapsed() < limit {
            thread::sleep(Duration::from_millis(2));
        }
        self.thread.is_finished()
    }
}

struct Decider {
    members: Members,
    master_addr: String,
    inbox: Receiver<Heard>,
    /// How often the ranks were started before.
    attempt: u32,
    /// How often they were started again because a rank or, in a run of fixed size, a node had failed.
    restarts: u32,
    /// Whether ranks were started before.
    begun: bool,
    /// How many nodes should join soon after the loss of an earlier node 0: the others of the last start.
    expected: Option<usize>,
    /// Set for a node 0 that was elected.
    lease: Option<Kept>,
    health: Arc<Health>,
    /// The door accepts the other nodes on a copy of it.
    listener: TcpListener,
    deposed: bool,
    port: Option<ReservedPort>,
    last_heartbeat: Instant,
    /// A launcher got a signal that ends the run; in an elastic run only node 0's counts.
    told_to_end: bool,
}

impl Decider {
    fn run(mut self) {
        let result = self.decide();
        let health = Arc::clone(&self.health);
        self.end(&result);
        health.is_over(LOOP);
    }

    fn end(mut self, result: &Result<(), LaunchError>) {
        let hands_over = self.deposed || self.told_to_end && self.members.plan.is_elastic();
        if self.lease.is_none() || !hands_over {
            self.members.admit_last(&self.inbox);
            return self.members.finish(result);
        }
        // The others elect another node 0. No node joins this one any more, and all end their ranks before the lease
        // has ended.
        let _ = shutdown(&self.listener, Shutdown::Both);
        self.members.admit_last(&self.inbox);
        self.members.hand_over(result, self.deposed);
        drop(self.lease.take());
        // Those whose greeting came before.
        self.members.admit_last(&self.inbox);
        self.members.hand_over(result, self.deposed);
    }

    fn decide(&mut self) -> Result<(), LaunchError> {
        let mut ports_taken = 0;
        loop {
            self.gather()?;
            self.begin()?;
            let Some(cause) = self.watch() else { return Ok(()) };
            let plan = &self.members.plan;
            let what = match &cause {
                _ if self.told_to_end => return Err(self.error(cause)),
                Cause::Failed(failures) => {
                    let failure = &failures.first;
                    let chosen = plan.master_port.is_none() && failure.rank == 0;
                    if chosen && port::reports_taken(&failure.output) && ports_taken < port::MOST_RETRIES {
                        ports_taken += 1;
                        self.say("the ranks' port was taken; trying another one");
                        continue;
                    }
                    failures.summary()
                }
                Cause::Lost(what) => what.clone(),
                Cause::Members(what) => {
                    self.say(what);
                    self.attempt += 1;
                    continue;
                }
                Cause::Other(error) => return Err(error.clone()),
            };
            let most = plan.max_restarts;
            if self.restarts == most {
                return Err(self.error(cause));
            }
            self.attempt += 1;
            self.restarts += 1;
            self.say(&format!("{what}; restart {} of {most}", self.restarts));
        }
    }

    fn say(&self, text: &str) {
        self.members.console.say(text);
    }

    fn error(&self, cause: Cause) -> LaunchError {
        match cause {
            Cause::Failed(failures) => {
                let ends = self.members.nodes.iter().flat_map(|node| node.ends.clone()).collect();
                LaunchError::Rank(Box::new(failures.report(ends, self.restarts)))
            }
            Cause::Lost(what) | Cause::Members(what) => LaunchError::NodeLost(what),
            Cause::Other(error) => error,
        }
    }

    /// Waits until no node runs the attempt any more. Returns why it ended, None if all ranks have succeeded.
    fn watch(&mut self) -> Option<Cause> {
        let window = self.members.plan.failure_window;
        let mut cause: Option<Cause> = None;
        // When to stop the other ranks after one has failed. Until then they may fail by themselves.
        let mut stop_at = None;
        let mut deadline = None;
        while self.members.nodes.iter().any(|node| !node.ended) {
            let let_in_at = if cause.is_none() { self.members.let_in_at() } else { None };
            let worse = match self.hear(stop_at.or(deadline).or(let_in_at)) {
                // A signal may reach a node between two attempts, so it counts whatever the attempt.
                Ok(Heard::Said(id, ToNodeZero::Ended { attempt: which, how, ends }))
                    if which == self.attempt || how.ends_the_run() =>
                {
                    self.node_ended(id, how, ends)
                }
                Ok(Heard::Said(..)) => None,
                Ok(Heard::Lost(id, why)) => self.node_left(id, &format!("was lost: {why}")),
                Ok(Heard::Joined(id, speaker, hello)) => {
                    self.members.admit(id, speaker, &hello);
                    None
                }
                // All nodes end their ranks when they lose the connection to this one.
                Ok(Heard::Deposed(why)) => return Some(Cause::Other(self.depose(&why))),
                Err(_) if stop_at.take().is_some() => {
                    self.members.stop(self.attempt);
                    None
                }
                // Nodes that could not end their ranks in time are dropped.
                Err(_) if deadline.is_some() => {
                    self.members.drop_late();
                    None
                }
                Err(_) => {
                    let names: Vec<String> = self.members.newcomers().map(Node::name).collect();
                    Some(Cause::Members(format!("{} joined", names.join(", "))))
                }
            };
            let Some(worse) = worse else { continue };
            let is_first = cause.is_none();
            if is_first {
                deadline = Some(Instant::now() + attempt::longest_end(&self.members.plan));
            }
            let waits = matches!(worse, Cause::Failed(_)) && (is_first || stop_at.is_some());
            cause = Some(match cause {
                None => worse,
                Some(cause) => cause.and(worse, window, self.told_to_end),
            });
            if let Some(Cause::Failed(failures)) = cause.as_ref().filter(|_| waits) {
                stop_at = Some(failures.first_at + window);
            } else if is_first || stop_at.take().is_some() {
                // Not a failed rank, so no other failures are waited for.
                self.members.stop(self.attempt);
            }
        }
        // All ranks had succeeded before the nodes were told to stop because another node has joined.
        let are_done = self.members.succeeded == self.members.started;
        cause.filter(|cause| !(are_done && matches!(cause, Cause::Members(_))))
    }

    /// Records how a node's ranks have ended. Returns what this means for the attempt.
    fn node_ended(&mut self, id: usize, how: NodeEnd, ends: Vec<(usize, RankEnd)>) -> Option<Cause> {
        let is_elastic = self.members.plan.is_elastic();
        let told_to_end = how.ends_the_run();
        let mut succeeded = 0;
        // Only nodes with a place take part.
        let node = self.members.find(id)?;
        if !std::mem::replace(&mut node.ended, true) {
            node.ends = ends;
            node.succeeded = how == NodeEnd::Done;
            succeeded = usize::from(node.succeeded);
        }
        let (cause, is_node_zero) = (Cause::of(how, &node.host), node.place == Some(0));
        self.members.succeeded += succeeded;
        if told_to_end && is_elastic && !is_node_zero {
            // The others go on without it.
            let result = cause.map_or(Ok(()), |cause| Err(self.error(cause)));
            self.members.find(id)?.tell(&FromNodeZero::Finish(result));
            return self.node_left(id, "has left: its launcher got a signal");
        }
        self.told_to_end |= told_to_end;
        cause
    }

    /// Removes a node. Returns what this means for the attempt, None if the node did not take part in it.
    fn node_left(&mut self, id: usize, how: &str) -> Option<Cause> {
        let node = self.members.remove(id)?;
        let what = format!("{} {how}", node.name());
        if node.place == Some(0) && self.lease.is_some() {
            // This host's own node has ended. The others can elect another node 0.
            self.deposed = true;
            return Some(Cause::Other(LaunchError::NodeLost(what)));
        }
        if node.succeeded {
            self.say(&format!("{what}; its ranks had succeeded"));
            return None;
        }
        let goes_on = self.members.plan.is_elastic() && node.place != Some(0);
        (!node.is_new).then_some(if goes_on { Cause::Members(what) } else { Cause::Lost(what) })
    }

    fn depose(&mut self, why: &str) -> LaunchError {
        self.deposed = true;
        self.say(&format!("this node is no longer node 0: {why}"));
        LaunchError::NodeLost(why.to_owned())
    }

    /// Waits for the next event, and sends heartbeats to all nodes meanwhile.
    fn hear(&mut self, deadline: Option<Instant>) -> Result<Heard, RecvTimeoutError> {
        let interval = self.members.plan.keep_alive;
        loop {
            self.health.beat(LOOP);
            if self.last_heartbeat.elapsed() >= interval {
                self.last_heartbeat = Instant::now();
                self.members.send_heartbeats();
                self.members.find_places();
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let longest = interval.min(self.members.plan.longest_wait());
            let wait = left.map_or(longest, |left| left.min(longest));
            match self.inbox.recv_timeout(wait) {
                Err(RecvTimeoutError::Timeout) if left.is_none_or(|left| left > wait) => {}
                other => return other,
            }
        }
    }
}

#[cfg(test)]
mod tests;
