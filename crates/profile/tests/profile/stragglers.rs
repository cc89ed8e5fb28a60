//! Stragglers: ranks that the others wait for.

use overdrive_profile::{Phase, ProfileError, StepReport, stragglers};

use crate::step_timer::Clock;

/// The report of a rank whose steps take these milliseconds in each phase.
fn report(clock: &Clock, milliseconds: &[(Phase, u64)]) -> StepReport {
    let timer = clock.timer().build().unwrap();
    for _ in 0..3 {
        for &(phase, time) in milliseconds {
            let _phase = timer.phase(phase);
            clock.pass(time);
        }
        timer.step(1);
    }
    timer.report().unwrap()
}

fn forward_of(clock: &Clock, milliseconds: &[u64]) -> Vec<StepReport> {
    milliseconds.iter().map(|&time| report(clock, &[(Phase::Forward, time), (Phase::Backward, 100)])).collect()
}

fn ranks(reports: &[StepReport], k: f64) -> Vec<(usize, Phase)> {
    stragglers(reports, k).unwrap().iter().map(|found| (found.rank, found.phase)).collect()
}

#[test]
fn the_slowest_comes_first() {
    let clock = Clock::new();
    let mut reports = forward_of(&clock, &[100, 102, 99, 180, 101, 98, 150, 100]);
    let found = stragglers(&reports, 3.0).unwrap();
    assert_eq!(found.iter().map(|it| it.rank).collect::<Vec<_>>(), [3, 6]);
    assert!((found[0].seconds - 0.18).abs() < 1e-9 && (found[0].typical_seconds - 0.1).abs() < 1e-9);
    assert!((found[0].excess_seconds() - 0.08).abs() < 1e-9);
    // A rank that is slow in another phase.
    reports[2] = report(&clock, &[(Phase::DataWait, 300), (Phase::Forward, 100), (Phase::Backward, 100)]);
    assert_eq!(ranks(&reports, 3.0), [(2, Phase::DataWait), (3, Phase::Forward), (6, Phase::Forward)]);
}

#[test]
fn ordinary_ranks_are_not_named() {
    let clock = Clock::new();
    assert_eq!(ranks(&forward_of(&clock, &[100, 104, 96, 101, 107, 93, 100, 103]), 3.0), []);
    // Below 2% of a step, even if the others are equal.
    assert_eq!(ranks(&forward_of(&clock, &[100, 100, 100, 103]), 3.0), []);
    assert_eq!(ranks(&forward_of(&clock, &[100, 100, 100, 110]), 3.0), [(3, Phase::Forward)]);
    assert_eq!(ranks(&[], 3.0), []);
    assert_eq!(ranks(&forward_of(&clock, &[100]), 0.0), []);
}

#[test]
fn of_two_ranks_the_slower_one_is_named() {
    let clock = Clock::new();
    assert_eq!(ranks(&forward_of(&clock, &[100, 150]), 3.0), [(1, Phase::Forward)]);
}

#[test]
fn a_rank_that_waits_for_others_is_not_a_straggler() {
    let clock = Clock::new();
    let rank = |forward, waits| report(&clock, &[(Phase::Forward, forward), (Phase::Communication, waits)]);
    assert_eq!(ranks(&[rank(20, 80), rank(100, 0), rank(20, 80)], 3.0), [(1, Phase::Forward)]);
    assert_eq!(ranks(&[rank(100, 0), rank(20, 80), rank(100, 0)], 3.0), []);
}

#[test]
fn invalid_figures_are_refused() {
    let clock = Clock::new();
    let mut reports = forward_of(&clock, &[100, 100]);
    for k in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(stragglers(&reports, k), Err(ProfileError::Setting { name: "k", .. })));
    }
    for seconds in [f64::NAN, f64::INFINITY, -1.0] {
        reports[1].phases[2].median_seconds = seconds;
        assert!(matches!(stragglers(&reports, 3.0), Err(ProfileError::Setting { name: "forward", .. })), "{seconds}");
    }
}
