//! One attempt: starts this host's ranks, and waits until all of their processes have ended.

mod start;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde::{Deserialize, Serialize};

use crate::error::{LaunchError, RankEnd, RankFailure};
use crate::error_file;
use crate::failures::Failures;
use crate::filters::Filtered;
use crate::host::{Event, Host};
use crate::node_check::NodeCheck;
use crate::output::{self, Kind, Output};
use crate::plan::Plan;
use crate::process::{self, DEATH_LIMIT};
use crate::rendezvous::FromNodeZero;
use crate::signals;

/// The ranks that this host runs in one attempt, and the address of their store.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Team {
    /// How often the ranks were started before.
    pub attempt: u32,
    /// How often they were started again after a failure; other reasons are changes of the nodes.
    pub restarts: u32,
    pub node_rank: usize,
    /// Nodes that take part.
    pub nnodes: usize,
    pub first_rank: usize,
    pub world_size: usize,
    pub master_addr: String,
    pub master_port: u16,
}

pub enum Outcome {
    Done,
    Failed(Failures),
    /// By a signal to this launcher.
    Interrupted(i32),
    /// The message of node 0 that ended the attempt.
    NodeZero(FromNodeZero),
    LauncherGone,
}

pub struct Ended {
    pub outcome: Outcome,
    /// Every rank of this host, and how it ended.
    pub ends: Vec<(usize, RankEnd)>,
    /// The first signal that asked to end the run, even if the attempt ended for another reason. No restart follows it.
    pub told_to_end: Option<i32>,
    /// The time that a check may take was over.
    pub timed_out: bool,
}

struct Running {
    rank: usize,
    pid: Pid,
    end: Option<RankEnd>,
    outputs: [Output; 2],
    logs: [Option<PathBuf>; 2],
    error_file: Option<PathBuf>,
}

/// Starts the ranks, and waits until all of their processes have ended and their output has been passed on.
pub fn run(host: &Host, team: &Team) -> Result<Ended, LaunchError> {
    Attempt::new(host, team, filtered(host, team)?, None).run()
}

/// As `run`, of a check in place of the program.
pub fn check(host: &Host, team: &Team, check: &NodeCheck) -> Result<Ended, LaunchError> {
    Attempt::new(host, team, [None, None], Some(check)).run()
}

/// The files with the lines of standard output and standard error that match the filters.
fn filtered(host: &Host, team: &Team) -> Result<[Option<Arc<Filtered>>; 2], LaunchError> {
    let Some(logs) = &host.logs else { return Ok([None, None]) };
    let folder = logs.join(format!("attempt_{}", team.attempt));
    std::fs::create_dir_all(&folder).map_err(LaunchError::system(format!("create {}", folder.display())))?;
    let [out, err] = &host.plan.filters;
    Ok([
        Filtered::create(out, &folder.join("filtered_stdout.log"))?,
        Filtered::create(err, &folder.join("filtered_stderr.log"))?,
    ])
}

struct Attempt<'a> {
    host: &'a Host,
    team: &'a Team,
    filtered: [Option<Arc<Filtered>>; 2],
    ranks: Vec<Running>,
    /// Why the attempt ends; None while it continues.
    outcome: Option<Cause>,
    told_to_end: Option<i32>,
    /// Set when a rank has failed: when the others get SIGTERM. Until then they may still fail by themselves.
    stop_at: Option<Instant>,
    /// The check that runs in place of the program, and until when it may.
    check: Option<(&'a NodeCheck, Instant)>,
    timed_out: bool,
    /// Set when the ranks were told to end: when they get SIGKILL, and after that, when to stop waiting for them.
    kill_at: Option<Instant>,
    killed: bool,
}

/// A failed rank's index in `ranks`, and when it failed. The report is made later, when all of its output has been
/// read.
type FailedAt = (usize, Instant);

enum Cause {
    /// The first failure, and the ranks that failed by themselves after it.
    Failed(FailedAt, Vec<FailedAt>),
    Other(Outcome),
}

impl<'a> Attempt<'a> {
    fn new(host: &'a Host, team: &'a Team, filtered: [Option<Arc<Filtered>>; 2], check: Option<&'a NodeCheck>) -> Self {
        Self {
            host,
            team,
            filtered,
            ranks: Vec::new(),
            outcome: None,
            told_to_end: None,
            stop_at: None,
            check: check.map(|check| (check, Instant::now() + check.timeout)),
            timed_out: false,
            kill_at: None,
            killed: false,
        }
    }

    fn run(mut self) -> Result<Ended, LaunchError> {
        let (host, progress) = (self.host, Arc::default());
        for local_rank in 0..host.plan.nproc {
            match self.start(local_rank, &progress) {
                Ok(rank) => self.ranks.push(rank),
                Err(error) => {
                    process::end_descendants();
                    return Err(error);
                }
            }
        }
        self.wait();
        let left = process::end_descendants();
        if !left.is_empty() {
            host.console.say(&format!("{} processes are still alive after SIGKILL", left.len()));
        }
        let (ranks, outcome, told) = (&self.ranks, &mut self.outcome, &mut self.told_to_end);
        let stops = || stops_draining(host, outcome, told);
        output::drain(ranks.iter().flat_map(|rank| &rank.outputs), &progress, stops);
        Ok(self.ended())
    }

    /// Returns when every rank has ended. If they were told to end, waits for the processes that they started too,
    /// until the grace period is over.
    fn wait(&mut self) {
        loop {
            self.collect();
            let ended = self.ranks.iter().all(|rank| rank.end.is_some());
            if self.stop_at.is_some_and(|at| ended || at <= Instant::now()) {
                self.stop(Signal::TERM);
            }
            if ended && (self.kill_at.is_none() || self.killed || process::members(&self.groups()).is_empty()) {
                return;
            }
            match self.host.next_event(self.kill_at.or(self.stop_at).or(self.check.map(|it| it.1))) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) if self.killed => {
                    self.living().for_each(|rank| rank.end = Some(RankEnd::Unkillable));
                }
                Err(RecvTimeoutError::Timeout) if self.stop_at.is_some() => {}
                Err(RecvTimeoutError::Timeout) if self.kill_at.is_none() => {
                    self.timed_out = true;
                    self.outcome.get_or_insert(Cause::Other(Outcome::Interrupted(signal_hook::consts::SIGTERM)));
                    self.stop(Signal::TERM);
                }
                // The grace period is over. (The channel never closes, but without it nothing could stop the ranks.)
                Err(_) => self.kill(),
            }
        }
    }

    /// Records the ranks that have ended. The first failure ends the attempt. Ranks that fail before they are told to
    /// end are recorded as further failures.
    fn collect(&mut self) {
        let mut failed = Vec::new();
        for (pid, end) in process::reap() {
            if let Some(place) = self.ranks.iter().position(|rank| rank.pid == pid && rank.end.is_none()) {
                self.ranks[place].end = Some(end);
                self.host.health.ended(self.ranks[place].rank);
                if end != RankEnd::Code(0) {
                    failed.push(place);
                }
            }
        }
        // Of ranks found ended together, the ones killed by a signal come first: a crash is more likely the cause.
        failed.sort_by_key(|place| !matches!(self.ranks[*place].end, Some(RankEnd::Signal(_))));
        let now = Instant::now();
        let mut failed = failed.into_iter().map(|place| (place, now));
        match &mut self.outcome {
            None => {
                let Some(first) = failed.next() else { return };
                self.outcome = Some(Cause::Failed(first, failed.collect()));
                self.stop_at = Some(now + self.host.plan.failure_window);
            }
            Some(Cause::Failed(_, also)) if self.stop_at.is_some() => also.extend(failed),
            Some(_) => {}
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Signal(number) if signals::ends_the_run(number) => {
                let again = number == signal_hook::consts::SIGINT && self.told_to_end == Some(number);
                self.told_to_end.get_or_insert(number);
                self.outcome.get_or_insert(Cause::Other(Outcome::Interrupted(number)));
                if let Some(signal) = signals::from_number(number) {
                    self.stop(signal);
                }
                if again {
                    self.kill();
                }
            }
            Event::Signal(signal_hook::consts::SIGCHLD) => {} // `collect` runs next.
            Event::Signal(number) => {
                // To the ranks only: their children may have no handler for it, and would die.
                for rank in self.living() {
                    let _ = signals::from_number(number).map(|signal| kill_process(rank.pid, signal));
                }
            }
            Event::LauncherGone => {
                self.outcome = Some(Cause::Other(Outcome::LauncherGone));
                self.kill();
            }
            Event::NodeZero(FromNodeZero::Stop { attempt }) if attempt != self.team.attempt => {}
            Event::NodeZero(said) => {
                // Ranks may have ended before node 0 said it.
                self.collect();
                let have_succeeded = self.ranks.iter().all(|rank| rank.end == Some(RankEnd::Code(0)));
                if have_succeeded && matches!(said, FromNodeZero::Stop { .. }) {
                    return;
                }
                // Nothing follows these, so they count even if a rank has failed before.
                let is_last = matches!(said, FromNodeZero::Finish(_) | FromNodeZero::Lost(_));
                let is_gone = matches!(self.outcome, Some(Cause::Other(Outcome::LauncherGone)));
                if is_last && !is_gone {
                    self.outcome = None;
                }
                self.outcome.get_or_insert(Cause::Other(Outcome::NodeZero(said)));
                self.stop(Signal::TERM);
            }
        }
    }

    fn living(&mut self) -> impl Iterator<Item = &mut Running> {
        self.ranks.iter_mut().filter(|rank| rank.end.is_none())
    }

    fn groups(&self) -> Vec<Pid> {
        self.ranks.iter().map(|rank| rank.pid).collect()
    }

    /// Signals the ranks' process groups, including what is left of ended ranks' groups. Errors are ignored: they mean
    /// that the process has ended.
    fn signal_groups(&mut self, signal: Signal) {
        for rank in self.living() {
            let _ = kill_process_group(rank.pid, signal);
        }
        let ended: Vec<Pid> = self.ranks.iter().filter(|rank| rank.end.is_some()).map(|rank| rank.pid).collect();
        if !ended.is_empty() {
            for pid in process::members(&ended) {
                let _ = kill_process(pid, signal);
            }
        }
    }

    /// Tells all ranks to end. Later failures are not recorded, because this signal may be their cause.
    fn stop(&mut self, signal: Signal) {
        self.stop_at = None;
        self.signal_groups(signal);
        self.kill_at.get_or_insert(Instant::now() + self.host.plan.grace);
    }

    fn kill(&mut self) {
        self.killed = true;
        self.kill_at = Some(Instant::now() + DEATH_LIMIT);
        self.signal_groups(Signal::KILL);
    }

    fn ended(mut self) -> Ended {
        let outcome = match self.outcome.take() {
            None => Outcome::Done,
            Some(Cause::Failed(first, also)) => {
                let failure = |(place, at): FailedAt| self.failure(place, at.duration_since(first.1));
                Outcome::Failed(Failures::new(first.1, failure(first), also.into_iter().map(failure).collect()))
            }
            Some(Cause::Other(outcome)) => outcome,
        };
        let ends = self.ranks.iter().filter_map(|rank| Some((rank.rank, rank.end?))).collect();
        Ended { outcome, ends, told_to_end: self.told_to_end, timed_out: self.timed_out }
    }

    fn failure(&self, place: usize, after: Duration) -> RankFailure {
        let rank = &self.ranks[place];
        let wrote = |output: &&Output| !output.tail().is_empty();
        let [out, err] = &rank.outputs;
        let shown = [err, out].into_iter().find(wrote).unwrap_or(err);
        RankFailure {
            rank: rank.rank,
            local_rank: place,
            host: self.host.name.clone(),
            pid: rank.pid.as_raw_pid(),
            end: rank.end.unwrap_or(RankEnd::Unkillable),
            attempt: self.team.attempt,
            after,
            stream: shown.kind.name().to_owned(),
            output: shown.tail(),
            error: rank.error_file.as_deref().and_then(error_file::read),
            log: rank.logs[usize::from(shown.kind == Kind::Err)].clone(),
        }
    }
}

/// Whether to stop waiting for remaining output: after a signal, when node 0 ends the run, or when the launcher has
/// died.
fn stops_draining(host: &Host, outcome: &mut Option<Cause>, told_to_end: &mut Option<i32>) -> bool {
    host.beat();
    loop {
        match host.events.try_recv() {
            Ok(Event::LauncherGone) => {
                *outcome = Some(Cause::Other(Outcome::LauncherGone));
                return true;
            }
            Ok(Event::Signal(number)) if signals::ends_the_run(number) => {
                told_to_end.get_or_insert(number);
                outcome.get_or_insert(Cause::Other(Outcome::Interrupted(number)));
                return true;
            }
            Ok(Event::NodeZero(said @ (FromNodeZero::Finish(_) | FromNodeZero::Lost(_)))) => {
                *outcome = Some(Cause::Other(Outcome::NodeZero(said)));
                return true;
            }
            Ok(_) => {}
            Err(TryRecvError::Empty) => return false,
            Err(TryRecvError::Disconnected) => return true,
        }
    }
}

/// How long a node may take, after a failure on any node, to end its ranks and pass their output on.
pub fn longest_end(plan: &Plan) -> Duration {
    plan.failure_window + plan.grace + 3 * DEATH_LIMIT
}

#[cfg(test)]
mod tests;
