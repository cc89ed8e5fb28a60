//! Starting and stopping, and what may go wrong in between.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use overdrive_profile::{Activity, Profile, ProfileError, Profiler, ProfilerAction, Schedule};

use crate::{Model, alone, profile_of};

#[test]
fn a_profiler_starts_and_stops_once() {
    let _alone = alone();
    let mut profiler = Profiler::builder().build().unwrap();
    assert!(matches!(profiler.step(), Err(ProfileError::NotStarted)));
    assert!(matches!(profiler.stop(), Err(ProfileError::NotStarted)));
    profiler.start().unwrap();
    assert!(matches!(profiler.start(), Err(ProfileError::AlreadyStarted)));
    assert!(profiler.is_on() && profiler.is_recording());
    profiler.stop().unwrap();
    assert!(matches!(profiler.stop(), Err(ProfileError::NotStarted)));
    // And again.
    profiler.start().unwrap();
    profiler.stop().unwrap();
}

#[test]
fn a_second_profiler_is_refused_while_one_is_on() {
    let _alone = alone();
    let mut first = Profiler::builder().start().unwrap();
    assert!(matches!(Profiler::builder().start(), Err(ProfileError::Busy)));
    // On another thread too.
    let elsewhere = std::thread::spawn(|| matches!(Profiler::builder().start(), Err(ProfileError::Busy)));
    assert!(elsewhere.join().unwrap());
    Model::new().step();
    first.stop().unwrap();
    assert!(first.profile().unwrap().key_averages(false).unwrap().get("aten::addmm").is_some());
    Profiler::builder().start().unwrap().stop().unwrap();
}

#[test]
fn after_a_profiler_is_dropped_in_a_step_or_a_panic_another_can_start() {
    let _alone = alone();
    let model = Model::new();
    let schedule = Schedule::new(0, 1, 3).unwrap();
    for steps in 0..4 {
        let mut dropped = Profiler::builder().schedule(schedule).start().unwrap();
        for _ in 0..steps {
            model.step();
            dropped.step().unwrap();
        }
        drop(dropped);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut profiler = Profiler::builder().schedule(schedule).start().unwrap();
            (0..steps).for_each(|_| profiler.step().unwrap());
            let _scope = overdrive_profile::record_function("open in the panic");
            panic!("planted");
        }));
        assert_eq!(panicked.expect_err("it panics").downcast_ref(), Some(&"planted"));
    }
    let profile = profile_of(Profiler::builder(), || model.step());
    let averages = profile.key_averages(false).unwrap();
    assert_eq!(averages.get("aten::addmm").unwrap().count, 2);
    assert!(averages.get("open in the panic").is_none());
}

#[test]
fn each_cycle_gives_a_profile_of_its_steps() {
    let _alone = alone();
    let model = Model::new();
    let ready: Arc<Mutex<Vec<Arc<Profile>>>> = Arc::default();
    let kept = ready.clone();
    let mut profiler = Profiler::builder()
        .schedule(Schedule::new(1, 1, 2).unwrap().repeat(2).skip_first(1))
        .on_trace_ready(move |profile| {
            kept.lock().unwrap().push(profile);
            Ok(())
        })
        .start()
        .unwrap();
    let mut recorded = Vec::new();
    for step in 0..12 {
        if profiler.is_recording() {
            recorded.push(step);
        }
        model.step();
        profiler.step().unwrap();
    }
    profiler.stop().unwrap();
    assert_eq!(recorded, [3, 4, 7, 8]);
    let ready = ready.lock().unwrap();
    assert_eq!(ready.iter().map(|profile| profile.steps()).collect::<Vec<_>>(), [3..=4, 7..=8]);
    for (profile, steps) in ready.iter().zip([[3, 4], [7, 8]]) {
        let averages = profile.key_averages(false).unwrap();
        assert_eq!(averages.get("aten::addmm").unwrap().count, 4);
        assert_eq!(averages.get("ProfilerStep*").unwrap().count, 2);
        let events = profile.events().unwrap();
        let names: Vec<_> = events.iter().filter_map(|event| event.trace_name.as_deref()).collect();
        for step in steps {
            assert!(names.contains(&&*format!("ProfilerStep#{step}")), "{names:?}");
        }
    }
}

#[test]
fn a_window_that_is_open_at_the_stop_gives_a_profile() {
    let _alone = alone();
    let mut profiler = Profiler::builder().schedule(Schedule::new(0, 0, 100).unwrap()).start().unwrap();
    Model::new().step();
    profiler.step().unwrap();
    profiler.stop().unwrap();
    assert_eq!(profiler.profile().unwrap().steps(), 0..=1);
    assert!(profiler.gaps().is_empty());
}

#[test]
fn events_accumulate_if_asked_for() {
    let _alone = alone();
    let model = Model::new();
    for (acc_events, expected) in [(false, 2), (true, 6)] {
        let mut profiler =
            Profiler::builder().schedule(Schedule::new(0, 1, 1).unwrap()).acc_events(acc_events).start().unwrap();
        for _ in 0..6 {
            model.step();
            profiler.step().unwrap();
        }
        profiler.stop().unwrap();
        let averages = profiler.profile().unwrap().key_averages(false).unwrap();
        assert_eq!(averages.get("aten::addmm").unwrap().count, expected);
        assert!(averages.iter().all(|group| group.self_cpu_time_total_ns >= 0));
    }
}

#[test]
fn a_handler_that_fails_does_not_stop_the_profiler() {
    let _alone = alone();
    let model = Model::new();
    let mut calls = 0;
    let mut profiler = Profiler::builder()
        .schedule(Schedule::new(0, 0, 1).unwrap())
        .on_trace_ready(move |_| {
            calls += 1;
            if calls == 1 { Err(ProfileError::Schedule("planted".to_owned())) } else { Ok(()) }
        })
        .start()
        .unwrap();
    model.step();
    let error = profiler.step().expect_err("the handler fails");
    assert!(error.to_string().contains("planted"), "{error}");
    assert_eq!(profiler.current_step(), 1);
    model.step();
    profiler.step().unwrap();
    assert_eq!(profiler.profile().unwrap().steps(), 1..=1);
    profiler.stop().unwrap();
}

#[test]
fn an_inconsistent_schedule_does_not_break_the_profiler() {
    let _alone = alone();
    let model = Model::new();
    let actions = [
        ProfilerAction::Warmup,
        ProfilerAction::None,
        ProfilerAction::Record,
        ProfilerAction::Warmup,
        ProfilerAction::Record,
        ProfilerAction::None,
        ProfilerAction::RecordAndSave,
        ProfilerAction::Warmup,
    ];
    let saved = Arc::new(Mutex::new(0));
    let counted = saved.clone();
    let mut profiler = Profiler::builder()
        .schedule_fn(move |step| actions[step as usize % actions.len()])
        .on_trace_ready(move |_| {
            *counted.lock().unwrap() += 1;
            Ok(())
        })
        .start()
        .unwrap();
    for _ in 0..16 {
        model.step();
        profiler.step().unwrap();
    }
    profiler.stop().unwrap();
    assert_eq!(*saved.lock().unwrap(), 2);
}

#[test]
fn nothing_to_record_is_refused() {
    assert!(matches!(Profiler::builder().activities(&[]).build(), Err(ProfileError::NothingToRecord(_))));
    if !tch::Cuda::is_available() {
        let error = Profiler::builder().activities(&[Activity::Cuda]).build().expect_err("no GPU");
        assert!(error.to_string().contains("no CUDA device"), "{error}");
    }
}

#[test]
fn metadata_can_only_be_added_while_recording() {
    let _alone = alone();
    let mut profiler = Profiler::builder().build().unwrap();
    assert!(matches!(profiler.add_metadata_json("key", "1"), Err(ProfileError::NotStarted)));
    profiler.start().unwrap();
    profiler.add_metadata_json("key", "1").unwrap();
    for (key, json) in
        [("nul\0", "1"), ("quote\"", "1"), ("key", "no JSON"), ("key", r#""back\\slash""#), ("key", "1 2")]
    {
        let error = profiler.add_metadata_json(key, json).expect_err(json);
        assert!(matches!(error, ProfileError::Metadata { .. }), "{error}");
    }
    assert!(Profiler::builder().metadata_json("key", "no JSON").build().is_err());
    profiler.stop().unwrap();
}
