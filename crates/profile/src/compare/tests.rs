//! Tests of [`super`] on runs of random steps, whose distribution is known.

use super::*;
use crate::run::{OpTimes, ProfiledSteps};

/// Steps of 10 ms times `factor`, with Gaussian noise; the correlation of a step with the next is `kept`.
fn drawn(random: &mut fastrand::Rng, steps: usize, factor: f64, noise: f64, kept: f64) -> RunProfile {
    let mut run = RunProfile::default();
    let mut last = 0.0;
    for step in 0..steps {
        let normal = (-2.0 * (1.0 - random.f64()).ln()).sqrt() * (std::f64::consts::TAU * random.f64()).cos();
        last = kept * last + (1.0 - kept * kept).sqrt() * normal;
        let mut host_seconds = vec![0.0; Phase::ALL.len()];
        host_seconds[Phase::Forward as usize] = 0.010 * factor * (1.0 + noise * last).max(0.1);
        run.step_times.push(StepTimes { step: step as u64, host_seconds, samples: 32, ..StepTimes::default() });
    }
    run
}

/// In how many trials a run whose steps are `factor` times as long is reported as faster, and as slower.
fn count_verdicts(factor: f64, kept: f64, trials: usize) -> (usize, usize) {
    let mut random = fastrand::Rng::with_seed(17);
    let mut counts = (0, 0);
    for _ in 0..trials {
        let runs = [1.0, factor].map(|factor| drawn(&mut random, 200, factor, 0.03, kept));
        let steps = [timed(&runs[0]), timed(&runs[1])];
        let series = median(|step| Some(step.total_seconds()));
        match compare("step", false, &steps, series, &mut Vec::new()).verdict {
            Verdict::Faster => counts.0 += 1,
            Verdict::Slower => counts.1 += 1,
            Verdict::WithinNoise => {}
            Verdict::TooFewSteps | Verdict::NotComparable => panic!("200 steps are enough"),
        }
    }
    counts
}

#[test]
fn false_alarms_are_as_rare_as_claimed() {
    for kept in [0.0, 0.6] {
        let (faster, slower) = count_verdicts(1.0, kept, 200);
        // 1% is nominal; 7 or more of 200 happen by chance in 0.5% of cases.
        assert!(faster + slower <= 6, "{faster} and {slower} of 200 at {kept}");
    }
}

/// Intervals that are too wide never miss the truth, but find no change either.
#[test]
fn intervals_are_not_wider_than_they_have_to_be() {
    let mut random = fastrand::Rng::with_seed(3);
    let trials = 200;
    let mut outside = 0;
    for _ in 0..trials {
        let runs = [(); 2].map(|()| drawn(&mut random, 200, 1.0, 0.03, 0.3));
        let [before, after] = runs.each_ref().map(|run| Series::seconds_a_sample(&timed(run)).estimate());
        let [low, high] = interval::of_ratio(&before, &after, 1.959_964);
        outside += usize::from(!(low..=high).contains(&1.0));
    }
    // 5% is nominal: 10 of 200.
    assert!((3..=20).contains(&outside), "{outside} of {trials}");
}

#[test]
fn a_change_of_5_percent_is_found_in_noise_of_3() {
    for kept in [0.0, 0.5] {
        assert_eq!(count_verdicts(1.05, kept, 25), (0, 25), "kept {kept}");
        assert_eq!(count_verdicts(1.0 / 1.05, kept, 25), (25, 0), "kept {kept}");
    }
}

#[test]
fn profiled_steps_do_not_count_and_few_steps_give_no_verdict() {
    let mut random = fastrand::Rng::with_seed(5);
    let before = drawn(&mut random, 40, 1.0, 0.01, 0.0);
    let mut after = drawn(&mut random, 40, 3.0, 0.01, 0.0);
    assert_eq!(Comparison::of(&before, &after).times[0].verdict, Verdict::Slower);
    after.step_times.iter_mut().for_each(|step| step.is_profiled = true);
    let compared = Comparison::of(&before, &after);
    assert_eq!((compared.times[0].verdict, compared.steps), (Verdict::TooFewSteps, [40, 0]));
    assert!(compared.notes.iter().any(|note| note.contains("only 0 steps")), "{:?}", compared.notes);
    assert!(compared.to_string().contains("too few steps"));
}

#[test]
fn a_new_phase_is_slower_and_an_unused_one_is_not_listed() {
    let mut random = fastrand::Rng::with_seed(6);
    let before = drawn(&mut random, 50, 1.0, 0.01, 0.0);
    let mut after = drawn(&mut random, 50, 1.0, 0.01, 0.0);
    after.step_times.iter_mut().for_each(|step| step.host_seconds[Phase::DataWait as usize] = 0.002);
    let compared = Comparison::of(&before, &after);
    let names: Vec<&str> = compared.times.iter().map(|time| &*time.name).collect();
    assert_eq!(names, ["step", "data wait", "forward"]);
    let wait = &compared.times[1];
    assert_eq!((wait.verdict, wait.ratio, wait.ratio_interval), (Verdict::Slower, None, None));
    assert_eq!(compared.times[2].verdict, Verdict::WithinNoise);
    let rates = compared.samples_per_second.unwrap();
    assert!((3150.0..3250.0).contains(&rates[0]) && (2600.0..2720.0).contains(&rates[1]), "{rates:?}");
    // As JSON, for programs.
    let text = serde_json::to_string(&compared).unwrap();
    assert!(text.contains("\"verdict\":\"within_noise\""), "{text}");
}

/// Compares the data wait of two runs of 60 steps; `before` and `after` are its seconds by step.
fn waits(before: impl Fn(u64) -> f64, after: impl Fn(u64) -> f64) -> ComparedTime {
    let mut random = fastrand::Rng::with_seed(8);
    let mut run = |wait: &dyn Fn(u64) -> f64| {
        let mut run = drawn(&mut random, 60, 1.0, 0.01, 0.0);
        run.step_times.iter_mut().for_each(|it| it.host_seconds[Phase::DataWait as usize] = wait(it.step));
        run
    };
    let compared = Comparison::of(&run(&before), &run(&after));
    compared.times.into_iter().find(|time| time.name == "data wait").expect("the phase takes time")
}

#[test]
fn a_phase_that_some_steps_lack_is_judged_by_its_mean_too() {
    // Steps with and without the phase alternate irregularly.
    let some = |step: u64, of_100: u64| step * 37 % 100 < of_100;
    let (most, half) =
        (|step| if some(step, 54) { 0.0308 } else { 0.0 }, |step| if some(step, 48) { 0.02 } else { 2e-7 });
    for (before, after, verdict) in [
        (&(|_| 0.0) as &dyn Fn(u64) -> f64, &most as &dyn Fn(u64) -> f64, Verdict::Slower),
        (&most, &|_| 0.0, Verdict::Faster),
        (&half, &|_| 0.0308, Verdict::Slower),
        (&|_| 0.0308, &half, Verdict::Faster),
    ] {
        let wait = waits(before, after);
        assert_eq!((wait.verdict, wait.ratio_interval), (verdict, None), "{wait:?}");
    }
    assert_eq!([waits(most, most).verdict, waits(half, half).verdict], [Verdict::WithinNoise; 2]);
    // A single hiccup is no change, and does not hide one.
    let hiccup = |step: u64| if step == 30 { 2.0 } else { 0.0 };
    let late = |step: u64| 0.0308 + hiccup(step);
    assert_eq!(waits(late, |_| 0.0).verdict, Verdict::Faster);
    assert_eq!(waits(|_| 0.0, late).verdict, Verdict::Slower);
    let rarely = |step: u64| if step < 31 { 1e-7 } else { 0.0 } + hiccup(step);
    assert_eq!(waits(|_| 0.0, rarely).verdict, Verdict::WithinNoise);
}

/// Two runs that have a phase in a random half of their steps.
#[test]
fn false_alarms_are_as_rare_for_a_phase_that_some_steps_lack() {
    let mut random = fastrand::Rng::with_seed(11);
    let mut alarms = 0;
    for _ in 0..200 {
        let mut run =
            || -> Vec<f64> { (0..200).map(|_| if random.bool() { 0.01 * random.f64() } else { 0.0 }).collect() };
        let series = [run(), run()].map(Series::median);
        let [before, after] = series.each_ref().map(Series::estimate);
        alarms += usize::from(verdict_by_differences([&before, &after], &series) != Verdict::WithinNoise);
    }
    assert!(alarms <= 6, "{alarms} of 200");
}

#[test]
fn operators_are_compared_by_their_shares() {
    let op = |name: &str, seconds: f64, phase| OpTimes {
        name: name.to_owned(),
        phase,
        scope: None,
        calls: 2.0,
        self_cpu_seconds: seconds,
        device_seconds: 0.0,
        flops: 0.0,
    };
    let profiled = |step_seconds: f64, ops: Vec<OpTimes>| {
        let profiled = ProfiledSteps { steps: 5, step_seconds, ops, ..ProfiledSteps::default() };
        RunProfile { profiled: Some(profiled), ..RunProfile::default() }
    };
    let before = profiled(0.01, vec![op("aten::mm", 0.002, Phase::Forward), op("aten::mm", 0.003, Phase::Backward)]);
    let after = profiled(0.02, vec![op("aten::mm", 0.002, Phase::Forward), op("aten::add", 0.001, Phase::Forward)]);
    let ops = Comparison::of(&before, &after).ops;
    let shares: Vec<_> = ops.iter().map(|op| (&*op.name, op.before_share, op.after_share, op.before_calls)).collect();
    assert_eq!(shares, [("aten::mm", 0.5, 0.1, 4.0), ("aten::add", 0.0, 0.05, 0.0)]);
}

/// A run as it is recorded without a StepTimer, and the same with one.
#[test]
fn phases_that_one_run_does_not_mark_are_neither_faster_nor_slower() {
    let mut random = fastrand::Rng::with_seed(9);
    let marked = drawn(&mut random, 40, 1.0, 0.01, 0.0);
    let mut unmarked = drawn(&mut random, 40, 2.0, 0.01, 0.0);
    for step in &mut unmarked.step_times {
        step.host_seconds.swap(Phase::Forward as usize, Phase::Other as usize);
        step.device_seconds = Some(step.host_seconds.clone());
    }
    unmarked.notes = vec![crate::run::NO_STEP_TIMER.to_owned()];
    for (before, after, step) in [(&marked, &unmarked, Verdict::Slower), (&unmarked, &marked, Verdict::Faster)] {
        let compared = Comparison::of(before, after);
        let result = |time: &ComparedTime| (time.ratio.is_some(), time.ratio_interval.is_some(), time.verdict);
        assert_eq!(result(&compared.times[0]), (true, true, step));
        assert_eq!(result(compared.sample_time.as_ref().unwrap()), (true, true, step));
        assert!(compared.times.len() >= 4, "{compared:?}");
        for time in &compared.times[1..] {
            assert_eq!(result(time), (false, false, Verdict::NotComparable), "{time:?}");
        }
        let noted = compared.notes.iter().filter(|note| note.contains("phases mean different things"));
        assert_eq!(noted.count(), 1, "{:?}", compared.notes);
        let text = compared.to_string();
        assert!(text.contains("not comparable") && !text.contains("other (") && !text.contains("forward ("), "{text}");
    }
    // Neither run has a StepTimer, so their phases are comparable.
    let compared = Comparison::of(&unmarked, &unmarked);
    assert!(compared.times.iter().all(|time| time.verdict == Verdict::WithinNoise), "{compared:?}");
    assert!(compared.notes.is_empty(), "{:?}", compared.notes);
}

#[test]
fn different_programs_are_noted() {
    let run = |command: &[&str]| {
        let command = command.iter().map(|&word| word.to_owned()).collect();
        RunProfile { command, ..RunProfile::default() }
    };
    let noted = |before: &[&str], after: &[&str]| {
        let notes = Comparison::of(&run(before), &run(after)).notes;
        notes.into_iter().filter(|note| note.contains("program")).collect::<Vec<_>>()
    };
    assert_eq!(noted(&["a/train"], &["b/evaluate"]), ["the runs differ in the program: train before, evaluate after"]);
    for (before, after) in [(&["a/train", "--lr=1"][..], &["/b/train"][..]), (&[], &["train"]), (&["train"], &[])] {
        assert_eq!(noted(before, after), Vec::<String>::new());
    }
}

#[test]
fn different_machines_are_noted() {
    let mut before = RunProfile::default();
    before.machine.cpus = 2;
    let notes = Comparison::of(&before, &RunProfile::default()).notes;
    assert!(notes.contains(&"the runs differ in CPUs: 2 before, 0 after".to_owned()), "{notes:?}");
}

#[test]
fn huge_changes_are_printed_as_factors() {
    let mut random = fastrand::Rng::with_seed(5);
    let [before, after] = [1.0, 1e5].map(|factor| drawn(&mut random, 40, factor, 0.03, 0.0));
    let text = Comparison::of(&before, &after).to_string();
    assert!(text.contains("Slower: step (>1000x), forward (>1000x)"), "{text}");
    let mut no_time = before.clone();
    no_time.step_times.iter_mut().for_each(|step| step.host_seconds.clear());
    assert_eq!(Comparison::of(&no_time, &after).samples_per_second, None);
}
