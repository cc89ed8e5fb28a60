//! Why a launch did not end well.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::failures::LAST_WORDS;
use crate::signals;

/// Why a launch did not end well. The message is complete in itself, the report of a failed rank included.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// An option that cannot be, or options that contradict one another.
    #[error("{0}")]
    Options(String),

    /// The program cannot be started.
    #[error("cannot start `{program}`: {reason}")]
    Program {
        /// As it was given.
        program: String,
        /// What the file system said of it.
        reason: String,
        /// Whether there is no such file, rather than one that cannot be executed.
        missing: bool,
    },

    /// A rank failed, and no restart was left.
    #[error("{0}")]
    Rank(Box<FailureReport>),

    /// The launcher was told to end by a signal.
    #[error("ended by {}{}", signals::describe(*.signal), on_host(.host.as_deref()))]
    Interrupted {
        /// The signal's number.
        signal: i32,
        /// The host whose launcher was told, where there are several.
        host: Option<String>,
    },

    /// Nodes that were waited for and did not come.
    #[error("{0}")]
    NodesMissing(String),

    /// The connection to a node's launcher broke or fell silent.
    #[error("{0}")]
    NodeLost(String),

    /// Node 0 did not let this node in.
    #[error("node 0 at {endpoint} refused this node: {reason}")]
    Refused {
        /// Where node 0 was reached.
        endpoint: String,
        /// Its reason.
        reason: String,
    },

    /// The guard process, which holds the ranks, could not be started or died. What it had started was ended.
    #[error("{0}")]
    Guard(String),

    /// The operating system refused something that a launch needs.
    #[error("cannot {doing}: {reason}")]
    System {
        /// What was being done.
        doing: String,
        /// What the operating system said.
        reason: String,
    },
}

fn on_host(host: Option<&str>) -> String {
    host.map(|host| format!(" on {host}")).unwrap_or_default()
}

impl LaunchError {
    /// What a launcher exits with: the code of the first rank that failed; 128 and the signal's number, as shells have
    /// it; 2 for options, 127 and 126 for a program that is missing or cannot be executed; 1 for the rest.
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
    /// It was still there some seconds after SIGKILL, as a process can be that waits for a dead file system.
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
            Self::Unkillable => f.write_str("still there after SIGKILL"),
        }
    }
}

/// What is known of a rank that failed before the launcher ended anything.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RankFailure {
    /// Its rank among all.
    pub rank: usize,
    /// Its rank on its host.
    pub local_rank: usize,
    /// The host that it ran on.
    pub host: String,
    /// Its process.
    pub pid: i32,
    /// How it ended.
    pub end: RankEnd,
    /// How often the run had been restarted before.
    pub attempt: u32,
    /// How long after the first failure of its attempt.
    pub after: Duration,
    /// Which of its outputs `output` is the end of: its standard error, or its standard output where that was empty.
    pub stream: String,
    /// The last lines of that output, 20 at most, 8 where it is not the first that failed; bytes that are not UTF-8
    /// are replaced.
    pub output: Vec<String>,
    /// The file that holds all of that output, where one was asked for.
    pub log: Option<PathBuf>,
}

/// The first rank that failed, those that failed by themselves soon after it, and what became of the others.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FailureReport {
    /// The first by time. It need not be the cause: a rank that panics may be lost to another before it has ended.
    pub first: RankFailure,
    /// Those that failed by themselves within a second of the first, by time; 8 at most that ended alike.
    pub also: Vec<RankFailure>,
    /// The other ranks' ends by rank, those of `also` among them. Most of them were ended by the launcher.
    pub others: Vec<(usize, RankEnd)>,
    /// How often the run was restarted.
    pub restarts: u32,
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, local_rank, host, pid, end, attempt, .. } = self;
        write!(f, "rank {rank} failed: {end} (host {host}, local rank {local_rank}, pid {pid}, attempt {attempt})")
    }
}

impl RankFailure {
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
            Some(log) => write!(f, "\n{indent}all of it: {}", log.display()),
            None => Ok(()),
        }
    }
}

impl fmt::Display for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)?;
        self.first.show_output(f, "  ")?;
        if !self.also.is_empty() {
            let limit = LAST_WORDS.as_secs_f64();
            write!(f, "\n  failed by themselves within {limit} s of it; what failed first need not be the cause:")?;
        }
        for failure in &self.also {
            write!(f, "\n  after {:.3} s, {failure}", failure.after.as_secs_f64())?;
            failure.show_output(f, "    ")?;
        }
        let is_told = |rank: usize| self.also.iter().any(|failure| failure.rank == rank);
        let rest: Vec<(usize, RankEnd)> = self.others.iter().copied().filter(|(rank, _)| !is_told(*rank)).collect();
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
    fn the_others_are_listed_by_how_they_ended() {
        let ends = [(0, RankEnd::Signal(15)), (2, RankEnd::Code(0)), (3, RankEnd::Signal(15))];
        assert_eq!(by_end(&ends), "rank 0, 3: signal 15 (SIGTERM); rank 2: exit code 0");
    }
}
