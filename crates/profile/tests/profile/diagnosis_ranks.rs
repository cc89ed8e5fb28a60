//! Diagnoses of made-up runs on several ranks.

use overdrive_profile::{Bottleneck, Diagnosis, Phase, RunProfile, StepTimes};
use serde_json::json;

use crate::made_up::{finding, op, process, run, system, with_ops, with_samples};

/// Rank `number` of `size`, whose forward pass takes `forward(step)` milliseconds; for the rest of 12 ms it waits for
/// others.
fn rank(number: u64, size: u64, forward: impl Fn(u64) -> f64) -> RunProfile {
    const STEPS: u64 = 50;
    let mut times: Vec<f64> = (0..STEPS).map(&forward).collect();
    let steps = (0..STEPS).map(|step| {
        let mut of = StepTimes::default();
        of.step = step;
        of.start_seconds = 0.012 * step as f64;
        of.host_seconds = vec![0.0; Phase::ALL.len()];
        of.host_seconds[Phase::Forward as usize] = forward(step) / 1e3;
        of.host_seconds[Phase::Communication as usize] = (12.0 - forward(step)) / 1e3;
        of
    });
    let step_times = steps.collect();
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let mut run = run(&[(Phase::Forward, median), (Phase::Communication, 12.0 - median)]);
    (run.rank, run.world_size, run.step_times) = (number, size, step_times);
    run.machine.host = format!("host{number}");
    run
}

/// The same run, whose training thread waits for a CPU for this share of the time.
fn queued(run: RunProfile, share: f64) -> RunProfile {
    with_samples(run, move |number| {
        let cpu = 0.1 * number * (1.0 - share);
        json!({ "threads": [{ "id": 7, "name": "train", "cpu_seconds": cpu, "queued_seconds": 0.1 * number * share }] })
    })
}

fn stragglers(runs: Vec<RunProfile>) -> Diagnosis {
    Diagnosis::of(&RunProfile::merge_ranks(runs).unwrap())
}

fn names_a_slow_rank(diagnosis: &Diagnosis) -> bool {
    diagnosis.findings.iter().any(|finding| finding.bottleneck == Bottleneck::Straggler)
}

#[test]
fn ranks_keep_their_numbers_if_some_are_missing() {
    let merged = RunProfile::merge_ranks(vec![rank(3, 5, |_| 9.0), rank(0, 5, |_| 4.0), rank(2, 5, |_| 4.0)]).unwrap();
    assert_eq!((0..3).map(|place| merged.rank_number(place)).collect::<Vec<_>>(), [0, 2, 3]);
    assert_eq!(merged.notes, ["3 of 5 ranks left a record; without one: rank 1, rank 4"]);
    let found = finding(&merged);
    assert_eq!(found.bottleneck, Bottleneck::Straggler);
    assert!(found.evidence[0].starts_with("rank 3 takes 9.00 ms") && found.remedy.contains("rank 3"), "{found}");
    assert!(found.evidence.iter().any(|line| line == "there is no record of rank 1, rank 4"), "{found}");
    let page = merged.html(&Diagnosis::of(&merged));
    assert!(page.contains("Of the 5 ranks, these have no report: rank 1, rank 4."));
    assert!(!page.contains("wrong numbers"));
    // A rank that timed no step has no report.
    let mut idle = rank(1, 3, |_| 4.0);
    idle.steps = None;
    let merged = RunProfile::merge_ranks(vec![rank(0, 3, |_| 4.0), idle, rank(2, 3, |_| 4.0)]).unwrap();
    assert_eq!((merged.ranks.len(), merged.rank_number(1)), (2, 2));
    assert_eq!(merged.notes, ["rank 1 timed no step"]);
    // The numbers are stored in the record. Older records without them can be read.
    let mut text = serde_json::to_value(&merged).unwrap();
    assert_eq!(serde_json::from_value::<RunProfile>(text.clone()).unwrap(), merged);
    text.as_object_mut().unwrap().remove("rank_info");
    assert_eq!(serde_json::from_value::<RunProfile>(text).unwrap().rank_number(1), 1);
    // The profile is that of a rank that has one.
    let mut without = rank(0, 2, |_| 4.0);
    without.profiled = None;
    let other = rank(1, 2, |_| 4.0);
    let merged = RunProfile::merge_ranks(vec![other.clone(), without]).unwrap();
    assert!(merged.profiled.is_some() && merged.profiled == other.profiled);
    assert!(merged.notes.iter().any(|note| note.contains("are those of rank 1")), "{:?}", merged.notes);
    // Findings about the machine of a rank whose samples are not in the merged record.
    let mut leak = with_samples(
        rank(1, 2, |_| 4.0),
        |number| json!({ "process": process(1e9 + 2e7 * number, 0.0), "system": system(1.0) }),
    );
    // Steps for as long as there are samples.
    leak.step_times.iter_mut().for_each(|step| step.start_seconds *= 2.0);
    let diagnosis = stragglers(vec![rank(0, 2, |_| 4.0), leak]);
    let first = &diagnosis.findings[0];
    assert_eq!((first.bottleneck, first.evidence[0].as_str()), (Bottleneck::MemoryGrowth, "found on rank 1"));
    // An impossible number of ranks is not counted through.
    let absurd = RunProfile::merge_ranks(vec![rank(0, u64::MAX, |_| 4.0)]).unwrap();
    assert!(absurd.notes[0].ends_with("rank 8 and 18446744073709551606 more"), "{:?}", absurd.notes);
}

#[test]
fn a_slow_rank_is_slow_in_nearly_each_step() {
    let steady = stragglers(vec![rank(0, 2, |_| 4.0), rank(1, 2, |_| 9.0)]);
    assert!(names_a_slow_rank(&steady), "{steady}");
    assert!(steady.findings[0].evidence.iter().any(|line| line.contains("in 100% of the steps")), "{steady}");
    // Sometimes rank 0 is slow and sometimes rank 1, whose median is slower.
    let second = |step: u64| if step % 5 < 3 { 8.0 } else { 3.0 };
    let first = |step: u64| if step % 5 < 3 { 4.0 } else { 8.0 };
    let turns = stragglers(vec![rank(0, 2, first), rank(1, 2, second)]);
    assert!(!names_a_slow_rank(&turns), "{turns}");
    let noted = |why: &String| why.starts_with("rank 1 takes") && why.contains("in only 60% of the steps");
    assert!(turns.unknown.iter().any(noted), "{turns}");
}

#[test]
fn a_rank_that_waits_for_a_cpu_is_on_a_busy_machine() {
    let slow = |share: f64| stragglers(vec![queued(rank(0, 2, |_| 4.0), 0.0), queued(rank(1, 2, |_| 8.0), share)]);
    // The waiting, 32% of a step of 12 ms, explains most of the 4 ms.
    let busy = slow(0.32);
    assert!(!names_a_slow_rank(&busy), "{busy}");
    let noted = |why: &String| why.starts_with("rank 1 takes 4.00 ms") && why.contains("host1 is busy");
    assert!(busy.unknown.iter().any(noted), "{busy}");
    assert!(busy.unknown.iter().any(|why| why.contains("thread of rank 1 waited for a CPU for 32%")), "{busy}");
    // Waiting explains only a part of the excess.
    assert!(names_a_slow_rank(&slow(0.1)) && names_a_slow_rank(&slow(0.0)));
}

#[test]
fn a_rank_that_waits_for_a_rank_on_a_busy_machine_is_not_slow() {
    let wait = |mut run: RunProfile, ms: f64| {
        let backward = run.steps.as_mut().unwrap().phases.iter_mut().find(|it| it.phase == Phase::Backward).unwrap();
        backward.median_seconds = ms / 1e3;
        for step in &mut run.step_times {
            step.host_seconds[Phase::Backward as usize] = ms / 1e3;
        }
        run
    };
    let first = wait(queued(rank(0, 2, |_| 4.0), 0.0), 6.0);
    let diagnosis = stragglers(vec![first, wait(queued(rank(1, 2, |_| 8.0), 0.35), 2.0)]);
    assert!(!names_a_slow_rank(&diagnosis), "{diagnosis}");
    // Also if the ranks differ only in the backward pass.
    let first = wait(queued(rank(0, 2, |_| 4.0), 0.0), 6.0);
    let diagnosis = stragglers(vec![first, wait(queued(rank(1, 2, |_| 4.0), 0.35), 2.0)]);
    assert!(!names_a_slow_rank(&diagnosis), "{diagnosis}");
}

#[test]
fn the_scope_is_that_of_work_that_the_others_do_not_do() {
    let common = || op("aten::mkldnn_convolution", Phase::Forward, None, 2.0, (4.0, 0.0));
    let more = op("aten::grid_sampler", Phase::Forward, Some("augmentation"), 2.0, (3.9, 0.0));
    let others = [0, 1].map(|number| with_ops(rank(number, 3, |_| 4.0), vec![common()]));
    let slow = with_ops(rank(2, 3, |_| 9.0), vec![common(), more]);
    let found = finding(&RunProfile::merge_ranks(others.into_iter().chain([slow]).collect()).unwrap());
    assert_eq!(found.scope.as_deref(), Some("augmentation"));
    assert_eq!(found.op.as_deref(), Some("aten::grid_sampler"));
    assert!(found.evidence[0].starts_with("rank 2"), "{found}");
}
