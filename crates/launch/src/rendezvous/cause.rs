//! Why an attempt ended.

use std::time::Duration;

use super::NodeEnd;
use crate::error::LaunchError;
use crate::failures::Failures;

pub enum Cause {
    Failed(Failures),
    Lost(String),
    /// An elastic run goes on with other nodes: one was lost, left or joined.
    Members(String),
    /// No restart follows this.
    Other(LaunchError),
}

impl Cause {
    /// None if the node's ranks succeeded.
    pub fn of(how: NodeEnd, host: &str) -> Option<Self> {
        Some(match how {
            NodeEnd::Done => return None,
            NodeEnd::Failed { age, first, also, .. } => Self::Failed(Failures::with_age(age, first, also)),
            NodeEnd::Interrupted(signal) => {
                Self::Other(LaunchError::Interrupted { signal, host: Some(host.to_owned()) })
            }
            NodeEnd::Broken(error) => Self::Other(error),
            NodeEnd::Stopped => Self::Other(LaunchError::NodeLost(format!(
                "the launcher on host {host} ended its ranks without being told to"
            ))),
        })
    }

    /// What counts when something else follows. `told_to_end`: a signal ends the run.
    pub fn and(self, next: Self, window: Duration, told_to_end: bool) -> Self {
        match (self, next) {
            (Self::Failed(first), Self::Failed(second)) => Self::Failed(first.merge(second, window)),
            // No attempt follows, so that the failure is what the run ends with.
            (Self::Failed(failures), Self::Members(_)) if told_to_end => Self::Failed(failures),
            // Ranks of other nodes fail when a node is lost, and often before its loss is noticed.
            (Self::Failed(_), Self::Members(lost)) => Self::Members(lost),
            (Self::Failed(failures), Self::Lost(node)) => Self::Failed(failures.with_lost(node)),
            // The signal ends the run, so a change of the nodes no longer matters.
            (Self::Members(_), next) if told_to_end => next,
            (Self::Members(first), Self::Members(second)) => Self::Members(format!("{first}; {second}")),
            (Self::Lost(first), Self::Lost(second)) => Self::Lost(format!("{first}; {second}")),
            (first, _) => first,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::error::{RankEnd, RankFailure};

    #[test]
    fn all_nodes_that_are_lost_are_named() {
        let name = |cause| match cause {
            Cause::Lost(what) | Cause::Members(what) => what,
            _ => "something else".to_owned(),
        };
        for kind in [Cause::Lost, Cause::Members] {
            let both =
                kind("node 1 was lost".to_owned()).and(kind("node 2 was lost".to_owned()), Duration::ZERO, false);
            assert_eq!(name(both), "node 1 was lost; node 2 was lost");
        }
    }

    #[test]
    fn a_node_that_is_lost_after_a_failure_is_named_too() {
        let first = RankFailure {
            rank: 0,
            local_rank: 0,
            host: "a".to_owned(),
            pid: 1,
            end: RankEnd::Code(1),
            attempt: 0,
            after: Duration::ZERO,
            stream: "standard error".to_owned(),
            output: Vec::new(),
            error: None,
            log: None,
        };
        let failed = Cause::Failed(Failures::new(Instant::now(), first.clone(), Vec::new()));
        let later = Cause::Failed(Failures::new(Instant::now(), RankFailure { rank: 2, ..first }, Vec::new()));
        let cause = failed.and(Cause::Lost("node 1 was lost".to_owned()), Duration::MAX, false);
        let Cause::Failed(failures) = cause.and(later, Duration::MAX, false) else {
            panic!("the failure is forgotten")
        };
        let summary = "rank 0 failed: exit code 1 (host a, local rank 0, pid 1, attempt 0), then rank 2: exit code 1; \
                       node 1 was lost";
        assert_eq!(failures.summary(), summary);
        let report = failures.report(Vec::new(), 0).to_string();
        assert!(report.contains("\n  node 1 was lost; that may be the cause"), "{report}");
    }
}
