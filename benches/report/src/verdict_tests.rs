use super::*;
use crate::{Disturbance, Turn, Workload, sample};

/// Turns of so many samples a second.
fn measured(contender: Contender, rates: &[f64]) -> Measured {
    let mut one = sample::measurements(Workload::Digits, &[(contender, 1.0, 0.0, 1, None)], 1).measured.remove(0);
    one.turns = rates.iter().map(|rate| Turn { seconds: 1000.0 / rate, samples: 1000, ..Turn::default() }).collect();
    one
}

fn outcome(ours: &[f64], theirs: &[f64], at_least: f64) -> Outcome {
    let [ours, theirs] =
        [(Contender::Combined, ours), (Contender::Tch, theirs)].map(|(who, rates)| measured(who, rates));
    Comparison::of_turns(&ours, &theirs).unwrap().outcome(at_least)
}

#[test]
fn the_whole_interval_decides() {
    let theirs = [10.0, 20.0, 40.0];
    assert_eq!(outcome(&[20.0, 44.0, 80.0], &theirs, 2.0), Outcome::Met);
    assert_eq!(outcome(&[20.0, 44.0, 80.0], &theirs, 2.1), Outcome::Undecided);
    assert_eq!(outcome(&[20.0, 44.0, 80.0], &theirs, 2.3), Outcome::Missed);
    // Two pairs are no interval.
    assert_eq!(outcome(&[20.0, 44.0], &theirs, 1.0), Outcome::Undecided);
}

#[test]
fn nothing_is_concluded_from_a_disturbed_time() {
    let mut ours = measured(Contender::Combined, &[20.0; 3]);
    let theirs = measured(Contender::Tch, &[10.0; 3]);
    assert_eq!(Comparison::of_turns(&ours, &theirs).unwrap().outcome(1.0), Outcome::Met);
    ours.turns[1].disturbance = Disturbance { stolen_cpus: 0.5, ..Disturbance::default() };
    let comparison = Comparison::of_turns(&ours, &theirs).unwrap();
    assert_eq!((comparison.outcome(1.0), comparison.disturbed), (Outcome::Disturbed, 1));
    let mut all = sample::measurements(Workload::Digits, &[], 0);
    all.measured = vec![theirs, ours];
    let report = crate::Report::new(sample::report().setting, vec![all]);
    assert!(
        report.conclusion[0].starts_with("No conclusion: other programs used this machine"),
        "{:?}",
        report.conclusion
    );
    assert!(report.conclusion[1].contains("1 timings were disturbed"), "{:?}", report.conclusion);
}

#[test]
fn whole_trainings_decide_goals_where_there_are_enough_of_them() {
    let report = sample::report();
    let digits = &report.workloads[0];
    assert!(digits.goals.iter().all(|goal| goal.of_wholes && goal.outcome == Outcome::Met), "{:?}", digits.goals);
    assert!((digits.goals[0].comparison.ratio.median - 79.0 / 23.9).abs() < 1e-9);
    let said = &report.conclusion;
    assert!(
        said[0].starts_with("Overdrive trains digits 3.40x, photos 3.40x and text 3.40x as fast as Python's PyTorch"),
        "{said:?}"
    );
    let parts =
        "digits: combined uses cache_prefetch and fused; left out, because they did not make steps faster here: bf16.";
    assert!(said.iter().any(|line| line == parts), "{said:?}");
}

#[test]
fn a_goal_is_missed_by_who_learns_less_however_fast() {
    let mut all = sample::report().workloads.remove(0).measurements;
    let ours = all.measured.iter_mut().find(|one| one.contender == Contender::Combined).unwrap();
    ours.wholes.iter_mut().for_each(|whole| whole.marks.last_mut().unwrap().accuracy = Some(0.5));
    assert!(goals(&all).iter().all(|goal| goal.outcome == Outcome::Missed));
    let report = crate::Report::new(sample::report().setting, vec![all]);
    assert!(report.conclusion.iter().any(|line| line.ends_with("do not use it like this.")), "{:?}", report.conclusion);
}
