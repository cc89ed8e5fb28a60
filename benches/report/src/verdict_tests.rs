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
fn a_workload_that_failed_is_named() {
    let setting = Setting { failures: vec!["text: cannot read data".to_owned()], ..sample::report().setting };
    let said = conclusion(&sample::report().workloads, &setting);
    assert!(said.contains(&"text: cannot read data. Nothing was measured of it.".to_owned()), "{said:?}");
}

#[test]
fn faster_slower_and_undecided_are_said_of_each_apart_from_its_goal() {
    let side = |rates: &[f64]| {
        let same = vec![1.0; rates.len()];
        let [ours, theirs] =
            [(Contender::Combined, rates), (Contender::Tch, &same[..])].map(|(who, it)| measured(who, it));
        Comparison::of_turns(&ours, &theirs).unwrap().side()
    };
    assert_eq!(side(&[1.02, 1.11, 1.16]), Side::Faster);
    assert_eq!(side(&[0.95, 0.98, 0.99]), Side::Slower);
    assert_eq!(side(&[0.99, 1.0, 1.12]), Side::Undecided);
    assert_eq!(side(&[1.5, 1.6]), Side::Undecided);
    // Faster, though not by as much as the goal asks.
    let said = crate::Report::new(sample::report().setting, at_speeds(&[&[2.1, 2.2, 2.3]])).conclusion;
    let expected = "Overdrive is 2.20x (2.10-2.30) as fast as PyTorch as written (faster; goal 2.20x: undecided);";
    assert!(said[1].contains(expected), "{said:?}");
    let said = crate::Report::new(sample::report().setting, at_speeds(&[&[0.9, 1.0, 2.3]])).conclusion;
    assert!(
        said[1].contains("1.00x (0.90-2.30) as fast as PyTorch as written (undecided; as is the goal of 2.20x)"),
        "{said:?}"
    );
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
    let said = "digits: 1 of 6 timings was disturbed by other use of the machine; its numbers are no basis for \
                a comparison.";
    assert_eq!(report.conclusion[1], said);
    assert!(!report.conclusion.iter().any(|line| line.contains("as fast as")), "{:?}", report.conclusion);
}

#[test]
fn two_pairs_have_no_median() {
    let of = |rates: &[f64]| {
        let same = vec![1.0; rates.len()];
        let [ours, theirs] =
            [(Contender::Combined, rates), (Contender::Tch, &same[..])].map(|(who, it)| measured(who, it));
        Comparison::of_turns(&ours, &theirs).unwrap().text()
    };
    let said = [&[2.0][..], &[0.9, 10.4], &[2.0, 3.0, 4.0]].map(of);
    assert_eq!(said, ["2.00x", "0.90x and 10.4x", "3.00x (2.00-4.00)"]);
}

#[test]
fn one_disturbed_comparison_is_said_beside_the_others() {
    let mut all = at_speeds(&[&[3.0; 3]]);
    one(&mut all[0], Contender::Pytorch).turns[0].disturbance.stolen_cpus = 0.5;
    let said = crate::Report::new(sample::report().setting, all).conclusion;
    let expected = "digits, steady training (turns of a few seconds, without the start): Overdrive is not comparable \
                    with PyTorch as written, because timings were disturbed; 3.00x (3.00-3.00) as fast as plain tch \
                    (faster; goal 1.00x: met).";
    assert_eq!(said[1], expected);
    assert!(said[2].ends_with("nothing is concluded from those."), "{said:?}");
}

#[test]
fn a_first_look_says_that_nothing_was_tried() {
    let mut all = at_speeds(&[&[3.0; 2]]);
    all[0].left_out = Vec::new();
    let setting = Setting { size: "quick".to_owned(), ..sample::report().setting };
    let said = crate::Report::new(setting, all).conclusion;
    let expected =
        "digits: Overdrive uses cache_prefetch and fused; --quick has no time to try which of them pay here.";
    assert!(said.iter().any(|line| line == expected), "{said:?}");
}

#[test]
fn whole_trainings_decide_goals_where_there_are_enough_of_them() {
    let report = sample::report();
    let digits = &report.workloads[0];
    assert!(digits.goals.iter().all(|goal| goal.of_wholes && goal.outcome == Outcome::Met), "{:?}", digits.goals);
    assert!((digits.goals[0].comparison.ratio.median - 79.0 / 23.9).abs() < 1e-9);
    let said = &report.conclusion;
    assert!(
        said[0].starts_with("Overdrive trains digits 3.31x, photos 3.31x and text 3.31x as fast as Python's PyTorch"),
        "{said:?}"
    );
    let parts =
        "digits: Overdrive uses cache_prefetch and fused; left out, because a short trial showed no gain here: bf16.";
    assert!(said.iter().any(|line| line == parts), "{said:?}");
}

#[test]
fn a_goal_is_missed_by_who_learns_less_however_fast() {
    let mut all = sample::report().workloads.remove(0).measurements;
    let ours = all.measured.iter_mut().find(|one| one.contender == Contender::Combined).unwrap();
    ours.wholes.iter_mut().for_each(|whole| whole.marks.last_mut().unwrap().accuracy = Some(0.5));
    let setting = sample::report().setting;
    assert!(goals(&all, &setting).iter().all(|goal| goal.outcome == Outcome::Missed));
    let said = crate::Report::new(setting.clone(), vec![all.clone()]).conclusion;
    assert_eq!(said[0], "It learned less than plain tch on digits.");
    assert!(said.iter().any(|line| line.ends_with("do not use it like this.")), "{said:?}");
    // One seed may be an unlucky one.
    all.measured.iter_mut().for_each(|one| one.wholes.truncate(1));
    assert!(goals(&all, &setting).iter().all(|goal| goal.outcome == Outcome::Undecided));
}

/// Turns in which the combined contender has these speeds, relative to both others, on as many workloads.
fn at_speeds(speeds: &[&[f64]]) -> Vec<Measurements> {
    let measurements = speeds.iter().zip(Workload::ALL).map(|(rates, workload)| {
        let mut all = sample::measurements(workload, &[], 0);
        let same = vec![1.0; rates.len()];
        let others = [Contender::Pytorch, Contender::Tch].map(|other| measured(other, &same));
        all.measured = others.into_iter().chain([measured(Contender::Combined, rates)]).collect();
        all
    });
    measurements.collect()
}

fn headline_of(measurements: Vec<Measurements>) -> String {
    crate::Report::new(sample::report().setting, measurements).conclusion.remove(0)
}

fn one(all: &mut Measurements, contender: Contender) -> &mut Measured {
    all.measured.iter_mut().find(|one| one.contender == contender).unwrap()
}

#[test]
fn the_headline_names_losses_like_gains() {
    let said = headline_of(at_speeds(&[&[0.5, 0.52, 0.48]]));
    assert_eq!(said, "Overdrive is slower here: digits 0.50x as fast as Python's PyTorch as most people write it.");
    let said = headline_of(at_speeds(&[&[3.0; 3], &[0.9, 1.0, 1.1], &[0.8; 3]]));
    assert!(said.starts_with("Overdrive trains digits 3.00x as fast as Python's"), "{said}");
    assert!(said.ends_with(", but text 0.80x; photos is undecided."), "{said}");
    assert!(headline_of(at_speeds(&[&[0.9, 1.0, 1.1]])).starts_with("No conclusion: the differences are smaller"));
    let said = headline_of(at_speeds(&[&[3.0, 3.1], &[0.8, 0.7]]));
    assert!(
        said.starts_with("A first look, with too few rounds to decide: Overdrive trains digits 3.00x")
            && said.ends_with("but photos 0.80x.")
    );
}

#[test]
fn the_headline_compares_as_the_goals_do() {
    let mut all = sample::report().workloads.remove(0).measurements;
    // Steady steps are 3.40 times as fast, whole trainings are not.
    one(&mut all, Contender::Combined).wholes.iter_mut().for_each(|whole| whole.seconds = 100.0);
    assert_eq!(goals(&all, &sample::report().setting)[0].outcome, Outcome::Missed);
    let said = headline_of(vec![all]);
    assert!(said.starts_with("Overdrive is slower here: digits 0.80x as fast as Python's PyTorch"), "{said}");
}

#[test]
fn the_headline_names_what_failed_and_what_is_absent_or_disturbed() {
    let mut all = at_speeds(&[&[3.0; 3], &[2.0; 3], &[4.0; 3]]);
    one(&mut all[0], Contender::Combined).failure = Some("it ran out of memory".to_owned());
    assert!(goals(&all[0], &sample::report().setting).iter().all(|goal| goal.outcome == Outcome::Undecided));
    assert_eq!(headline_of(all[..1].to_vec()), "No conclusion: digits is missing (Overdrive failed).");
    one(&mut all[1], Contender::Pytorch).turns[0].disturbance.stolen_cpus = 0.5;
    let said = headline_of(all.clone());
    let open = "; photos is disturbed; digits is missing (Overdrive failed).";
    assert!(said.starts_with("Overdrive trains text 4.00x as fast as Python's") && said.ends_with(open), "{said}");
    all[2].measured.remove(0);
    all[2].absent = vec![(Contender::Pytorch, "no torchvision".to_owned())];
    let said = headline_of(all);
    assert!(said.starts_with("Overdrive trains photos 2.00x and text 4.00x as fast as plain tch;"), "{said}");
    let beside = "beside Python's PyTorch as most people write it, photos is disturbed; \
                  digits is missing (Overdrive failed); text is missing (PyTorch as written is absent).";
    assert!(said.ends_with(beside), "{said}");
}

#[test]
fn a_disturbed_training_and_a_late_failure_are_named() {
    let mut all = sample::report().workloads.remove(0).measurements;
    let of = |all: &mut Measurements, who| all.measured.iter().position(|one| one.contender == who).unwrap();
    let (python, ours) = (of(&mut all, Contender::Pytorch), of(&mut all, Contender::Combined));
    all.measured[python].failure = Some("it ran out of memory".to_owned());
    all.measured[ours].wholes[0].disturbance = Disturbance { stolen_cpus: 0.5, ..Disturbance::default() };
    let said = crate::Report::new(sample::report().setting, vec![all]).conclusion.join("\n");
    assert!(said.contains("PyTorch as written failed after 3 turns: it ran out of memory"), "{said}");
    assert!(said.contains("Overdrive a disturbed time to 98.6"), "{said}");
}

#[test]
fn goals_above_equality_hold_for_two_cores_only() {
    let mut setting = sample::report().setting;
    let all = sample::report().workloads.remove(0).measurements;
    let least = |setting: &Setting| goals(&all, setting).iter().map(|goal| goal.at_least).collect::<Vec<_>>();
    assert_eq!(least(&setting), [2.2, 1.0, 1.0]);
    setting.machine.cores = 64;
    assert_eq!(least(&setting), [1.0; 3]);
}
