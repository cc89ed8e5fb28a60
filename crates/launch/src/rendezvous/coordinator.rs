//! Node 0's side: lets nodes join, starts attempts, and decides what happens when a rank or a node fails.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::cause::Cause;
use super::door::{Door, GREETING_TIMEOUT, Heard};
use super::wire::Speaker;
use super::{FromNodeZero, Hello, NodeEnd, PROTOCOL, ToNodeZero};
use crate::attempt::{self, Team};
use crate::error::{LaunchError, RankEnd};
use crate::output::Console;
use crate::plan::Plan;
use crate::port::{self, ReservedPort};

/// Connections beyond the run's nodes: of nodes that wait for a place, or are about to be refused.
const SPARE_CONNECTIONS: usize = 64;

/// The thread that decides for all nodes.
pub struct Coordinator {
    thread: JoinHandle<()>,
    address: SocketAddr,
}

impl Coordinator {
    pub fn start(
        listener: TcpListener,
        plan: &Plan,
        master_addr: &str,
        console: &Arc<Console>,
    ) -> Result<Self, LaunchError> {
        let failed = || LaunchError::system("serve the other nodes");
        let address = listener.local_addr().map_err(failed())?;
        let (heard, inbox) = channel();
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
            plan: plan.clone(),
            master_addr: master_addr.to_owned(),
            console: Arc::clone(console),
            inbox,
            nodes: Vec::new(),
            waiting: Vec::new(),
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

    /// Waits, for at most `limit`, until the other nodes have been told how the run ended.
    pub fn finish(self, limit: Duration) {
        let start = Instant::now();
        while !self.thread.is_finished() && start.elapsed() < limit {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

struct Node {
    id: usize,
    speaker: Speaker,
    nproc: usize,
    host: String,
    rank: Option<usize>,
    ended: bool,
    ends: Vec<(usize, RankEnd)>,
}

impl Node {
    fn name(&self) -> String {
        match self.rank {
            Some(rank) => format!("node {rank} (host {})", self.host),
            None => format!("host {}", self.host),
        }
    }

    fn tell(&mut self, message: &FromNodeZero) {
        // The reader thread reports a lost connection.
        let _ = self.speaker.say(message);
    }
}

struct Decider {
    plan: Plan,
    master_addr: String,
    console: Arc<Console>,
    inbox: Receiver<Heard>,
    nodes: Vec<Node>,
    /// Nodes without a place yet, and until when they may wait for one.
    waiting: Vec<(Instant, Node)>,
    port: Option<ReservedPort>,
    last_heartbeat: Instant,
    /// A node's launcher got a signal that ends the run.
    told_to_end: bool,
}

impl Decider {
    fn run(mut self) {
        let result = self.decide();
        self.nodes.iter_mut().for_each(|node| node.tell(&FromNodeZero::Finish(result.clone())));
        for (_, node) in std::mem::take(&mut self.waiting) {
            self.refuse(node, "the run has ended".to_owned());
        }
    }

    fn decide(&mut self) -> Result<(), LaunchError> {
        let (mut attempt, mut ports_taken) = (0, 0);
        loop {
            self.gather()?;
            self.begin(attempt)?;
            let Some(cause) = self.watch(attempt) else { return Ok(()) };
            let what = match &cause {
                _ if self.told_to_end => return Err(self.error(cause, attempt)),
                Cause::Failed(failures) => {
                    let failure = &failures.first;
                    let chosen = self.plan.master_port.is_none() && failure.rank == 0;
                    if chosen && port::reports_taken(&failure.output) && ports_taken < port::MOST_RETRIES {
                        ports_taken += 1;
                        self.console.say("the ranks' port was taken; trying another one");
                        continue;
                    }
                    failures.summary()
                }
                Cause::Lost(what) => what.clone(),
                Cause::Other(error) => return Err(error.clone()),
            };
            if attempt == self.plan.max_restarts {
                return Err(self.error(cause, attempt));
            }
            attempt += 1;
            self.console.say(&format!("{what}; restart {attempt} of {}", self.plan.max_restarts));
        }
    }

    fn error(&self, cause: Cause, restarts: u32) -> LaunchError {
        match cause {
            Cause::Failed(failures) => {
                let ends: Vec<(usize, RankEnd)> = self.nodes.iter().flat_map(|node| node.ends.clone()).collect();
                LaunchError::Rank(Box::new(failures.report(ends, restarts)))
            }
            Cause::Lost(what) => LaunchError::NodeLost(what),
            Cause::Other(error) => error,
        }
    }

    /// Waits until every node has joined.
    fn gather(&mut self) -> Result<(), LaunchError> {
        let deadline = Instant::now() + self.plan.join_timeout;
        self.find_places();
        while self.nodes.len() < self.plan.nnodes {
            let heard = self.hear(Some(deadline));
            match heard {
                Ok(Heard::Joined(id, speaker, hello)) => self.admit(id, speaker, &hello),
                // It may connect again.
                Ok(Heard::Lost(id, _)) => drop(self.forget(id)),
                Ok(Heard::Said(id, ToNodeZero::Ended { how: NodeEnd::Interrupted(signal), .. })) => {
                    // Only nodes with a place may end the run.
                    if let Some(node) = self.nodes.iter().find(|node| node.id == id) {
                        return Err(LaunchError::Interrupted { signal, host: Some(node.host.clone()) });
                    }
                }
                Ok(Heard::Said(..)) => {}
                Err(_) => return Err(self.missing()),
            }
        }
        self.assign_ranks();
        Ok(())
    }

    fn missing(&self) -> LaunchError {
        let taken: Vec<usize> = self.nodes.iter().filter_map(|node| node.rank).collect();
        let free: Vec<String> =
            (0..self.plan.nnodes).filter(|rank| !taken.contains(rank)).take(16).map(|it| it.to_string()).collect();
        let joined: Vec<String> = self.nodes.iter().map(Node::name).take(16).collect();
        LaunchError::NodesMissing(format!(
            "{} of {} nodes joined within {} s: {}; missing: node {}",
            self.nodes.len(),
            self.plan.nnodes,
            self.plan.join_timeout.as_secs_f64(),
            joined.join(", "),
            free.join(", ")
        ))
    }

    fn admit(&mut self, id: usize, speaker: Speaker, hello: &Hello) {
        let node = Node {
            id,
            speaker,
            nproc: hello.nproc,
            host: hello.host.clone(),
            rank: hello.node_rank,
            ended: true,
            ends: Vec::new(),
        };
        match self.objection(hello) {
            Some(reason) => self.refuse(node, reason),
            None => self.waiting.push((Instant::now() + self.plan.silence + 2 * self.plan.keep_alive, node)),
        }
        self.find_places();
    }

    /// Tells a node why it is refused, and closes its connection.
    fn refuse(&self, mut node: Node, reason: String) {
        self.console.say(&format!("refused {}: {reason}", node.name()));
        node.tell(&FromNodeZero::Refused(reason));
        node.speaker.hang_up();
    }

    /// Gives waiting nodes the places that are free. A restarted node may connect before the loss of its first
    /// connection is noticed. So nodes without a place wait, for longer than it takes to notice a loss, before they are
    /// refused.
    fn find_places(&mut self) {
        for (until, node) in std::mem::take(&mut self.waiting) {
            match self.no_place(&node) {
                None => self.nodes.push(node),
                Some(reason) if until <= Instant::now() => self.refuse(node, reason),
                Some(_) => self.waiting.push((until, node)),
            }
        }
    }

    fn no_place(&self, node: &Node) -> Option<String> {
        let same = self.nodes.iter().find(|other| other.rank.is_some() && other.rank == node.rank);
        if let Some(same) = same {
            return Some(format!("{} has already joined", same.name()));
        }
        (self.nodes.len() >= self.plan.nnodes).then(|| format!("all {} nodes of the run have joined", self.plan.nnodes))
    }

    /// Removes a lost node; returns its name if it had a place.
    fn forget(&mut self, id: usize) -> Option<String> {
        self.waiting.retain(|(_, node)| node.id != id);
        let place = self.nodes.iter().position(|node| node.id == id)?;
        Some(self.nodes.remove(place).name())
    }

    fn objection(&self, hello: &Hello) -> Option<String> {
        let (plan, seconds) = (&self.plan, |time: Duration| format!("{} s", time.as_secs_f64()));
        let differs = |what: &str, here: &dyn std::fmt::Display, there: &dyn std::fmt::Display| {
            Some(format!("{what} is {here} on node 0 and {there} here; both have to be the same"))
        };
        if hello.protocol != PROTOCOL {
            return differs("the launchers' protocol", &PROTOCOL, &hello.protocol);
        }
        if hello.run_id != plan.run_id {
            return differs("--rdzv-id", &plan.run_id, &hello.run_id);
        }
        if hello.nnodes != plan.nnodes {
            return differs("--nnodes", &plan.nnodes, &hello.nnodes);
        }
        if hello.max_restarts != plan.max_restarts {
            return differs("--max-restarts", &plan.max_restarts, &hello.max_restarts);
        }
        if hello.failure_window != plan.failure_window {
            return differs("--failure-window", &seconds(plan.failure_window), &seconds(hello.failure_window));
        }
        if hello.keep_alive != (plan.keep_alive.as_millis(), plan.silence.as_millis()) {
            return Some("the keep-alive options differ from those of node 0; they have to be the same".to_owned());
        }
        let rank = hello.node_rank.filter(|rank| *rank >= plan.nnodes)?;
        Some(format!("node rank {rank} of {} nodes: ranks are 0 to {}", plan.nnodes, plan.nnodes - 1))
    }

    /// Numbers the nodes without a chosen rank, in the order in which they joined.
    fn assign_ranks(&mut self) {
        let taken: Vec<usize> = self.nodes.iter().filter_map(|node| node.rank).collect();
        let mut free = (0..self.plan.nnodes).filter(|rank| !taken.contains(rank));
        for node in self.nodes.iter_mut().filter(|node| node.rank.is_none()) {
            node.rank = free.next();
        }
        self.nodes.sort_by_key(|node| node.rank);
    }

    fn begin(&mut self, attempt: u32) -> Result<(), LaunchError> {
        self.port = None;
        let master_port = match self.plan.master_port {
            Some(given) => given,
            None => self.port.insert(ReservedPort::new()?).number,
        };
        let world_size = self.nodes.iter().map(|node| node.nproc).sum();
        let mut first_rank = 0;
        for node in &mut self.nodes {
            node.ended = false;
            node.ends.clear();
            node.tell(&FromNodeZero::Start(Team {
                attempt,
                node_rank: node.rank.unwrap_or_default(),
                first_rank,
                world_size,
                master_addr: self.master_addr.clone(),
                master_port,
            }));
            first_rank += node.nproc;
        }
        Ok(())
    }

    /// Waits until no node runs the attempt any more. Returns why it failed, None if it did not.
    fn watch(&mut self, attempt: u32) -> Option<Cause> {
        let window = self.plan.failure_window;
        let mut cause: Option<Cause> = None;
        // Set when a rank has failed: when the others are stopped. Until then they may fail by themselves.
        let mut stop_at = None;
        let mut deadline = None;
        while cause.is_none() && self.nodes.len() < self.plan.nnodes || self.nodes.iter().any(|node| !node.ended) {
            let worse = match self.hear(stop_at.or(deadline)) {
                // A signal may reach a node between two attempts, so it counts whatever the attempt.
                Ok(Heard::Said(id, ToNodeZero::Ended { attempt: which, how, ends }))
                    if which == attempt || how.ends_the_run() =>
                {
                    // Only nodes with a place take part.
                    let Some(node) = self.nodes.iter_mut().find(|node| node.id == id) else { continue };
                    self.told_to_end |= how.ends_the_run();
                    if !std::mem::replace(&mut node.ended, true) {
                        node.ends = ends;
                    }
                    Cause::of(how, &node.host)
                }
                Ok(Heard::Said(..)) => None,
                Ok(Heard::Lost(id, why)) => self.forget(id).map(|name| Cause::Lost(format!("{name} was lost: {why}"))),
                Ok(Heard::Joined(id, speaker, hello)) => {
                    self.admit(id, speaker, &hello);
                    None
                }
                Err(_) if stop_at.take().is_some() => {
                    self.stop(attempt);
                    None
                }
                // Nodes that could not end their ranks in time are dropped.
                Err(_) => {
                    self.nodes.retain(|node| node.ended);
                    None
                }
            };
            let Some(worse) = worse else { continue };
            let is_first = cause.is_none();
            if is_first {
                deadline = Some(Instant::now() + attempt::longest_end(&self.plan));
            }
            let waits = matches!(worse, Cause::Failed(_)) && (is_first || stop_at.is_some());
            cause = Some(match (cause, worse) {
                (None, worse) => worse,
                (Some(Cause::Failed(first)), Cause::Failed(second)) => Cause::Failed(first.merge(second, window)),
                (Some(first), _) => first,
            });
            if let Some(Cause::Failed(failures)) = cause.as_ref().filter(|_| waits) {
                stop_at = Some(failures.first_at + window);
            } else if is_first || stop_at.take().is_some() {
                // Not a failed rank, so no other failures are waited for.
                self.stop(attempt);
            }
        }
        cause
    }

    fn stop(&mut self, attempt: u32) {
        let running = self.nodes.iter_mut().filter(|node| !node.ended);
        running.for_each(|node| node.tell(&FromNodeZero::Stop { attempt }));
    }

    /// Waits for the next event, and sends heartbeats to all nodes meanwhile.
    fn hear(&mut self, deadline: Option<Instant>) -> Result<Heard, RecvTimeoutError> {
        let interval = self.plan.keep_alive;
        loop {
            if self.last_heartbeat.elapsed() >= interval {
                self.last_heartbeat = Instant::now();
                self.nodes.iter_mut().for_each(|node| node.tell(&FromNodeZero::Alive));
                self.waiting.iter_mut().for_each(|(_, node)| node.tell(&FromNodeZero::Alive));
                self.find_places();
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let wait = left.map_or(interval, |left| left.min(interval));
            match self.inbox.recv_timeout(wait) {
                Err(RecvTimeoutError::Timeout) if left.is_none_or(|left| left > wait) => {}
                other => return other,
            }
        }
    }
}
