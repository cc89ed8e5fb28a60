//! Schedules are pure functions of the step.

use overdrive_profile::{ProfileError, ProfilerAction, Schedule};

/// PyTorch's schedule, step by step.
fn naive(wait: u64, warmup: u64, active: u64, repeat: u64, skip_first: u64, steps: u64) -> Vec<ProfilerAction> {
    let mut actions = vec![ProfilerAction::None; skip_first as usize];
    for _ in 0..if repeat == 0 { steps } else { repeat } {
        actions.extend((0..wait).map(|_| ProfilerAction::None));
        actions.extend((0..warmup).map(|_| ProfilerAction::Warmup));
        actions.extend((1..active).map(|_| ProfilerAction::Record));
        actions.push(ProfilerAction::RecordAndSave);
    }
    actions.resize(actions.len() + steps as usize, ProfilerAction::None);
    actions.truncate(steps as usize);
    actions
}

#[test]
fn a_schedule_is_its_cycles_one_after_another() {
    for case in 0..3u64.pow(5) {
        let digit = |place: u32| case / 3u64.pow(place) % 3;
        let (wait, warmup, active, repeat, skip_first) = (digit(0), digit(1), digit(2) + 1, digit(3), digit(4));
        let schedule = Schedule::new(wait, warmup, active).unwrap().repeat(repeat).skip_first(skip_first);
        let found: Vec<_> = (0..30).map(|step| schedule.action(step)).collect();
        assert_eq!(found, naive(wait, warmup, active, repeat, skip_first, 30), "{schedule:?}");
    }
}

#[test]
fn the_first_wait_may_be_skipped() {
    let schedule = Schedule::new(20, 1, 1).unwrap().skip_first(10).skip_first_wait(true);
    let at = |step| schedule.action(step);
    assert_eq!(
        [at(9), at(10), at(11), at(12)],
        [ProfilerAction::None, ProfilerAction::Warmup, ProfilerAction::RecordAndSave, ProfilerAction::None]
    );
    assert_eq!([at(31), at(32), at(33)], [ProfilerAction::None, ProfilerAction::Warmup, ProfilerAction::RecordAndSave]);
}

#[test]
fn a_schedule_that_records_nothing_is_refused() {
    let error = Schedule::new(1, 1, 0).expect_err("nothing is recorded");
    assert!(matches!(error, ProfileError::Schedule(_)), "{error}");
    assert!(error.to_string().contains("active = 0"), "{error}");
    Schedule::new(u64::MAX, 1, 1).expect_err("too many steps to count");
    // The largest numbers that are possible.
    let schedule = Schedule::new(u64::MAX - 1, 0, 1).unwrap().skip_first_wait(true);
    assert_eq!(schedule.action(0), ProfilerAction::RecordAndSave);
    assert_eq!(schedule.action(1), ProfilerAction::None);
    assert_eq!(schedule.action(u64::MAX), ProfilerAction::RecordAndSave);
}
