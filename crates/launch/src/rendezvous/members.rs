//! The nodes of a run: which have a place, which wait for one, and which are refused.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::door::Heard;
use super::wire::Speaker;
use super::{FromNodeZero, Hello, PROTOCOL};
use crate::error::{LaunchError, RankEnd};
use crate::output::Console;
use crate::plan::Plan;

/// How long an elastic run waits, after a node has joined, for another one. Ranks run on meanwhile, so this costs
/// nothing, and nodes that come together restart the ranks once.
const SETTLE: Duration = Duration::from_secs(1);

pub struct Node {
    pub id: usize,
    pub speaker: Speaker,
    pub nproc: usize,
    pub host: String,
    /// The node's number: chosen by `--node-rank`, or given when an attempt begins. The rank that its ranks know
    /// (`GROUP_RANK`) is lower where nodes with lower numbers are missing.
    pub place: Option<usize>,
    pub joined: Instant,
    /// It has joined since the attempt began, and takes part from the next one on.
    pub is_new: bool,
    pub ended: bool,
    /// All of its ranks have succeeded in this attempt.
    pub succeeded: bool,
    pub ends: Vec<(usize, RankEnd)>,
}

impl Node {
    pub fn name(&self) -> String {
        match self.place {
            Some(place) => format!("node {place} (host {})", self.host),
            None => format!("host {}", self.host),
        }
    }

    pub fn tell(&mut self, message: &FromNodeZero) {
        // The reader thread reports a lost connection.
        let _ = self.speaker.say(message);
    }
}

/// Why a node has no place.
enum NoPlace {
    /// Another node has the one that it asks for.
    Taken(String),
    Full,
}

pub struct Members {
    pub plan: Plan,
    pub console: Arc<Console>,
    /// Nodes with a place; sorted by it once an attempt has begun.
    pub nodes: Vec<Node>,
    /// Nodes without a place yet, and until when they may wait for one.
    waiting: Vec<(Instant, Node)>,
    /// How many nodes were there when this attempt began, and on how many of them all ranks have succeeded. A node that
    /// leaves after that still counts.
    pub started: usize,
    pub succeeded: usize,
}

impl Members {
    pub fn new(plan: Plan, console: Arc<Console>) -> Self {
        Self { plan, console, nodes: Vec::new(), waiting: Vec::new(), started: 0, succeeded: 0 }
    }

    /// Whether there are enough nodes to begin. Node 0, where the ranks' store is, has to be one of them.
    pub fn are_enough(&self) -> bool {
        self.nodes.len() >= self.plan.fewest_nodes() && self.nodes.iter().any(|node| node.place == Some(0))
    }

    pub fn are_all(&self) -> bool {
        self.nodes.len() >= self.plan.nnodes
    }

    pub fn admit(&mut self, id: usize, speaker: Speaker, hello: &Hello) {
        let unfit = hello.unfit.as_ref().map(|why| format!("it has failed its check: {why}"));
        let node = Node {
            id,
            speaker,
            nproc: hello.nproc,
            host: hello.host.clone(),
            place: hello.node_rank,
            joined: Instant::now(),
            is_new: true,
            ended: true,
            succeeded: false,
            ends: Vec::new(),
        };
        match self.objection(hello).or(unfit) {
            Some(reason) => self.refuse(node, reason),
            None => self.waiting.push((Instant::now() + self.plan.silence + 2 * self.plan.keep_alive, node)),
        }
        self.find_places();
    }

    /// Admits the nodes that have joined as the run ended, so that they are told how.
    pub fn admit_last(&mut self, inbox: &Receiver<Heard>) {
        for heard in inbox.try_iter() {
            if let Heard::Joined(id, speaker, hello) = heard {
                self.admit(id, speaker, &hello);
            }
        }
    }

    /// Tells a node why it is refused, and closes its connection.
    fn refuse(&self, mut node: Node, reason: String) {
        self.console.say(&format!("refused {}: {reason}", node.name()));
        node.tell(&FromNodeZero::Refused(reason));
        node.speaker.hang_up();
    }

    /// Gives waiting nodes the places that are free. A restarted node may connect before the loss of its first
    /// connection is noticed. So nodes without a place wait, for longer than it takes to notice a loss, before they are
    /// refused. Nodes beyond the most of an elastic run wait until one is lost, or the run ends.
    pub fn find_places(&mut self) {
        for (until, node) in std::mem::take(&mut self.waiting) {
            match self.no_place(&node) {
                None => self.nodes.push(node),
                Some(NoPlace::Full) if self.plan.is_elastic() => self.waiting.push((until, node)),
                Some(_) if until > Instant::now() => self.waiting.push((until, node)),
                Some(NoPlace::Full) => {
                    self.refuse(node, format!("all {} nodes of the run have joined", self.plan.nnodes));
                }
                Some(NoPlace::Taken(by)) => self.refuse(node, format!("{by} has already joined")),
            }
        }
    }

    fn no_place(&self, node: &Node) -> Option<NoPlace> {
        let same = self.nodes.iter().find(|other| other.place.is_some() && other.place == node.place);
        if let Some(same) = same {
            return Some(NoPlace::Taken(same.name()));
        }
        self.are_all().then_some(NoPlace::Full)
    }

    /// Removes a node; returns it if it had a place.
    pub fn remove(&mut self, id: usize) -> Option<Node> {
        self.waiting.retain(|(_, node)| node.id != id);
        let index = self.nodes.iter().position(|node| node.id == id)?;
        Some(self.nodes.remove(index))
    }

    pub fn find(&mut self, id: usize) -> Option<&mut Node> {
        self.nodes.iter_mut().find(|node| node.id == id)
    }

    fn objection(&self, hello: &Hello) -> Option<String> {
        let (plan, seconds) = (&self.plan, |time: Duration| format!("{} s", time.as_secs_f64()));
        let differs = |what: &str, on_zero: &dyn Display, there: &dyn Display| {
            let host = &hello.host;
            Some(format!("{what} is {on_zero} on node 0 and {there} on host {host}; both have to be the same"))
        };
        if hello.protocol != PROTOCOL {
            return differs("the launchers' protocol", &PROTOCOL, &hello.protocol);
        }
        if hello.run_id != plan.run_id {
            return differs("--rdzv-id", &plan.run_id, &hello.run_id);
        }
        if hello.nnodes != plan.nnodes_text() {
            return differs("--nnodes", &plan.nnodes_text(), &hello.nnodes);
        }
        if hello.max_restarts != plan.max_restarts {
            return differs("--max-restarts", &plan.max_restarts, &hello.max_restarts);
        }
        if hello.failure_window != plan.failure_window {
            return differs("--failure-window", &seconds(plan.failure_window), &seconds(hello.failure_window));
        }
        if hello.keep_alive != (plan.keep_alive.as_millis(), plan.silence.as_millis()) {
            return Some(format!(
                "keep_alive_interval or keep_alive_max_attempt of --rdzv-conf is not the same on node 0 and on host {}; \
                 both have to be",
                hello.host
            ));
        }
        let rank = hello.node_rank.filter(|rank| *rank >= plan.nnodes)?;
        Some(format!("node rank {rank} of {} nodes: ranks are 0 to {}", plan.nnodes, plan.nnodes - 1))
    }

    /// Gives places to the nodes that have not chosen one, in the order in which they joined.
    pub fn assign_places(&mut self) {
        let taken: Vec<usize> = self.nodes.iter().filter_map(|node| node.place).collect();
        let mut free = (0..self.plan.nnodes).filter(|place| !taken.contains(place));
        for node in self.nodes.iter_mut().filter(|node| node.place.is_none()) {
            node.place = free.next();
        }
        self.nodes.sort_by_key(|node| node.place);
    }

    /// When nodes that have joined an elastic run since the attempt began are to take part; None if there are none, or
    /// if ranks of a node have succeeded already, so that the run is about to end.
    pub fn let_in_at(&self) -> Option<Instant> {
        let (first, last) = self.newcomers().fold(None, |found: Option<(Instant, Instant)>, node| {
            let (first, last) = found.unwrap_or((node.joined, node.joined));
            Some((first.min(node.joined), last.max(node.joined)))
        })?;
        let settled = (last + SETTLE).min(first + self.plan.last_call);
        (self.plan.is_elastic() && self.succeeded == 0).then_some(if self.are_all() { first } else { settled })
    }

    pub fn newcomers(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.is_new)
    }

    pub fn send_heartbeats(&mut self) {
        let waiting = self.waiting.iter_mut().map(|(_, node)| node);
        self.nodes.iter_mut().chain(waiting).for_each(|node| node.tell(&FromNodeZero::Alive));
    }

    /// Tells the nodes whose ranks still run to end them.
    pub fn stop(&mut self, attempt: u32) {
        let running = self.nodes.iter_mut().filter(|node| !node.ended);
        running.for_each(|node| node.tell(&FromNodeZero::Stop { attempt }));
    }

    /// Removes the nodes that could not end their ranks in time, and tells them so.
    pub fn drop_late(&mut self) {
        let late: Vec<Node>;
        (self.nodes, late) = std::mem::take(&mut self.nodes).into_iter().partition(|node| node.ended);
        for mut node in late {
            let why = format!("{} did not end its ranks in time", node.name());
            self.console.say(&why);
            node.tell(&FromNodeZero::Finish(Err(LaunchError::NodeLost(why))));
        }
    }

    /// Tells all nodes how the run has ended, in an elastic run also those that wait for a place.
    pub fn finish(&mut self, result: &Result<(), LaunchError>) {
        let waiting = std::mem::take(&mut self.waiting).into_iter().map(|(_, node)| node);
        if self.plan.is_elastic() {
            self.nodes.extend(waiting);
        } else {
            waiting.for_each(|node| self.refuse(node, "the run has ended".to_owned()));
        }
        self.nodes.iter_mut().for_each(|node| node.tell(&FromNodeZero::Finish(result.clone())));
    }

    /// Closes the connections of the nodes, which then look for another node 0. This host's own node is told to end,
    /// unless another host may be node 0 already.
    pub fn hand_over(&mut self, result: &Result<(), LaunchError>, deposed: bool) {
        let waiting = std::mem::take(&mut self.waiting).into_iter().map(|(_, node)| node);
        for mut node in self.nodes.drain(..).chain(waiting) {
            if node.place == Some(0) && !deposed {
                node.tell(&FromNodeZero::Finish(result.clone()));
            } else {
                node.speaker.hang_up();
            }
        }
    }

    /// Which nodes of a run did not come in time.
    pub fn missing(&self) -> LaunchError {
        let (there, seconds) = (self.nodes.len(), self.plan.join_timeout.as_secs_f64());
        let joined: Vec<String> = self.nodes.iter().map(Node::name).take(16).collect();
        let joined = joined.join(", ");
        let taken: Vec<usize> = self.nodes.iter().filter_map(|node| node.place).collect();
        let free = (0..self.plan.nnodes).filter(|place| !taken.contains(place)).take(16);
        let free: Vec<String> = free.map(|it| it.to_string()).collect();
        LaunchError::NodesMissing(if self.plan.is_elastic() {
            format!(
                "{there} of at least {} nodes were there within {seconds} s: {joined}; start overdrive-run on more \
                 hosts, or give fewer in --nnodes {}",
                self.plan.fewest_nodes(),
                self.plan.nnodes_text()
            )
        } else {
            format!(
                "{there} of {} nodes joined within {seconds} s: {joined}; missing: node {}",
                self.plan.nnodes,
                free.join(", ")
            )
        })
    }
}
