//! The ranks of an attempt that failed by themselves: their order in time, and which of them the report lists.

use std::iter;
use std::time::{Duration, Instant};

use crate::error::{FailureReport, RankEnd, RankFailure, by_end};

/// How long the other ranks may run on after the first failure, unless the options say otherwise. The first to fail is
/// not always the cause: a rank that panics closes its connections while it unwinds, so another rank may exit because
/// of that before the panic is reported. A second is enough for a backtrace, and short compared with a restart.
pub const FAILURE_WINDOW: Duration = Duration::from_secs(1);

/// Limits on the failures listed after the first. Hundreds of ranks may fail because one is lost: listing a few with
/// the same exit code or signal is enough, keeps a rank that ended differently visible, and bounds the report's size.
const MOST_ALIKE: usize = 8;
const MOST: usize = 64;
const MOST_LINES: usize = 8;

/// Ranks that failed before the launcher ended anything.
#[derive(Debug)]
pub struct Failures {
    pub first_at: Instant,
    pub first: RankFailure,
    later: Box<Later>,
}

/// What follows the first failure.
#[derive(Debug)]
struct Later {
    /// Further failures, by time.
    also: Vec<RankFailure>,
    /// Nodes that were lost, and how.
    lost: Vec<String>,
}

impl Failures {
    pub fn new(first_at: Instant, first: RankFailure, also: Vec<RankFailure>) -> Self {
        Self { first_at, first, later: Box::new(Later { also: limited(also), lost: Vec::new() }) }
    }

    /// Ranks fail when they lose those of another node, and often before that node's loss is noticed.
    pub fn with_lost(mut self, node: String) -> Self {
        self.later.lost.push(node);
        self
    }

    /// As another host reports them, with the age of the first failure, because the hosts' clocks differ.
    pub fn with_age(age: Duration, first: RankFailure, also: Vec<RankFailure>) -> Self {
        let now = Instant::now();
        Self::new(now.checked_sub(age).unwrap_or(now), first, also)
    }

    /// The age of the first failure, the first failure, and the others by time.
    pub fn into_parts(self) -> (Duration, RankFailure, Vec<RankFailure>) {
        (self.first_at.elapsed(), self.first, self.later.also)
    }

    /// The failures of both. Ranks that failed later than `window` after the first are dropped: they may have failed
    /// because ranks of the other host were ended.
    pub fn merge(self, other: Self, window: Duration) -> Self {
        let (earlier, later) = if other.first_at < self.first_at { (other, self) } else { (self, other) };
        let between = later.first_at.duration_since(earlier.first_at);
        let mut lost = earlier.later.lost;
        lost.extend(later.later.lost);
        let later = iter::once(later.first).chain(later.later.also).map(|mut rank| {
            rank.after = rank.after.saturating_add(between);
            rank
        });
        let mut also: Vec<RankFailure> = earlier.later.also.into_iter().chain(later).collect();
        also.retain(|rank| rank.after <= window);
        also.sort_by_key(|rank| rank.after);
        let mut both = Self::new(earlier.first_at, earlier.first, also);
        both.later.lost = lost;
        both
    }

    /// The failures on one line.
    pub fn summary(&self) -> String {
        let ends: Vec<(usize, RankEnd)> = self.later.also.iter().map(|rank| (rank.rank, rank.end)).collect();
        let then = if ends.is_empty() { String::new() } else { format!(", then {}", by_end(&ends)) };
        let lost: String = self.later.lost.iter().map(|node| format!("; {node}")).collect();
        format!("{}{then}{lost}", self.first)
    }

    /// The full report; `ends` has all ranks.
    pub fn report(self, mut ends: Vec<(usize, RankEnd)>, restarts: u32) -> FailureReport {
        ends.retain(|(rank, _)| *rank != self.first.rank);
        ends.sort_by_key(|(rank, _)| *rank);
        let Later { also, lost } = *self.later;
        FailureReport { first: self.first, also, lost_nodes: lost, others: ends, restarts }
    }
}

/// Whatever the limits, the rank whose error was recorded first stays: it may be the cause.
fn limited(mut also: Vec<RankFailure>) -> Vec<RankFailure> {
    let recorded = also.iter().filter_map(|rank| Some((rank.error.as_ref()?.time?, rank.rank)));
    let earliest = recorded.min().map(|(_, rank)| rank);
    let mut seen: Vec<(RankEnd, usize)> = Vec::new();
    let mut all = 0;
    also.retain(|rank| {
        let alike = match seen.iter_mut().find(|(end, _)| *end == rank.end) {
            Some((_, count)) => {
                *count += 1;
                *count
            }
            None => {
                seen.push((rank.end, 1));
                1
            }
        };
        let is_within = alike <= MOST_ALIKE && all < MOST;
        all += usize::from(is_within);
        is_within || Some(rank.rank) == earliest
    });
    for rank in &mut also {
        rank.output.drain(..rank.output.len().saturating_sub(MOST_LINES));
    }
    also
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_file::RecordedError;

    fn failure(rank: usize, code: i32, after_ms: u64) -> RankFailure {
        RankFailure {
            rank,
            local_rank: 0,
            host: "node0".to_owned(),
            pid: 1,
            end: RankEnd::Code(code),
            attempt: 0,
            after: Duration::from_millis(after_ms),
            stream: "standard error".to_owned(),
            output: (0..20).map(|line| format!("line {line}")).collect(),
            error: None,
            log: None,
        }
    }

    fn order(failures: &Failures) -> Vec<(usize, u128)> {
        iter::once(&failures.first).chain(&failures.later.also).map(|it| (it.rank, it.after.as_millis())).collect()
    }

    #[test]
    fn failures_of_two_hosts_are_ordered_by_time_whichever_report_arrives_first() {
        let start = Instant::now();
        let here = || Failures::new(start, failure(0, 1, 0), vec![failure(1, 1, 300)]);
        let there = || {
            let at = start + Duration::from_millis(200);
            // The last one is dropped: it failed when ranks may have been ended here.
            Failures::new(at, failure(2, 101, 0), vec![failure(3, 1, 50), failure(4, 1, 900)])
        };
        let expected = [(0, 0), (2, 200), (3, 250), (1, 300)];
        assert_eq!(order(&here().merge(there(), FAILURE_WINDOW)), expected);
        assert_eq!(order(&there().merge(here(), FAILURE_WINDOW)), expected);
        // Only the first failure keeps all of its lines.
        let both = there().merge(here(), FAILURE_WINDOW);
        let lines: Vec<usize> = both.later.also.iter().map(|it| it.output.len()).collect();
        assert_eq!((both.first.output.len(), lines), (20, vec![MOST_LINES; 3]));
        // In a longer window the last one counts as well.
        let longer = here().merge(there(), Duration::from_secs(2));
        assert_eq!(order(&longer).last(), Some(&(4, 1100)));
    }

    #[test]
    fn a_rank_that_ended_differently_is_listed_among_many() {
        let mut also: Vec<RankFailure> = (1..1000).map(|rank| failure(rank, 1, 10)).collect();
        also.push(failure(1000, 101, 500));
        let all = Failures::new(Instant::now(), failure(0, 1, 0), also);
        assert_eq!(all.later.also.len(), MOST_ALIKE + 1);
        assert_eq!(order(&all).last(), Some(&(1000, 500)));
        let tail = all.later.also.last().map(|it| it.output[0].as_str());
        assert_eq!(tail, Some("line 12"));
    }

    #[test]
    fn the_rank_with_the_earliest_error_is_listed_among_many() {
        let recorded = |rank, code, time| {
            let error = RecordedError { time: Some(Duration::from_secs(time)), ..RecordedError::default() };
            RankFailure { error: Some(error), ..failure(rank, code, 10) }
        };
        let of_first = recorded(0, 1, 100);
        // Beyond the limit on those that ended alike, and beyond that on all.
        for code in [|_| 1, |rank| rank as i32] {
            let mut also: Vec<RankFailure> = (1..1000).map(|rank| recorded(rank, code(rank), 200)).collect();
            also.push(recorded(1000, 1, 50));
            let here = Failures::new(Instant::now(), of_first.clone(), also);
            let there = Failures::new(here.first_at, recorded(1001, 1, 300), Vec::new());
            let all = here.merge(there, FAILURE_WINDOW);
            assert!(all.later.also.len() <= MOST + 1);
            assert_eq!(all.report(Vec::new(), 0).cause().rank, 1000);
        }
    }

    #[test]
    fn an_impossible_age_does_no_harm() {
        let mut odd = failure(1, 1, 0);
        odd.after = Duration::MAX;
        let odd = Failures::with_age(Duration::MAX, failure(0, 1, 0), vec![odd]);
        let both = odd.merge(Failures::with_age(Duration::ZERO, failure(2, 1, 0), Vec::new()), FAILURE_WINDOW);
        assert_eq!(both.first.rank, 0);
        assert!(both.later.also.iter().all(|it| it.after <= FAILURE_WINDOW));
    }
}
