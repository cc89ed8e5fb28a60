//! Why a launch failed.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error_file::RecordedError;
use crate::signals;

/// Why a launch failed. The message is complete: it includes the report of a failed rank.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// An invalid option, or options that contradict each other.
    #[error("{0}")]
    Options(String),

    /// The program cannot be started.
    #[error("cannot start `{program}`: {reason}")]
    Program {
        /// As the user gave it.
        program: String,
        /// Why it cannot be started.
        reason: String,
        /// True if there is no such file, false if it cannot be executed.
        missing: bool,
    },

    /// A rank failed, and no restart was left.
    #[error("{0}")]
    Rank(Box<FailureReport>),

    /// A launcher got a signal that ends the run.
    #[error("ended by {}{}", signals::describe(*.signal), on_host(.host.as_deref()))]
    Interrupted {
        /// The signal's number.
        signal: i32,
        /// The host whose launcher got the signal, if node 0 reported it.
        host: Option<String>,
    },

    /// Nodes that did not join in time.
    #[error("{0}")]
    NodesMissing(String),

    /// The connection to a node's launcher broke or fell silent.
    #[error("{0}")]
    NodeLost(String),

    /// The etcd by which the nodes meet cannot be trusted, or does not accept this host's certificate, user or password.
    #[error("{0}")]
    Etcd(String),

    /// A node has failed its [check](crate::Launch::node_check).
    #[error("{0}")]
    NodeUnfit(String),

    /// Node 0 refused this node.
    #[error("node 0 at {endpoint} refused this node: {reason}")]
    Refused {
        /// Where node 0 was reached.
        endpoint: String,
        /// Node 0's reason.
        reason: String,
    },

    /// The guard process, which is the parent of the ranks, could not be started or died. Its ranks were ended.
    #[error("{0}")]
    Guard(String),

    /// A system call that a launch needs failed.
    #[error("cannot {doing}: {reason}")]
    System {
        /// What the launcher tried to do.
        doing: String,
        /// The operating system's error.
        reason: String,
    },
}

fn on_host(host: Option<&str>) -> String {
    host.map(|host| format!(" on {host}")).unwrap_or_default()
}

impl LaunchError {
    /// The launcher's exit code: that of the first rank that failed; 128 plus the signal's number, as in shells; 2 for
    /// invalid options; 127 for a missing program, 126 for one that cannot be executed; 1 otherwise.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Options(_) => 2,
            Self::Program { missing, .. } => 126 + u8::from(*missing),
            Self::Rank(report) => report.first.end.exit_code(),
            Self::Interrupted { signal, .. } => RankEnd::Signal(*signal).exit_code(),
            _ => 1,
        }
    }

    pub(crate) fn system(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |error| Self::System { doing, reason: error.to_string() }
    }
}

/// How a rank's process ended.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum RankEnd {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// It was still alive 30 s after SIGKILL, for example because it waits for a network file system that is down.
    Unkillable,
}

impl RankEnd {
    fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::Unkillable => 1,
        };
        u8::try_from(code).unwrap_or(1)
    }
}

impl fmt::Display for RankEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => f.write_str(&signals::describe(signal)),
            Self::Unkillable => f.write_str("still alive after SIGKILL"),
        }
    }
}

/// A rank that failed before the launcher told any rank to end.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RankFailure {
    /// Its global rank.
    pub rank: usize,
    /// Its rank on its host.
    pub local_rank: usize,
    /// The host that it ran on.
    pub host: String,
    /// Its process ID.
    pub pid: i32,
    /// How it ended.
    pub end: RankEnd,
    /// How often the ranks had been started before.
    pub attempt: u32,
    /// The time since the first failure of its attempt.
    pub after: Duration,
    /// Where `output` comes from: standard error, or standard output if standard error was empty.
    pub stream: String,
    /// The last lines of its output: at most 20 for the first failure, 8 for others. Invalid UTF-8 is replaced.
    pub output: Vec<String>,
    /// The error that it has recorded by [`record`](crate::record) or Python's `@record`.
    pub error: Option<RecordedError>,
    /// The file with all of that output, if outputs go to files.
    pub log: Option<PathBuf>,
}

/// The first rank that failed, ranks that failed by themselves soon after it, and how all the others ended.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FailureReport {
    /// The first failure by time. Not always the cause: a rank that panics closes its connections before it exits, and
    /// another rank may exit because of that first.
    pub first: RankFailure,
    /// Ranks that failed by themselves within the [failure window](crate::Launch::failure_window) of the first, by
    /// time; at most 8 with the same exit code or signal, and always the one whose error was recorded first.
    pub also: Vec<RankFailure>,
    /// Nodes that were lost after the first failure, and how, in words. One of them may be its cause: ranks fail when they
    /// lose those of another node, and often before that node's loss is noticed.
    pub lost_nodes: Vec<String>,
    /// How the other ranks ended, by rank, including those in `also`. Most were ended by the launcher.
    pub others: Vec<(usize, RankEnd)>,
    /// How often the run was restarted after a failure.
    pub restarts: u32,
}

impl FailureReport {
    /// The failure that is most likely the cause: the one whose error was recorded first, by the hosts' clocks, of
    /// those that failed by themselves; the [first](Self::first) failure if nothing tells more, or if a signal ended
    /// it: a rank that crashes cannot record anything.
    ///
    /// # Source
    /// `ChildFailedError.get_first_failure`.
    #[doc(alias = "get_first_failure")]
    pub fn cause(&self) -> &RankFailure {
        self.earlier_error().map_or(&self.first, |(failure, _)| failure)
    }

    /// Another rank's error that was recorded before that of the first failure, and how long before, as text. If the
    /// first failure has exited without recording one, the earliest of the others, and no text.
    fn earlier_error(&self) -> Option<(&RankFailure, Option<String>)> {
        let time = |failure: &RankFailure| failure.error.as_ref()?.time;
        let (of_cause, cause) = self.also.iter().filter_map(|it| Some((time(it)?, it))).min_by_key(|it| it.0)?;
        if self.first.error.is_none() {
            return matches!(self.first.end, RankEnd::Code(_)).then_some((cause, None));
        }
        let of_first = time(&self.first)?;
        // Python records whole seconds, rounded down, so that a rank within the same second may be the earlier one.
        let is_whole = of_first.subsec_micros() == 0 || of_cause.subsec_micros() == 0;
        let before = of_first.checked_sub(of_cause)?;
        let is_earlier = if is_whole { of_cause.as_secs() < of_first.as_secs() } else { !before.is_zero() };
        is_earlier.then(|| (cause, Some(format!("{:.3} s", before.as_secs_f64()))))
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, local_rank, host, pid, end, attempt, .. } = self;
        write!(f, "rank {rank} failed: {end} (host {host}, local rank {local_rank}, pid {pid}, attempt {attempt})")
    }
}

impl RankFailure {
    /// What the rank has recorded: the message, or the traceback, which includes it.
    fn show_error(&self, f: &mut fmt::Formatter<'_>, indent: &str, whole: bool) -> fmt::Result {
        let Some(error) = &self.error else { return Ok(()) };
        write!(f, "\n{indent}the error that it has recorded:")?;
        let message: Vec<&str> = error.message.lines().collect();
        let traceback: Vec<&str> = error.traceback.iter().map(String::as_str).collect();
        let lines = if whole && !traceback.is_empty() { traceback } else { message };
        lines.iter().try_for_each(|line| write!(f, "\n{indent}  {line}"))
    }

    fn show_output(&self, f: &mut fmt::Formatter<'_>, indent: &str) -> fmt::Result {
        if self.output.is_empty() {
            write!(f, "\n{indent}it wrote nothing")?;
        } else {
            write!(f, "\n{indent}the end of its {}:", self.stream)?;
            for line in &self.output {
                write!(f, "\n{indent}  {line}")?;
            }
        }
        match &self.log {
            Some(log) => write!(f, "\n{indent}full log: {}", log.display()),
            None => Ok(()),
        }
    }
}

impl fmt::Display for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)?;
        if let Some((failure, before)) = self.earlier_error() {
            let (rank, message) = (failure.rank, failure.error.as_ref().map_or("", |error| error.message.as_str()));
            let message = message.lines().next().unwrap_or_default();
            match before {
                Some(before) => write!(f, "\n  the first error was that of rank {rank}, {before} earlier: {message}")?,
                None => write!(f, "\n  the first error that was recorded was that of rank {rank}: {message}")?,
            }
        }
        for node in &self.lost_nodes {
            write!(f, "\n  {node}; that may be the cause")?;
        }
        self.first.show_error(f, "  ", true)?;
        self.first.show_output(f, "  ")?;
        if !self.also.is_empty() {
            f.write_str("\n  failed by themselves soon after it; the first to fail is not always the cause:")?;
        }
        for failure in &self.also {
            write!(f, "\n  after {:.3} s, {failure}", failure.after.as_secs_f64())?;
            failure.show_error(f, "    ", std::ptr::eq(failure, self.cause()))?;
            failure.show_output(f, "    ")?;
        }
        let is_listed = |rank: usize| self.also.iter().any(|failure| failure.rank == rank);
        let rest: Vec<(usize, RankEnd)> = self.others.iter().copied().filter(|(rank, _)| !is_listed(*rank)).collect();
        if !rest.is_empty() {
            write!(f, "\n  the others: {}", by_end(&rest))?;
        }
        match self.restarts {
            0 => Ok(()),
            1 => f.write_str("\n  after 1 restart"),
            n => write!(f, "\n  after {n} restarts"),
        }
    }
}

/// `rank 0, 2: signal 15 (SIGTERM); rank 3: exit code 0`.
pub(crate) fn by_end(ends: &[(usize, RankEnd)]) -> String {
    let mut groups: Vec<(RankEnd, Vec<String>)> = Vec::new();
    for (rank, end) in ends {
        match groups.iter_mut().find(|group| group.0 == *end) {
            Some(group) => group.1.push(rank.to_string()),
            None => groups.push((*end, vec![rank.to_string()])),
        }
    }
    let groups: Vec<String> = groups.iter().map(|(end, ranks)| format!("rank {}: {end}", ranks.join(", "))).collect();
    groups.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_shells() {
        assert_eq!(RankEnd::Code(3).exit_code(), 3);
        assert_eq!(RankEnd::Signal(9).exit_code(), 137);
        assert_eq!(LaunchError::Interrupted { signal: 15, host: None }.exit_code(), 143);
        let missing = |missing| LaunchError::Program { program: "p".into(), reason: "r".into(), missing };
        assert_eq!((missing(true).exit_code(), missing(false).exit_code()), (127, 126));
    }

    #[test]
    fn the_earliest_error_is_named_if_the_first_to_end_has_recorded_none() {
        let failure = |rank, end, time: Option<u64>| RankFailure {
            rank,
            local_rank: 0,
            host: "node0".to_owned(),
            pid: 1,
            end,
            attempt: 0,
            after: Duration::ZERO,
            stream: "standard error".to_owned(),
            output: Vec::new(),
            error: time.map(|time| RecordedError {
                message: format!("error of rank {rank}"),
                time: Some(Duration::from_secs(time)),
                ..RecordedError::default()
            }),
            log: None,
        };
        let code = RankEnd::Code(1);
        let also = vec![failure(1, code, None), failure(2, code, Some(9)), failure(3, code, Some(7))];
        let report = |end| FailureReport {
            first: failure(0, end, None),
            also: also.clone(),
            lost_nodes: vec![],
            others: vec![],
            restarts: 0,
        };
        assert_eq!(report(code).cause().rank, 3);
        let line = "\n  the first error that was recorded was that of rank 3: error of rank 3\n";
        assert!(report(code).to_string().contains(line), "{}", report(code));
        // A crash may have caused the errors of the others.
        assert_eq!(report(RankEnd::Signal(11)).cause().rank, 0);
        assert!(!report(RankEnd::Signal(11)).to_string().contains("the first error"));
    }

    #[test]
    fn the_others_are_listed_by_how_they_ended() {
        let ends = [(0, RankEnd::Signal(15)), (2, RankEnd::Code(0)), (3, RankEnd::Signal(15))];
        assert_eq!(by_end(&ends), "rank 0, 3: signal 15 (SIGTERM); rank 2: exit code 0");
    }
}
